"""The float64 tier: attention and its gradients for up to many thousands of keys, with a derived
error bound.

Scores are exact (one product where float64 holds it, else products of limbs), so the row max comes
off exactly and huge scores keep their accuracy. The bound supposes: IEEE float64 sums and products
in any order (BLAS without Strassen), and NumPy's exp, log and tanh within 4 units in the last
place.

Notation of the bounds: u = 2^-53; gamma(m) = m u / (1 - m u) bounds a sum of m products; x_ij = the
exponent (score minus row max), p = exp x, P = p / l. Each function says what its error fields mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulation.oracle.result import Floats, Index, check_range, numbers, refuse_nonfinite
from emulation.problem import Problem

U = 2.0**-53
FUNCTION = 8 * U  # exp, log and tanh: 4 units in the last place
# Query rows at a time, and keys per partial sum: keeps memory small and gamma, too.
BLOCK = 128
DEPTH = 800.0  # exp(-800) = 0 in float64; weights below are covered by UNDERFLOW
UNDERFLOW = 1e-290
SLACK = 1.05  # second order: every first-order term that is multiplied by it is below 0.02


def gamma(terms: int) -> float:
    """Bound of the relative error of a float64 sum of so many products, in any order."""
    return terms * U / (1 - terms * U)


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """a + b as (rounded sum, exact rest); Knuth."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Floats, b: float) -> tuple[Floats, Floats]:
    """a * b as (rounded product, exact rest); Dekker, for |a|, |b| < 2^990."""

    def halves(x: Floats) -> tuple[Floats, Floats]:
        c = x * 134217729.0  # 2^27 + 1
        high = c - (c - x)
        return high, x - high

    p = a * b
    (a1, a2), (b1, b2) = halves(a), halves(np.asarray(b))
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


class Rows:
    """Rows (n, d) of numbers, and what an exact product of rows needs to know about them.

    |x| < 2^top in its row, and every number of a row is a multiple of the row's unit, a power of
    two; `norm` bounds the Euclidean norm of a row in its units. The first two limbs are the
    numbers' leading 2 beta bits counted from 2^top, the third (usually 0) is what is left.
    """

    def __init__(self, x: Floats) -> None:
        self.x = x
        fraction, exponent = np.frexp(x)
        integer = np.abs(fraction * 2.0**53).astype(np.int64)
        trailing = np.frexp((integer & -integer).astype(np.float64))[1] - 1
        zero = integer == 0
        self.top = np.where(zero, -9999, exponent).max(axis=1, initial=-9999)
        last = np.where(zero, 9999, exponent - 53 + trailing).min(axis=1, initial=9999)
        unit = np.ldexp(1.0, np.where(zero.all(axis=1), 0, last))
        self.norm = np.sqrt(((x / unit[:, None]) ** 2).sum(axis=1)) * (1 + 1e-12)

    def limbs(self, beta: int) -> tuple[Floats, Floats, Floats]:
        """Three arrays that sum to x; the first two are beta-bit integers of a unit per row."""
        unit = np.ldexp(1.0, np.maximum(self.top, -900) - beta)[:, None]
        first = np.rint(self.x / unit) * unit
        rest = self.x - first
        unit = unit * 2.0**-beta
        second = np.rint(rest / unit) * unit
        return first, second, rest - second


class Keys:
    """The keys of one head, and their exact products with queries; limbs are made when needed."""

    def __init__(self, k: Floats) -> None:
        self.rows = Rows(k)
        self.d = k.shape[1]
        self.beta = (53 - math.ceil(math.log2(self.d))) // 2
        self._limbs: tuple[Floats, Floats, Floats] | None = None

    def scores(self, q: Floats, keys: slice) -> tuple[Floats, Floats | None, Floats]:
        """The products q k^T as (high, low or None, error per row): |high + low - exact| <= error.

        One product is exact when the integers that the rows stand for keep every partial sum within
        2^53; by Cauchy and Schwarz the product of their norms bounds them all. Else limbs: |first|
        <= 2^top, |second| <= 2^(top - beta - 1), |third| <= 2^(top - 2 beta - 1). first*first is
        exact since 2 beta + log2 d <= 53, so is the sum of the two cross products, and the rest is
        below size * 2^(1 - 2 beta) with size = d 2^(top q + top k): its rounding (d + 8 roundings)
        is the error. The rounding of lo in a difference of scores, 4 u^2 size, is below that too.
        """
        rows, k = Rows(q), self.rows
        if rows.norm.max(initial=0.0) * k.norm[keys].max(initial=0.0) <= 2.0**53:
            return q @ k.x[keys].T, None, np.zeros(len(q))
        if self._limbs is None:
            self._limbs = k.limbs(self.beta)
        q1, q2, q3 = rows.limbs(self.beta)
        k1, k2, k3 = (limb[keys].T for limb in self._limbs)
        small = q2 @ k2
        if q3.any() or k3.any():
            small += q3 @ k.x[keys].T + (q1 + q2) @ k3
        high, low = two_sum(q1 @ k1, q1 @ k2 + q2 @ k1)
        high, low = two_sum(high, low + small)
        top = rows.top + int(k.top[keys].max(initial=-9999))
        size = self.d * np.ldexp(1.0, np.maximum(top, -900))
        return high, low, size * (2.0 ** (2 - 2 * self.beta) * (self.d + 8) * U)


