"""Claim 8: bf16 has eps 2^-7, fp16 2^-10, and the difference stays within 1e-2.

Largest and rms difference of flash and standard attention, absolute and relative, over real,
random and adversarial inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation import flash, oracle, standard
from emulation.claims.claim import Claim, Figures, Plot, Verdict, listed, task
from emulation.claims.inputs import BUNDLED, captures, heads, make, shown
from emulation.claims.settings import Settings
from emulation.claims.statistics import rms
from emulation.claims.tasks import Task
from emulation.formats import format_of
from emulation.samples import KINDS

LIMIT = 1e-2
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


def measure(
    seed: int, *, kind: str, n: int | None, dtype: str, data: str | None = None
) -> dict[str, Any]:
    """Differences of flash and standard, and of each from the exact values.

    relative: rms over rms of the exact output. absolute: largest difference. by_row: largest
    difference over the largest |O| of its row.
    """
    x = make(kind, dtype=dtype, seed=seed, n=n, data=data)
    ours, theirs = (f(*x.qkv, **x.masks)[0].astype(np.float64) for f in (flash, standard))
    exact = oracle.attention(*x.qkv, **x.masks, certified_rows=0, tier="float64").out
    size = rms(exact)

    def sizes(d: Any) -> dict[str, float]:
        tops = np.abs(exact).max(axis=-1, keepdims=True)
        return {
            "absolute": float(np.abs(d).max()),
            "relative": rms(d) / size,
            "by_row": float((np.abs(d) / np.where(tops == 0, 1.0, tops)).max()),
        }

    return {
        "kind": shown(kind), "dtype": dtype, "n": x.k.shape[1], "size": size,
        "flash - standard": sizes(ours - theirs), "flash - exact": sizes(ours - exact),
        "standard - exact": sizes(theirs - exact),
    }  # fmt: skip


def _tasks(settings: Settings) -> list[Task]:
    n = settings.pick(tiny=48, quick=512, full=2048)
    found = []
    for dtype in EPS:
        for kind in (*KINDS, *captures(settings.data)):
            where: dict[str, Any] = (
                {} if kind in KINDS or kind == BUNDLED else {"data": settings.data}
            )
            length = n if kind in KINDS else settings.pick(tiny=48, quick=512, full=None)
            found.append(
                task(
                    8, f"{dtype} {shown(kind)}", measure, kind=kind, n=length, dtype=dtype, **where
                )
            )
    return found


def _gather(values: Mapping[str, Any]) -> Figures:
    eps = {dtype: 2.0 ** (1 - format_of(dtype).precision) for dtype in EPS}
    return {"eps": eps, "cells": list(values.values())}


def _judge(figures: Figures) -> Verdict:
    if figures["eps"] != EPS:
        return Verdict("does not hold", f"eps is {figures['eps']}.")
    cells = figures["cells"]

    def breakers(what: str) -> list[str]:
        over = [c for c in cells if not c["flash - standard"][what] <= LIMIT]
        return [f"{c['kind']} ({c['dtype']}, {c['flash - standard'][what]:.2g})" for c in over]

    absolute, relative = breakers("absolute"), breakers("relative")
    worst = max(c["flash - standard"]["relative"] for c in cells)
    real = heads(c["kind"] for c in cells)
    said = f"the largest rms difference over rms(O) is {worst:.2g} ({real}, one draw of each kind)"
    if not absolute and not relative:
        return Verdict("holds", f"On all {len(cells)} inputs; {said}.")
    if not relative:
        return Verdict(
            "holds if",
            f"it is meant relative to the output's rms: {said}. Single values differ by more than "
            f"1e-2 on {len(absolute)} of {len(cells)} inputs: {listed(absolute)}.",
            "it is relative to the output's rms",
        )
    if len(relative) < len(cells) / 2:
        return Verdict(
            "holds if",
            f"the input is none of {len(relative)} of {len(cells)}, which break 1e-2 even in rms: "
            f"{listed(relative)}.",
            f"the input is none of {len(relative)} of {len(cells)}",
        )
    return Verdict("does not hold", f"{len(relative)} of {len(cells)} inputs break 1e-2; {said}.")


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "input": c["kind"], "format": c["dtype"], "N": c["n"], "pair": pair,
            "largest": c[pair]["absolute"], "largest / largest of the row": c[pair]["by_row"],
            "rms / rms(O)": c[pair]["relative"],
        }
        for c in figures["cells"]
        for pair in ("flash - standard", "flash - exact", "standard - exact")
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    series: dict[str, list[list[float]]] = {}
    for dtype in EPS:
        cells = [c for c in figures["cells"] if c["dtype"] == dtype]
        for what in ("relative", "absolute"):
            found = [[i + 1, c["flash - standard"][what]] for i, c in enumerate(cells)]
            series[f"{what}, {dtype}"] = [[i, y] for i, y in found if y]
        series["1e-2"] = [[1, LIMIT], [len(cells), LIMIT]]
    return [
        Plot("flash minus standard", "input, as in the table", "difference", series, log_y=True)
    ]


CLAIM = Claim(
    number=8,
    title="Within 1e-2",
    says="bf16 has eps 2^-7 = 0.008, fp16 2^-10 = 0.001; the difference stays within 1e-2.",
    rule="eps must be as said. Holds if flash - standard stays within 1e-2 on every input, both in "
    "its largest value and in rms over rms(O); holds if, when only single values break it, or when "
    "fewer than half of the inputs do in rms.",
    setting=lambda s: "nine kinds of samples and real captures, default arithmetic, fp32 state",
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
)
run = CLAIM.run
