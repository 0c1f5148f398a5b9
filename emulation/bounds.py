"""Bounds: how far a tiled attention under a Plan may be from the exact one, derived before it runs.

Every rounding that `flash`, `backward` and `standard` make with an fp32 state is bounded by its
worst case and carried to the result; factors (1 + eps) are multiplied up, never dropped. Needed are
only float64 values of the exact result, no computed one, so that the bound judges any
implementation of a Plan: the emulator's, and a kernel's. Notation: see `bound_terms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation.backward import check_dout
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
    gamma64,
    reference,
    scores,
)
from emulation.flash import LN2, LOG2E
from emulation.oracle.result import check_cotangents, numbers, refuse_nonfinite
from emulation.plan import Plan
from emulation.problem import Array, Problem

ROWS = 256  # queries at a time


# -- forward


@dataclass(frozen=True, eq=False)
class _Forward:
    """A block of rows: scores, exact P, O and LSE, bounds of O before and after its cast, and of
    LSE.
    """

    s: Scores
    p: F64
    o: F64
    wide: F64
    out: F64
    lse: F64


def _cast_error(value: F64, err: F64, fmt: str) -> F64:
    """Error after the output cast: u_h of what is rounded, and half a subnormal."""
    r = Rounding.of(fmt)
    up = np.abs(value) + err
    return np.where(up < r.limit, err + r.relative * up + r.absolute, np.inf)


def _check(problem: Problem, plan: Plan | None = None) -> None:
    """Refuse what no bound is derived for."""
    refuse_nonfinite(problem)
    if plan is None:
        return
    if plan.format != problem.dtype:
        raise ValueError(f"plan: format {plan.format}, must be {problem.dtype} like q")
    if plan.state != "float32":
        raise ValueError(f"plan.state: got {plan.state!r}, must be 'float32' to be bounded")
    if plan.numerics.reference == "stale" and 2.0**plan.stale_limit < plan.tile_n / 4:
        # Else a lane of a tile may exceed the limit without a score above the reference.
        raise ValueError(
            f"plan.stale_limit: got {plan.stale_limit}, must be >= log2(tile_n / 4) to be bounded"
        )


def _blocks(problem: Problem) -> Iterator[tuple[slice, Array]]:
    band = np.stack(problem.band())
    for start in range(0, problem.n_q, ROWS):
        rows = slice(start, min(start + ROWS, problem.n_q))
        yield rows, band[:, rows]


def _spread(common: F64, v: F64, o: F64) -> F64:
    """sum_j common_ij |v_jd - O_id|: what errors do to O that its numerator and l share."""
    gaps = (np.abs(v[:, d] - o[:, d, None]) for d in range(v.shape[1]))
    parts = [np.where(gap > 0, common * gap, 0.0).sum(axis=1) for gap in gaps]
    return np.stack(parts, axis=1)


def _forward(problem: Problem, plan: Plan, h: int, rows: slice, band: Array) -> _Forward:
    num, fmt = plan.numerics, plan.format
    product, const = Product.of(fmt, plan.arch, plan.step), Constants.of(problem)
    rounding = Rounding.of(fmt, num.p == "split")
    q, k, v = (numbers(x) for x in _head(problem, h, rows))
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
    if plan.score == "unfused":
        e = e + U * (np.abs(s.y) + s.e)
    factor = np.exp2(e) * (1.0 + compounded(EX2, 1.0 + ref.moves))[:, None]
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
    if num.accumulate == "tensor-core":
        after, adds = after + (after_tiles - 1) * per_tile, ref.moves[:, None] + 0.0 * after
    else:
        adds = after_tiles
    steps = walk.tiles.max(initial=0.0) * per_tile

    def accumulated(b: F64) -> F64:
        """Matrix products with the multiplications by alpha, or with the promoted additions."""
        return _accumulated(product, parts, b, np.where(seen, after, 0.0), steps, adds, unit)

    # Row sums by lanes: at most 2 ceil(T / 8) - 1 additions in a tile (or 2 ceil(T / 8) with the
    # running sum in front), one fma a tile, two joins; not more than there are keys and moves.
    lane = 2 * math.ceil(plan.tile_n / 8)
    ops = after_tiles + lane + 1 if plan.row_sum_order == "tile" else after_tiles * lane + 2
    ops = np.minimum(ops, (seen.sum(axis=1) - 1 + ref.moves)[:, None])

    def lanes(values: F64, extra: int = 0) -> F64:
        lost = np.asarray((values * compounded(U, ops + extra)).sum(axis=1))
        return lost + walk.tiles * TINY * unit[:, 0]

    if not shared:
        l_err = lanes(weight_up)
    elif plan.rounded_sum == "matrix":
        l_err = accumulated(np.ones((problem.n_k, 1)))[:, 0]
    else:  # of split halves, which are added first
        l_err = lanes(sum(parts[1:], start=parts[0]), extra=len(parts) - 1)

    # acc / l - O = (sum_j common_j (v_j - O) + acc_err - O l_err) / l, exactly; then 1 / l and the
    # final multiply.
    weight_low = np.maximum(p / factor * (1 - EX2 * EX2) ** (1 + ref.moves[:, None]) - flush, 0.0)
    l_low = (weight_low - (p_err if shared else 0.0)).sum(axis=1) - l_err
    err = _spread(common, v, o) + accumulated(v) + np.abs(o) * l_err[:, None]
    if not shared:
        err += p_err @ np.abs(v)
    err = np.where(l_low > 0, 1.0 / np.where(l_low > 0, l_low, 1.0), np.inf)[:, None] * err
    inverse = RCP if plan.inverse == "hardware" else U
    err += ((1 + inverse) * (1 + U) - 1) * (np.abs(o) + err) + TINY
    # Nothing on the way overflows: sums of computed weights, before l divides them.
    size = 2.0 * np.exp2(ref.x_up)[:, None]
    err = np.where(size * (seen @ np.abs(v)) < 2.0**127, err, np.inf)
    err = np.where(size * problem.n_k < 2.0**125, err, np.inf)
    wide = _finish(err, seen)
    out = _finish(_cast_error(o, wide, fmt if num.out == "input" else "float32"), seen)

    # log2 l: upper and lower ends of the computed sum over the exact one (Jensen is not needed).
    l_err = lanes(weight_up)
    low = weight_low.sum(axis=1) - l_err
    high = weight_up.sum(axis=1) + l_err
    e_log = np.maximum(np.log2(high), -np.log2(np.where(low > 0, low, 0.0)))
    lse = _lse_error(plan, problem, const, s, ref, e_log)
    return _Forward(s, p, o, wide, out, _finish(lse[:, None], seen)[:, 0])


def _accumulated(
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
    size, most = sum(parts[1:], start=parts[0]), adds.max(initial=0.0)
    err = product.error(parts, b, after, steps, unit)
    err = err + product.growth(steps) * ((size * compounded(U, adds)) @ np.abs(b))
    return np.asarray((1.0 + compounded(U, most)) * err + 2 * (most + 1) * TINY * unit)


def _finish(err: F64, seen: NDArray[np.bool_]) -> F64:
    """NaN (infinity times zero) is no bound; a row that sees nothing is exact."""
    err = np.where(np.isnan(err), np.inf, err * EVALUATION)
    return np.where(seen.any(axis=1)[:, None], err, 0.0)


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
    if plan.lse == "sum":
        e = e_log + e_lg
        return LN2 * (e + ((1 + U) ** 2 * (1 + ln2) - 1) * (np.abs(s.lse2) + e)) + TINY
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


def _head(problem: Problem, h: int, rows: slice) -> tuple[Array, Array, Array]:
    g = problem.kv_head(h)
    return problem.q[h, rows], problem.k[g], problem.v[g]


def forward_bound(problem: Problem, plan: Plan, *, before_cast: bool = False) -> tuple[F64, F64]:
    """Bounds of |out - exact| (H, N_q, D_v) and |lse - exact| (H, N_q), elementwise, float64.

    They hold for every implementation of `plan` (fp32 state) on every finite input; inf where the
    Plan may overflow or be wrong by more than its own size, 0 for rows that see no key.
    before_cast: of O before it is rounded to the output format. O(N_q N_k D_v) float64 operations.
    Raises ValueError for NaN or Inf that some query sees, for a Plan of another format or with a
    half state, and for a "stale" reference whose limit a tile can exceed without a larger score.

    >>> x = np.eye(64, dtype=np.float16)
    >>> out, lse = forward_bound(Problem.of(x, x, x), Plan(format="float16"))
    >>> out.shape, bool(out.max() < 2**-15), bool(lse.max() < 2**-18)
    ((1, 64, 64), True, True)
    """
    _check(problem, plan)
    out = np.zeros((problem.heads, problem.n_q, problem.d_v))
    lse = np.zeros(out.shape[:2])
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            for rows, band in _blocks(problem):
                f = _forward(problem, plan, h, rows, band)
                out[h, rows], lse[h, rows] = f.wide if before_cast else f.out, f.lse
    return out, lse


# -- backward


def _delta_error(plan: Plan, f: _Forward, dout: F64, v_terms: F64, dlse: F64) -> tuple[F64, F64]:
    """delta = sum_d dO_d O_d - dLSE (R,) and its error: that of the O which is summed, as a rounded
    part and (delta="full") the rounded remainder, which is exact before its rounding; then 8 fmas a
    part in a chain, a tree over the chunks, one subtraction.
    """
    r = Rounding.of(plan.format)
    o_err, size, parts = f.out, np.abs(f.o) + f.out, 1
    half = plan.numerics.out == "input" and r.relative > 0
    if half and plan.numerics.delta == "full":
        up = np.abs(f.o) + f.wide
        first = r.relative * up + r.absolute
        rest = r.relative * first + r.absolute
        o_err = np.where(up < r.limit, f.wide + rest, np.inf)
        size, parts = up + 2 * first + rest, 2
    chunks = 1
    while chunks * 8 < f.o.shape[1]:
        chunks *= 2
    weight = np.abs(dout)
    rounded = compounded(U, 8 * parts + math.log2(chunks)) + gamma64(f.o.shape[1])
    err = (weight * o_err).sum(axis=1) + rounded * (weight * size).sum(axis=1)
    err = err + 8 * parts * chunks * TINY + gamma64(f.o.shape[1]) * v_terms
    delta = (dout * f.o).sum(axis=1) - dlse
    return delta, err + np.where(dlse != 0, U * (np.abs(delta) + err), 0.0)


def _query_walk(
    plan: Plan, product: Product, n_q: int, rows: slice, heads_after: int
) -> tuple[F64, F64, int]:
    """For dV and dK: steps after a query's own (it included), promoted additions after, steps of
    one head. An unsplit product runs through from the first row that sees the tile (one step more
    where that is no multiple of L); the others start anew every tile_m queries.
    """
    i = np.arange(rows.start, rows.stop)
    parts = 2 if plan.numerics.p == "split" else 1
    if plan.numerics.accumulate == "tensor-core" and parts == 1:
        head = product.steps(n_q) + 1
        after = (n_q - 1 - i) // product.length + 2 + heads_after * head
        return after.astype(np.float64), np.zeros(len(i)), head
    tile, per_tile = plan.backward.tile_m, parts * product.steps(plan.backward.tile_m)
    tiles = -(-n_q // tile)
    within = per_tile - i % tile // product.length
    left = tiles - 1 - i // tile + heads_after * tiles
    if plan.numerics.accumulate == "promoted":
        return within.astype(np.float64), left + 1.0, tiles * per_tile
    return within + left * float(per_tile), np.zeros(len(i)), tiles * per_tile


@dataclass(frozen=True, eq=False)
class _Sum:
    """An accumulator before its scaling: exact value, error, and sum of the terms' magnitudes."""

    value: F64
    err: F64
    size: F64

    @staticmethod
    def zeros(*shape: int) -> _Sum:
        return _Sum(np.zeros(shape), np.zeros(shape), np.zeros(shape))

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.value + other.value, self.err + other.err, self.size + other.size)

    def finished(self, plan: Plan, scale: float | None = None) -> F64:
        """Scaled by the held fp32 factor (None: not) and cast; inf where a sum may overflow."""
        value, err = self.value, np.where(self.size + self.err < 2.0**126, self.err, np.inf)
        if scale is not None:
            with np.errstate(over="ignore"):
                held = float(np.float32(scale))
            err = err * held + np.abs(value) * abs(held - scale)
            value = value * scale
            err += U * (np.abs(value) + err) + TINY
        err = _cast_error(value, err, plan.format if plan.numerics.out == "input" else "float32")
        return np.where(np.isnan(err), np.inf, err * EVALUATION)


