"""The standing count of bits: cuflash's kernels against the emulator, forward and gradients.

    python -m bench.bits [--data FOLDER] [--workers 14]

At least 10^8 elements of O and 10^8 of dQ, dK and dV: formats, head dimensions, masks, groups,
ragged lengths, every value of every Numerics field, adversarial inputs and captures (those of
FOLDER, else the bundled one). CUFLASH_KERNELS=sm80 counts the portable kernels. The kernels run in
this process; the emulator runs on CPU processes, which share nothing with them but the Plan. Exits
with 1 if an element differs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import captures, gpu, write
from cuflash.planner import portable_only
from emulation import Plan
from emulation.backward import Saved, delta_parts, finite_lse, flash_backward
from emulation.flash import flash_forward
from emulation.problem import Array, Problem
from emulation.samples import KINDS, sample
from emulation.tiled import machine_of
from tests.cases import NUMERICS
from tests.first_step import differing

NAMES = ("out", "lse", "dq", "dk", "dv")
WIDTHS = (32, 64, 80, 96, 128, 192, 256)
MASKS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (100, 30)}, {"softcap": 20.0},
    {"causal": True, "window": (70, None)}, {"causal": True, "softcap": 5.0, "scale": 0.2},
]  # fmt: skip
#: Queries, keys, query heads, key heads: ragged, in groups.
SHAPES = ((515, 130, 6, 2), (384, 257, 4, 4), (129, 421, 7, 1), (700, 97, 4, 2), (1, 300, 16, 2))


@dataclass(frozen=True)
class Task:
    """One problem: inputs, options, and the group that its counts go to."""

    group: str
    inputs: tuple[Array, Array, Array, Array]
    masks: dict[str, Any]
    numerics: dict[str, str]


def _inputs(kind: str, dtype: str, shape: tuple[int, ...], d: int, seed: int) -> Any:
    n_q, n_k, heads, kv_heads = shape
    q = sample(kind, n=n_q, n_k=2, d=d, heads=heads, dtype=dtype, seed=seed)[0]
    k, v = sample(kind, n=1, n_k=n_k, d=d, heads=kv_heads, dtype=dtype, seed=seed + 1)[1:]
    dout = sample("normal", n=n_q, n_k=2, d=d, heads=heads, dtype=dtype, seed=seed + 2)[0]
    return q, k, v, dout


def tasks(folder: Path | None, rounds: int) -> Iterator[Task]:
    """The whole set, the long problems first."""
    turn = itertools.count()
    for dtype in ("float16", "bfloat16"):
        for name, h, q, k, v, causal in captures(folder, dtype):
            if h % 3 == 0:
                dout = sample("normal", n=q.shape[1], d=q.shape[2], dtype=dtype, seed=h)[0]
                yield Task(f"capture {name}", (q, k, v, dout), {"causal": causal}, {})
    for number in range(rounds):
        for dtype, d in itertools.product(("float16", "bfloat16"), WIDTHS):
            i = next(turn)
            shape, mask = SHAPES[i % len(SHAPES)], MASKS[i % len(MASKS)]
            kind = sorted(KINDS)[(i + number) % len(KINDS)]
            yield Task(f"{dtype} D={d}", _inputs(kind, dtype, shape, d, i), mask, {})
    for field, values in NUMERICS.items():
        for value in values:
            for dtype in ("float16", "bfloat16"):
                i = next(turn)
                shape, mask = SHAPES[i % 4], MASKS[i % len(MASKS)]
                inputs = _inputs("rising", dtype, shape, (64, 128)[i % 2], i)
                yield Task(f"{field}={value}", inputs, mask, {field: value})
    for d in WIDTHS:
        i = next(turn)
        inputs = _inputs("normal", "float32", (260, 130, 4, 2), d, i)
        yield Task(f"float32 D={d}", inputs, MASKS[i % len(MASKS)], {})


def emulated(task: Task, plan: Plan) -> dict[str, Array]:
    """All results of the emulator."""
    q, k, v, dout = task.inputs
    problem = Problem.of(q, k, v, **task.masks)
    machine = machine_of(plan)
    with np.errstate(all="ignore"):
        found = flash_forward(problem, plan)
        saved = Saved(
            lse=lambda h: machine.input(finite_lse(found.lse[h])),
            o=lambda h: [machine.input(x) for x in delta_parts(plan, found, h)],
        )
        g = flash_backward(machine, plan, problem, dout, None, saved)
    arrays = {"out": found.out, "lse": found.lse}
    for name, parts in (("dq", g.dq), ("dk", g.dk), ("dv", g.dv)):
        arrays[name] = np.stack(parts).astype(found.out.dtype)
    return arrays


def _prepare() -> None:
    """A worker has one thread: the problems are many."""
    import numba

    numba.set_num_threads(1)


def computed(task: Task) -> tuple[Plan, dict[str, Array]]:
    """All results of the kernels."""
    import cupy

    import cuflash

    q, k, v, dout = (cupy.asarray(x) for x in task.inputs)
    options: dict[str, Any] = {"numerics": task.numerics or None, **task.masks}
    plan = cuflash.plan(q, k, v, **options)
    (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    found = (out, lse, *vjp(dout))
    return plan, {n: cupy.asnumpy(x) for n, x in zip(NAMES, found, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of captures with manifest.json")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rounds", type=int, default=40, help="problems of each format and D")
    chosen = parser.parse_args()
    start = time.perf_counter()
    compared: dict[str, Counter[str]] = {}
    wrong: dict[str, Counter[str]] = {}
    # Spawned, since a forked child of a process with a CUDA context is not allowed.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.workers, context, _prepare) as pool:

        def both(task: Task) -> tuple[str, dict[str, Array], Future[dict[str, Array]]]:
            plan, got = computed(task)
            return task.group, got, pool.submit(emulated, task, plan)

        # Threads, for the kernels have to be compiled.
        with ThreadPoolExecutor(chosen.workers) as threads:
            queued = list(threads.map(both, tasks(chosen.data, chosen.rounds)))
        print(f"kernels: {len(queued)} problems, {time.perf_counter() - start:.1f} s", flush=True)
        for group, got, future in queued:
            want = future.result()
            for name in NAMES:
                expected = want[name].reshape(got[name].shape)
                compared.setdefault(group, Counter())[name] += got[name].size
                wrong.setdefault(group, Counter())[name] += int(
                    differing(got[name], expected).sum()
                )
    figures: dict[str, Any] = {
        "compared": {n: sum(c[n] for c in compared.values()) for n in NAMES},
        "differing": {n: sum(c[n] for c in wrong.values()) for n in NAMES},
        "seconds": round(time.perf_counter() - start, 1),
        "groups": {
            group: {n: [compared[group][n], wrong[group][n]] for n in NAMES} for group in compared
        },
    }
    for group in compared:
        if wrong[group].total():
            print(f"{group}: {dict(wrong[group])} of {dict(compared[group])} differ")
    print("compared", figures["compared"], "differing", figures["differing"])
    name = "bits_sm80" if portable_only() else "bits"
    print(write(name, figures, extra=gpu()))
    return int(any(figures["differing"].values()))


if __name__ == "__main__":
    sys.exit(main())
