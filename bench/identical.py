"""Runs the backward of each of eight problems, N up to 64k, a thousand times on as many CTAs as the
GPU takes, and counts words that differ from the first run's.

    python -m bench.identical [--runs 1000]

Outputs lie in memory that held NaN just before, and are compared on the device. Exits with 1 if a
word differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import cupy
import numpy as np

import cuflash
from bench.common import gpu, write
from bench.soak import wrong
from emulation.problem import numpy_dtype

#: Sequence length, D, heads, key heads, options: 1.4e12 to 5.5e12 operations, 3 to 15 ms each.
PROBLEMS: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
    (65_536, 64, 2, 2, {}),
    (65_536, 64, 4, 2, {"causal": True}),
    (65_536, 128, 1, 1, {}),
    (65_536, 128, 2, 1, {"causal": True}),
    (65_536, 256, 1, 1, {"causal": True}),
    (65_536, 128, 8, 8, {"window": (4096, 0)}),
    (16_384, 256, 8, 8, {}),
    (4096, 128, 128, 32, {"causal": True}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="of each problem")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error(f"--runs: {runs}: must be at least 1")
    figures = []
    for i, (n, d, heads, kv_heads, options) in enumerate(PROBLEMS):
        dtype = numpy_dtype(("float16", "bfloat16")[i % 2])
        random = np.random.default_rng(i)
        q, k, v, dout = (
            cupy.asarray(random.standard_normal((h, n, d), np.float32).astype(dtype))
            for h in (heads, kv_heads, kv_heads, heads)
        )
        _, vjp = cuflash.attention_vjp(q, k, v, **options)
        first = list(vjp(dout))
        start, count = time.monotonic(), cupy.zeros((), np.int64)
        for _ in range(runs):
            poison = [cupy.full_like(x, cupy.nan) for x in first]
            del poison  # its memory is the next outputs'
            count += wrong(list(vjp(dout)), first)
        row = {
            "n": n, "d": d, "heads": heads, "kv_heads": kv_heads, "dtype": str(q.dtype),
            "options": options, "runs": runs, "words": sum(x.size for x in first) * runs,
            "differing": int(count), "seconds": round(time.monotonic() - start, 1),
        }  # fmt: skip
        print(row, flush=True)
        figures.append(row)
    print(write("identical", figures, extra=gpu()))
    return int(any(row["differing"] for row in figures))


if __name__ == "__main__":
    sys.exit(main())
