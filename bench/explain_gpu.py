"""Public kernels on a GPU against their Plans, and `explain` on what they give.

    python -m bench.explain --gpu [--data FOLDER] [--elements 2e8] [--workers 14] [--seconds 240]

Forward: equal bits of O and LSE of FlashAttention-3 (module fa3_fwd_interface, if it is there),
FlashAttention-2 (with its split keys where it splits them), cuDNN, the memory-efficient kernel and
the unfused path ("math") of PyTorch, and the arithmetic of Triton's tutorial. Fresh random inputs
of every kind, groups of heads, N_q != N_k, D 32 to 256, full and causal, captures. Backward: equal
bits of dK and dV, under the Plan and those whose `BackwardPlan` differs in one choice. Then what
`explain` says of every kernel's output, and how long it takes for N = 8k, D = 128 in arrays on the
GPU. Kernels run here, Plans on CPU processes. What a kernel refuses is listed. Results:
bench/results/explain_gpu.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import captures, gpu, write
from bench.gpu_kernels import BACKENDS, CALLS, TRITON, Pair, Task, called, gradients
from emulation import Plan, Problem, explain, flash, plan_of
from emulation.backward import Saved, finite_lse, flash_backward
from emulation.explain.whose import emulated, neighbours
from emulation.problem import Array
from emulation.samples import KINDS, sample
from emulation.tiled import machine_of

WIDTHS = (64, 128, 32, 96, 192, 256)
#: Queries, keys, query heads, key heads. With 48 and more heads FlashAttention-2 splits no keys.
SHAPES = (
    (512, 512, 48, 48), (300, 300, 8, 2), (257, 700, 48, 48), (1024, 1024, 16, 4), (64, 900, 6, 6),
)  # fmt: skip
#: Every third head of a capture, and so many heads of the slow unfused path.
STEP, MATH_HEADS = 3, 4
#: Of a backward, and of a verdict: queries, heads.
SMALL = (384, 2)


def tasks(folder: Path | None) -> Iterator[Task]:
    """Without end: every kind in turn, and captures between them."""
    heads = (
        Task(f"capture {name}", q, k, v, causal)
        for dtype in ("bfloat16", "float16")
        for name, h, q, k, v, causal in captures(folder, dtype)
        if h % STEP == 0
    )
    for seed in itertools.count():
        for i, kind in enumerate(sorted(KINDS)):
            turn = seed * len(KINDS) + i
            n_q, n_k, count, kv_heads = SHAPES[turn % len(SHAPES)]
            d, dtype = WIDTHS[turn % len(WIDTHS)], ("bfloat16", "float16")[turn // 2 % 2]
            causal = n_q == n_k and turn % 3 != 0
            q = sample(kind, n=n_q, n_k=2, d=d, heads=count, dtype=dtype, seed=seed)[0]
            _, k, v = sample(kind, n=1, n_k=n_k, d=d, heads=kv_heads, dtype=dtype, seed=seed + 1)
            yield Task(kind, q, k, v, causal)
            yield from itertools.islice(heads, 2)


def plan_for(kernel: str, q: Array, k: Array, v: Array, causal: bool) -> Plan:
    known = "fa2-split" if kernel == "fa2" else kernel
    plan = plan_of(known, q, k, v, causal=causal)
    if kernel != "triton":
        return plan
    m, n = TRITON
    return dataclasses.replace(plan, tile_n=min(n, q.shape[2]), diagonal=m if causal else 0)


# -- what a worker does ----------------------------------------------------------------


def compared(task: Task, plan: Plan, got: Pair) -> list[int]:
    """Elements and differing elements of O, and of LSE."""
    rows = np.arange(task.q.shape[1])
    problem = Problem.of(task.q, task.k, task.v, causal=task.causal)
    out, lse = emulated(problem, plan, rows)
    counts = [out.size, differing(got[0], out, np.uint16), 0, 0]
    if got[1] is not None:
        counts[2:] = [lse.size, differing(got[1], lse, np.uint32)]
    return counts


def differing(a: Array, b: Array, bits: Any) -> int:
    """Elements of other bits; two NaN are equal."""
    other = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    both = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return int((other & ~both).sum())


def orders(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The Plan's own backward, and those that differ from it in one choice."""
    yield "its plan", plan
    yield from neighbours(plan)


