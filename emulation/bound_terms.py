"""Pieces of `bounds`: what one step can lose, what scores lose, what is known of references.

Notation, one query row. y_j = c S_j are the exact scores in log2 units, L2 = log2 sum_j 2^y_j,
P_j = 2^(y_j - L2), O = sum_j P_j v_j. The machine subtracts a reference r that is an arbitrary fp32
number (R at the end), so no error of r itself counts: w_j = 2^(y_j - R) are the exact weights,
their sum is 2^(L2 - R). Everything is divided by that sum: absolute errors made in units of the
reference (underflow, subnormal P) are multiplied by unit = 2^(R_up - L2), R_up >= R. In names, `e`
are absolute errors of exponents, `up` largest computed magnitudes, `err` errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulation import rules, tensor_core, wide
from emulation.formats import BFLOAT16, FLOAT32, FORMATS, Format
from emulation.plan import C, Plan
from emulation.problem import Array, Problem
from emulation.tiled import LAZY_LIMIT, LN2, LOG2E, score_unit, unrounded_c

F64 = NDArray[np.float64]

U = FLOAT32.unit_roundoff  # one fp32 rounding to nearest, relative
TINY = FLOAT32.smallest_subnormal  # one fp32 rounding below 2^-126, absolute (either mode)
EX2 = (
    2.0**-22
)  # 2^x, relative: measured over all 2^23 fractions 0.61 (unit), 0.71 (polynomial) of it
RCP = 2.0**-23  # rcp.approx, relative: 0.83 of it over all mantissas
LG2 = 2.0**-22  # lg2.approx, absolute where |log2 l| < 1, else relative (PTX ISA): 0.97 of it
TANH = 2.0**-21  # 1 - 2 / (1 + 2^x) for tanh, absolute: derived in `_softcap` (0.93 of it)
#: 2^x is flushed below x = -126; if its argument erred by 1 at most, 2^-125 was lost. (If by more,
#: the relative bound 2^e - 1 exceeds 1 and covers a flushed weight.)
FLUSH = 2.0**-125
#: float64 evaluates this file with relative errors far below 2^-20: sums of at most some thousand
#: positive terms, and weights whose exponents' own float64 error is part of `e` below.
EVALUATION = 1.0 + 2.0**-20
ROWS = 256  # queries at a time


def compounded(base: float, count: F64 | float) -> F64:
    """(1 + base)^count - 1."""
    return np.asarray(np.expm1(np.asarray(count) * math.log1p(base)))


def total(parts: list[F64]) -> F64:
    """The sum of one or two parts."""
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def gamma64(terms: int) -> float:
    """A float64 sum of products, relative to the sum of their magnitudes."""
    return (terms + 4) * 2.0**-52


def threshold(f: Format) -> float:
    """The smallest magnitude that rounds to infinity."""
    return (2.0 - f.unit_roundoff) * 2.0**f.emax


# -- matrix products


@dataclass(frozen=True)
class Product:
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
    passes: int = 1  # products of terms that make one product of operands (`wide`)

    @staticmethod
    def of(fmt: str, arch: str = "sm90", step: int | None = None, how: str = "fma") -> Product:
        f, passes = FORMATS[fmt], 1
        if f is FLOAT32 and how == "fma":
            return Product(1, 0.0, U, TINY, TINY, f)
        if f is FLOAT32:
            f, passes = BFLOAT16, len(wide.PRODUCTS)
        rule = rules.Step.of(rules.RULES[arch], f, step)
        lost = 2.0**-rule.fraction_bits
        align = rule.length * lost
        # The accumulator's subnormals count as 2^-126, nothing as less than 2^zero_exponent.
        floor = align * 2.0**-126 + (rule.length + 1) * lost * 2.0**rule.zero_exponent + TINY
        return Product(rule.length, align, 2.0**-23, floor, 2.0**f.emin, f, passes)

    def steps(self, terms: int) -> int:
        """Steps of a product of so many terms."""
        return -(-terms // self.length) * self.passes

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
        the term sets E; in the after - 1 others it is part of the accumulator, which may set E,
        too; in all of them it is part of a sum that is cut. steps: their number at most. `unit` is
        the value of 1 where a has been divided by something. `power`: power(a) of known a. Errors
        of earlier steps pass through later ones: (1 + align)(1 + cut) each.
        """
        size = total(parts)
        if self.align and power is None:
            least = self.emin * unit
            power = total([np.where(a > 0, np.maximum(a, least), 0.0) for a in parts])
        if self.passes > 1 and power is not None:
            err = self._of_terms(size, b, after, unit, power)
        else:
            err = (size * (after * (self.align + self.cut) - self.align)) @ np.abs(b)
            if power is not None:
                err = err + self.align * (power @ self.powers(b))
        return np.asarray(self.growth(steps) * (err + steps * self.floor * unit))

    def _of_terms(
        self,
        size: F64,
        b: F64,
        after: F64 | NDArray[np.int64],
        unit: F64 | float,
        power: F64,
    ) -> F64:
        """The same for six products of three terms each, of which |middle| <= 2^-8 |x| and |low| <=
        2^-16 |x|, or bfloat16's subnormals: their magnitudes add up to less than (1 + 2^-6) |a b|,
        and the products left out to less than 2^-22.9 |a b|. power(high) may be 2 power(x); the
        subnormals that count as 2^-126 are counted apart; what no term holds is below 2^-133.
        """
        powers, tiny = self.powers(b), 2.0**-133
        err = (size * ((1 + 2.0**-6) * after * (self.align + self.cut) + 2.0**-22.9)) @ np.abs(b)
        err = err + self.align * (1 + 2.0**-4) * 4 * (power @ powers)
        least = 12 * self.align * self.emin
        err = err + least * (unit * powers.sum(axis=0) + power.sum(axis=1, keepdims=True))
        err = err + tiny * (unit * np.abs(b).sum(axis=0) + size.sum(axis=1, keepdims=True))
        return np.asarray(err)

    def growth(self, steps: float) -> float:
        """What so many steps can make of an error, or of a magnitude."""
        return float(1.0 + compounded((1 + self.align) * (1 + self.cut) - 1, steps))


