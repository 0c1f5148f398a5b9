"""What one call of cuflash costs the host, in microseconds.

    python -m bench.host

Small problems, so that the GPU is never waited for; medians over batches of calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy

import cuflash
from bench.common import gpu, write
from emulation.problem import numpy_dtype

BATCHES, CALLS = 50, 20


def microseconds(run: Callable[[], Any]) -> dict[str, float]:
    """Of one call: median of the batches, least and most."""
    for _ in range(CALLS):
        run()
    times = []
    for _ in range(BATCHES):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    cupy.cuda.Device().synchronize()
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def main() -> None:
    figures = {}
    for dtype in ("bfloat16", "float16", "float32"):
        x, out = (cupy.zeros((1, 8, 128, 64), numpy_dtype(dtype)) for _ in range(2))
        _, vjp = cuflash.attention_vjp(x, x, x, causal=True)
        calls: dict[str, Callable[[], Any]] = {
            "attention": lambda x=x: cuflash.attention(x, x, x, causal=True),  # type: ignore[misc]
            "attention, out given": lambda x=x, out=out: cuflash.attention(  # type: ignore[misc]
                x, x, x, causal=True, out=out
            ),
            "vjp": lambda x=x, vjp=vjp: vjp(x),  # type: ignore[misc]
            "cupy.empty": lambda x=x: cupy.empty(x.shape, x.dtype),  # type: ignore[misc]
        }
        for name, run in calls.items():
            row = figures[f"{dtype}, {name}"] = microseconds(run)
            print(f"{dtype:9} {name:22} {row['median']:6.1f} us a call")
    print(write("host", figures, extra=gpu()))


if __name__ == "__main__":
    main()
