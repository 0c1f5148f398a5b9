"""The mpmath tier: attention and its gradients as they are defined, one row after the other at 200
bits.

To be read, and to check the other tiers with. Slow (N <= 64), and its radius is an estimate, not a
proof.
"""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np

from emulation.oracle.result import Exact, ExactGradients, Floats, Index, numbers
from emulation.problem import Problem

PRECISION = 200
LARGEST = 64

mp: Any = mpmath.MPContext()  # a context of its own: the caller's precision stays as it is
mp.prec = PRECISION


def softmax(problem: Problem, q: list[Any], k: list[list[Any]]) -> tuple[list[Any], Any, list[Any]]:
    """Weights, lse, and the derivative of the softcap, of one query and the keys that it sees."""
    scores = [mp.mpf(problem.scale) * mp.fdot(q, key) for key in k]
    slopes = [mp.one] * len(scores)
    if problem.softcap is not None:
        cap = mp.mpf(problem.softcap)
        tanhs = [mp.tanh(s / cap) for s in scores]
        scores = [cap * t for t in tanhs]
        slopes = [1 - t * t for t in tanhs]
    top = max(scores)
    weights = [mp.exp(s - top) for s in scores]
    total = mp.fsum(weights)
    return [w / total for w in weights], top + mp.log(total), slopes


def forward(problem: Problem, rows: Index) -> Exact:
    """Attention for the given query rows, heads flattened."""
    q, k, v = (to_mpf(numbers(x)) for x in (problem.q, problem.k, problem.v))
    lo, hi = problem.band()
    out = np.full((problem.heads, len(rows), problem.d_v), mp.zero, dtype=object)
    lse = np.full((problem.heads, len(rows)), mp.ninf, dtype=object)
    for head in range(problem.heads):
        kv = problem.kv_head(head)
        for at, i in enumerate(rows):
            seen = slice(lo[i], hi[i])
            if hi[i] > lo[i]:
                p, lse[head, at], _ = softmax(problem, q[head][i], k[kv][seen])
                out[head, at] = [mp.fdot(p, column) for column in zip(*v[kv][seen], strict=True)]
    error = estimate(problem)
    out_radius, lse_radius = error * float(np.abs(numbers(problem.v)).max(initial=0.0)), error
    (high, low), (lse_high, lse_low) = to_pair(out), to_pair(lse)
    return Exact(high, lse_high, low, lse_low, out_radius, lse_radius, "mpmath", False)


def backward(problem: Problem, dout: Floats, dlse: Floats) -> ExactGradients:
    """Gradients for dout (H, N_q, D_v) and dlse (H, N_q), heads flattened."""
    q, k, v, do, dl = (
        to_mpf(x) for x in (*map(numbers, (problem.q, problem.k, problem.v)), dout, dlse)
    )
    lo, hi = problem.band()
    scale = mp.mpf(problem.scale)
    dq, dk, dv = (
        np.full(x.shape, mp.zero, dtype=object) for x in (problem.q, problem.k, problem.v)
    )
    for head in range(problem.heads):
        kv = problem.kv_head(head)
        for i in range(problem.n_q):
            if hi[i] <= lo[i]:
                continue
            seen = range(lo[i], hi[i])
            p, _, slopes = softmax(problem, q[head][i], [k[kv][j] for j in seen])
            dp = [mp.fdot(do[head][i], v[kv][j]) for j in seen]
            delta = mp.fdot(p, dp) - dl[head][i]  # sum_j P_j dP_j is rowsum(dout * out)
            for j, p_j, dp_j, slope in zip(seen, p, dp, slopes, strict=True):
                ds = scale * p_j * (dp_j - delta) * slope
                dq[head, i] += ds * np.array(k[kv][j])
                dk[kv, j] += ds * np.array(q[head][i])
                dv[kv, j] += p_j * np.array(do[head][i])
    sizes = [float(np.abs(numbers(x)).max(initial=0.0)) for x in (problem.q, problem.k, problem.v)]
    size = float(np.abs(dout).max(initial=0.0))
    error = estimate(problem) * problem.n_q * problem.group
    ds_error = (
        error
        * problem.scale
        * (2 * problem.d_v * size * sizes[2] + float(np.abs(dlse).max(initial=0.0)))
    )
    radii = ds_error * sizes[1], ds_error * sizes[0], error * size
    (dq_high, dq_low), (dk_high, dk_low), (dv_high, dv_low) = map(to_pair, (dq, dk, dv))
    return ExactGradients(
        dq_high, dk_high, dv_high, dq_low, dk_low, dv_low, *radii, tier="mpmath", certified=False
    )


def estimate(problem: Problem) -> float:
    """Size of the relative error of a weight: 200 bits less those of the largest score and of the
    sums."""
    q, k = (float(np.abs(numbers(x)).max(initial=0.0)) for x in (problem.q, problem.k))
    return float((8 + problem.n_k + problem.scale * problem.d * q * k) * 2.0 ** (4 - PRECISION))


def to_mpf(x: Floats) -> Any:
    """Nested lists of the same numbers in mpmath."""
    return [to_mpf(row) for row in x] if x.ndim > 1 else [mp.mpf(float(value)) for value in x]


def to_pair(x: Any) -> tuple[Floats, Floats]:
    """An array of mpf as the nearest float64 and what that leaves."""
    high = np.array([float(value) for value in x.flat]).reshape(x.shape)
    low = [
        float(value - h) if mp.isfinite(value) else 0.0
        for value, h in zip(x.flat, high.flat, strict=True)
    ]
    return high, np.array(low).reshape(x.shape)