def _backward(
    problem: Problem, plan: Plan, h: int, rows: slice, band: Array, dout: F64, dlse: F64
) -> tuple[_Sum, _Sum, _Sum]:
    """What a block of queries of one head gives to dQ (all of it), dK and dV."""
    f = _forward(problem, plan, h, rows, band)
    product = Product.of(plan.format, plan.arch, plan.step)
    rounding = Rounding.of(plan.format, plan.numerics.p == "split")
    q, k, v = (numbers(x) for x in _head(problem, h, rows))
    s, p, seen = f.s, f.p, f.s.seen

    # P = 2^(s c - rn(LSE log2 e)): the forward's LSE error, its conversion, then as in the forward.
    held = float(np.float32(LOG2E))
    e_lse = f.lse * held + np.abs(s.lse2) * (abs(held - LOG2E) + 2.0**-51) * LN2
    e_lse = (e_lse + U * (np.abs(s.lse2) + e_lse) + TINY)[:, None]
    e = s.e + e_lse
    x_up = e
    e = e + U * (s.lse2[:, None] - s.y + e) + TINY
    factor = np.exp2(e) * (1 + EX2)
    p_err = np.where(seen, p * (factor - 1.0) + FLUSH, 0.0)
    p_err = np.where(seen & ~(x_up < 126.0), np.inf, p_err)
    p_up = p + p_err
    p_half = np.where(seen & (p_up < rounding.limit), rounding.error(p_up), 0.0 * seen)
    p_half = np.where(p_up < rounding.limit, p_half, np.inf)

    # dS = rn(P rn(dP - delta)), with a softcap times rn(1 - tanh^2).
    terms = np.abs(dout) @ np.abs(v).T
    d_v = problem.d_v
    after = product.steps(d_v) - np.arange(d_v) // product.length
    dp_err = product.error(
        [np.abs(dout)], v.T, after, product.steps(d_v), power=product.powers(dout)
    )
    dp_err = np.where(terms + dp_err < 2.0**126, dp_err + gamma64(d_v) * terms, np.inf)
    delta, delta_err = _delta_error(plan, f, dout, (p * terms).sum(axis=1), dlse)
    gap = dout @ v.T - delta[:, None]
    gap_err = dp_err + delta_err[:, None]
    gap_err += U * (np.abs(gap) + gap_err)
    ds = p * gap
    ds_err = p_err * (np.abs(gap) + gap_err) + p * gap_err
    ds_err += U * (np.abs(ds) + ds_err) + TINY
    if problem.softcap is not None:
        slope = 1.0 - s.tanh**2
        slope_err = (2 * np.abs(s.tanh) + s.tanh_e) * s.tanh_e
        slope_err += U * (slope + slope_err)
        ds_err = ds_err * (slope + slope_err) + np.abs(ds) * slope_err
        ds = ds * slope
        ds_err += U * (np.abs(ds) + ds_err) + TINY
    ds, ds_err = np.where(seen, ds, 0.0), np.where(seen, ds_err, 0.0)
    ds_up = np.abs(ds) + ds_err
    ds_half = np.where(seen, rounding.error(ds_up), 0.0)
    ds_half = np.where(ds_up < rounding.limit, ds_half, np.inf)

    def parts(up: F64) -> list[F64]:
        return [np.where(seen, part, 0.0) for part in rounding.parts(up)]

    ds_parts, p_parts = parts(ds_up), parts(p_up)
    ascending = plan.backward.dq_order == "ascending"
    walk = Walk.of(problem.n_k, plan.backward.tile_n, ascending, band)
    steps = len(ds_parts) * product.steps(walk.tile)
    after = np.asarray(steps - walk.inside // product.length, np.float64)
    dq_err = _accumulated(product, ds_parts, k, after, steps, walk.tiles_after)
    group = problem.group
    later, adds, head = _query_walk(plan, product, problem.n_q, rows, group - 1 - h % group)

    def over_queries(value: F64, err: F64, up: list[F64], b: F64) -> _Sum:
        lost = _accumulated(product, [x.T for x in up], b, later, head * group, adds)
        size = sum(up[1:], start=up[0]).T @ np.abs(b)
        return _Sum(value.T @ b, err.T @ np.abs(b) + lost, size)

    dq = _Sum(
        ds @ k,
        (ds_err + ds_half) @ np.abs(k) + dq_err,
        sum(ds_parts[1:], start=ds_parts[0]) @ np.abs(k),
    )
    dk = over_queries(ds, ds_err + ds_half, ds_parts, q)
    return dq, dk, over_queries(p, p_err + p_half, p_parts, dout)


def backward_bound(
    problem: Problem, plan: Plan, dout: Any, dlse: Any = None
) -> tuple[F64, F64, F64]:
    """Bounds of |dq - exact| (H, N_q, D), |dk - exact| (H_kv, N_k, D) and |dv - exact| (H_kv, N_k,
    D_v), elementwise, float64, for `flash_vjp` of this Plan (its forward included).

    dout (..., N_q, D_v) and dlse (..., N_q) as in `flash_vjp`. What holds and what is raised is as
    in `forward_bound`.

    >>> x = np.eye(64, dtype=np.float16)
    >>> bounds = backward_bound(Problem.of(x, x, x), Plan(format="float16"), x)
    >>> [bool(b.max() < 2**-10) for b in bounds]
    [True, True, True]
    """
    _check(problem, plan)
    check_dout(problem, dout, dlse)
    do, dl = check_cotangents(problem, dout, dlse)
    kv = problem.k.shape[0]
    dq = np.zeros((problem.heads, problem.n_q, problem.d))
    dk, dv = np.zeros((kv, problem.n_k, problem.d)), np.zeros((kv, problem.n_k, problem.d_v))
    with np.errstate(all="ignore"):
        for g in range(kv):
            dk_sum, dv_sum = _Sum.zeros(*dk.shape[1:]), _Sum.zeros(*dv.shape[1:])
            for h in range(g * problem.group, (g + 1) * problem.group):
                for rows, band in _blocks(problem):
                    parts = _backward(problem, plan, h, rows, band, do[h, rows], dl[h, rows])
                    dq[h, rows] = parts[0].finished(plan, problem.scale)
                    dk_sum, dv_sum = dk_sum + parts[1], dv_sum + parts[2]
            dk[g], dv[g] = dk_sum.finished(plan, problem.scale), dv_sum.finished(plan)
    return dq, dk, dv


# -- standard attention


def standard_bound(problem: Problem) -> tuple[F64, F64]:
    """Bounds of |out - exact| and |lse - exact| for `standard` with state="float32", as
    `forward_bound`.

    >>> x = np.eye(64, dtype=np.float16)
    >>> out, lse = standard_bound(Problem.of(x, x, x))
    >>> bool(out.max() < 2**-15), bool(lse.max() < 2**-18)
    (True, True)
    """
    _check(problem)
    out = np.zeros((problem.heads, problem.n_q, problem.d_v))
    lse = np.zeros(out.shape[:2])
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            for rows, band in _blocks(problem):
                out[h, rows], lse[h, rows] = _standard(problem, h, rows, band)
    return out, lse


def _standard(problem: Problem, h: int, rows: slice, band: Array) -> tuple[F64, F64]:
    """Weights relative to the largest computed score (an exact number, which cancels)."""
    product, const = Product.of(problem.dtype), Constants.of(problem, natural=True)
    q, k, v = (numbers(x) for x in _head(problem, h, rows))
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
    err = inverse * (_spread(common, v, o) + np.abs(o) * l_err[:, None])
    # P / l rounded, rounded to the format, one product over the row, the cast.
    rounding = Rounding.of(problem.dtype)
    p_up = np.where(seen, up * inverse, 0.0)
    once = np.where(seen, U * p_up + TINY, 0.0)
    p_err = once + np.where(seen, rounding.error(p_up + once), 0.0)
    steps = product.steps(n_k)
    after = steps - np.arange(n_k) // product.length
    err = err + p_err @ np.abs(v) + product.error([p_up + p_err], v, after, steps)
    err = np.where((p_up + p_err) @ np.abs(v) < 2.0**126, err, np.inf)
    out = _finish(_cast_error(o, _finish(err, seen), problem.dtype), seen)
    e_log = np.maximum(np.log2(up.sum(axis=1) + l_err), -np.log2(np.where(low > 0, low, 0.0)))
    size = np.maximum(np.abs(s.lse2 - top), np.abs(s.lse2 - bottom)) + e_log  # |log2 l|
    e_lg = LG2 * np.maximum(1.0, size)
    ln2 = abs(float(np.float32(LN2)) - LN2) / LN2 + 2.0**-52
    lse = LN2 * (e_log + e_lg + ln2 * (size + e_lg))
    lse = lse + U * (LN2 * np.abs(s.lse2) + lse) + TINY
    return out, _finish(lse[:, None], seen)[:, 0]