@dataclass(frozen=True)
class Rounding:
    """P and dS on their way into the matrix unit: rounded (relative, absolute), or high + low."""

    relative: float
    absolute: float
    split: bool
    limit: float  # from here on the cast gives infinity

    @staticmethod
    def of(fmt: str, split: bool = False) -> Rounding:
        f = FORMATS[fmt]
        if f is FLOAT32:
            return Rounding(0.0, 0.0, split, math.inf)
        return Rounding(f.unit_roundoff, f.smallest_subnormal / 2, split, threshold(f))

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
class Constants:
    """unit (scale, or softcap) and c = unit log2 e: exact, as held, and the error of c as held."""

    unit: float
    unit_held: float
    c: float
    c_held: float
    c_error: float

    @staticmethod
    def of(problem: Problem, rule: C = "once", *, natural: bool = False) -> Constants:
        """c by a rule of `Plan.c`. natural: scores are multiplied by unit instead, and c_held means
        unit_held log2 e.
        """
        unit = score_unit(problem)
        with np.errstate(over="ignore"):
            held, c = float(np.float32(unit)), unit * LOG2E
            rounded = float(np.float32(unrounded_c(unit, rule)))
            c_held = held * LOG2E if natural else rounded
        return Constants(unit, held, c, c_held, abs(c_held - c) + 2.0**-50 * c)


@dataclass(frozen=True, eq=False)
class Scores:
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


def scores(
    problem: Problem, product: Product, const: Constants, q: F64, k: F64, band: Array
) -> Scores:
    """Exact scores of rows q (R, D) with band (2, R), and the errors of computed ones."""
    d = problem.d
    columns = np.arange(problem.n_k)
    seen = (columns >= band[0][:, None]) & (columns < band[1][:, None])
    s, size = q @ k.T, np.abs(q) @ np.abs(k).T
    after = product.steps(d) - np.arange(d) // product.length
    err = product.error([np.abs(q)], k.T, after, product.steps(d), power=product.powers(q))
    err = err + gamma64(d) * size
    err = np.where(size + err < 2.0**127, err, np.inf)  # no partial sum overflows
    tanh = tanh_e = np.zeros((0, 0))
    if problem.softcap is not None:
        s, err = tanh, tanh_e = _softcap(problem, s, err)
    y = s * const.c
    e = err * const.c_held + np.abs(s) * const.c_error + 2.0**-50 * np.abs(y)
    e = np.where(np.isfinite(e) & (np.abs(y) + e < 2.0**126), e, np.inf)
    top = np.where(seen, y, -np.inf).max(axis=1, initial=-np.inf)
    top = np.where(seen.any(axis=1), top, 0.0)
    total = np.where(seen, np.exp2(np.where(seen, y - top[:, None], 0.0)), 0.0).sum(axis=1)
    lse2 = top + np.log2(np.where(total > 0, total, 1.0))
    return Scores(
        np.where(seen, y, lse2[:, None]), np.where(seen, e, 0.0), seen, lse2, tanh, tanh_e
    )


