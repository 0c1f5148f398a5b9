"""Peak GPU memory of cuflash's calls beyond their inputs and `out`, by CuPy's pool.

    python -m bench.memory

Two heads, D = 64, causal, N up to 128k: a forward takes LSE (4 bytes a row); a forward whose
gradient will be asked for also what rounding O left; a backward its results, 8 bytes a row and, of
halves, dQ in float32 and 4 bytes a row more. Never anything that grows with N squared.
"""

from __future__ import annotations

from typing import Any

import cupy

import cuflash
from bench.common import gpu, write
from emulation.problem import numpy_dtype
from tests.gpu_memory import measured

HEADS, D = 2, 64
LENGTHS = (1024, 4096, 16_384, 65_536, 131_072)


def measure(n: int, dtype: str) -> dict[str, Any]:
    """Bytes of every call, and of one array (2, N, D) beside them."""
    with measured() as peak:
        q, k, v, out = (cupy.zeros((HEADS, n, D), numpy_dtype(dtype)) for _ in range(4))
        cuflash.attention(q, k, v, causal=True, out=out)
        peak.restart()
        cuflash.attention(q, k, v, causal=True, out=out)
        row: dict[str, Any] = {"one array": q.nbytes, "forward": peak.bytes}
        peak.restart()
        _, vjp = cuflash.attention_vjp(q, k, v, causal=True, out=out)
        row["forward before a backward"] = peak.bytes
        peak.restart()
        vjp(out)
        row["backward, gradients included"] = peak.bytes
    for name in list(row)[1:]:
        row[f"{name}, a row and head"] = row[name] / (HEADS * n)
    return row


def wide() -> dict[str, Any]:
    """A backward's workspace over the size of q, k, v and dout: D = 192, D_v = 128, 128 heads."""
    heads, n = 128, 32768
    q, k, v, dout = (
        cupy.zeros((heads, n, d), numpy_dtype("bfloat16")) for d in (192, 192, 128, 128)
    )
    given = q.nbytes + k.nbytes + v.nbytes + dout.nbytes
    _, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    with measured() as peak:
        results = sum(x.nbytes for x in vjp(dout))
        workspace = peak.bytes - results
    return {
        "q, k, v and dout": given,
        "workspace": workspace,
        "workspace / given": workspace / given,
    }


def main() -> None:
    figures = {}
    for dtype in ("bfloat16", "float32"):
        for n in LENGTHS:
            row = figures[f"{dtype} N={n}"] = measure(n, dtype)
            print(f"{dtype} N={n:6}", {x: y for x, y in row.items() if "a row" in x}, flush=True)
    figures["bfloat16 D=192 D_v=128 N=32768, 128 heads, backward"] = row = wide()
    print(row)
    print(write("memory", figures, extra=gpu()))


if __name__ == "__main__":
    main()
