"""Ten minutes of forward and backward with changing shapes on two streams: the same bits, always.

    python -m bench.soak [--minutes 10] [--seed 0] [--d D ...] [--add]

Every problem's first outputs are its reference; the small ones are compared with the emulator, too.
Then random problems run on two streams at once, `out` in memory that held NaN, and all outputs are
compared on the device, word by word. Once they run, SIGTERM ends it early, and what ran until then
counts. Exits with 1 if a word differs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np

import cuflash
import emulation
from bench.common import RESULTS, added, gpu, write
from emulation.samples import sample
from tests.first_step import differing

#: Queries, keys, D, D_v, heads, key heads, batch.
SHAPES = (
    (130, 300, 64, 64, 4, 2, 1),
    (257, 129, 128, 128, 2, 2, 1),
    (100, 200, 256, 256, 2, 1, 1),
    (1024, 1024, 64, 64, 32, 32, 4),
    (1024, 1024, 128, 128, 16, 16, 4),
    (1000, 1500, 256, 256, 8, 8, 4),
    (4096, 4096, 128, 128, 16, 4, 1),
    (4000, 4100, 64, 64, 16, 16, 1),
    (2048, 2048, 96, 96, 8, 8, 2),
    (2048, 2048, 192, 128, 8, 8, 2),
    (1, 8192, 128, 128, 32, 8, 8),
    (8192, 8192, 256, 256, 4, 4, 1),
    (16384, 16384, 128, 128, 4, 4, 1),
)
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window": (300, 100)}, {"causal": True, "window": (1000, None)},
    {"softcap": 20.0, "causal": True},
)  # fmt: skip
#: Problems up to this many scores are compared with the emulator.
SMALL = 200_000


@dataclass
class Problem:
    """Inputs on the device, options, and the outputs of the first run."""

    name: str
    inputs: list[Any]
    options: dict[str, Any]
    reference: list[Any] = field(default_factory=list)
    runs: int = 0


def problems(chosen: Sequence[int]) -> Iterator[Problem]:
    """Every shape of these D under masks by turns, in both formats by turns."""
    for i, (n_q, n_k, d, d_v, heads, kv_heads, batch) in enumerate(SHAPES):
        if d not in chosen:
            continue
        dtype = ("bfloat16", "float16")[i % 2]
        rows = {"q": (n_q, d, heads), "k": (n_k, d, kv_heads), "v": (n_k, d_v, kv_heads)}
        rows["dout"] = (n_q, d_v, heads)
        inputs = []
        for j, (n, width, count) in enumerate(rows.values()):
            x = sample("normal", n=n, d=width, heads=count, dtype=dtype, seed=10 * i + j)[0]
            inputs.append(cupy.asarray(np.broadcast_to(x, (batch, *x.shape)).copy()))
        for mask in (MASKS[i % len(MASKS)], MASKS[(i + 1) % len(MASKS)]):
            yield Problem(f"{n_q} x {n_k}, D {d} {d_v}, {dtype}, {mask}", inputs, mask)


def outputs(problem: Problem) -> list[Any]:
    """out, lse, dq, dk, dv, out in memory that held NaN."""
    q, k, v, dout = problem.inputs
    out = cupy.full((*q.shape[:-1], v.shape[-1]), cupy.nan, q.dtype)
    (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, out=out, **problem.options)
    return [out, lse, *vjp(dout)]


def against_emulator(problem: Problem) -> int:
    """Words of out and lse that differ from the emulator's."""
    q, k, v, _ = problem.inputs
    plan = cuflash.plan(q, k, v, **problem.options)
    arrays = [cupy.asnumpy(x) for x in (q, k, v)]
    want = emulation.flash(*arrays, plan=plan, **problem.options)
    got = (cupy.asnumpy(x) for x in problem.reference)
    return sum(int(differing(x, y).sum()) for x, y in zip(got, want, strict=False))


def wrong(got: list[Any], want: list[Any]) -> Any:
    """Words that differ, on the device."""
    return sum(
        (x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")).sum()
        for x, y in zip(got, want, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    widths = sorted({d for _, _, d, *_ in SHAPES})
    parser.add_argument("--minutes", type=float, default=10, help="how long problems run")
    parser.add_argument("--seed", type=int, default=0, help="of the order of problems")
    parser.add_argument(
        "--d", type=int, nargs="+", choices=widths, default=widths, help="head dimensions"
    )
    parser.add_argument(
        "--add", action="store_true", help="to the result file, as a part of the same soak"
    )
    chosen = parser.parse_args()
    # Read now: a file that is not there should not cost a soak.
    before = json.loads((RESULTS / "soak.json").read_text())["figures"] if chosen.add else {}
    begun = time.monotonic()
    found = list(problems(chosen.d))
    emulated = 0
    for problem in found:
        problem.reference = outputs(problem)
        if problem.inputs[0].shape[-2] * problem.inputs[1].shape[-2] <= SMALL:
            emulated += against_emulator(problem)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    counts = [cupy.zeros((), np.int64) for _ in streams]
    rng = np.random.default_rng(chosen.seed)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    start, words = time.monotonic(), 0
    print(f"{len(found)} problems, ready after {start - begun:.0f} s", flush=True)
    while True:  # once at least: a record of no run would say that none differs
        for _ in range(8):
            for stream, count in zip(streams, counts, strict=True):
                problem = found[rng.integers(len(found))]
                with stream:
                    count += wrong(outputs(problem), problem.reference)
                problem.runs += 1
                words += sum(x.size for x in problem.reference)
        for stream in streams:
            stream.synchronize()
        if stopped.is_set() or time.monotonic() - start >= 60 * chosen.minutes:
            break
    differ = sum(int(count) for count in counts)
    figures: dict[str, Any] = {
        "seconds": round(time.monotonic() - start, 1),
        "runs": sum(problem.runs for problem in found),
        "words": words,
        "differing": differ,
        "differing from the emulator": emulated,
        "problems": {problem.name: problem.runs for problem in found},
    }
    figures = added(before, figures)
    path = write("soak", figures, extra=gpu())
    print({k: x for k, x in figures.items() if k != "problems"}, path, sep="\n")
    return int(bool(figures["differing"] or figures["differing from the emulator"]))


if __name__ == "__main__":
    sys.exit(main())
