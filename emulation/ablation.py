"""An independent split of the error: group by group, in all orders (Shapley)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from emulation.attribution import (
    check_algorithm,
    check_tiled,
    explainable,
    flash_plan_of,
    track_forward,
    tracking_machine,
)
from emulation.plan import Numerics, Plan
from emulation.sources import GROUPS, SOURCES
from emulation.tracking import F64


def shapley(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "flash",
    plan: Plan | None = None,
    numerics: Numerics | dict[str, Any] | None = None,
    state: str | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
) -> dict[str, F64]:
    """The error of out before its cast, split among groups by Shapley's rule: an exact split by
    other means.

    The algorithm runs once for every subset of its groups (2^G runs, small inputs), with only that
    subset's roundings; a group's part is its mean effect over all orders in which groups could be
    switched on. Returns group -> (..., N_q, D_v) float64; they sum to the error. Arguments and
    errors as in `attribute`, which has more of them.

    >>> from emulation.samples import sample
    >>> parts = shapley(*sample("normal", n=16, d=16), state="bfloat16", algorithm="standard")
    >>> max(parts, key=lambda g: float(np.abs(parts[g]).max())) in parts
    True
    """
    check_algorithm(algorithm)
    check_tiled(plan, numerics, algorithm == "flash")
    problem = explainable(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    tiled = flash_plan_of(problem, plan, numerics, state)
    used, kept = tiled if algorithm == "flash" else None, tiled.state
    shape = (*problem.lead, problem.n_q, problem.d_v)

    def outcome(groups: frozenset[str]) -> F64:
        fold = [s.name for s in SOURCES.values() if s.group in groups]
        tracks = track_forward(tracking_machine(problem, used, kept, fold), problem, used, None)
        return np.stack([x.exact for x in tracks.o]).reshape(shape)

    errors = track_forward(tracking_machine(problem, used, kept), problem, used, None)
    players = [g for g in GROUPS if any(SOURCES[n].group == g for x in errors.o for n in x.errors)]
    value = {
        frozenset(s): outcome(frozenset(s))
        for r in range(len(players) + 1)
        for s in itertools.combinations(players, r)
    }
    parts = {}
    for player in players:
        part = np.zeros(shape)
        for subset, base in value.items():
            if player not in subset:
                n, s = len(players), len(subset)
                weight = math.factorial(s) * math.factorial(n - s - 1) / math.factorial(n)
                part += weight * (value[subset | {player}] - base)
        parts[player] = part
    return parts
