"""The Arb tier: attention and its gradients in ball arithmetic, whose radius is proved. Needs
python-flint.

Scores are exact integers times a power of two, so the row max and the differences from it are exact
however large the scores are; only scale, tanh, exp, log and the sums round, at a precision that is
raised until the radius reaches TARGET.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from emulation.oracle.result import Exact, ExactGradients, Floats, Index, numbers
from emulation.problem import Array, Problem

try:
    from flint import arb, arb_mat, ctx, fmpz, fmpz_mat
except ImportError as error:
    raise ImportError(
        "the certified oracle needs python-flint: pip install cuflash[oracle]"
    ) from error

TARGET = 1e-30
PRECISION = 128
TRIES = 8
WIDE = 1100  # bits that hold any scaled score (below 2^900) exactly
BLOCK = 128  # query rows at a time: a ball takes about 100 bytes
LARGEST = 1024  # queries and keys of a full problem

Balls = list[list[arb]]
Pair = tuple[Floats, Floats, float]
T = TypeVar("T")


def power(exponent: int) -> arb:
    """2^exponent, exactly."""
    return arb((1, exponent))


def integers(x: Floats) -> tuple[list[int], int]:
    """The numbers of an array as integers times 2^exponent, exactly."""
    fraction, exponent = np.frexp(x.ravel())
    mantissa = (fraction * 2.0**53).astype(np.int64)
    low = mantissa & -mantissa
    trailing = np.frexp(low.astype(np.float64))[1] - 1
    used = mantissa != 0
    last = int((exponent - 53 + trailing)[used].min()) if used.any() else 0
    shifts = np.where(used, exponent - 53 + trailing - last, 0).tolist()
    odd = np.where(used, mantissa // np.where(used, low, 1), 0).tolist()
    return [i << s for i, s in zip(odd, shifts, strict=True)], last


@dataclass(frozen=True)
class Block:
    """Softmax of some rows of one head, not yet divided by the sum.

    weights (rows, keys of `seen`) = exp(score - max), 0 outside the band; top = the max; slopes =
    derivative of the softcap, or None.
    """

    seen: slice
    weights: Balls
    top: list[arb]
    slopes: Balls | None


def softmax(problem: Problem, head: int, rows: Index) -> Block:
    """Scores and weights of rows that all see something, at the current precision."""
    lo, hi = (side[rows].tolist() for side in problem.band())
    seen = slice(min(lo), max(hi))
    k, k_last = integers(numbers(problem.k[problem.kv_head(head), seen]))
    n, d = seen.stop - seen.start, problem.d
    queries = [integers(row) for row in numbers(problem.q[head, rows])]  # each row its own exponent
    product = (
        fmpz_mat(len(rows), d, [i for row, _ in queries for i in row])
        * fmpz_mat(n, d, k).transpose()
    )
    # A weight below exp(-prec) becomes the ball [0, 2^-prec]: their sum is far below TARGET, or
    # raises the precision.
    tail = arb(power(-ctx.prec - 1), power(-ctx.prec - 1))
    cap = problem.softcap
    weights, tops, all_slopes = [], [], []
    for scores, (_, q_last), start, stop in zip(product.tolist(), queries, lo, hi, strict=True):
        row = scores[start - seen.start : stop - seen.start]
        exponent = q_last + k_last
        unit = arb(problem.scale) * power(exponent)  # exact: 53 bits
        top = max(row)
        before, after = [arb(0)] * (start - seen.start), [arb(0)] * (seen.stop - stop)
        if cap is None:
            depth = Fraction(ctx.prec) / (Fraction(problem.scale) * Fraction(2) ** exponent)
            cut = top - fmpz(math.ceil(depth))
            inside = [tail if s < cut else (unit * (s - top)).exp() for s in row]
            with ctx.workprec(WIDE):
                tops.append(unit * top)
        else:
            limit = arb(cap)
            unit /= limit
            tanhs = [(unit * s).tanh() for s in row]
            top_tanh = (unit * top).tanh()
            inside = [(limit * (t - top_tanh)).exp() for t in tanhs]
            tops.append(limit * top_tanh)
            all_slopes.append(before + [1 - t * t for t in tanhs] + after)
        weights.append(before + inside + after)
    return Block(seen, weights, tops, all_slopes if cap is not None else None)


def matrix(x: Floats) -> arb_mat:
    """An array (n, m) as balls, exactly."""
    return arb_mat(x.shape[0], x.shape[1], x.ravel().tolist())


def to_pair(x: Balls, shape: tuple[int, ...]) -> tuple[Floats, Floats, float]:
    """The float64 nearest to each midpoint, what that leaves, and the largest radius."""
    high, low, radius = [], [], 0.0
    for row in x:
        for ball in row:
            h = float(ball.mid())
            rest = ball - h
            high.append(h)
            low.append(float(rest.mid()))
            r = float(rest.rad())
            radius = max(radius, r if r < math.inf else math.inf)  # NaN counts as infinite
    # 2^-1000 for what float() flushes to zero.
    return np.array(high).reshape(shape), np.array(low).reshape(shape), radius + 2.0**-1000


def adapt(compute: Callable[[], T], radius: Callable[[T], float], precision: int = PRECISION) -> T:
    """Compute at rising precision until the radius is TARGET, or TRIES are spent; the context is
    left as it was."""
    for attempt in range(TRIES):
        with ctx.workprec(precision):
            result = compute()
        size = radius(result)
        if size <= TARGET or attempt == TRIES - 1:
            break
        missing = math.ceil(math.log2(size / TARGET)) if math.isfinite(size) else precision
        precision += min(max(missing, 0) + 16, 4096)
    return result


def forward(problem: Problem, rows: Index, head: int | None = None) -> Exact:
    """Attention for the given query rows, heads flattened; of one head only, if it is named."""
    lo, hi = problem.band()
    heads = range(problem.heads) if head is None else [head]
    shape = (len(heads), len(rows))
    out, out_low = np.zeros((*shape, problem.d_v)), np.zeros((*shape, problem.d_v))
    lse, lse_low = np.full(shape, -np.inf), np.zeros(shape)
    seeing = np.flatnonzero(hi[rows] > lo[rows])
    radii = [(0.0, 0.0)]
    for at, h in enumerate(heads):
        for start in range(0, len(seeing), BLOCK):
            part = seeing[start : start + BLOCK]
            (o, o_low, o_radius), (m, m_low, m_radius) = adapt(
                lambda h=h, part=part: _forward_block(problem, h, rows[part]),  # type: ignore[misc]
                lambda pair: max(pair[0][2], pair[1][2]),
            )
            out[at, part], out_low[at, part], lse[at, part], lse_low[at, part] = o, o_low, m, m_low
            radii.append((o_radius, m_radius))
    out_radius, lse_radius = (max(side) for side in zip(*radii, strict=True))
    return Exact(out, lse, out_low, lse_low, out_radius, lse_radius, "arb", True)


def _forward_block(problem: Problem, head: int, rows: Index) -> tuple[Pair, Pair]:
    block = softmax(problem, head, rows)
    v = numbers(problem.v[problem.kv_head(head), block.seen])
    ones = np.ones((len(v), 1))
    totals = (arb_mat(block.weights) * matrix(np.concatenate([v, ones], axis=1))).tolist()
    out = [[x / total for x in row] for *row, total in totals]
    logs = [total.log() for *_, total in totals]
    with ctx.workprec(
        ctx.prec + WIDE
    ):  # lse may be as large as the scores, and ln l is small beside them
        lse = [top + log for top, log in zip(block.top, logs, strict=True)]
    return to_pair(out, (len(rows), problem.d_v)), to_pair([lse], (len(rows),))


def backward(problem: Problem, dout: Floats, dlse: Floats) -> ExactGradients:
    """Gradients for dout (H, N_q, D_v) and dlse (H, N_q), heads flattened."""
    pairs = [
        adapt(
            lambda kv=kv: _backward_group(problem, kv, dout, dlse),  # type: ignore[misc]
            lambda group: max(pair[2] for pair in group),
        )
        for kv in range(len(problem.k))
    ]
    halves: list[Floats] = []
    radii = []
    for which, like in enumerate((problem.q, problem.k, problem.v)):
        group = [pair[which] for pair in pairs]
        for half in (0, 1):
            halves.append(np.array([pair[half] for pair in group], np.float64).reshape(like.shape))
        radii.append(max((pair[2] for pair in group), default=0.0))
    dq, dq_low, dk, dk_low, dv, dv_low = halves
    dq_radius, dk_radius, dv_radius = radii
    return ExactGradients(
        dq, dk, dv, dq_low, dk_low, dv_low, dq_radius, dk_radius, dv_radius, "arb", True
    )


def _backward_group(
    problem: Problem, kv: int, dout: Floats, dlse: Floats
) -> tuple[Pair, Pair, Pair]:
    """Dq of the query heads that read one key head, dk and dv of that head."""
    lo, hi = problem.band()
    seeing = np.flatnonzero(hi > lo)
    dq = [[arb(0)] * problem.d for _ in range(problem.group * problem.n_q)]
    dk = [[arb(0)] * problem.d for _ in range(problem.n_k)]
    dv = [[arb(0)] * problem.d_v for _ in range(problem.n_k)]
    for member in range(problem.group):
        head = kv * problem.group + member
        for start in range(0, len(seeing), BLOCK):
            rows = seeing[start : start + BLOCK]
            block, inverse, ds = _score_gradients(
                problem, head, rows, dout[head, rows], dlse[head, rows]
            )
            factors = [arb(problem.scale) * x for x in inverse]
            products = _times(ds, problem.k[kv, block.seen])
            for i, factor, row in zip(rows, factors, products, strict=True):
                dq[member * problem.n_q + i] = [factor * x for x in row]
            _add_transposed(dk, block.seen, ds, factors, numbers(problem.q[head, rows]))
            _add_transposed(dv, block.seen, block.weights, inverse, dout[head, rows])
    return (
        to_pair(dq, (problem.group, problem.n_q, problem.d)),
        to_pair(dk, (problem.n_k, problem.d)),
        to_pair(dv, (problem.n_k, problem.d_v)),
    )


def _score_gradients(
    problem: Problem, head: int, rows: Index, dout: Floats, dlse: Floats
) -> tuple[Block, list[arb], Balls]:
    """The softmax of a block, 1 / l per row, and l * dS (before the scale)."""
    block = softmax(problem, head, rows)
    v = numbers(problem.v[problem.kv_head(head), block.seen])
    dp = (matrix(dout) * matrix(v).transpose()).tolist()
    inverse, ds = [], []
    for i, (weights, slope_of_p) in enumerate(zip(block.weights, dp, strict=True)):
        inverse.append(1 / sum(weights, arb(0)))
        products = [w * x for w, x in zip(weights, slope_of_p, strict=True)]
        delta = sum(products, arb(0)) * inverse[-1] - float(
            dlse[i]
        )  # sum_j P dP is rowsum(dout * out)
        row = [x - w * delta for w, x in zip(weights, products, strict=True)]
        if block.slopes is not None:
            row = [x * slope for x, slope in zip(row, block.slopes[i], strict=True)]
        ds.append(row)
    return block, inverse, ds


def _times(a: Balls, b: Array) -> Balls:
    return (arb_mat(a) * matrix(numbers(b))).tolist()


def _add_transposed(total: Balls, seen: slice, a: Balls, factors: list[arb], b: Floats) -> None:
    """Add a^T diag(factors) b to the rows `seen` of total."""
    scaled = [[factor * x for x in row] for factor, row in zip(factors, b.tolist(), strict=True)]
    for j, row in enumerate((arb_mat(a).transpose() * arb_mat(scaled)).tolist(), seen.start):
        total[j] = [x + y for x, y in zip(total[j], row, strict=True)]


def query_gradients(problem: Problem, head: int, row: int, dout: Floats, dlse: float) -> Pair:
    """One row of dq (D,) of a row that sees something, for dout (D_v,) and its dlse."""

    def compute() -> Pair:
        block, inverse, ds = _score_gradients(
            problem, head, np.array([row]), dout[None], np.array([dlse])
        )
        factor = arb(problem.scale) * inverse[0]
        (dq,) = _times(ds, problem.k[problem.kv_head(head), block.seen])
        return to_pair([[factor * x for x in dq]], (problem.d,))

    return adapt(compute, lambda pair: pair[2])
