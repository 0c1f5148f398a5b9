"""Seconds from the first calls in a new process to their launches: of `attention_vjp`, which also
starts to compile the gradients' kernels, and then of `vjp`, which waits for them. Without a cache
of compiled kernels and with one. Wants a host that does nothing else.

    python -m bench.first_call [--d 64 128 256] [--rounds 3]

fp16, causal, NVRTC loaded and the GPU in use before. Medians of the rounds with their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common import gpu, write

ROOT = Path(__file__).parent.parent
CALLS = ("forward", "gradients")
PROCESS = """
import json, sys, time
import cupy, numpy
import cuflash
from cuflash import compiler, sm80
compiler.nvrtc()
x = cupy.zeros((2, 200, int(sys.argv[1])), numpy.float16)
(x + x).sum()
cupy.cuda.Device().synchronize()
times = []
def timed(call):
    start = time.perf_counter()
    result = call()
    times.append(time.perf_counter() - start)
    return result
_, vjp = timed(lambda: cuflash.attention_vjp(x, x, x, causal=True))
timed(lambda: vjp(x))
cupy.cuda.Device().synchronize()
print(json.dumps(times))
"""


def first_calls(directory: Path, d: int) -> list[float]:
    """Seconds of CALLS in a new process, with the cache in this directory."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "CUFLASH_CACHE_DIR": str(directory), "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(d)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [float(x) for x in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    figures = {}
    for d in given.d:
        times: dict[str, list[float]] = {}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as directory:
                for cache in ("without", "with"):
                    for call, seconds in zip(CALLS, first_calls(Path(directory), d), strict=True):
                        times.setdefault(f"{call} {cache} a cache", []).append(seconds)
        row = figures[f"D={d}"] = {
            name: {"median": statistics.median(x), "min": min(x), "max": max(x)}
            for name, x in times.items()
        }
        said = ", ".join(f"{name} {x['median']:.3f}" for name, x in row.items())
        print(f"D={d}: {said} s", flush=True)
    print(write("first_call", figures, extra=gpu()))


if __name__ == "__main__":
    main()
