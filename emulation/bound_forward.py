"""The forward part of `bounds`: blocks of rows of `flash` and of `standard`, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulation.bound_terms import (
    EVALUATION,
    EX2,
    F64,
    FLUSH,
    LG2,
    RCP,
    TINY,
    Constants,
    Product,
    Reference,
    Rounding,
    Scores,
    U,
    Walk,
    compounded,
    reference,
    scores,
    total,
)
from emulation.oracle.result import numbers
from emulation.plan import Plan
from emulation.problem import Array, Problem
from emulation.tiled import LN2, LOG2E

# -- forward


@dataclass(frozen=True, eq=False)
class Forward:
    """A block of rows: scores, exact P, O and LSE, bounds of O before and after its cast, and of
    LSE.
    """

    s: Scores
    p: F64
    o: F64
    wide: F64
    out: F64
    lse: F64


def cast_error(value: F64, err: F64, fmt: str) -> F64:
    """Error after the output cast: u_h of what is rounded, and half a subnormal."""
    r = Rounding.of(fmt)
    up = np.abs(value) + err
    return np.where(up < r.limit, err + r.relative * up + r.absolute, np.inf)


def _spread(common: F64, v: F64, o: F64, loose: bool = False) -> F64:
    """sum_j common_ij |v_jd - O_id|: what errors do to O that its numerator and l share.

    loose: with |v| + |O| for |v - O|, which is one product.
    """
    if loose:
        return np.asarray(common @ np.abs(v) + np.abs(o) * common.sum(axis=1, keepdims=True))
    gaps = (np.abs(v[:, d] - o[:, d, None]) for d in range(v.shape[1]))
    parts = [np.where(gap > 0, common * gap, 0.0).sum(axis=1) for gap in gaps]
    return np.stack(parts, axis=1)


def forward(
    problem: Problem, plan: Plan, h: int, rows: slice, band: Array, *, loose: bool = False
) -> Forward:
    """Bounds of `flash_rows` for rows of head h with band (2, R); `loose` as in `_spread`."""
    num, fmt = plan.numerics, plan.format
    product = Product.of(fmt, plan.arch, plan.step, plan.wide)
    const = Constants.of(problem, plan.c, natural=plan.score == "scaled")
    rounding = Rounding.of(fmt, num.p == "split")
    q, k, v = operands(problem, h, rows)
    s = scores(problem, product, const, q, k, band)
    walk = Walk.of(problem.n_k, plan.tile_n, plan.direction == "left-to-right", band)
    ref = reference(plan, s, walk)
    p, seen = s.p, s.seen
    o = p @ v
    unit = np.exp2(ref.up - s.lse2)[:, None]

    # Exponents: the score, the rounding of x (|x| <= max(x_up, up - y)), that of s c where it is
    # rounded alone, the arguments of alpha; then 1 + moves evaluations of 2^x.
    x = np.maximum(ref.x_up[:, None], ref.up[:, None] - s.y + s.e)
    e = s.e + U * x + 2 * TINY + ref.alpha_e[:, None]
    apart = U * (np.abs(s.y) + s.e)  # s c rounded alone
    if plan.score == "unfused" or plan.diagonal:
        e = e + apart
    elif plan.score == "scaled":  # two products, and log2 e as held
        held = abs(float(np.float32(LOG2E)) / LOG2E - 1) + 2.0**-51
        e = e + ((1 + U) ** 2 * (1 + held) - 1) * (np.abs(s.y) + s.e) + 2 * TINY
    elif plan.score == "guarded":  # from |r| = 2^24 on; half of it leaves room for r's own error
        e = e + np.where(np.abs(ref.up[:, None]) >= 2.0**23, apart, 0.0)
    factor = np.exp2(e) * np.asarray(1.0 + compounded(EX2, 1.0 + ref.moves))[:, None]
    # A weight is flushed by its own 2^x, or (having been up to 2^x_up) by an alpha.
    flush = np.where(seen, FLUSH * np.exp2(ref.x_up)[:, None] * unit, 0.0)
    weight_err = np.where(seen, p * (factor - 1.0), 0.0) + flush
    weight_err[~(ref.x_up < 126.0)] = np.inf
    weight_up = p + weight_err

    # P as P V sees it. If l sums the same P, both share this error, too.
    p_err = np.where(seen, rounding.error(weight_up, unit), 0.0)
    p_err[np.exp2(ref.x_up) * (1 + EX2) >= rounding.limit] = np.inf
    parts = [np.where(seen, part, 0.0) for part in rounding.parts(weight_up, unit)]
    shared = num.row_sum == "rounded"
    common = weight_err + p_err if shared else weight_err

    after_tiles = walk.tiles_after
    per_tile = len(parts) * product.steps(plan.tile_n)
    after = per_tile - walk.inside // product.length + 0.0 * after_tiles
    keys = seen.sum(axis=1)[:, None]  # steps that multiply nothing visible change nothing
    if num.accumulate == "tensor-core":
        after, adds = after + (after_tiles - 1) * per_tile, ref.moves[:, None] + 0.0 * after
    else:
        adds = after_tiles + (2.0 if plan.finish == "fold" else 0.0)
    after = np.where(seen, np.minimum(after, keys * len(parts) * product.passes), 0.0)
    steps = walk.tiles.max(initial=0.0) * per_tile

    def summed(b: F64) -> F64:
        """Matrix products with the multiplications by alpha, or with the promoted additions."""
        return accumulated(product, parts, b, after, steps, adds, unit)

    # Row sums by lanes: at most 2 ceil(T / 8) - 1 additions in a tile (or 2 ceil(T / 8) with the
    # running sum in front), one fma a tile, two joins; not more than there are keys and moves.
    lane = 2 * math.ceil(plan.tile_n / 8)
    # Groups of 32 columns: 7 additions and two joins in a group, then one a group and one product.
    ops = after_tiles + lane + 1
    if plan.row_sum_order == "running":
        ops = after_tiles * lane + 2
    elif plan.row_sum_order == "groups":
        ops = after_tiles * (1 + math.ceil(plan.tile_n / 32)) + 10
    ops = np.minimum(ops, keys - 1 + ref.moves[:, None])

    def lanes(values: F64, extra: int = 0) -> F64:
        lost = np.asarray((values * compounded(U, ops + extra)).sum(axis=1))
        return lost + walk.tiles * TINY * unit[:, 0]

    if not shared:
        l_err = lanes(weight_up)
    elif plan.rounded_sum == "matrix":
        l_err = summed(np.ones((problem.n_k, 1)))[:, 0]
    else:  # of split halves, which are added first
        l_err = lanes(total(parts), extra=len(parts) - 1)

    # acc / l - O = (sum_j common_j (v_j - O) + acc_err - O l_err) / l, exactly; then 1 / l and the
    # final multiply.
    weight_low = np.maximum(p / factor * (1 - EX2 * EX2) ** (1 + ref.moves[:, None]) - flush, 0.0)
    l_low = (weight_low - (p_err if shared else 0.0)).sum(axis=1) - l_err
    err = _spread(common, v, o, loose) + summed(v) + np.abs(o) * l_err[:, None]
    if not shared:
        err += p_err @ np.abs(v)
    err = np.where(l_low > 0, 1.0 / np.where(l_low > 0, l_low, 1.0), np.inf)[:, None] * err
    inverse = RCP if plan.inverse == "hardware" else U
    err += ((1 + inverse) * (1 + U) - 1) * (np.abs(o) + err) + TINY
    # Nothing on the way overflows: sums of computed weights, before l divides them.
    size = 2.0 * np.exp2(ref.x_up)[:, None]
    err = np.where(size * (seen @ np.abs(v)) < 2.0**127, err, np.inf)
    err = np.where(size * problem.n_k < 2.0**125, err, np.inf)
    wide = finish(err, seen)
    out = finish(cast_error(o, wide, fmt if num.out == "input" else "float32"), seen)

    # log2 l: upper and lower ends of the computed sum over the exact one.
    l_err = lanes(weight_up)
    low = weight_low.sum(axis=1) - l_err
    high = weight_up.sum(axis=1) + l_err
    e_log = np.maximum(np.log2(high), -np.log2(np.where(low > 0, low, 0.0)))
    lse = _lse_error(plan, problem, const, s, ref, e_log)
    return Forward(s, p, o, wide, out, finish(lse[:, None], seen)[:, 0])


def accumulated(
    product: Product,
    parts: list[F64],
    b: F64,
    after: F64,
    steps: float,
    adds: F64,
    unit: F64 | float = 1.0,
) -> F64:
    """Errors of a product on the matrix unit (see `Product.error`) whose terms also pass through so
    many fp32 roundings (`adds`: additions of tiles, multiplications by alpha).
    """
    size, most = total(parts), float(adds.max(initial=0.0))
    err = product.error(parts, b, after, steps, unit)
    err = err + product.growth(steps) * ((size * compounded(U, adds)) @ np.abs(b))
    return np.asarray((1.0 + compounded(U, most)) * err + 2 * (most + 1) * TINY * unit)


def finish(err: F64, seen: NDArray[np.bool_]) -> F64:
    """NaN (infinity times zero) is no bound; a row that sees nothing is exact."""
    err = np.where(np.isnan(err), np.inf, err * EVALUATION)
    return np.where(seen.any(axis=1, keepdims=True), err, 0.0)


def _lse_error(
    plan: Plan, problem: Problem, const: Constants, s: Scores, ref: Reference, e_log: F64
) -> F64:
    """LSE = ln2 (r + log2 l) in the Plan's form."""
    held = float(np.float32(LN2))
    ln2 = abs(held - LN2) / LN2 + 2.0**-52  # relative error of the constant
    size = np.maximum(np.abs(s.lse2 - ref.up), np.abs(s.lse2 - ref.low)) + e_log  # |log2 l|
    e_lg = LG2 * np.maximum(1.0, size)
    log2_l, r = size + e_lg, np.maximum(np.abs(ref.up), np.abs(ref.low))
    exact = LN2 * np.abs(s.lse2)
    if plan.lse in ("sum", "log2f"):  # log2f errs by less than lg2
        e = e_log + e_lg
        return LN2 * (e + ((1 + U) ** 2 * (1 + ln2) - 1) * (np.abs(s.lse2) + e)) + TINY
    if plan.lse == "natural":  # logf errs by less than an ulp; r / log2 e by 2 U
        e = LN2 * (e_log + 2 * U * size + ((1 + U) * (1 + 2 * ln2) - 1) * r)
        return e + U * (exact + e) + TINY
    w = e_log + e_lg + ((1 + U) * (1 + ln2) - 1) * log2_l
    if plan.lse == "reference":
        e = LN2 * (w + ln2 * r)
    else:
        # m factor for r ln2, where r = rn(m c) and |m| = |r| / c.
        factor, wanted = const.unit_held, const.c_held * LN2
        if plan.lse == "c ln2":
            factor = float(np.float32(const.c_held * LN2))
        m = r * (1 + 2 * U) / const.c_held if const.c_held else np.inf
        e = LN2 * w + m * (abs(factor - wanted) + 2.0**-50 * wanted + U * wanted)
        e = np.where(ref.same, e, np.inf)
    return e + U * (exact + e) + TINY


