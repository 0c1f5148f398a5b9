"""Claim 3: when the running max goes from 1.0 to 2.0, what is there is multiplied by exp(-1).

One row walks four tiles; a machine that writes down what passes shows m, alpha, l and O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation import Numerics, Problem, default_plan
from emulation.claims.claim import Claim, Figures, Plot, Verdict, task
from emulation.claims.settings import Settings
from emulation.claims.tasks import Task
from emulation.machine import Machine, Node
from emulation.problem import Array, numpy_dtype
from emulation.tiled import arithmetic_of, constants, flash_rows

TILE = 16
#: Largest score of each tile: the max moves from 1 to 2, then stays.
TOPS = (1.0, 2.0, 0.5, 2.0)
#: Relative error of alpha in fp32: ex2.approx within 2 ulp (PTX), its argument (below 2 in log2
#: units: two references and their difference, half an ulp each, times ln 2) another 3.
TOLERANCE = 5 * 2.0**-23


class _Recorder(Machine):
    """Keeps alpha and the accumulators of every tile."""

    def __init__(self, **arithmetic: Any) -> None:
        super().__init__(**arithmetic)
        self.alphas: list[float] = []
        self.sums: list[float] = []
        self.outs: list[float] = []

    def exp2(self, name: str, x: Node, seen: Array | None = None) -> Node:
        y = super().exp2(name, x, seen)
        if name == "exp2":  # P of the next tile; alpha, if any, comes after it
            self.alphas.append(1.0)
        elif name == "alpha":
            self.alphas[-1] = float(y[0])
        return y

    def fma(self, name: str, a: Node, b: Node, c: Node, product: str | None = None) -> Node:
        y = super().fma(name, a, b, c, product)
        if name == "row sum":
            self.sums.append(float(y[0].sum()))
        return y

    def dot_seen(self, name: str, a: Node, b: Node, c: Node | None, seen: Array) -> Node:
        y = super().dot_seen(name, a, b, c, seen)
        if name == "PV accumulation":
            self.outs.append(float(y[0, 0]))
        return y


def trace(seed: int, *, dtype: str, reference: str) -> dict[str, Any]:
    """m, alpha, l and O[0] after each tile of one row."""
    rng = np.random.default_rng(seed)
    n = TILE * len(TOPS)
    q, k = np.zeros((1, 1, TILE)), np.zeros((1, n, TILE))
    q[0, 0, 0] = 1.0
    for t, top in enumerate(TOPS):
        # Eighths are exact in every format; the largest of a tile is its `top`.
        below = rng.integers(-16, 0, TILE) / 8 + top
        below[int(rng.integers(TILE))] = top
        k[0, t * TILE : (t + 1) * TILE, 0] = below
    v = np.abs(rng.standard_normal((1, n, TILE)))
    half = [x.astype(np.float32).astype(numpy_dtype(dtype)) for x in (q, k, v)]
    problem = Problem.of(*half, scale=1.0)
    plan = default_plan(
        problem,
        Numerics(reference=reference, row_sum="unrounded"),  # type: ignore[arg-type]  # a plain str
        tile_n=TILE,
        direction="left-to-right",
    )
    m = _Recorder(**arithmetic_of(plan))
    lo, hi = problem.band()
    const, q_node = constants(m, problem, plan), m.input(problem.q[0])
    flash_rows(m, plan, const, q_node, problem.k[0], problem.v[0], lo, hi)
    maxima = np.maximum.accumulate(TOPS).tolist()
    return {
        "m": maxima, "alpha": m.alphas, "l": m.sums, "o": m.outs,
        "dtype": dtype, "reference": reference,
    }  # fmt: skip


def _tasks(settings: Settings) -> list[Task]:
    return [
        task(3, f"{dtype} {reference}", trace, dtype=dtype, reference=reference)
        for dtype in ("float16", "bfloat16")
        for reference in ("row-max", "power-of-two")
    ]


def _gather(values: Mapping[str, Any]) -> Figures:
    return {"traces": list(values.values()), "expected": math.exp(-1.0)}


def _judge(figures: Figures) -> Verdict:
    expected = figures["expected"]
    followed = [t for t in figures["traces"] if t["reference"] == "row-max"]
    errors = [abs(t["alpha"][1] / expected - 1) for t in followed]
    powers = [t["alpha"][1] for t in figures["traces"] if t["reference"] == "power-of-two"]
    worst = max(errors)
    if worst <= TOLERANCE:
        return Verdict(
            "holds",
            f"alpha = {followed[0]['alpha'][1]:.9f}, within {worst:.1e} of exp(-1); with the "
            f"reference rounded up to a power of two it is {powers[0]:g}, which rounds nothing.",
        )
    return Verdict("does not hold", f"alpha = {followed[0]['alpha'][1]:.9f}, not {expected:.9f}.")


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "format": t["dtype"], "reference": t["reference"], "tile": i + 1, "m": t["m"][i],
            "alpha": t["alpha"][i], "l": t["l"][i], "O[0], not divided": t["o"][i],
        }
        for t in figures["traces"]
        for i in range(len(t["m"]))
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    first = figures["traces"][0]
    tiles = range(1, len(first["m"]) + 1)
    series = {
        name: [[i, y] for i, y in zip(tiles, first[key], strict=True)]
        for name, key in (("m", "m"), ("alpha", "alpha"), ("l", "l"))
    }
    return [Plot("One row, tile after tile", "tile", "value", series)]


CLAIM = Claim(
    number=3,
    title="The rescale factor",
    says="When the running max goes from 1.0 to 2.0 the old output is multiplied by exp(-1) = "
    "0.368.",
    rule="Holds if alpha at the tile that moves the max is within 5 ulp of exp(-1) (2 of the "
    "exponential unit, 3 of its argument) in every format.",
    setting=lambda s: "one row of 64 keys in four tiles of 16, largest scores 1, 2, 0.5, 2",
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
)
run = CLAIM.run
