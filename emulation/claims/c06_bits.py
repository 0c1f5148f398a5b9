"""Claim 6: flash and standard attention never agree bit for bit, nor do two standard ones.

The share of equal output bits, for pairs that differ in the algorithm, in the order of sums alone,
or in nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation import Numerics, Problem, default_plan
from emulation.claims import gpu
from emulation.claims.claim import Claim, Figures, Plot, Verdict, cells_and_kernels, no_gpu, task
from emulation.claims.inputs import BUNDLED, make
from emulation.claims.settings import Settings
from emulation.claims.tasks import Task
from emulation.flash import flash_forward
from emulation.problem import Array
from emulation.standard import standard_forward

FLASH, STANDARD, ORDER, SAME = (
    "flash / standard",
    "standard / standard, keys in another order",
    "flash / flash, sums in another order",
    "the same order again",
)


def equal(a: Array, b: Array) -> float:
    """Share of equal bit patterns."""
    width = f"u{a.dtype.itemsize}"
    return float(np.mean(a.view(width) == b.view(width)))


def measure(seed: int, *, kind: str, n: int, dtype: str, rows: int) -> dict[str, Any]:
    """Share of equal values after and before the output cast, for every pair."""
    x = make(kind, dtype=dtype, seed=seed, n=n, rows=min(rows, n))
    q, k, v = x.qkv
    problem = Problem.of(q, k, v)  # all keys: a permutation would move a causal mask
    order = np.random.default_rng(seed).permutation(n)
    shuffled = Problem.of(q, k[:, order], v[:, order])
    # The exact max as reference: P then has the same bits in any tiling, so only sums differ.
    final = Numerics(reference="final")
    tiled = [default_plan(problem, final, tile_n=tile) for tile in (128, 16)]
    ours = flash_forward(problem, default_plan(problem))
    theirs, _ = standard_forward(problem, "float32")
    pairs = {
        FLASH: (ours, theirs),
        STANDARD: (theirs, standard_forward(shuffled, "float32")[0]),
        ORDER: (flash_forward(problem, tiled[0]), flash_forward(problem, tiled[1])),
        SAME: (ours, flash_forward(Problem.of(q[:, ::-1], k, v), default_plan(problem))),
    }
    shares = {}
    for name, (a, b) in pairs.items():
        back = slice(None, None, -1) if name == SAME else slice(None)
        shares[name] = {
            "out": equal(a.out, np.ascontiguousarray(b.out[:, back])),
            "before": equal(a.o, np.ascontiguousarray(b.o[:, back])),
        }
    return {"kind": kind, "n": n, "dtype": dtype, "pairs": shares}


def on_gpu(seed: int, *, kernels: str, n: int, dtype: str, rows: int) -> dict[str, Any]:
    """The kernel and the emulator under one Plan: share of equal values."""
    cp, module = gpu.load(kernels)
    x = make("normal", dtype=dtype, seed=seed, n=n)
    q, k, v = (cp.asarray(a) for a in x.qkv)
    out = np.ascontiguousarray(cp.asnumpy(module.attention(q, k, v))[:, -rows:])
    problem = Problem.of(x.q[:, -rows:], x.k, x.v)
    emulated = flash_forward(problem, module.plan(q, k, v)).out
    return {"n": n, "dtype": dtype, "equal": equal(out, emulated)}


def _tasks(settings: Settings) -> list[Task]:
    sizes = settings.pick(
        tiny=(1, 2, 32), quick=(1, 2, 4, 16, 64, 256, 1024),
        full=(1, 2, 4, 16, 64, 256, 1024, 4096, 16384),
    )  # fmt: skip
    found = [
        task(6, f"{dtype} {kind} {n}", measure, kind=kind, n=n, dtype=dtype, rows=64)
        for dtype in ("float16", "bfloat16")
        for kind in ("normal", BUNDLED)
        for n in sizes
        if kind == "normal" or n <= 1024
    ]
    if settings.gpu:
        found += [
            task(6, f"kernel {dtype} {n}", on_gpu, gpu=True, kernels=settings.kernels, n=n,
                 dtype=dtype, rows=64)
            for dtype in ("float16", "bfloat16") for n in (1024, 16384)
        ]  # fmt: skip
    return found


def _judge(figures: Figures) -> Verdict:
    cells = figures["cells"]
    same = min(c["pairs"][SAME]["before"] for c in cells)
    kernels = min((k["equal"] for k in figures["kernels"]), default=1.0)
    if same < 1 or kernels < 1:
        return Verdict(
            "does not hold", "Even the same order of the same operations does not repeat its bits."
        )
    agree = {
        pair: {c["n"] for c in cells if c["pairs"][pair]["out"] == 1} for pair in (FLASH, STANDARD)
    }
    sizes = {c["n"] for c in cells}
    largest = [c for c in cells if c["n"] == max(sizes)]
    shares = {
        p: f"{100 * float(np.mean([c['pairs'][p]['out'] for c in largest])):.1f} %"
        for p in (FLASH, STANDARD, ORDER)
    }
    said = (
        f"At N = {max(sizes)} (one draw of each input and format) equal output values are "
        f"{shares[FLASH]} ({FLASH}), "
        f"{shares[STANDARD]} ({STANDARD}), but {shares[ORDER]} where only the order of sums "
        "differs and 100 % where nothing does: most of it is not the order."
    )
    if not agree[FLASH] and not agree[STANDARD]:
        return Verdict("holds", said)
    first = {pair: min((n for n in sizes if n > max(agree[pair], default=0)), default=None)
             for pair in agree}  # fmt: skip
    if None not in first.values():
        where = ", ".join(f"{n} or more ({pair})" for pair, n in first.items())
        return Verdict(
            "holds if", f"rows see enough keys, here {where}. {said}", "rows see enough keys"
        )
    return Verdict("does not hold", f"Whole outputs agree at N = {max(sizes)}. {said}")


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "input": c["kind"], "format": c["dtype"], "N": c["n"], "pair": pair,
            "equal out": share["out"], "equal before the cast": share["before"],
        }
        for c in figures["cells"] for pair, share in c["pairs"].items()
    ]  # fmt: skip
    rows += [
        {"input": "normal", "format": k["dtype"], "N": k["n"], "pair": "kernel / emulator",
         "equal out": k["equal"]}
        for k in figures["kernels"]
    ]  # fmt: skip
    return rows


def _draw(figures: Figures) -> list[Plot]:
    cells = [c for c in figures["cells"] if c["kind"] == "normal" and c["dtype"] == "bfloat16"]
    series = {
        pair: [[c["n"], c["pairs"][pair]["out"]] for c in cells]
        for pair in (FLASH, STANDARD, ORDER, SAME)
    }
    return [Plot("Share of equal output values, bf16", "N", "share", series, log_x=True)]


CLAIM = Claim(
    number=6,
    title="Never the same bits",
    says="Addition is not associative, so the two never agree bit for bit; two standard "
    "implementations do not either.",
    rule="The same order again, and kernel and emulator, must agree wholly. Holds if "
    "flash/standard "
    "and standard/standard agree wholly on no input; holds if, when they do only below some N.",
    setting=lambda s: "64 rows, all keys, D = 64; fp16 and bf16; normal and real inputs",
    tasks=_tasks,
    gather=cells_and_kernels,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
    missing=no_gpu,
)
run = CLAIM.run
