"""Suspects with a free number: the output times a gain, another scale, another softcap.

The number is fitted (Gauss-Newton on z). What the roundings themselves lean by is taken from the
same statistic of modelled kernels, so that a gain which rounding gives is not called one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from emulation.explain import fit
from emulation.explain.case import Case
from emulation.explain.exact import F64, NOTHING, Change, Index, run, weigh
from emulation.explain.fit import Match, Observed
from emulation.formats import FORMATS
from emulation.oracle.result import numbers
from emulation.problem import Problem
from emulation.rounding import round_to

#: Logarithm of the largest factor that is looked for.
REACH = 1.0
#: What a free number costs in log-likelihood: as much as it must gain to be sure.
COST = fit.SIGNIFICANT**2 / 2
STEP = 2.0**-12


def modelled(case: Case, positions: Index) -> list[F64]:
    """Results (H, R, D_v) of kernels that round P (its sum rounded or not, or after division) or
    nothing, and the output: what lean their roundings have here.
    """
    problem, rows = case.problem, case.rows[positions]
    fmt = problem.dtype
    half = FORMATS[fmt].bits == 16
    band = problem.band()
    found = np.zeros((4 if half else 1, problem.heads, len(rows), problem.d_v))
    for h in range(problem.heads):
        g = problem.kv_head(h)
        k, v = numbers(problem.k[g]), numbers(problem.v[g])
        w = weigh(problem, NOTHING, numbers(problem.q[h, rows]), k, rows, band)
        found[0, h] = w.p @ v
        if not half:
            continue
        some = np.isfinite(w.lse)
        lift = np.exp(np.where(some, w.lse - w.top, 0.0))[:, None]
        p = _to(w.p * lift, fmt)
        total = np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
        found[1, h], found[2, h] = p @ v / lift, p @ v / total
        found[3, h] = _to(w.p, fmt) @ v
    return [_to(x, fmt) for x in found]


def _to(x: F64, fmt: str) -> F64:
    return np.asarray(round_to(x, fmt)).astype(np.float64)


def of_forward(case: Case, seen: Observed, close: Index, models: list[F64]) -> list[Match]:
    """The free suspects that stand out of the rounding, on rows that are finite."""
    keep = np.isfinite(seen.out).all(axis=(0, 2))
    if not keep.any():
        return []
    part = Observed(*(x[:, keep] for x in (seen.out, seen.exact, seen.sigma, seen.bound)))
    models = [m[:, keep] for m in models]
    return [
        m
        for name, right, theirs in _free(case, close[keep])
        if (m := _fitted(part, name, right, theirs, models)) is not None
    ]


Free = Callable[[float], tuple[F64, F64]]


def _free(case: Case, positions: Index) -> Iterator[tuple[str, float | None, Free]]:
    """(name, the right number or None, result and expected error at a logarithm of its factor)."""
    near, rows = case.near(positions), case.rows[positions]

    def gain(t: float) -> tuple[F64, F64]:
        return near.out * math.exp(t), near.sigma * max(1.0, math.exp(t))

    def with_(f: Callable[[Problem, float], Problem]) -> Free:
        def theirs(t: float) -> tuple[F64, F64]:
            change = Change(inputs=lambda p: f(p, math.exp(t)))
            got = run(case.problem, change, rows)
            return got.out, got.sigma

        return theirs

    yield "output times a constant", None, gain
    yield (
        "scale wrong by a factor",
        None,
        with_(lambda p, x: dataclasses.replace(p, scale=p.scale * x)),
    )
    if case.problem.softcap is not None:
        cap = case.problem.softcap
        yield "another softcap", cap, with_(lambda p, x: dataclasses.replace(p, softcap=cap * x))


def _fitted(
    seen: Observed, name: str, right: float | None, theirs: Free, models: list[F64]
) -> Match | None:
    t = 0.0
    value, sigma = theirs(0.0)
    for turn in range(6):
        ahead = theirs(t + STEP)[0]
        # The larger of both sigmas: the right result's counts where this one's is too small.
        both = np.maximum(np.maximum(seen.sigma, sigma), 1e-300)
        d, error = (ahead - value) / STEP / both, (seen.out - value) / both
        size = float(np.sum(d * d))
        if not size > 0:
            return None
        step = float(np.sum(error * d)) / size
        if not turn and not _stands_out(seen, d, step, models, both):
            return None
        t += float(np.clip(step, -0.5, 0.5))
        if abs(t) > REACH:
            return None
        value, sigma = theirs(t)
        if abs(step) < 1e-5 + 1e-4 * abs(t):
            break
    factor = math.exp(t)
    word = f"x {factor:.4f}" if right is None else f"{factor * right:.4g} for {right:.4g}"
    m = fit.match(seen, name, word, value, sigma)
    return None if m is None else dataclasses.replace(m, score=m.score - COST)


def _stands_out(seen: Observed, d: F64, a: float, models: list[F64], both: F64) -> bool:
    """Whether the first step is beyond that of every modelled rounding, by rows and by columns."""
    size = float(np.sum(d * d))
    leans = [0.0, *(float(np.sum((m - seen.exact) / both * d)) / size for m in models)]
    excess = max(a - max(leans), min(leans) - a, 0.0)
    error = (seen.out - seen.exact) / both
    return all(fit.sure(excess, *fit.spread(error * d, d * d, a, axis)) for axis in (1, 2))
