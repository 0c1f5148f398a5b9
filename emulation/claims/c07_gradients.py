"""Claim 7: the backward recomputes the softmax, so gradients differ from those of a stored P.

Share of equal bits of dQ, dK, dV, and whether recomputing is what parts them: the attribution of
the difference to recomputed scores, exponential and LSE, to roundings of P and dS, to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation import attribute
from emulation.claims.c06_bits import equal
from emulation.claims.claim import Claim, Figures, Plot, Verdict, listed, task
from emulation.claims.inputs import BUNDLED, captures, heads, make, shown
from emulation.claims.settings import Settings
from emulation.claims.statistics import rms
from emulation.claims.tasks import Task
from emulation.problem import numpy_dtype

OUTPUTS = ("dq", "dk", "dv")
#: What exists only because P is made twice: once more the scores and the exponential, from an LSE
#: that was rounded; and, on the other side, what the stored P had lost.
RECOMPUTED = ("score", "exponential", "LSE", "P from forward")


def measure(
    seed: int, *, kind: str, n: int | None, dtype: str, data: str | None = None
) -> dict[str, Any]:
    """Equal bits and the split of the difference for each gradient."""
    x = make(kind, dtype=dtype, seed=seed, n=n, data=data)
    found = attribute(*x.qkv, dout=x.dout, against="standard", **x.masks)
    outputs = {}
    for name in OUTPUTS:
        part = found.parts[name]
        narrow = numpy_dtype(dtype)
        ours, theirs = (
            y.astype(np.float32).astype(narrow) for y in (part.observed, part.exact)
        )  # the "exact" of a difference is the other algorithm's value
        inner = part.before_cast
        assert inner is not None
        outputs[name] = {
            "equal": equal(ours, theirs),
            "relative": rms(part.error) / rms(part.exact),
            "groups": {g: c.rms for g, c in inner.groups.items()},
            "recomputed_share": sum(c.share for g, c in inner.groups.items() if g in RECOMPUTED),
            "top": max(inner.groups.values(), key=lambda c: c.rms).name,
        }
    return {"kind": shown(kind), "n": x.k.shape[1], "dtype": dtype, "outputs": outputs}


def _tasks(settings: Settings) -> list[Task]:
    sizes = settings.pick(tiny=(64,), quick=(256, 1024), full=(256, 1024))
    length = settings.pick(tiny=64, quick=512, full=1024)
    found = []
    for dtype in ("float16", "bfloat16"):
        found += [task(7, f"{dtype} normal {n}", measure, kind="normal", n=n, dtype=dtype)
                  for n in sizes]  # fmt: skip
        for kind in captures(settings.data):
            where: dict[str, Any] = {} if kind == BUNDLED else {"data": settings.data}
            found.append(
                task(
                    7, f"{dtype} {shown(kind)}", measure, kind=kind, n=length, dtype=dtype, **where
                )
            )
    return found


def _gather(values: Mapping[str, Any]) -> Figures:
    return {"cells": list(values.values())}


def _judge(figures: Figures) -> Verdict:
    parts = [o for c in figures["cells"] for o in c["outputs"].values()]
    shares = [o["recomputed_share"] for o in parts]
    low, high = min(o["equal"] for o in parts), max(o["equal"] for o in parts)
    said = (
        f"{100 * low:.0f} to {100 * high:.0f} % of gradient values are equal "
        f"({heads(c['kind'] for c in figures['cells'])} and normal inputs); recomputing "
        f"(score, exponential, LSE) explains {100 * min(shares):.2g} to {100 * max(shares):.2g} % "
        f"of the difference before the cast, most comes from {_tops(parts)}."
    )
    whole = [c for c in figures["cells"] if all(o["equal"] == 1 for o in c["outputs"].values())]
    if whole:
        names = listed([f"{c['kind']} ({c['dtype']}, N = {c['n']})" for c in whole])
        return Verdict("does not hold", f"All three gradients agree wholly on {names}. {said}")
    if min(shares) >= 0.5:
        return Verdict("holds", said)
    return Verdict(
        "holds if",
        f"no more is meant than that they differ: recomputing is not why. {said}",
        "recomputing is not meant as the cause",
    )


def _tops(parts: list[dict[str, Any]]) -> str:
    names = [o["top"] for o in parts]
    ranked = sorted(set(names), key=lambda g: (-names.count(g), g))
    return " and ".join(ranked[:2])


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "input": c["kind"], "format": c["dtype"], "N": c["n"], "gradient": name,
            "equal values": o["equal"], "difference / rms": o["relative"],
            "recomputing, share before the cast": o["recomputed_share"], "largest": o["top"],
        }
        for c in figures["cells"] for name, o in c["outputs"].items()
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    plots = []
    for name in OUTPUTS:
        series: dict[str, list[list[float]]] = {}
        cells = [c for c in figures["cells"] if c["dtype"] == "bfloat16"]
        for i, c in enumerate(cells):
            for group, value in c["outputs"][name]["groups"].items():
                if value:
                    series.setdefault(group, []).append([i + 1, value])
        title = f"{name}: recomputed minus stored, before the cast"
        plots.append(Plot(title, "input", "rms", series, log_y=True))
    return plots


CLAIM = Claim(
    number=7,
    title="Gradients from a recomputed P",
    says="The backward recomputes softmax, so gradients do not agree bit for bit with stored P.",
    rule="Does not hold if dQ, dK and dV all agree wholly on some input. Holds if recomputing "
    "(score, exponential, "
    "LSE; on the other side the stored P) explains at least half of every difference before the "
    "cast; else it holds if no cause is named.",
    setting=lambda s: (
        "whole problems, dO normal, fp16 and bf16, fp32 state; normal and real inputs"
    ),
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
)
run = CLAIM.run
