"""Claim 2: in real arithmetic flash and standard attention are equal, for any tiles and any order.

Both algorithms run over number types instead of floats: rationals, where scores that are integers
in log2 units make every exponential a power of two, and mpmath at rising precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np

from emulation.claims.claim import Claim, Figures, Plot, Verdict, task
from emulation.claims.settings import Settings
from emulation.claims.tasks import Task

Row = Sequence[Any]
Exp2 = Callable[[Any], Any]


def standard_row(scores: Row, v: Sequence[Row], exp2: Exp2, zero: Any) -> list[Any]:
    """softmax(scores) v over any number type; scores in log2 units."""
    top = max(scores)
    p = [exp2(s - top) for s in scores]
    total = sum(p, start=zero)
    return [
        sum((a * b for a, b in zip(p, column, strict=True)), start=zero) / total
        for column in zip(*v, strict=True)
    ]


def flash_row(
    scores: Row, v: Sequence[Row], exp2: Exp2, zero: Any, tiles: Sequence[Sequence[int]],
    forget: int | None = None,
) -> list[Any]:  # fmt: skip
    """The same with a running max over tiles of keys. forget: the tile that is not rescaled for."""
    top, total, out = None, zero, [zero] * len(v[0])
    for t, tile in enumerate(tiles):
        new = max(scores[j] for j in tile) if top is None else max(top, *(scores[j] for j in tile))
        if top is not None and t != forget:
            alpha = exp2(top - new)
            total, out = total * alpha, [x * alpha for x in out]
        top = new
        for j in tile:
            p = exp2(scores[j] - top)
            total += p
            out = [x + p * y for x, y in zip(out, v[j], strict=True)]
    return [x / total for x in out]


def _tiling(rng: np.random.Generator, n: int) -> list[list[int]]:
    """The keys in random order, cut into tiles of random sizes."""
    order = [int(j) for j in rng.permutation(n)]
    cuts = sorted({0, n, *(int(c) for c in rng.integers(1, n, size=int(rng.integers(1, 8))))})
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def rational(seed: int, *, n: int, width: int, trials: int) -> dict[str, int]:
    """Differences in rational arithmetic; `control` leaves one rescale out, where the max moved."""
    rng = np.random.default_rng(seed)
    differing, tiles_used, controls = 0, set(), 0
    for _ in range(trials):
        scores = [Fraction(int(s)) for s in rng.integers(-12, 13, n)]
        v = [[Fraction(int(x), 64) for x in row] for row in rng.integers(-200, 201, (n, width))]

        def exp2(x: Fraction) -> Fraction:
            return Fraction(2) ** int(x)

        tiles = _tiling(rng, n)
        tiles_used.add(len(tiles))
        truth = standard_row(scores, v, exp2, Fraction(0))
        differing += flash_row(scores, v, exp2, Fraction(0), tiles) != truth
        # Scores that rise from one tile to the next: each rescale is needed.
        order = sorted(range(n), key=lambda j: scores[j])
        halves = [order[: n // 2], order[n // 2 :]]
        controls += flash_row(scores, v, exp2, Fraction(0), halves, forget=1) != truth
    return {
        "trials": trials, "differing": differing, "most_tiles": max(tiles_used),
        "controls_differing": controls,
    }  # fmt: skip


def precise(seed: int, *, n: int, width: int, bits: int, trials: int) -> dict[str, float]:
    """Largest difference at `bits` bits, in units of 2^-bits of the largest |v|."""
    rng = np.random.default_rng(seed)
    mp: Any = mpmath.MPContext()
    mp.prec = bits
    worst = mp.zero
    for _ in range(trials):
        scores = [mp.mpf(float(s)) for s in 3 * rng.standard_normal(n)]
        v = [[mp.mpf(float(x)) for x in row] for row in rng.standard_normal((n, width))]

        def exp2(x: Any) -> Any:
            return mp.exp(x * mp.ln2)

        ours = flash_row(scores, v, exp2, mp.zero, _tiling(rng, n))
        theirs = standard_row(scores, v, exp2, mp.zero)
        size = max(abs(x) for row in v for x in row)
        worst = max(worst, *(abs(a - b) / size for a, b in zip(ours, theirs, strict=True)))
    exponent = float(mp.log(worst, 2)) if worst else -math.inf
    return {"bits": bits, "log2_difference": exponent, "bound_log2": _bound(n) - bits}


def _bound(n: int) -> float:
    """log2 of how many roundings of 2^-bits each can part the two.

    Each side: x and its exponential 16 (argument below 32, so 2^4 of its own rounding), the sum of
    P and the sum of P v n each, a rescale of both at each of at most 9 tiles 2 (and 16 for alpha's
    own exponential), a division.
    """
    return math.log2(2 * (16 + 2 * n + 9 * 18 + 1))


def _tasks(settings: Settings) -> list[Task]:
    n, trials = settings.pick(tiny=24, quick=96, full=256), settings.pick(tiny=4, quick=24, full=96)
    bits = settings.pick(tiny=(24, 53), quick=(24, 53, 113, 200), full=(11, 24, 53, 113, 200, 400))
    return [
        task(2, "rational", rational, n=n, width=4, trials=trials),
        *(
            task(2, f"{b} bits", precise, n=n, width=4, bits=b, trials=max(2, trials // 8))
            for b in bits
        ),
    ]


def _gather(values: Mapping[str, Any]) -> Figures:
    return {
        "rational": values["rational"],
        "precision": [values[name] for name in values if name.endswith(" bits")],
    }


def _judge(figures: Figures) -> Verdict:
    exact, precision = figures["rational"], figures["precision"]
    equal = exact["differing"] == 0 < exact["controls_differing"]
    falls = all(p["log2_difference"] <= p["bound_log2"] for p in precision)
    last = precision[-1]
    if equal and falls:
        return Verdict(
            "holds",
            f"In rational arithmetic {exact['trials']} of {exact['trials']} random tilings give "
            "the "
            f"same fractions; at {last['bits']} bits the two differ by "
            f"2^{last['log2_difference']:.0f}.",
        )
    if not equal:
        return Verdict(
            "does not hold",
            f"{exact['differing']} of {exact['trials']} tilings differ in rational arithmetic "
            f"({exact['controls_differing']} controls do).",
        )
    return Verdict("does not hold", "The difference does not fall with the precision.")


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    exact = figures["rational"]
    rows: list[dict[str, Any]] = [
        {
            "arithmetic": "rational",
            "difference": f"{exact['differing']} of {exact['trials']} tilings",
        },
        {
            "arithmetic": "rational, one rescale left out (control)",
            "difference": f"{exact['controls_differing']} of {exact['trials']} tilings",
        },
    ]
    rows += [
        {"arithmetic": f"{p['bits']} bits", "difference": f"2^{p['log2_difference']:.1f}"}
        for p in figures["precision"]
    ]
    return rows


def _draw(figures: Figures) -> list[Plot]:
    points = [[p["bits"], p["log2_difference"]] for p in figures["precision"]]
    bound = [[p["bits"], p["bound_log2"]] for p in figures["precision"]]
    return [
        Plot(
            "Difference of flash and standard attention", "bits of precision", "log2",
            {"difference": points, "bound": bound},
        )
    ]  # fmt: skip


CLAIM = Claim(
    number=2,
    title="Exact in real arithmetic",
    says="No product, exponential or sum is skipped; in the reals both are equal, whatever the "
    "tiles.",
    rule="Holds if no tiling differs in rational arithmetic while leaving out one rescale does, "
    "and "
    "the difference at every precision is within the bound of its roundings.",
    setting=lambda s: (
        "one row, keys in random order in random tiles; integer scores in log2 units "
        "(rational), normal scores (mpmath)"
    ),
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
)
run = CLAIM.run
