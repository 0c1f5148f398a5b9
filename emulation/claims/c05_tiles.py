"""Claim 5: do more tiles and longer rows mean more rescales, and more deviation?

How often the running max moves is counted on scores alone; what it costs is measured by
attribution, over tile sizes and over N, in fp32 and bf16 state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation import Numerics, Problem, attribute, default_plan
from emulation.claims.c04_rescale import RESCALE
from emulation.claims.claim import Claim, Figures, Plot, Verdict, task
from emulation.claims.inputs import make
from emulation.claims.settings import Settings
from emulation.claims.statistics import SIGMAS, mean_and_error, rms, sigmas
from emulation.claims.tasks import Task

#: Growth below this is what the project calls equal accuracy (the rule of the default Numerics).
GROWTH = 1.03


def count(seed: int, *, tiles: int, rows: int) -> dict[str, Any]:
    """Moves of the running max over so many tiles, first included: random and rising scores.

    Only the order of the tiles' largest scores matters, and in random order that is the order of
    uniform numbers, whatever the scores' distribution and the tiles' size.
    expected: the t-th tile holds the largest so far with probability 1 / t.
    """
    tops = np.random.default_rng(seed).random((rows, tiles))

    def moves(x: Any) -> Any:
        running = np.maximum.accumulate(x, axis=1)
        return 1 + (running[:, 1:] > running[:, :-1]).sum(axis=1)

    mean, error = mean_and_error(moves(tops).tolist())
    rising = moves(np.sort(tops, axis=1))
    expected = sum(1.0 / t for t in range(1, tiles + 1))
    return {
        "tiles": tiles, "random": mean, "error": error, "expected": expected,
        "rising": float(rising.mean()),
    }  # fmt: skip


def measure(
    seed: int, *, sweep: str, state: str, points: list[list[int]], rows: int
) -> list[dict[str, Any]]:
    """Rms of the rescale group and of the whole error before the output cast at every (N, tile)."""
    found = []
    # The longest input once; shorter ones are its first keys, so that points are comparable.
    longest = max(n for n, _ in points)
    x = make("normal", dtype="bfloat16", seed=seed, n=longest, rows=rows)
    for n, tile_n in points:
        q, k, v = x.q, x.k[:, :n], x.v[:, :n]
        plan = default_plan(Problem.of(q, k, v), Numerics(), tile_n=tile_n, state=state)
        part = attribute(q, k, v, plan=plan, state=state).before_cast
        assert part is not None
        size = rms(part.exact)
        rescale = part.groups[RESCALE].rms if RESCALE in part.groups else 0.0
        found.append({
            "sweep": sweep, "state": state, "n": n, "tile_n": tile_n, "tiles": -(-n // tile_n),
            "rescale": rescale / size, "whole": rms(part.error) / size,
        })  # fmt: skip
    return found


def _tasks(settings: Settings) -> list[Task]:
    seeds = settings.pick(tiny=2, quick=3, full=8)
    n = settings.pick(tiny=64, quick=512, full=4096)
    by_tile = [[n, t] for t in settings.pick(
        tiny=(64, 16), quick=(512, 128, 32, 16), full=(1024, 512, 256, 128, 64, 32, 16)
    )]  # fmt: skip
    by_n = [[m, 64] for m in settings.pick(
        tiny=(64, 128), quick=(128, 512, 2048), full=(128, 512, 2048, 8192, 32768)
    )]  # fmt: skip
    rows = settings.pick(tiny=8, quick=32, full=32)
    counted = settings.pick(
        tiny=(1, 4, 16), quick=(1, 4, 16, 64, 256), full=(1, 4, 16, 64, 256, 1024)
    )
    return [
        *(
            task(5, f"moves {t}", count, tiles=t,
                 rows=settings.pick(tiny=200, quick=4000, full=20000))
            for t in counted
        ),
        *(
            task(5, f"{sweep} {state} {i}", measure, cost=float(sum(m for m, _ in points) * rows),
                 sweep=sweep, state=state, points=points,
                 rows=rows)
            for sweep, points in (("tiles", by_tile), ("N", by_n))
            for state in ("float32", "bfloat16")
            for i in range(seeds)
        ),
    ]  # fmt: skip


def _gather(values: Mapping[str, Any]) -> Figures:
    moves = [value for name, value in values.items() if name.startswith("moves ")]
    runs = [value for name, value in values.items() if not name.startswith("moves ")]
    curves: dict[str, Any] = {}
    for sweep in ("tiles", "N"):
        for state in ("float32", "bfloat16"):
            group = [r for r in runs if r[0]["sweep"] == sweep and r[0]["state"] == state]
            points = [
                {
                    "n": p[0]["n"], "tile_n": p[0]["tile_n"], "tiles": p[0]["tiles"],
                    "rescale": rms([x["rescale"] for x in p]),
                    "whole": rms([x["whole"] for x in p]),
                }
                for p in zip(*group, strict=True)
            ]  # fmt: skip
            ratios = [float(np.log(r[-1]["whole"] / r[0]["whole"])) for r in group]
            mean, error = mean_and_error(ratios)
            curves[f"{sweep}, {state} state"] = {
                "points": points,
                "growth": float(np.exp(mean)),
                "log_growth": mean,
                "error": error,
            }
    return {"moves": moves, "curves": curves}


def _judge(figures: Figures) -> Verdict:
    most = sigmas(len(figures["moves"]))
    counted = all(
        abs(m["random"] - m["expected"]) <= most * m["error"] + 1e-9 and m["rising"] == m["tiles"]
        for m in figures["moves"]
    )
    last = figures["moves"][-1]
    if not counted:
        return Verdict(
            "does not hold",
            f"Over {last['tiles']} tiles the max moves {last['random']:.2f} times, not as "
            "expected.",
        )
    grows = {
        name: c["log_growth"] > SIGMAS * c["error"] and c["growth"] > GROWTH
        for name, c in figures["curves"].items()
    }
    said = "; ".join(f"{name}: x{c['growth']:.3g}" for name, c in figures["curves"].items())
    parts = [
        f"{max(p['rescale'] / p['whole'] for p in c['points']):.1e} ({name})"
        for name, c in figures["curves"].items()
    ]
    said += f". Rescaling's rms is at most these parts of it: {', '.join(parts)}"
    moved = (
        f"The max moves {last['random']:.1f} times over {last['tiles']} tiles in random order "
        f"(expected {last['expected']:.1f}), every time where scores rise."
    )
    if all(grows.values()):
        return Verdict("holds", f"{moved} Whole relative error, first point to last: {said}.")
    if any(grows.values()):
        where = _where(grows)
        return Verdict(
            "holds if", f"{where}. {moved} Relative error, first point to last: {said}.", where
        )
    return Verdict("does not hold", f"{moved} But the error does not grow: {said}.")


def _where(grows: Mapping[str, bool]) -> str:
    """In which state each sweep grows.

    >>> _where({"tiles, float32 state": False, "tiles, bfloat16 state": True,
    ...         "N, float32 state": True, "N, bfloat16 state": True})
    'tiles are many and the state is bfloat16, or rows are long'
    """
    told = []
    for sweep, words in (("tiles", "tiles are many"), ("N", "rows are long")):
        found = {n.split(", ")[1]: yes for n, yes in grows.items() if n.startswith(f"{sweep}, ")}
        states = [state.removesuffix(" state") for state, yes in found.items() if yes]
        if states:
            told.append(words if all(found.values()) else f"{words} and the state is {states[0]}")
    return ", or ".join(told)


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "sweep": "moves of the max", "tiles": m["tiles"], "random order": m["random"],
            "expected": m["expected"], "rising scores": m["rising"],
        }
        for m in figures["moves"]
    ]  # fmt: skip
    for name, curve in figures["curves"].items():
        rows += [
            {
                "sweep": name, "N": p["n"], "tile": p["tile_n"], "tiles": p["tiles"],
                "rescale / rms(O)": p["rescale"], "whole error / rms(O)": p["whole"],
            }
            for p in curve["points"]
        ]  # fmt: skip
    return rows


def _draw(figures: Figures) -> list[Plot]:
    moves = figures["moves"]
    plots = [
        Plot(
            "How often the running max moves", "tiles", "moves of a row",
            {
                "random order": [[m["tiles"], m["random"]] for m in moves],
                "expected": [[m["tiles"], m["expected"]] for m in moves],
                "rising scores": [[m["tiles"], m["rising"]] for m in moves],
            },
            True, True,
        )
    ]  # fmt: skip
    for sweep, x in (("tiles", "tiles"), ("N", "n")):
        series = {}
        for state in ("float32", "bfloat16"):
            points = figures["curves"][f"{sweep}, {state} state"]["points"]
            for what in ("whole", "rescale"):
                series[f"{what}, {state}"] = [[p[x], p[what]] for p in points if p[what]]
        title = f"Error before the cast over {sweep}"
        plots.append(Plot(title, x if x == "tiles" else "N", "rms / rms(O)", series, True, True))
    return plots


CLAIM = Claim(
    number=5,
    title="More tiles, more error?",
    says="More tiles and longer sequences mean more rescales and more accumulated deviation.",
    rule="The moves of the max must be as expected (ln of the number of tiles in random order, "
    "within the error of all counts together, and all tiles where scores rise). Holds if the whole "
    "error before the cast, relative to O, grows from the first point to the last by more than 3 "
    "standard errors and 3 % in every sweep; holds if, where it grows in some.",
    setting=lambda s: (
        "normal inputs, bf16, D = 64; N = "
        f"{s.pick(tiny=64, quick=512, full=4096)} in tiles of many sizes, then N at tiles of 64"
    ),
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
)
run = CLAIM.run
