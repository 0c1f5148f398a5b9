"""Attention in float32 without fusion, as PyTorch's "math" path computes it for half inputs.

q, k and v are widened; q and k are each multiplied by the root of the scale; two products are
chains of fp32 FMAs (cuBLAS without TF32); softmax is CUDA's expf, a sum and a division per row.
"""

from __future__ import annotations

import numpy as np

from emulation import rounding
from emulation.machine import Machine, Node
from emulation.plan import Plan
from emulation.problem import Array
from emulation.row_sum import column
from emulation.standard import warp_sum
from emulation.tiled import Constants, Rows, visible

#: Keys up to which one warp sums a row; beyond, a block of threads, four columns a load.
WARP_KEYS, THREADS, LOAD = 1024, 1024, 4


def softmax_sum(m: Machine, p: Node) -> Node:
    """Row sums (R, N_k) -> (R,) in the order of PyTorch's softmax.

    Up to 1024 keys 32 lanes (see `warp_sum`). Beyond, each of 1024 threads adds four neighbours,
    then those 4096 further on; threads join by halves within a warp, then warps do. A last load
    that is not whole counts as filled up with zeros.
    """
    rows, n_k = m.value(p).shape
    if n_k <= WARP_KEYS:
        return warp_sum(m, "row sum", p)
    pad = -n_k % (THREADS * LOAD)

    def loads(x: Array) -> Array:
        xp = rounding.namespace(x)
        x = xp.concatenate([x, xp.zeros((rows, pad), x.dtype)], axis=1) if pad else x
        return x.reshape(rows, -1, THREADS, LOAD)

    p, every = m.map(p, loads), slice(None)
    total = None
    for i in range((n_k + pad) // (THREADS * LOAD)):
        for j in range(LOAD):
            entry = m.take(p, (every, i, every, j))
            total = entry if total is None else m.add("row sum", total, entry)
    total = m.map(total, lambda x: x.reshape(rows, THREADS // 32, 32))
    for axis in (2, 1):
        half = 16
        while half:
            low, high = ((every,) * axis + (part,) for part in (slice(half), slice(half, 2 * half)))
            total = m.add("row sum", m.take(total, low), m.take(total, high))
            half //= 2
    return m.map(total, lambda x: x[:, 0, 0])


def unfused_rows(
    m: Machine, plan: Plan, const: Constants, q: Node, k: Array, v: Array, lo: Array, hi: Array
) -> Rows:
    """A block of rows: q (R, D), k (N_k, D), v (N_k, D_v), band [lo, hi) per row.

    LSE is rn(max + logf(l)): PyTorch's path gives none.
    """
    xp = rounding.namespace(lo)
    seen = visible(xp.arange(k.shape[0]), lo, hi)
    started = hi > lo
    q = m.mul("score scaling", q, const.root)
    s = m.dot("QK accumulation", q, m.mul("score scaling", m.input(k), const.root))
    top = m.top(s, seen)
    x = m.sub("exponent argument", s, column(m, top))
    p = m.exp("exp2", x, seen)
    l_row = m.select(started, softmax_sum(m, p), xp.ones(started.shape, np.float32))
    p = m.div("final multiply", p, column(m, l_row))
    o = m.dot_seen("PV accumulation", p, m.transpose(m.input(v)), None, seen)
    out = m.cast("output cast", o, plan.format if plan.numerics.out == "input" else "float32")
    ln_l = m.log("LSE", l_row)
    value = rounding.add(m.value(top), m.value(ln_l))
    return Rows(o, out, m.linear("LSE", value, (1.0, top), (1.0, ln_l)), started)