@dataclass(frozen=True)
class Weights:
    """Unnormalised softmax weights of a block of rows that all see something.

    p (rows, keys) = exp(x) computed, 0 outside the band; its relative error is at most `eta`, of
    which `share` (rows) comes from the scores, in rows that are `sound` (eta <= 0.01; scores beyond
    10^30 may leave a row without bound). m + m_low (rows) is the row max of the scaled, capped
    scores, within m_error. tanh (rows, keys) is the tanh of the softcap, or None.
    """

    p: Floats
    eta: Floats
    m: Floats
    m_low: Floats
    m_error: Floats
    share: Floats
    sound: NDArray[np.bool_]
    tanh: Floats | None


def weigh(
    problem: Problem,
    q: Floats,
    keys: Keys,
    seen: slice,
    lo: Index,
    hi: Index,
) -> Weights:
    """Scores, mask, max and exp.

    Without softcap x = scale * ((high - max high) + (low - max low)): three roundings of what is
    nearly x, one more for the product, plus 2 * scale * (error of a score), plus that of exp: eta =
    4u|x| + share + FUNCTION. With it, x = cap * tanh(a - b) * (1 - tanh a * tanh b) with a - b as
    accurate as x was: tanh(a - b) is within 13u of itself, tanh a and tanh b too, so x errs by at
    most 17u|x| + 27u cap |tanh(a - b) tanh a tanh b|.
    """
    scale, cap = problem.scale, problem.softcap
    high, low, error = keys.scores(q, seen)
    at = np.arange(seen.start, seen.stop)
    visible = (at >= lo[:, None]) & (at < hi[:, None])
    if not visible.all():
        high = np.where(visible, high, -np.inf)
    top = high.max(axis=1)
    top_low = np.zeros(len(q))
    tanh = None
    with np.errstate(over="ignore"):  # scale * score may reach -inf: weight 0; score / cap: tanh 1
        x = high - top[:, None]
        if low is not None:
            top_low = np.where(high == top[:, None], low, -np.inf).max(axis=1)
            x += low - top_low[:, None]
        x *= scale
        m, m_low = two_product(top, scale)
        m_low = m_low + scale * top_low
        m_error = 8 * U * U * np.abs(m) + scale * error
        share = 2 * scale * error
        eta = np.minimum(-x, DEPTH) * (4 * U)
        if cap is not None:
            tanh = np.tanh(np.where(visible, scale * high, 0.0) / cap)
            top_tanh = np.tanh(scale * top / cap)
            bent = tanh * top_tanh[:, None]
            difference = np.tanh(x / cap)
            x = np.where(visible, cap * difference * (1.0 - bent), -np.inf)
            m, m_low = cap * top_tanh, np.zeros(len(q))
            flushed = cap * 2.0**-1060  # what a tiny score / cap may lose to underflow
            m_error += 14 * U * np.abs(m) + flushed
            share = 2 * share + flushed
            eta = np.minimum(-x, DEPTH) * (17 * U) + np.abs(difference * bent) * (27 * U * cap)
    eta += share[:, None] + FUNCTION
    return Weights(np.exp(x), eta, m, m_low, m_error, share, eta.max(axis=1) <= 0.01, tanh)


def chunked(a: Floats, b: Floats) -> Floats:
    """The product of a and b, summed BLOCK terms at a time: within gamma(partial_terms(n))."""
    total = a[:, :BLOCK] @ b[:BLOCK]
    for start in range(BLOCK, a.shape[1], BLOCK):
        total += a[:, start : start + BLOCK] @ b[start : start + BLOCK]
    return total