def gradients_under(
    plan: Plan, problem: Problem, dout: Array, out: Array, lse: Array
) -> list[Array]:
    """dq, dk, dv (H, N, D) under a Plan, from O (rounded) and LSE as they are given."""
    m = machine_of(plan)
    saved = Saved(
        lse=lambda h: m.input(finite_lse(lse[h])),
        o=lambda h: [m.input(out[h].astype(np.float32))],
    )
    g = flash_backward(m, plan, problem, dout, None, saved)
    return [np.stack(x).astype(dout.dtype) for x in (g.dq, g.dk, g.dv)]


def differentiated(task: Task, dout: Array, plan: Plan, got: Any) -> dict[str, list[int]]:
    """Elements of dk and of dv, and the equal ones, under every order."""
    problem = Problem.of(task.q, task.k, task.v, causal=task.causal)
    out, lse = flash(task.q, task.k, task.v, plan=plan, causal=task.causal)
    found = {}
    for word, other in orders(plan):
        _, dk, dv = gradients_under(other, problem, dout, out, lse)
        counts = [dk.size]
        counts += [x.size - differing(x, y, np.uint16) for x, y in ((got[1], dk), (got[2], dv))]
        found[word] = counts
    return found


def judged(task: Task, kernel: str, got: Pair) -> tuple[str, str, list[str]]:
    """What `explain` says: the kernel, the kind of verdict, and whose bits it finds."""
    found = explain(task.q, task.k, task.v, got[0], lse=got[1], causal=task.causal, sources=False)
    return kernel, found.kind, [s.name for s in found.kernels if s.all_bits]


# -- the parts of the run --------------------------------------------------------------


class Run:
    """The processes, the clock, and what kernels refused."""

    def __init__(self, pool: ProcessPoolExecutor, seconds: float) -> None:
        self.pool, self.start, self.seconds = pool, time.perf_counter(), seconds
        self.refused: dict[str, str] = {}
        self.failed: list[str] = []
        self.dropped = 0

    def spent(self) -> float:
        return time.perf_counter() - self.start

    def late(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return self.spent() > share * self.seconds

    def wait(self, job: Future[Any]) -> Any:
        """A worker's result; None where there is no time left, or it failed (a finding)."""
        try:
            return job.result(max(0.01, 1.3 * self.seconds - self.spent()))
        except Late:
            job.cancel()
            self.dropped += 1
        except Exception as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:300])
        return None

    def call(self, kernel: str, word: str, f: Any, *args: Any) -> Any:
        """What a kernel gives, None where it refuses."""
        word = f"{kernel}, {word}"
        if word in self.refused:
            return None
        try:
            return f(kernel, *args)
        except Exception as error:  # what a kernel does not take, it says in many ways
            self.refused[word] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            return None