def _softcap(problem: Problem, s: F64, err: F64) -> tuple[F64, F64]:
    """tanh(S scale / softcap) and the error of 1 - 2 rcp(1 + ex2(x)), x = rn(S kappa) clamped.

    The argument's error passes with the largest slope near it. ex2 errs by EX2, of which 1 + 2^x
    has the share (1 + tanh) / 2, the sum and rcp by u and RCP: relative errors of r = (1 - tanh) /
    2, of which the final FMA takes 2 r and rounds. Clamping at 30 changes tanh by less than 2^-29.
    With an exact score all this is below 2^-21, absolutely: largest near tanh = -3/4.
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
    unit = (1 + RCP) / ((1 - EX2 * np.minimum(1.0 + t + moved, 2.0) / 2) * (1 - U)) - 1
    e_t = moved + (1.0 - t + moved) * unit
    e_t += U * (np.abs(t) + e_t) + 2.0**-50
    return t, np.where(np.isfinite(err), e_t, np.inf)


# -- tiles and references


@dataclass(frozen=True, eq=False)
class Walk:
    """The order of keys: rank of each key's tile, and its first and last rank per row."""

    rank: NDArray[np.int64]  # (N_k,)
    first: NDArray[np.int64]  # (R,)
    last: NDArray[np.int64]
    inside: NDArray[np.int64]  # (N_k,), position in its tile
    tile: int

    @staticmethod
    def of(n_k: int, tile: int, ascending: bool, band: Array) -> Walk:
        columns = np.arange(n_k)
        count = -(-n_k // tile)
        low, high = band[0] // tile, np.maximum(band[1] - 1, 0) // tile
        if not ascending:
            low, high = count - 1 - high, count - 1 - low
        rank = columns // tile if ascending else count - 1 - columns // tile
        return Walk(rank, low, high, columns % tile, tile)

    @property
    def tiles_after(self) -> F64:
        """(R, N_k): tiles from a key's own to the row's last, both included (0 after it)."""
        return np.asarray(np.maximum(self.last[:, None] - self.rank + 1, 0), np.float64)

    @property
    def tiles(self) -> F64:
        """(R,): tiles of the band."""
        return np.asarray(self.last - self.first + 1, np.float64)


@dataclass(frozen=True, eq=False)
class Reference:
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


def reference(plan: Plan, s: Scores, walk: Walk) -> Reference:
    """What `flash._follow`, `_redo` and `_alpha` can do with these scores."""
    policy = plan.numerics.reference
    some = s.seen.any(axis=1)

    def largest(x: F64, where: NDArray[np.bool_]) -> F64:
        return np.where(some, np.where(where, x, -np.inf).max(axis=1, initial=-np.inf), 0.0)

    start = s.seen & (walk.rank == walk.first[:, None])
    m_up, m_low = largest(s.y + s.e, s.seen), largest(s.y - s.e, s.seen)
    f_up, f_low = largest(s.y + s.e, start), largest(s.y - s.e, start)
    # Roundings of r = rn(m c), of a reference lifted or moved, and of x at the largest score.
    near = (
        (4 if plan.score == "scaled" else 3)
        * U
        * (np.maximum(largest(np.abs(s.y) + s.e, s.seen), 0.0) + 1.0)
    )
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
        up = np.where(jumps, m_up, f_up) + 1.0 + near  # an integer, and moved by integers
        low = np.maximum(f_low, m_low - limit) - near
        x_up = np.minimum(limit, np.maximum(m_up - f_low, 0.0)) + near
        few = np.floor((up - f_low + near) / jump) if jump > 0.25 else later
        moves = np.where(jumps, np.where(near > 0.25, later, np.minimum(later, few)), 0.0)
        same = np.zeros(len(up), bool)
    span = np.maximum(up - f_low + near, 0.0)
    if plan.alpha == "maxima":
        # rn(rn(m_old - m_new) c) for r_old - r_new: two roundings of each difference, and what
        # rounding m c made of the first and of the last reference. No form for other references.
        alpha_e = np.where(same, U * (2 + U) * span + near, np.inf)
    else:
        alpha_e = U * span
        if policy in ("power-of-two", "stale"):  # 2^integer: exact, and so are products with it
            moves = np.zeros(len(up))
    alpha_e = np.where(moves > 0, alpha_e + moves * TINY, 0.0)
    return Reference(up, low, x_up, moves, alpha_e, same)