def partial_terms(n: int) -> int:
    """Roundings that one term of a chunked sum of n products goes through."""
    return BLOCK + -(-n // BLOCK)


def blocks(rows: Index, lo: Index, hi: Index) -> Iterator[tuple[Index, slice]]:
    """Positions in `rows`, BLOCK at a time, of rows that see something, and the keys they see."""
    seeing = np.flatnonzero(hi[rows] > lo[rows])
    for start in range(0, len(seeing), BLOCK):
        part = seeing[start : start + BLOCK]
        yield part, slice(int(lo[rows[part]].min()), int(hi[rows[part]].max()))


@dataclass(frozen=True)
class Forward:
    """out (H, rows, D_v), lse + lse_low (H, rows), and the bounds of both per row (H, rows)."""

    out: Floats
    lse: Floats
    lse_low: Floats
    out_radius: Floats
    lse_radius: Floats


def forward(problem: Problem, rows: Index) -> Forward:
    """Attention for the given query rows.

    With w = sum_j P_j eta_j: numerator and l each err by w (relative to sum P|v| <= max|v|) and by
    the gamma of their sums, the quotient rounds once: |error of out| <= max|v| (2w + 2 gamma + 4u).
    In rows that are not sound both sides are still averages of values: 2.1 max|v|. lse = m + ln l:
    w, gamma, the error of log and of m; ln l and m are added without rounding.
    """
    q, k, v = numbers(problem.q), numbers(problem.k), numbers(problem.v)
    lo, hi = problem.band()
    heads, n = problem.heads, len(rows)
    out, lse = np.zeros((heads, n, problem.d_v)), np.full((heads, n), -np.inf)
    lse_low, out_radius, lse_radius = (np.zeros((heads, n)) for _ in range(3))
    keys = None
    for head in range(heads):
        kv = problem.kv_head(head)
        if keys is None or head % problem.group == 0:
            keys = Keys(k[kv])
            ones = np.ones((problem.n_k, 1))
            values = np.concatenate([v[kv], ones], axis=1)  # the last column sums the weights
        for part, seen in blocks(rows, lo, hi):
            at = rows[part]
            w = weigh(problem, q[head, at], keys, seen, lo[at], hi[at])
            sums = chunked(w.p, values[seen])
            total = sums[:, -1]
            out[head, part] = sums[:, :-1] / total[:, None]
            log = np.log(total)
            s, low = two_sum(w.m, log)
            lse[head, part], lse_low[head, part] = two_sum(s, low + w.m_low)
            spread = (w.p * w.eta).sum(axis=1) / total
            g = gamma(partial_terms(seen.stop - seen.start))
            size = float(np.abs(v[kv, seen]).max())
            bound = SLACK * size * (2 * spread + 2 * g + 4 * U)
            out_radius[head, part] = np.where(w.sound, bound, 2.1 * size) + UNDERFLOW * size
            small = np.where(w.sound, spread, np.max(w.eta, axis=1))
            lse_radius[head, part] = SLACK * (small + g + FUNCTION * log + w.m_error) + UNDERFLOW
    return Forward(out, lse, lse_low, out_radius, lse_radius)


@dataclass(frozen=True)
class Backward:
    """dq (H, N_q, D), dk, dv (H_kv, N_k, ...) and their worst bounds."""

    dq: Floats
    dk: Floats
    dv: Floats
    dq_radius: float
    dk_radius: float
    dv_radius: float


def backward(problem: Problem, dout: Floats, dlse: Floats) -> Backward:
    """Gradients for dout (H, N_q, D_v) and dlse (H, N_q), checked.

    delta is summed as sum_j P dP - dlse, so that dS sums to dlse. With A = sum_c |dout_c| max|v_c|
    >= |dP| and B = 2A + |dlse|: P is within eta + w + gamma of itself and dP - delta within B (w +
    2 gamma + ...), so dS is within P B (eta + c), c = 2w + 3 gamma(keys) + 2 gamma(D_v) + 40u +
    slope (40u: roundings, and 24u for the factor 1 - tanh^2; slope: what the error of a score does
    to that factor). Rows that are not sound get no bound. The bounds of dq, dk, dv are those
    errors through the last products, plus their gammas.
    """
    q, k, v = numbers(problem.q), numbers(problem.k), numbers(problem.v)
    lo, hi = problem.band()
    scale, rows = problem.scale, np.arange(problem.n_q)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dk_bound, dv_bound = np.zeros(k.shape[:2]), np.zeros(k.shape[:2])
    dq_bound = 0.0
    column = gamma(BLOCK + problem.group * -(-problem.n_q // BLOCK) + 2)
    keys = None
    for head in range(problem.heads):
        kv = problem.kv_head(head)
        if keys is None or head % problem.group == 0:
            keys = Keys(k[kv])
        for at, seen in blocks(rows, lo, hi):
            w = weigh(problem, q[head, at], keys, seen, lo[at], hi[at])
            values, grad = v[kv, seen], dout[head, at]
            p = w.p / chunked(w.p, np.ones((w.p.shape[1], 1)))
            dp = grad @ values.T
            delta = (p * dp).sum(axis=1) - dlse[head, at]
            ds = p * (dp - delta[:, None])
            if w.tanh is not None:
                ds *= (1.0 - w.tanh) * (1.0 + w.tanh)
            dq[head, at] = scale * chunked(ds, k[kv, seen])
            dk[kv, seen] += scale * (ds.T @ q[head, at])
            dv[kv, seen] += p.T @ grad

            g = gamma(partial_terms(seen.stop - seen.start))
            spread = p * w.eta
            mean = spread.sum(axis=1)
            b = 2 * (np.abs(grad) @ np.abs(values).max(axis=0)) + np.abs(dlse[head, at])
            c = 2 * mean + 3 * g + 2 * gamma(problem.d_v) + 40 * U
            if problem.softcap is not None:
                c += np.minimum(w.share, problem.softcap) / problem.softcap
            b = np.where(w.sound, b, np.where(b > 0, np.inf, 0.0))
            size_k, size_q = np.abs(k[kv, seen]).max(), np.abs(q[head, at]).max(axis=1)
            size_out = np.abs(grad).max(axis=1)
            if size_k:  # infinity times 0 is no bound
                row = scale * size_k * b * (mean + c + g + 3 * U + UNDERFLOW)
                dq_bound = max(dq_bound, SLACK * float(row.max()))
            error = spread + p * (c + column)[:, None] + UNDERFLOW
            through = np.where((b > 0) & (size_q > 0), b, 0.0) * size_q
            dk_bound[kv, seen] += SLACK * scale * _weighted(through, error)
            dv_bound[kv, seen] += SLACK * _weighted(
                np.where(w.sound, size_out, np.inf * np.sign(size_out)), error
            )
    worst = [float(x.max(initial=0.0)) for x in (dk_bound, dv_bound)]
    return Backward(dq, dk, dv, dq_bound, *worst)


def _weighted(weight: Floats, error: Floats) -> Floats:
    """Sum over rows of weight * error, infinite as soon as one weight is."""
    return weight @ error if np.isfinite(weight).all() else np.full(error.shape[1], np.inf)


def float64_attention(problem: Problem) -> tuple[Floats, Floats]:
    """Out (H, N_q, D_v) and lse (H, N_q) of a problem in float64, heads flattened; no bound.

    A row that sees no key gives 0 and -inf. Raises ValueError for a NaN or Inf that some query
    sees; others reach nothing.

    >>> x = np.ones((2, 4), np.float16)
    >>> out, lse = float64_attention(Problem.of(x, x, x))
    >>> out.shape, (lse - 2).round(4).tolist()  # two equal scores of 4 / sqrt(4)
    ((1, 2, 4), [[0.6931, 0.6931]])
    """
    refuse_nonfinite(problem)
    result = forward(problem, np.arange(problem.n_q))
    return result.out, result.lse


def float64_gradients(
    problem: Problem, dout: Floats, dlse: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Gradients dq (H, N_q, D), dk (H_kv, N_k, D), dv (H_kv, N_k, D_v) in float64; no bound.

    Heads are flattened; dout (H, N_q, D_v) and dlse (H, N_q) are float64 and finite. Rows that see
    no key get 0. Raises as `float64_attention`.

    >>> x = np.ones((2, 4), np.float16)
    >>> dq, dk, dv = float64_gradients(Problem.of(x, x, x), np.ones((1, 2, 4)))
    >>> dq.any(), dv[0, 0].tolist()  # equal keys
    (np.False_, [1.0, 1.0, 1.0, 1.0])
    """
    refuse_nonfinite(problem)
    dlse = np.zeros(dout.shape[:2]) if dlse is None else dlse
    check_range(problem, dout, dlse)
    result = backward(problem, dout, dlse)
    return result.dq, result.dk, result.dv