def parts(task: Task, got: Pair, most: int | None = None) -> Iterator[tuple[Task, Pair]]:
    """Some heads at a time, whole groups, with their results; of `most` heads in all."""
    group = len(task.q) // len(task.k)
    step = group * max(1, 4 // group)
    for i in range(0, min(len(task.q), most or len(task.q)), step):
        heads, of_kv = slice(i, i + step), slice(i // group, (i + step) // group)
        part = dataclasses.replace(task, q=task.q[heads], k=task.k[of_kv], v=task.v[of_kv])
        yield part, (got[0][heads], None if got[1] is None else got[1][heads])


def forwards(run: Run, folder: Path | None, elements: int) -> dict[str, Any]:
    """Equal bits of O and LSE until so many elements of O are compared, or time is up."""
    queued: list[tuple[str, str, Future[list[int]]]] = []
    planned = 0
    for task in tasks(folder):
        d, n_q = task.q.shape[2], task.q.shape[1]
        for kernel in CALLS:
            if kernel == "triton" and (
                n_q != task.k.shape[1] or n_q % TRITON[0] or d not in (32, 64, 128, 256)
            ):
                continue  # not the tutorial's
            got = run.call(kernel, f"{task.q.dtype}, D {d}", called, task)
            if got is None:
                continue
            plan = plan_for(kernel, task.q, task.k, task.v, task.causal)
            for part, result in parts(task, got, MATH_HEADS if kernel == "math" else None):
                queued.append((kernel, task.group, run.pool.submit(compared, part, plan, result)))
                planned += part.q.size
        while sum(not job.done() for *_, job in queued[-4000:]) > 400 and not run.late(0.6):
            time.sleep(0.2)
        if planned >= elements or run.late(0.6) or (not planned and len(run.refused) >= 50):
            break
    print(f"forward: {planned} elements planned, {run.spent():.0f} s", flush=True)
    table: dict[str, dict[str, list[int]]] = {}
    for kernel, group, job in queued:
        line = table.setdefault(kernel, {}).setdefault(group, [0, 0, 0, 0])
        for i, n in enumerate(run.wait(job) or ()):
            line[i] += n
    totals = {
        kernel: [sum(line[i] for line in groups.values()) for i in range(4)]
        for kernel, groups in table.items()
    }
    for kernel, (o, o_wrong, lse, lse_wrong) in totals.items():
        print(f"{kernel}: O {o_wrong} of {o} differ, LSE {lse_wrong} of {lse}")
        bad = [f"{g} {x[1]}/{x[0]} {x[3]}/{x[2]}" for g, x in table[kernel].items() if x[1] or x[3]]
        if bad:
            print("    " + "; ".join(bad)[:400])
    return {
        "columns": ["O", "O differing", "LSE", "LSE differing"], "totals": totals,
        "groups": table,
    }  # fmt: skip


def repeated(*arrays: Array) -> tuple[Array, Array, Array]:
    """Three arrays of heads, each 24 times over."""
    q, k, v = (np.tile(x, (24, 1, 1)) for x in arrays)
    return q, k, v


def backwards(run: Run) -> dict[str, Any]:
    """Share of equal bits of dK and dV, by kernel, width, format and mask (which may have kernels
    of their own), under its Plan and under the order that fits best.
    """
    n, heads = SMALL
    queued: list[tuple[str, Future[dict[str, list[int]]]]] = []
    for d, dtype, causal in itertools.product(WIDTHS, ("bfloat16", "float16"), (False, True)):
        # Few keys a head, so many heads that FlashAttention-2 does not split: they are repeated.
        q, k, v = sample("normal", n=n, d=d, heads=heads, dtype=dtype, seed=d)
        dout = sample("normal", n=n, d=d, heads=heads, dtype=dtype, seed=d + 1)[0]
        many = Task("normal", *repeated(q, k, v), causal)
        task = Task("normal", q, k, v, causal)
        for kernel in BACKENDS:
            if kernel == "math":  # unfused Plans have no backward
                continue
            word = f"backward, {dtype}, D {d}"
            got = run.call(kernel, word, gradients, many, repeated(dout, dout, dout)[0])
            if got is not None and not run.late(0.9):
                plan = plan_of(kernel, many.q, many.k, many.v, causal=causal)
                first = tuple(x[:heads] for x in got)
                job = run.pool.submit(differentiated, task, dout, plan, first)
                mask = "causal" if causal else "full"
                queued.append((f"{kernel}, D {d}, {dtype}, {mask}", job))
    shares: dict[str, Any] = {}
    for name, job in queued:
        found = run.wait(job)
        if not found:
            continue
        share = {w: [dk / size, dv / size] for w, (size, dk, dv) in found.items()}
        best = max(share, key=lambda w: sum(share[w]))
        own, top = share["its plan"], share[best]
        shares[name] = {"its plan": own, "best": best, "share": top}
        line = f"{name}: dK, dV equal {own[0]:.6f} {own[1]:.6f} under its plan"
        print(line + (f"; best {top[0]:.6f} {top[1]:.6f}: {best}" if sum(top) > sum(own) else ""))
    print(f"backward: {run.spent():.0f} s", flush=True)
    return shares


def verdicts(run: Run) -> dict[str, Any]:
    """What `explain` says of real outputs."""
    n, heads = SMALL
    jobs = []
    for kind, dtype, causal in itertools.product(
        sorted(KINDS), ("bfloat16", "float16"), (False, True)
    ):
        q, k, v = sample(kind, n=n, d=64, heads=heads, dtype=dtype, seed=9)
        task = Task(kind, q, k, v, causal)
        for kernel in CALLS:
            got = run.call(kernel, f"{dtype}, D 64", called, task)
            if got is not None and not run.late(1.0):
                jobs.append((task, run.pool.submit(judged, task, kernel, got)))
    kinds: dict[str, Counter[str]] = {}
    named: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    for task, job in jobs:
        found = run.wait(job)
        if found is None:
            continue
        kernel, kind, whose = found
        kinds.setdefault(kernel, Counter())[kind] += 1
        told = any(w.startswith(kernel) for w in whose)
        named[kernel] += told
        shared[kernel] += bool(whose) and not told
        if kind == "another computation":
            print(f"accused: {kernel}, {task.group}, {task.q.dtype}, causal {task.causal}")
    for kernel, counts in kinds.items():
        print(
            f"{kernel}: {dict(counts)}; whose arithmetic told in {named[kernel]}, "
            f"all bits another's in {shared[kernel]}"
        )
    print(f"verdicts: {run.spent():.0f} s", flush=True)
    return {
        "kinds": {n: dict(c) for n, c in kinds.items()}, "whose": dict(named),
        "all bits another's": dict(shared),
    }  # fmt: skip


def long_one() -> dict[str, Any]:
    """Seconds for a verdict on N = 8k, D = 128, one head, in CuPy's arrays and in NumPy's."""
    import cupy

    q, k, v = sample("normal", n=8192, d=128, dtype="bfloat16")
    task = Task("normal", q, k, v, True)
    out, lse = called("cudnn", task)
    found: dict[str, Any] = {}
    for name, move in (("gpu, first", cupy.asarray), ("gpu", cupy.asarray), ("cpu", np.asarray)):
        given = [move(x) for x in (q, k, v, out)]
        start = time.perf_counter()
        said = explain(*given, lse=move(lse), causal=True)
        found[name] = {"seconds": time.perf_counter() - start, "kind": said.kind}
        found[name]["nearest"] = [[s.name, s.out, s.lse] for s in said.kernels[:1]]
        print(f"8k, {name}: {found[name]}", flush=True)
    return found


def main(folder: Path | None, workers: int, elements: int, seconds: float) -> int:
    """1 if bits of a fused kernel's forward differ, or a real output is called a bug."""
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "NUMBA")}
    context = multiprocessing.get_context("spawn")
    figures: dict[str, Any] = {}
    with ProcessPoolExecutor(workers, context) as pool:
        run = Run(pool, seconds)
        for name, part in (
            ("forward", partial(forwards, run, folder, elements)),
            ("backward", partial(backwards, run)),
            ("verdicts", partial(verdicts, run)),
        ):
            try:
                figures[name] = part()
            except Exception as error:  # the other parts still count
                figures[name] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"{name} failed: {figures[name]['failed']}", flush=True)
        pool.shutdown(wait=False, cancel_futures=True)
    try:
        figures["8k"] = long_one()
    except Exception as error:
        figures["8k"] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"8k failed: {figures['8k']['failed']}")
    for word, why in run.refused.items():
        print(f"refused: {word}: {why}")
    for why, count in Counter(run.failed).items():
        print(f"{count} workers failed: {why}")
    print(f"{run.dropped} jobs dropped for time, {run.spent():.0f} s")
    figures |= {
        "refused": run.refused, "failed": run.failed[:20], "dropped": run.dropped,
        "seconds": round(run.spent(), 1),
    }  # fmt: skip
    print(write("explain_gpu", figures, extra=gpu()))
    totals = figures["forward"].get("totals", {})
    differ = any(x[1] or x[3] for n, x in totals.items() if n != "math")
    kinds = figures["verdicts"].get("kinds", {})
    accused = any("another computation" in counts for counts in kinds.values())
    failed = bool(run.failed) or any(
        "failed" in figures[n] for n in ("forward", "backward", "verdicts", "8k")
    )
    return int(not totals or differ or accused or failed)
