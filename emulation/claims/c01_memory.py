"""Claim 1: the score matrix takes 32 MB at N = 4096 and 32 GB at N = 128k; flash never stores it.

Peak memory of both against N, and the exponent of each: on the GPU what CuPy's pool hands out, on a
CPU what the emulator allocates.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

from emulation import Problem, default_plan
from emulation.claims import gpu
from emulation.claims.claim import Claim, Figures, Plot, Verdict, no_gpu, task
from emulation.claims.inputs import make
from emulation.claims.settings import Settings
from emulation.claims.statistics import slope
from emulation.claims.tasks import Task
from emulation.flash import flash_forward
from emulation.standard import standard_forward

#: N -> bytes that the claim gives for one head's scores in fp16 (MB and GB of 1024).
SAID = {4096: 32 * 2**20, 131072: 32 * 2**30}


def emulated(seed: int, *, n: int) -> dict[str, Any]:
    """Peak bytes that NumPy allocates beyond the inputs, for all rows at once."""
    x = make("normal", dtype="float16", seed=seed, n=n)
    problem = Problem.of(*x.qkv)
    plan = default_plan(problem)
    calls: dict[str, Callable[[], Any]] = {
        "flash": lambda: flash_forward(problem, plan),
        "standard": lambda: standard_forward(problem, "float32"),
    }
    return {"n": n, "gpu": False, "peak": {name: _traced(call) for name, call in calls.items()}}


def _traced(call: Callable[[], Any]) -> int:
    call()  # compiled and cached before it is traced
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def on_gpu(seed: int, *, kernels: str, n: int) -> dict[str, Any]:
    """Peak bytes that CuPy's pool hands out beyond the inputs: the kernel, and unfused fp16."""
    cp, module = gpu.load(kernels)
    rng = cp.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, 64), dtype=cp.float32).astype(cp.float16)
               for _ in range(3))  # fmt: skip
    found: dict[str, Any] = {"n": n, "gpu": True, "peak": {}}

    def unfused() -> Any:
        s = (q[0] * cp.float16(0.125)) @ k[0].T
        found["scores"] = int(s.nbytes)
        s -= s.max(axis=1, keepdims=True)
        cp.exp(s, out=s)
        s /= s.sum(axis=1, keepdims=True, dtype=cp.float32).astype(cp.float16)
        return s @ v[0]

    calls = {"flash": lambda: module.attention(q, k, v), "standard": unfused}
    for name, call in calls.items():
        if name == "flash":
            call()  # compiled and cached before it is measured
        cp.get_default_memory_pool().free_all_blocks()
        with _Peak(cp) as peak:
            call()
        found["peak"][name] = peak.most
    cp.get_default_memory_pool().free_all_blocks()
    return found


class _Peak:
    """High-water mark of the bytes handed out by CuPy's pool while it is entered."""

    def __init__(self, cp: Any) -> None:
        self.now = self.most = 0
        self.hook: Any = type(
            "PeakHook", (cp.cuda.MemoryHook,), {
                "name": "PeakHook",
                "malloc_postprocess": lambda _, **a: self._add(a["mem_size"]),
                "free_postprocess": lambda _, **a: self._add(-a["mem_size"]),
            },
        )()  # fmt: skip

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def __enter__(self) -> _Peak:
        self.hook.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hook.__exit__(*error)


def _tasks(settings: Settings) -> list[Task]:
    # One block of rows holds them all up to 1024: beyond, the emulator works in blocks of 1024.
    found = [
        task(1, f"emulator {n}", emulated, n=n)
        for n in settings.pick(tiny=(128, 256), quick=(256, 512, 1024), full=(256, 512, 1024))
    ]
    if settings.gpu:
        found += [
            task(1, f"kernel {n}", on_gpu, gpu=True, kernels=settings.kernels, n=n)
            for n in settings.pick(
                tiny=(1024, 4096), quick=(4096, 8192, 16384),
                full=(4096, 8192, 16384, 32768, 65536, 131072),
            )
        ]  # fmt: skip
    return found


def _gather(values: Mapping[str, Any]) -> Figures:
    curves = {}
    for where, on in (("emulator", False), ("GPU", True)):
        runs = [v for v in values.values() if v["gpu"] == on]
        if runs:
            sizes = [r["n"] for r in runs]
            peaks = {name: [r["peak"][name] for r in runs] for name in ("flash", "standard")}
            curves[where] = {
                "n": sizes, "peak": peaks,
                "exponents": {name: slope(sizes, p) for name, p in peaks.items()},
            }  # fmt: skip
    stored = {str(v["n"]): v["scores"] for v in values.values() if "scores" in v}
    return {
        "curves": curves, "stored_scores": stored, "scores": {str(n): 2 * n * n for n in SAID}
    }  # fmt: skip


def _judge(figures: Figures) -> Verdict:
    said = {str(n): size for n, size in SAID.items()}
    stored = figures["stored_scores"]
    sizes = figures["scores"] == said and all(
        stored[n] == size for n, size in said.items() if n in stored
    )
    shapes = {where: c["exponents"] for where, c in figures["curves"].items()}
    # Which whole power it is: nearest 2 for standard, nearest 1 (or below) for flash.
    grows = all(round(e["standard"]) == 2 and e["flash"] < 1.5 for e in shapes.values())
    told = "; ".join(
        f"{where}: standard N^{e['standard']:.2f}, flash N^{e['flash']:.2f}"
        for where, e in shapes.items()
    )
    last = list(figures["curves"].values())[-1]
    peak = (
        f"at N = {last['n'][-1]} the peaks are {last['peak']['standard'][-1] / 2**20:.4g} and "
        f"{last['peak']['flash'][-1] / 2**20:.4g} MiB"
    )
    if sizes and grows:
        return Verdict("holds", f"2 N^2 bytes are as said, and memory grows so: {told}; {peak}.")
    if sizes:
        return Verdict("does not hold", f"The sizes are as said, but memory grows so: {told}.")
    return Verdict("does not hold", f"The scores take {figures['scores']} and {stored} bytes.")


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "where": where, "N": n, "standard, MiB": c["peak"]["standard"][i] / 2**20,
            "flash, MiB": c["peak"]["flash"][i] / 2**20, "scores in fp16, MiB": 2 * n * n / 2**20,
        }
        for where, c in figures["curves"].items() for i, n in enumerate(c["n"])
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    series = {
        f"{name}, {where}": [[n, p / 2**20] for n, p in zip(c["n"], peak, strict=True)]
        for where, c in figures["curves"].items()
        for name, peak in c["peak"].items()
    }
    return [Plot("Peak memory beyond the inputs", "N", "MiB", series, True, True)]


CLAIM = Claim(
    number=1,
    title="Memory",
    says="The score matrix takes 32 MB in fp16 at N = 4096 and 32 GB at N = 128k; flash never "
    "stores it.",
    rule="Holds if 2 N^2 bytes are what is said (and what a stored score matrix takes), the "
    "peak of "
    "standard attention grows with a power of N nearest 2, and that of flash with one nearest 1 or "
    "less.",
    setting=lambda s: "one head, D = 64, fp16; memory beyond the inputs",
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
    missing=no_gpu,
)
run = CLAIM.run
