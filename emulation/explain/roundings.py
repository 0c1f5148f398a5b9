"""What kind of rounding: whose arithmetic, which source dominates, which inputs make a bias."""

from __future__ import annotations

import dataclasses

import numpy as np

from emulation.attribution import track_forward, tracking_machine
from emulation.explain import fit
from emulation.explain.case import Case
from emulation.explain.exact import F64, NOTHING, Index, weigh
from emulation.explain.verdict import Verdict
from emulation.explain.whose import Bits, Share, rows_for, search, whose
from emulation.oracle.result import numbers
from emulation.problem import Array, Problem
from emulation.sources import SOURCES

#: Scores of the rows whose rounding sources are attributed.
ATTRIBUTED = 1 << 18


def kernels(case: Case, out: Array, lse: Array | None, unknown: bool) -> tuple[Share, ...]:
    """Known kernels (and what a search finds), by the bits of O and LSE that they reproduce."""
    rows = rows_for(case.problem)
    with np.errstate(all="ignore"):
        theirs = None if lse is None else lse[:, rows].astype(np.float32)
    bits = Bits(case.problem, rows, out[:, rows], theirs)
    found = whose(bits)
    if unknown and not found[0].all_bits and case.problem.dtype != "float32":
        found = sorted([*found, search(bits)], key=lambda s: -s.score)
    return tuple(found)


def with_sources(case: Case, result: Verdict, biased: fit.Bias | None) -> Verdict:
    """The groups of roundings of the nearest arithmetic, on the last rows (the first, where these
    see what they would see alone).
    """
    problem = case.problem
    plan = next((s.plan for s in result.kernels if s.plan is not None and s.plan.splits == 1), None)
    heads = problem.group
    count = max(1, min(problem.n_q, ATTRIBUTED // max(1, heads * problem.n_k)))
    top = problem.causal == "top-left"
    part = slice(0, count) if top else slice(problem.n_q - count, problem.n_q)
    piece = Problem.of(
        problem.q[:heads, part], problem.k[:1], problem.v[:1], scale=problem.scale,
        causal=problem.causal, window=problem.window, softcap=problem.softcap,
    )  # fmt: skip
    m = tracking_machine(piece, plan, "float32")
    with np.errstate(all="ignore"):
        nodes = track_forward(m, piece, plan, None).out
    error = np.stack([x.value - x.exact for x in nodes])
    whole = float(np.sum(error * error))
    if m.overflows or not whole > 0:
        return result
    groups: dict[str, F64] = {}
    for i, node in enumerate(nodes):
        for name, e in node.errors.items():
            group = SOURCES[name].group
            groups.setdefault(group, np.zeros(error.shape))[i] += e
    shares = {n: float(np.sum(e * error)) / whole for n, e in groups.items()}
    source = max(shares, key=lambda n: abs(shares[n]))
    blamed = None
    if biased is not None:
        exact = np.stack([x.exact for x in nodes])
        sign = np.sign(exact) if "sign" not in biased.towards else np.ones_like(exact)
        means = {n: float(np.mean(e * sign)) for n, e in groups.items()}
        blamed = max(means, key=lambda n: means[n] * np.sign(biased.mean))
    return dataclasses.replace(result, source=source, shares=shares, bias_source=blamed)


def bias_notes(case: Case, close: Index) -> tuple[str, ...]:
    """Which inputs make a bias: ties at the maximum, values of one sign."""
    problem, rows = case.problem, case.rows[close[:64]]
    q, k, v = (numbers(x) for x in (problem.q[0, rows], problem.k[0], problem.v[0]))
    w = weigh(problem, NOTHING, q, k, rows, problem.band())
    seen = w.seen.any(axis=1)
    near = (np.where(w.seen, w.s, -np.inf) >= w.top[:, None] - 2.0**-9).sum(axis=1)
    tied = float(np.mean(near[seen] > 1)) if seen.any() else 0.0
    one = float(np.mean((v >= 0).all(axis=0) | (v <= 0).all(axis=0)))
    said = []
    if tied > 0.1:
        said.append(f"In {100 * tied:.0f} % of the rows several scores tie at the maximum.")
    if one > 0.1:
        said.append(f"In {100 * one:.0f} % of the columns all values have one sign.")
    return tuple(said)
