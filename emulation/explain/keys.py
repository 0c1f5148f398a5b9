"""Keys that count otherwise than they should, in every row: which, and how often they count.

If key j counts 1 + a_j times in every row, c (out - O) = sum_j a_j P_j (V_j - O) exactly, with
c = 1 + sum_j a_j P_j: least squares for a and for c by turns tells keys left out (a = -1) from
weights thrown away at random. a is known up to a constant: most keys count once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from emulation.explain.case import Case
from emulation.explain.exact import F64, NOTHING, Index, weigh
from emulation.explain.fit import APART, Observed
from emulation.oracle.result import numbers

#: Groups of keys that are told apart at once, and rows and heads that are looked at.
GROUPS, ROWS, HEADS = 96, 48, 4
#: Share of the error that keys must explain, and runs of keys that are listed.
NEARLY, RUNS = 0.95, 4
TURNS = 8


@dataclass(frozen=True)
class Counted:
    """explained: share of the error's energy; text: a sentence, if few runs of keys are all."""

    explained: float
    text: str | None


def counted(case: Case, seen: Observed, close: Index) -> Counted:
    """Whether the error is that of keys which count otherwise. seen: finite."""
    n = case.problem.n_k
    step = math.ceil(n / GROUPS)
    labels: Index = np.arange(n) // step
    extra, explained = _solve(case, seen, close, labels)
    if explained < 0.1 or step == 1:
        return Counted(explained, _text(extra[labels], explained))
    # Once more, key by key where the weight changes.
    wrong = np.abs(extra[labels]) > 0.1
    edge = np.flatnonzero(np.diff(wrong.astype(int)))
    near = np.zeros(n, bool)
    for at in edge[: 2 * RUNS]:
        near[max(0, at - step) : at + 1 + step] = True
    names = np.where(near, n + np.arange(n), np.where(wrong, n + n, 0) + labels // 4)
    _, labels = np.unique(names, return_inverse=True)
    if labels.max() < 2 * GROUPS:
        extra, explained = _solve(case, seen, close, labels)
    return Counted(explained, _text(extra[labels], explained))


def _solve(case: Case, seen: Observed, close: Index, labels: Index) -> tuple[F64, float]:
    """How much more each group of keys counts, and the share of the error this explains."""
    problem = case.problem
    heads = np.unique(np.linspace(0, problem.heads - 1, HEADS).astype(int))
    picks = np.unique(np.linspace(0, len(close) - 1, ROWS).astype(int))
    rows = case.rows[close[picks]]
    groups = int(labels.max()) + 1
    square = np.zeros((groups, groups))
    parts = []
    sets = [np.flatnonzero(labels == g) for g in range(groups)]
    for h in heads:
        g = problem.kv_head(int(h))
        k, v = numbers(problem.k[g]), numbers(problem.v[g])
        w = weigh(problem, NOTHING, numbers(problem.q[h, rows]), k, rows, problem.band())
        out, exact = seen.out[h, picks], seen.exact[h, picks]
        sigma = np.maximum(seen.sigma[h, picks], 1e-300)
        p = np.stack([w.p[:, at].sum(axis=1) for at in sets])
        x = np.stack([w.p[:, at] @ v[at] for at in sets]) - p[:, :, None] * exact
        x = (x / sigma).reshape(groups, -1)
        square += x @ x.T
        parts.append((x, (out - exact) / sigma, p))
    # A group whose leaving would not be noticed is left alone.
    known = np.diag(square) > APART**2
    total = sum(float(np.sum(e * e)) for _, e, _ in parts)
    found = np.zeros(groups)
    if not known.any() or not total > 0:
        return found, 0.0
    part = np.linalg.pinv(square[np.ix_(known, known)], rcond=1e-10, hermitian=True)
    for _ in range(TURNS):
        count = [(x, e, np.maximum(1.0 + found @ p, 0.01)[:, None]) for x, e, p in parts]
        along = sum((x @ (e * c).ravel() for x, e, c in count), np.zeros(groups))
        found[known] = part @ along[known]
        found[known] -= np.median(found[known])
    rest = sum(float(np.sum(((found @ x).reshape(e.shape) / c - e) ** 2)) for x, e, c in count)
    return found, 1.0 - rest / total


def _text(extra: F64, explained: float) -> str | None:
    if explained < NEARLY:
        return None
    wrong = np.flatnonzero(np.abs(extra) > 0.3)
    if not len(wrong):
        return None
    runs = np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1)
    if len(runs) > RUNS:
        return None
    said = []
    for run in runs:
        times = 1.0 + float(np.median(extra[run]))
        which = f"key {run[0]}" if len(run) == 1 else f"keys {run[0]} to {run[-1]}"
        count = "do not count" if abs(times) < 0.1 else f"count {times:.2f} times"
        said.append(f"{which} {count if len(run) > 1 else count.replace('do ', 'does ')}")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}, which explains {100 * explained:.1f} % of the error."
