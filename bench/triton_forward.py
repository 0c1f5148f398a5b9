"""The arithmetic of Triton's fused-attention tutorial in a kernel of our own, to be compared with
its Plan: every step in the tutorial's form, so that the compiler fuses the same ones.

Equal lengths, a multiple of the block of queries; out and, as there, LSE in log2.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tile(acc, total, top, q, k, v, c, seen, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of keys: k and v (N, D), seen (M, N)."""
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = s * c + tl.where(seen, 0, -1.0e6)
        new = tl.maximum(top, tl.max(s, 1))
        s -= new[:, None]
    else:
        new = tl.maximum(top, tl.max(s, 1) * c)
        s = s * c - new[:, None]
    p = tl.math.exp2(s)
    alpha = tl.math.exp2(top - new)
    row = tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc)
    total = total * alpha + row
    return acc, total, new


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    q, k, v, o, lse, scale, n, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * n * D
    rows, columns, dims = block * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    at = base + rows[:, None] * D + dims[None, :]
    q_tile = tl.load(q + at)
    c = scale
    c *= 1.44269504
    top = tl.zeros([M], tl.float32) - float("inf")
    total = tl.zeros([M], tl.float32) + 1.0
    acc = tl.zeros([M, D], tl.float32)
    whole = block * M if CAUSAL else n
    for start in range(0, whole, N):
        keys = base + (start + columns)[:, None] * D + dims[None, :]
        every = rows[:, None] >= 0
        acc, total, top = _tile(
            acc, total, top, q_tile, tl.load(k + keys), tl.load(v + keys), c, every, False
        )
    if CAUSAL:
        for start in range(whole, whole + M, N):
            keys = base + (start + columns)[:, None] * D + dims[None, :]
            seen = rows[:, None] >= (start + columns)[None, :]
            acc, total, top = _tile(
                acc, total, top, q_tile, tl.load(k + keys), tl.load(v + keys), c, seen, True
            )
    top += tl.math.log2(total)
    acc = acc / total[:, None]
    tl.store(lse + head * n + rows, top)
    tl.store(o + at, acc.to(o.dtype.element_ty))


def forward(q: Any, k: Any, v: Any, causal: bool, m: int, n: int) -> tuple[Any, Any]:
    """q, k, v (1, H, N, D) on the GPU, contiguous; blocks of m queries, n keys (not above D)."""
    import torch

    _, heads, length, d = q.shape
    if length % m or k.shape != q.shape:
        raise ValueError(f"q: {tuple(q.shape)}, must be of a length that {m} divides, like k's")
    o = torch.empty_like(q)
    lse = torch.empty((1, heads, length), dtype=torch.float32, device=q.device)
    _kernel[(length // m, heads)](
        q, k, v, o, lse, d**-0.5, length, D=d, M=m, N=n, CAUSAL=causal, num_warps=m // 16
    )
    return o, lse
