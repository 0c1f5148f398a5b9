"""How far any correct kernel may be from the exact result: the bounds of a family of Plans, the
largest of them element by element.

A correct kernel keeps fp32 between its steps, rounds P (and dS) to the input format at most once
and its result once. The family takes every other choice at its worst: tiles of 16 keys in either
direction, a tensor core of eight products a step and 24 bits, unfused arguments, every rounding of
c, approximate reciprocal and logarithm, row sums of the rounded or of the unrounded P, or an
unfused softmax.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from emulation.bound_forward import forward, standard
from emulation.bounds import backward_bound
from emulation.explain.exact import F64, Index
from emulation.oracle.result import refuse_nonfinite
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Problem
from emulation.tiled import c_rules

#: Rows times keys times columns up to which a shared error of P is followed value by value.
EXACT = 1 << 25
ROWS = 256
_UNROUNDED = Numerics(reference="row-max", row_sum="unrounded", delta="rounded")
_ROUNDED = Numerics(reference="row-max", row_sum="rounded", delta="rounded")


def family(problem: Problem) -> list[Plan]:
    """The Plans whose bounds the envelope takes the largest of."""
    backward = BackwardPlan(tile_m=16, tile_n=16, score="unfused", delta_threads=1)
    half = problem.dtype != "float32"
    worst = Plan(
        numerics=_UNROUNDED,
        format=problem.dtype,  # type: ignore[arg-type]  # checked by Problem
        arch="sm80" if half else "sm90",
        step=8 if half else None,
        tile_n=16,
        direction="right-to-left",
        score="scaled",
        alpha="references",
        row_sum_order="running",
        inverse="hardware",
        lse="reference",
        rounded_sum="matrix" if half else "lanes",
        backward=backward,
    )
    other = dataclasses.replace(worst, direction="left-to-right", score="unfused", alpha="maxima")
    plans = [
        worst,
        *(dataclasses.replace(other, lse="c ln2", c=rule) for rule in c_rules(problem)),
        dataclasses.replace(worst, numerics=_ROUNDED),
    ]
    if not half:  # fp32 inputs on a tensor core of bfloat16 terms, and by chains of FMAs
        plans += [dataclasses.replace(p, wide="fma") for p in plans]
    return plans


def envelope(problem: Problem, rows: Index, plans: list[Plan] | None = None) -> tuple[F64, F64]:
    """Bounds of |out - exact| (H, R, D_v) and |lse - exact| (H, R) for the given rows.

    plans: None is the family, and the unfused algorithm beside it. Raises ValueError for NaN or Inf
    that some query sees.
    """
    refuse_nonfinite(problem)
    chosen = family(problem) if plans is None else plans
    part = dataclasses.replace(problem, q=problem.q[:, rows])
    band = np.stack(problem.band())[:, rows]
    loose = problem.heads * len(rows) * problem.n_k * problem.d_v > EXACT
    out = np.zeros((problem.heads, len(rows), problem.d_v))
    lse = np.zeros(out.shape[:2])
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            for start in range(0, len(rows), ROWS):
                at = slice(start, min(start + ROWS, len(rows)))
                found = [forward(part, p, h, at, band[:, at], loose=loose) for p in chosen]
                pairs = [(f.out, f.lse) for f in found]
                if plans is None:
                    pairs.append(standard(part, h, at, band[:, at], loose=loose))
                out[h, at] = np.max([o for o, _ in pairs], axis=0)
                lse[h, at] = np.max([x for _, x in pairs], axis=0)
    return out, lse


def gradient_envelope(
    problem: Problem, dout: object, plans: list[Plan] | None = None
) -> dict[str, F64]:
    """Bounds of |dq - exact| (H, N_q, D), |dk - exact| and |dv - exact| (H_kv, N_k, ...)."""
    chosen = plans
    if chosen is None:
        worst = family(problem)[0]
        chosen = [dataclasses.replace(worst, c=rule) for rule in c_rules(problem)]
    found = [backward_bound(problem, plan, dout) for plan in chosen]
    return {n: np.max([f[i] for f in found], axis=0) for i, n in enumerate(("dq", "dk", "dv"))}
