"""Standard attention, step by step: the whole row of scores is stored, softmax is a step of its
own.

The order of operations is that of an unfused implementation: S = Q K^T, scaled, softmax over the
row (sums as a warp of 32 lanes makes them), P normalised, then P V. `state` is the format in which
S, P and every intermediate is kept between steps; half formats show what an unfused half-precision
chain does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import rounding
from emulation.arguments import check_progress, one_of
from emulation.machine import Machine, Node
from emulation.problem import Array, Problem, numpy_dtype
from emulation.row_sum import column
from emulation.tiled import LN2, LOG2E, Forward, Progress, row_blocks, scores, visible
from emulation.tiled import constants as flash_constants

STATES = ("float32", "bfloat16", "float16")


def standard_machine(problem: Problem, state: str, arch: str = "sm90") -> Machine:
    """The machine of a standard attention. Raises ValueError for an unknown state."""
    one_of("state", state, STATES)
    return Machine(arch=arch, fmt=problem.dtype, state=state)


def warp_sum(m: Machine, name: str, x: Node) -> Node:
    """Row sums (R, T) -> (R,): lane j % 32 adds its columns in ascending order, lanes join by
    halves.
    """
    rows, width = m.value(x).shape
    pad = -width % 32

    def lanes(y: Array) -> Array:
        xp = rounding.namespace(y)
        y = xp.concatenate([y, xp.zeros((rows, pad), y.dtype)], axis=1) if pad else y
        return y.reshape(rows, -1, 32)

    x = m.map(x, lanes)
    every = slice(None)
    total = m.take(x, (every, 0))
    for j in range(1, (width + pad) // 32):
        total = m.add(name, total, m.take(x, (every, j)))
    half = 16
    while half:
        low = m.take(total, (every, slice(half)))
        total = m.add(name, low, m.take(total, (every, slice(half, 2 * half))))
        half //= 2
    return m.take(total, (every, 0))


@dataclass(frozen=True)
class StandardRows:
    """A block of rows: P (R, N_k) as stored, O before and after the cast, LSE (R,)."""

    p: Node
    o: Node
    out: Node
    lse: Node
    started: Array


def standard_rows(
    m: Machine, problem: Problem, q: Node, k: Array, v: Array, lo: Array, hi: Array
) -> StandardRows:
    """Standard attention of a block of rows: q (R, D), k (N_k, D), v (N_k, D_v), band [lo, hi) of
    each row.
    """
    xp = rounding.namespace(lo)
    const = flash_constants(m, problem, None)
    columns = xp.arange(k.shape[0])
    seen = visible(columns, lo, hi)
    started = xp.any(seen, axis=1)

    s = scores(m, const, q, m.input(k))
    y = m.mul("score scaling", s, const.scale)
    top = m.top(y, seen)
    x = m.sub("exponent argument", y, column(m, top))
    x = m.mul("exponent argument", x, m.constant("exponent argument", LOG2E))
    p = m.exp2("exp2", x, seen)
    l_row = m.select(started, warp_sum(m, "row sum", p), xp.ones(started.shape, np.float32))
    p = m.div("final multiply", p, column(m, l_row))
    p_half = m.cast("P rounding", p, m.fmt)
    v_t = m.transpose(m.input(v))
    o = m.dot_seen("PV accumulation", p_half, v_t, None, seen)
    out = m.cast("output cast", o, m.fmt)
    log2_l = m.log2("LSE", l_row)
    ln2 = Machine(state=m.state).constant("LSE", LN2)
    value = rounding.fma(m.value(log2_l), ln2, m.value(top), m.state)
    return StandardRows(p, o, out, m.linear("LSE", value, (1.0, top), (LN2, log2_l)), started)


def standard_forward(
    problem: Problem, state: str, progress: Progress | None = None
) -> tuple[Forward, Array]:
    """`standard` on a checked problem, heads flattened; also P (H, N_q, N_k) as it is stored."""
    xp = rounding.namespace(problem.q)
    m = standard_machine(problem, state)
    lo, hi = (xp.asarray(x) for x in problem.band())
    heads, n_q, n_k = problem.heads, problem.n_q, problem.n_k
    out = xp.zeros((heads, n_q, problem.d_v), numpy_dtype(problem.dtype))
    o = xp.zeros(out.shape, np.float32)
    lse = xp.full((heads, n_q), -np.inf, np.float32)
    stored = xp.zeros((heads, n_q, n_k), np.float32)
    if n_k == 0:
        return Forward(out, lse, o), stored
    for h in range(heads):
        k, v = problem.k[problem.kv_head(h)], problem.v[problem.kv_head(h)]
        for block in row_blocks(n_q):
            rows = standard_rows(
                m, problem, m.input(problem.q[h, block]), k, v, lo[block], hi[block]
            )
            out[h, block], o[h, block] = rows.out.astype(out.dtype), rows.o
            stored[h, block] = rows.p
            lse[h, block] = xp.where(rows.started, rows.lse, xp.float32(-np.inf))
            if progress is not None:
                progress("standard", (h * n_q + block.stop) / (heads * n_q))
    return Forward(out, lse, o), stored


def standard(
    q: Any,
    k: Any,
    v: Any,
    *,
    state: str = "float32",
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    progress: Progress | None = None,
) -> tuple[Array, Array]:
    """Standard (unfused) attention with correct rounding after every step.

    Arrays, masks, results and errors as in `flash`. state: "float32", "bfloat16" or "float16", the
    format of scores, P and accumulators between steps. P V is one product over the whole row, on
    the tensor core.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> out, lse = standard(x, x, x, causal=True, state="bfloat16")
    >>> out[0, :2].tolist(), float(lse[0])
    ([1.0, 0.0], 0.25)
    """
    check_progress(progress)
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    forward, _ = standard_forward(problem, state, progress)
    shape = (*problem.lead, problem.n_q)
    return forward.out.reshape(*shape, problem.d_v), forward.lse.reshape(shape)