def operands(problem: Problem, h: int, rows: slice) -> tuple[F64, F64, F64]:
    """A block of queries and the keys and values they read, in float64."""
    g = problem.kv_head(h)
    q, k, v = (numbers(x) for x in (problem.q[h, rows], problem.k[g], problem.v[g]))
    return q, k, v


# -- standard attention


def standard(
    problem: Problem, h: int, rows: slice, band: Array, *, loose: bool = False
) -> tuple[F64, F64]:
    """Bounds of out and LSE of `standard_rows` with an fp32 state.

    Weights are relative to the largest computed score: an exact number, which cancels.
    """
    product, const = Product.of(problem.dtype), Constants.of(problem, natural=True)
    q, k, v = operands(problem, h, rows)
    s = scores(problem, product, const, q, k, band)
    p, seen, n_k = s.p, s.seen, problem.n_k
    top = np.where(seen, s.y + s.e, -np.inf).max(axis=1, initial=-np.inf)
    bottom = np.where(seen, s.y - s.e, -np.inf).max(axis=1, initial=-np.inf)
    top, bottom = (np.where(seen.any(axis=1), x, 0.0) for x in (top, bottom))
    top, bottom = top + 2 * U * np.abs(top) + TINY, bottom - 2 * U * np.abs(bottom) - TINY
    unit = np.exp2(top - s.lse2)[:, None]
    # y = rn(s unit), x = rn(rn(y - top) log2 e), 2^x.
    held = float(np.float32(LOG2E))
    y_err = s.e + U * (np.abs(s.y) + s.e) + 2 * TINY
    x = np.maximum(top[:, None] - s.y + y_err, 0.0)
    e = y_err + ((1 + U) ** 2 * (1 + abs(held / LOG2E - 1) + 2.0**-51) - 1) * x + 2 * TINY
    factor = np.exp2(e) * (1 + EX2)
    flush = np.where(seen, FLUSH * unit, 0.0)
    common = np.where(seen, p * (factor - 1.0), 0.0) + flush
    up = p + common
    adds = max(0, min(-(-n_k // 32) - 1 + 5, n_k - 1))
    l_err = up.sum(axis=1) * compounded(U, adds)
    low = np.maximum(p / factor * (1 - EX2 * EX2) - flush, 0.0).sum(axis=1) - l_err
    inverse = np.where(low > 0, 1.0 / np.where(low > 0, low, 1.0), np.inf)[:, None]
    o = p @ v
    err = inverse * (_spread(common, v, o, loose) + np.abs(o) * l_err[:, None])
    # P / l rounded, rounded to the format, one product over the row, the cast.
    rounding = Rounding.of(problem.dtype)
    p_up = np.where(seen, up * inverse, 0.0)
    once = np.where(seen, U * p_up + TINY, 0.0)
    p_err = once + np.where(seen, rounding.error(p_up + once), 0.0)
    steps = product.steps(n_k)
    after = steps - np.arange(n_k) // product.length
    err = err + p_err @ np.abs(v) + product.error([p_up + p_err], v, after, steps)
    err = np.where((p_up + p_err) @ np.abs(v) < 2.0**126, err, np.inf)
    out = finish(cast_error(o, finish(err, seen), problem.dtype), seen)
    e_log = np.maximum(np.log2(up.sum(axis=1) + l_err), -np.log2(np.where(low > 0, low, 0.0)))
    size = np.maximum(np.abs(s.lse2 - top), np.abs(s.lse2 - bottom)) + e_log  # |log2 l|
    e_lg = LG2 * np.maximum(1.0, size)
    ln2 = abs(float(np.float32(LN2)) - LN2) / LN2 + 2.0**-52
    lse = LN2 * (e_log + e_lg + ln2 * (size + e_lg))
    lse = lse + U * (LN2 * np.abs(s.lse2) + lse) + TINY
    return out, finish(lse[:, None], seen)[:, 0]
