"""Bounds: how far a tiled attention under a Plan may be from the exact one, derived before it runs.

Every rounding that `flash`, `backward` and `standard` make with an fp32 state is bounded by its
worst case and carried to the result; factors (1 + eps) are multiplied up, never dropped. Needed are
only float64 values of the exact result, no computed one, so that the bound judges any
implementation of a Plan: the emulator's, and a kernel's.

Notation, one query row. y_j = c S_j are the exact scores in log2 units, L2 = log2 sum_j 2^y_j, P_j =
2^(y_j - L2), O = sum_j P_j v_j. The machine subtracts a reference r that is an arbitrary fp32 number
(R at the end), so no error of r itself counts: w_j = 2^(y_j - R) are the exact weights, their sum
is 2^(L2 - R). Everything is divided by that sum: absolute errors made in units of the reference
(underflow, subnormal P) are multiplied by unit = 2^(R_up - L2), R_up >= R. All hats have gone into
names: `e` are absolute errors of exponents, `up` computed magnitudes, `err` errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulation import tensor_core
from emulation.backward import check_dout
from emulation.flash import LAZY_LIMIT, LN2, LOG2E
from emulation.formats import FLOAT32, FORMATS, Format
from emulation.oracle.result import numbers, refuse_nonfinite
from emulation.plan import Plan
from emulation.problem import Array, Problem

F64 = NDArray[np.float64]

U = FLOAT32.unit_roundoff  # one fp32 rounding to nearest, relative
TINY = FLOAT32.smallest_subnormal  # one fp32 rounding below 2^-126, absolute (either mode)
EX2 = 2.0**-22  # 2^x, relative: measured over all 2^23 fractions 0.61 (unit), 0.71 (polynomial) of it
RCP = 2.0**-23  # rcp.approx, relative: 0.83 of it over all mantissas
LG2 = 2.0**-22  # lg2.approx, absolute where |log2 l| < 1, else relative (PTX ISA): 0.97 of it
#: 2^x is flushed below x = -126; if its argument erred by 1 at most, 2^-125 was lost. (If by more,
#: the relative bound 2^e - 1 exceeds 1 and covers a flushed weight.)
FLUSH = 2.0**-125
#: float64 evaluates this file with relative errors far below 2^-20: sums of at most some thousand
#: positive terms, and weights whose exponents' own float64 error is part of `e` below.
EVALUATION = 1.0 + 2.0**-20
ROWS = 256  # queries at a time


def _power(base: float, count: F64 | float) -> F64:
    """(1 + base)^count - 1."""
    return np.asarray(np.expm1(np.asarray(count) * math.log1p(base)))


def _gamma64(terms: int) -> float:
    """A float64 sum of products, relative to the sum of their magnitudes."""
    return (terms + 4) * 2.0**-52


def _threshold(f: Format) -> float:
    """The smallest magnitude that rounds to infinity."""
    return (2.0 - f.unit_roundoff) * 2.0**f.emax


# -- matrix products


@dataclass(frozen=True)
class _Product:
    """One product on the Plan's matrix unit.

    A step of the tensor core aligns L products and the accumulator to the largest exponent E and
    cuts each behind F bits: at most L of the L + 1 terms lose something (the one at E does not), in
    all less than L 2^(E-F) = align 2^E. Then the sum is cut to 24 bits: 2^-23 of itself. 2^E is at
    most max_k power(a_k) power(b_k), where power(x) = 2^floor(log2 |x|), and 2^emin for subnormals:
    these count as if they were normal; or |accumulator|; or `floor`'s constants. A chain of fp32
    FMAs is a step of one product that rounds by u.
    """

    length: int
    align: float
    cut: float
    floor: float  # absolute, per step
    emin: float  # the least power() of an operand that is not 0
    format: Format

    @staticmethod
    def of(fmt: str, arch: str = "sm90", step: int | None = None) -> _Product:
        f = FORMATS[fmt]
        if f is FLOAT32:
            return _Product(1, 0.0, U, TINY, TINY, f)
        rule = tensor_core.Step.of(tensor_core.RULES[arch], f, step)
        lost = 2.0**-rule.fraction_bits
        align = rule.length * lost
        # The accumulator's subnormals count as 2^-126, nothing as less than 2^zero_exponent.
        floor = align * 2.0**-126 + (rule.length + 1) * lost * 2.0**rule.zero_exponent + TINY
        return _Product(rule.length, align, 2.0**-23, floor, 2.0**f.emin, f)

    def steps(self, terms: int) -> int:
        """Steps of a product of so many terms."""
        return -(-terms // self.length)

    def powers(self, x: F64) -> F64:
        """power(x) of an input."""
        return np.asarray(tensor_core.powers(np.ascontiguousarray(x), self.format))

    def error(
        self,
        parts: list[F64],
        b: F64,
        after: F64 | NDArray[np.int64],
        steps: float,
        unit: F64 | float = 1.0,
        power: F64 | None = None,
    ) -> F64:
        """Bound of the accumulation error of sum_j a_j b_j, a = sum of parts (their magnitudes).

        after: steps from the one that adds term j to the last one, both included. In its own step
        the term sets E; in the after - 1 others it is part of the accumulator, which may set E, too;
        in all of them it is part of a sum that is cut. steps: their number at most. `unit` is the
        value of 1 where a has been divided by something. `power`: power(a) of known a. Errors of
        earlier steps pass through later ones: (1 + align)(1 + cut) each.
        """
        size = sum(parts[1:], start=parts[0])
        err = (size * (after * (self.align + self.cut) - self.align)) @ np.abs(b)
        if self.align:
            if power is None:
                least = self.emin * unit
                power = sum((np.where(a > 0, np.maximum(a, least), 0.0) for a in parts), 0.0 * size)
            err = err + self.align * (power @ self.powers(b))
        growth = 1.0 + _power((1 + self.align) * (1 + self.cut) - 1, steps)
        return np.asarray(growth * (err + steps * self.floor * unit))


@dataclass(frozen=True)
class _Rounding:
    """P and dS on their way into the matrix unit: rounded (relative, absolute), or high plus low."""

    relative: float
    absolute: float
    split: bool
    limit: float  # from here on the cast gives infinity

    @staticmethod
    def of(fmt: str, split: bool = False) -> _Rounding:
        f = FORMATS[fmt]
        if f is FLOAT32:
            return _Rounding(0.0, 0.0, split, math.inf)
        return _Rounding(f.unit_roundoff, f.smallest_subnormal / 2, split, _threshold(f))

    def error(self, up: F64, unit: F64 | float = 1.0) -> F64:
        """|sum of parts - x|, |x| <= up. x - high is exact (both lie on x's fp32 grid), so split
        loses u_h of what the first rounding lost.
        """
        lost = self.relative * up + self.absolute * unit
        return self.relative * lost + self.absolute * unit if self.split else lost

    def parts(self, up: F64, unit: F64 | float = 1.0) -> list[F64]:
        """Magnitudes of the parts."""
        lost = self.relative * up + self.absolute * unit
        high = up + lost
        return [high, lost + self.relative * lost + self.absolute * unit] if self.split else [high]


# -- scores


@dataclass(frozen=True, eq=False)
class _Constants:
    """unit of the scores and c = unit log2 e, as the machine holds them, and their errors."""

    unit: float
    unit_error: float
    c: float
    c_error: float

    @staticmethod
    def of(problem: Problem) -> _Constants:
        unit = problem.scale if problem.softcap is None else problem.softcap
        with np.errstate(over="ignore"):
            held, c = float(np.float32(unit)), float(np.float32(unit * LOG2E))
        return _Constants(
            held, abs(held - unit), c, abs(c - unit * LOG2E) + 2.0**-51 * unit * LOG2E
        )


@dataclass(frozen=True, eq=False)
class _Scores:
    """A block of rows (R, N_k): exact y in log2 units and L2 (R,), what is visible, the error e of
    computed y, and with a softcap the tanh and its error.
    """

    y: F64
    e: F64
    seen: NDArray[np.bool_]
    lse2: F64
    tanh: F64
    tanh_e: F64

    @property
    def p(self) -> F64:
        """Exact P, 0 where not visible."""
        return np.where(self.seen, np.exp2(self.y - self.lse2[:, None]), 0.0)


def _scores(problem: Problem, product: _Product, const: _Constants, q: F64, k: F64, band: Array) -> _Scores:  # fmt: skip
    d = problem.d
    columns = np.arange(problem.n_k)
    seen = (columns >= band[0][:, None]) & (columns < band[1][:, None])
    s, size = q @ k.T, np.abs(q) @ np.abs(k).T
    after = product.steps(d) - np.arange(d) // product.length
    err = product.error([np.abs(q)], k.T, after, product.steps(d), power=product.powers(q))
    err = err + _gamma64(d) * size
    err = np.where(size + err < 2.0**127, err, np.inf)  # no partial sum overflows
    tanh = tanh_e = np.zeros((0, 0))
    if problem.softcap is not None:
        s, err = tanh, tanh_e = _softcap(problem, s, err)
    y = s * (const.unit * LOG2E)
    e = err * const.c + np.abs(s) * const.c_error + 2.0**-50 * np.abs(y)
    e = np.where(np.isfinite(e) & (np.abs(y) + e < 2.0**126), e, np.inf)
    top = np.where(seen, y, -np.inf).max(axis=1, initial=-np.inf)
    top = np.where(seen.any(axis=1), top, 0.0)
    total = np.where(seen, np.exp2(np.where(seen, y - top[:, None], 0.0)), 0.0).sum(axis=1)
    lse2 = top + np.log2(np.where(total > 0, total, 1.0))
    return _Scores(np.where(seen, y, lse2[:, None]), np.where(seen, e, 0.0), seen, lse2, tanh, tanh_e)


def _softcap(problem: Problem, s: F64, err: F64) -> tuple[F64, F64]:
    """tanh(S scale / softcap) and the error of 1 - 2 rcp(1 + ex2(x)), x = rn(S kappa) clamped.

    The argument's error passes with the largest slope near it. ex2 errs by EX2, the sum and rcp by u
    and RCP: relative errors of r = (1 - tanh) / 2, of which the final FMA takes 2 r and rounds once.
    Clamping at 30 changes tanh by less than 2^-29.
    """
    cap = problem.softcap or 1.0
    exact = 2.0 * LOG2E * problem.scale / cap
    with np.errstate(over="ignore"):
        kappa = float(np.float32(exact))
    x = s * exact
    e_x = err * kappa + np.abs(s) * (abs(kappa - exact) + 2.0**-50 * exact)
    e_x += U * (np.abs(x) + e_x) + TINY
    t = np.tanh(0.5 * LN2 * x)
    slope = 1.0 - np.tanh(0.5 * LN2 * np.maximum(np.abs(x) - e_x, 0.0)) ** 2
    moved = np.minimum(0.5 * LN2 * np.where(np.isfinite(e_x), e_x * slope, np.inf), 2.0) + 2.0**-29
    unit = (1 + RCP) / ((1 - EX2) * (1 - U)) - 1
    e_t = moved + (1.0 - t + moved) * unit
    e_t += U * (np.abs(t) + e_t) + 2.0**-50
    return t, np.where(np.isfinite(err), e_t, np.inf)


# -- tiles and references


@dataclass(frozen=True, eq=False)
class _Walk:
    """The order of keys: rank of each key's tile, and its first and last rank per row."""

    rank: NDArray[np.int64]  # (N_k,)
    first: NDArray[np.int64]  # (R,)
    last: NDArray[np.int64]
    inside: NDArray[np.int64]  # (N_k,), position in its tile
    tile: int

    @staticmethod
    def of(n_k: int, tile: int, ascending: bool, band: Array) -> _Walk:
        columns = np.arange(n_k)
        count = -(-n_k // tile)
        low, high = band[0] // tile, np.maximum(band[1] - 1, 0) // tile
        if not ascending:
            low, high = count - 1 - high, count - 1 - low
        rank = columns // tile if ascending else count - 1 - columns // tile
        return _Walk(rank, low, high, columns % tile, tile)

    @property
    def tiles_after(self) -> F64:
        """(R, N_k): tiles from a key's own to the row's last, both included (0 outside the band)."""
        return np.maximum(self.last[:, None] - self.rank + 1, 0).astype(np.float64)

    @property
    def tiles(self) -> F64:
        """(R,): tiles of the band."""
        return (self.last - self.first + 1).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Reference:
    """What is known of a row's references before it runs (log2 units, all (R,)).

    R <= up, R >= low; computed exponents x <= x_up; at most `moves` alphas are not exactly 1 (or
    another power of two without error); the arguments of alpha err by alpha_e in all; `same`: R is
    rn(m c) of the row's largest score, which some forms of the LSE suppose.
    """

    up: F64
    low: F64
    x_up: F64
    moves: F64
    alpha_e: F64
    same: NDArray[np.bool_]


def _reference(plan: Plan, s: _Scores, walk: _Walk) -> _Reference:
    policy = plan.numerics.reference
    some = s.seen.any(axis=1)

    def largest(x: F64, where: NDArray[np.bool_]) -> F64:
        return np.where(some, np.where(where, x, -np.inf).max(axis=1, initial=-np.inf), 0.0)

    start = s.seen & (walk.rank == walk.first[:, None])
    m_up, m_low = largest(s.y + s.e, s.seen), largest(s.y - s.e, s.seen)
    f_up, f_low = largest(s.y + s.e, start), largest(s.y - s.e, start)
    # Roundings of r = rn(m c), of a reference lifted or moved, and of x at the largest score.
    near = 3 * U * (np.maximum(largest(np.abs(s.y) + s.e, s.seen), 0.0) + 1.0)
    later = np.maximum(walk.tiles - 1, 0.0)
    up, low, x_up, moves = m_up + near, m_low - near, near, later
    same = np.ones(len(up), bool)
    limit = plan.stale_limit + 2.0**-16  # x of a P whose lane sum is at most 2^stale_limit
    if policy == "final":
        moves = np.zeros(len(up))
    elif policy == "lazy":
        low, x_up = low - LAZY_LIMIT * (1 + 2 * U), near + LAZY_LIMIT * (1 + 2 * U)
        moves = np.minimum(later, np.floor((up - f_low + near) / LAZY_LIMIT))
    elif policy in ("power-of-two", "tie-safe"):
        up, same = up + 1.0, ~same
    elif policy == "stale":
        # A lane of tile_n / 4 entries exceeds 2^limit only with an x above this (1/2 for rounding):
        jump = plan.stale_limit - math.log2(plan.tile_n / 4) - 0.5
        jumps = (m_up - f_low >= jump) | (near > 0.25)
        up = np.where(jumps, m_up + 1.0, f_up) + near
        low = np.maximum(f_low, m_low - limit) - near
        x_up = np.minimum(limit, np.maximum(m_up - f_low, 0.0)) + near
        few = np.floor((up - f_low + near) / jump) if jump > 0.25 else later
        moves = np.where(jumps, np.where(near > 0.25, later, np.minimum(later, few)), 0.0)
        same = ~jumps
    span = np.maximum(up - f_low + near, 0.0)
    if plan.alpha == "maxima":
        # rn(rn(m_old - m_new) c) for r_old - r_new: two roundings of each difference, and what
        # rounding m c made of the first and of the last reference. No form for other references.
        alpha_e = np.where(same, U * (2 + U) * span + near, np.inf)
    else:
        alpha_e = U * span
        if policy == "power-of-two":  # 2^integer: exact, and so are the products with it
            moves = np.zeros(len(up))
    alpha_e = np.where(moves > 0, alpha_e + moves * TINY, 0.0)
    return _Reference(up, low, x_up, moves, alpha_e, same)


# -- forward


@dataclass(frozen=True, eq=False)
class _Forward:
    """A block of rows: scores, exact P, O and LSE, bounds of O before and after its cast, and of
    LSE.
    """

    s: _Scores
    p: F64
    o: F64
    wide: F64
    out: F64
    lse: F64


def _cast_error(value: F64, err: F64, fmt: str) -> F64:
    """Error after the output cast: u_h of what is rounded, and half a subnormal."""
    r = _Rounding.of(fmt)
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
    product, const = _Product.of(fmt, plan.arch, plan.step), _Constants.of(problem)
    q, k, v = (numbers(x) for x in _head(problem, h, rows))
    s = _scores(problem, product, const, q, k, band)
    walk = _Walk.of(problem.n_k, plan.tile_n, plan.direction == "left-to-right", band)
    ref = _reference(plan, s, walk)
    p, seen = s.p, s.seen
    o = p @ v
    unit = np.exp2(ref.up - s.lse2)[:, None]

    # Exponents: the score, the rounding of x (|x| <= max(x_up, up - y)), that of s c where it is
    # rounded alone, the arguments of alpha; then 1 + moves evaluations of 2^x.
    x = np.maximum(ref.x_up[:, None], ref.up[:, None] - s.y + s.e)
    e = s.e + U * x + 2 * TINY + ref.alpha_e[:, None]
    if plan.score == "unfused":
        e = e + U * (np.abs(s.y) + s.e)
    factor = np.exp2(e) * (1.0 + _power(EX2, 1.0 + ref.moves))[:, None]
    # A weight is flushed by its own 2^x, or (having been up to 2^x_up) by an alpha.
    flush = np.where(seen, FLUSH * np.exp2(ref.x_up)[:, None] * unit, 0.0)
    weight_err = np.where(seen, p * (factor - 1.0), 0.0) + flush
    weight_up = p + weight_err
    fits = np.exp2(ref.x_up) < 2.0**126
    rounding = _Rounding.of(fmt, num.p == "split")
    fits &= np.exp2(ref.x_up) * (1 + EX2) < rounding.limit
    weight_err[~fits] = np.inf

    # P as P V sees it. If l sums the same P, both share this error, too.
    p_err = np.where(seen, rounding.error(weight_up, unit), 0.0)
    p_parts = [np.where(seen, part, 0.0) for part in rounding.parts(weight_up, unit)]
    p_up = sum(p_parts[1:], start=p_parts[0])
    shared = num.row_sum == "rounded"
    common = weight_err + p_err if shared else weight_err

    after_tiles = walk.tiles_after
    per_tile = product.steps(plan.tile_n) * len(p_parts)
    within = np.minimum(per_tile, len(p_parts) * product.steps(plan.tile_n)) - walk.inside // product.length  # fmt: skip
    carried = num.accumulate == "tensor-core"
    after = (after_tiles - 1) * per_tile + within if carried else 0.0 * after_tiles + within
    after = np.where(seen, after, 0.0)
    steps = walk.tiles.max(initial=0.0) * per_tile

    def accumulated(b: F64) -> F64:
        """Matrix products, and the roundings of rescales, or of the promoted additions."""
        err = product.error(p_parts, b, after, steps, unit)
        growth = 1.0 + _power(U, 2 * walk.tiles + ref.moves)[:, None]
        ops = ref.moves[:, None] if carried else after_tiles
        err += _gamma_sum(p_up, ops, b) + walk.tiles[:, None] * TINY * unit
        return growth * err * (1.0 + _power(product.align + product.cut, steps))

    # Row sums by lanes: at most 2 ceil(T / 8) - 1 additions in a tile (or 2 ceil(T / 8) with the
    # running sum in front), one fma a tile, two joins; not more than there are keys and moves.
    adds = 2 * math.ceil(plan.tile_n / 8)
    ops = after_tiles + adds + 1 if plan.row_sum_order == "tile" else after_tiles * adds + 2
    ops = np.minimum(ops, (seen.sum(axis=1) - 1 + ref.moves)[:, None])

    def lanes(values: F64, extra: int = 0) -> F64:
        return np.asarray((values * _power(U, ops + extra)).sum(axis=1)) + walk.tiles * TINY * unit[:, 0]  # fmt: skip

    if not shared:
        l_err = lanes(weight_up)
    elif plan.rounded_sum == "matrix":
        l_err = accumulated(np.ones((problem.n_k, 1)))[:, 0]
    else:  # of split halves, which are added first
        l_err = lanes(p_up, extra=len(p_parts) - 1)

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


def _gamma_sum(a: F64, ops: F64, b: F64) -> F64:
    """sum_j a_j b_j with so many fp32 roundings on each term."""
    return np.asarray((a * _power(U, ops)) @ np.abs(b))


def _finish(err: F64, seen: NDArray[np.bool_]) -> F64:
    """NaN (infinity times zero) is no bound; a row that sees nothing is exact."""
    err = np.where(np.isnan(err), np.inf, err * EVALUATION)
    return np.where(seen.any(axis=1)[:, None], err, 0.0)


def _lse_error(
    plan: Plan, problem: Problem, const: _Constants, s: _Scores, ref: _Reference, e_log: F64
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
        # m factor for r ln2, where r = rn(m c) and |m| = |r| / c: unit - c ln2 = (c - c_held) ln2.
        factor, wanted = const.unit, const.c * LN2
        if plan.lse == "c ln2":
            factor = float(np.float32(const.c * LN2))
        m = r * (1 + 2 * U) / const.c if const.c else np.inf
        e = LN2 * w + m * (abs(factor - wanted) + 2.0**-50 * wanted + U * wanted)
        e = np.where(ref.same, e, np.inf)
    return e + U * (exact + e) + TINY


def _head(problem: Problem, h: int, rows: slice) -> tuple[Array, Array, Array]:
    g = problem.kv_head(h)
    return problem.q[h, rows], problem.k[g], problem.v[g]


def forward_bound(
    problem: Problem, plan: Plan, *, before_cast: bool = False
) -> tuple[F64, F64]:
    """Bounds of |out - exact| (H, N_q, D_v) and |lse - exact| (H, N_q), elementwise, float64.

    They hold for every implementation of `plan` (fp32 state) on every finite input; inf where the
    Plan may overflow or be wrong by more than its own size, 0 for rows that see no key. before_cast:
    of O before it is rounded to the output format. O(N_q N_k D_v) float64 operations. Raises
    ValueError for NaN or Inf that some query sees, for a Plan of another format or with a half
    state, and for a "stale" reference whose limit a tile can exceed without a larger score.

    >>> x = np.eye(64, dtype=np.float16)
    >>> out, lse = forward_bound(Problem.of(x, x, x), Plan(format="float16"))
    >>> out.shape, bool(out.max() < 2**-15), bool(lse.max() < 2**-20)
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
