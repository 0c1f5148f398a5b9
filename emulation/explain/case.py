"""One problem as the judge sees it: exact values, expected errors, bounds and suspects' results.

Each is computed once and kept, so that many outputs of one problem can be judged.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import oracle
from emulation.explain.envelope import envelope, gradient_envelope
from emulation.explain.exact import (
    F64,
    NOTHING,
    Change,
    Glance,
    Index,
    Outcome,
    Slopes,
    Wide,
    glance,
    run,
    run_backward,
)
from emulation.explain.rows import sampled
from emulation.explain.suspects import suspects
from emulation.plan import Plan
from emulation.problem import Array, Problem

#: Scores up to which every row is computed exactly (8192 x 8192 takes some seconds), and on a GPU.
WHOLE, WHOLE_GPU = 1 << 27, 1 << 33
#: Scores of the rows that get derived bounds and are compared with every suspect.
CLOSE = 1 << 19
#: Scores of the rows on which suspects are sorted out first.
FIRST = 1 << 16
#: Scores up to which the gradients of all heads are judged (some 20 s), and those that the queries
#: of one key head may have: its dK and dV need all of them.
GRADIENTS, GRADIENTS_OF_ONE = 1 << 22, 1 << 24


@dataclass(frozen=True, eq=False)
class Theirs:
    """A suspect's result on some rows: out and lse, with the error that rounding adds."""

    out: F64
    sigma: F64
    lse: F64


class Case:
    """A checked, finite problem, not empty, and what is known of it.

    plan: whose bounds are claimed; None is any correct kernel (`envelope`). xp: the array module
    that computes the exact values of all rows, NumPy or CuPy; the problem is NumPy's.
    """

    def __init__(
        self, problem: Problem, plan: Plan | None = None, close: int = CLOSE, xp: Any = np
    ) -> None:
        self.problem, self.plan, self.close, self.xp = problem, plan, close, xp
        self._wide = Wide(problem)
        self._near: dict[bytes, Outcome] = {}
        self._bounds: dict[bytes, tuple[F64, F64]] = {}
        self._theirs: dict[tuple[str, str, str, bytes], Theirs] = {}
        self._slope_bounds: dict[bytes, dict[str, F64]] = {}
        self._slopes: dict[tuple[str, str, bytes], Slopes] = {}
        self._lists: dict[str, list[tuple[str, str, Change]]] = {}

    @property
    def scores(self) -> int:
        return self.problem.heads * self.problem.n_q * self.problem.n_k

    @functools.cached_property
    def rows(self) -> Index:
        """The rows that are computed exactly: all, or as many as time allows."""
        limit = WHOLE if self.xp is np else WHOLE_GPU
        if self.scores <= limit:
            return np.arange(self.problem.n_q)
        return sampled(self.problem, self._count(limit // 4))

    def _count(self, cells: int) -> int:
        return max(16, cells // max(1, self.problem.heads * self.problem.n_k))

    @functools.cached_property
    def whole(self) -> Glance:
        """Exact values of `rows`."""
        return glance(self.problem, self.rows, self.xp)

    def near(self, positions: Index) -> Outcome:
        """Exact values and expected errors of some positions in `rows`."""
        key = positions.tobytes()
        if key not in self._near:
            self._near[key] = run(self.problem, NOTHING, self.rows[positions], self._wide)
        return self._near[key]

    def close_rows(self, out: Array) -> Index:
        """Positions in `rows` of those looked at closely: where errors are largest, and others."""
        error = np.abs(out[:, self.rows].astype(np.float64) - self.whole.out)
        with np.errstate(all="ignore"):
            worst = np.where(error > 0, error / np.maximum(self.whole.worst, 1e-300), 0.0)
        worst = np.nan_to_num(worst, nan=1e300, posinf=1e300).max(axis=2)
        count = self._count(self.close)
        if len(self.rows) <= count:
            return np.arange(len(self.rows))
        part = sampled(self.problem, count)
        order = np.argsort(-worst.max(axis=0), kind="stable")[: count // 4]
        spread = np.searchsorted(self.rows, part[np.isin(part, self.rows)])
        return np.unique(np.concatenate([order, spread]))

    def first_rows(self, close: Index) -> Index:
        """Some of the close rows (positions in `rows`), on which suspects are sorted out."""
        count = self._count(FIRST)
        if len(close) <= count:
            return close
        return np.unique(close[np.linspace(0, len(close) - 1, count, dtype=np.int64)])

    def bounds(self, positions: Index) -> tuple[F64, F64]:
        """Derived bounds of out and lse in these positions of `rows`."""
        key = positions.tobytes()
        if key not in self._bounds:
            plans = None if self.plan is None else [self.plan]
            self._bounds[key] = envelope(self.problem, self.rows[positions], plans)
        return self._bounds[key]

    def suspects(self, of: str) -> list[tuple[str, str, Change]]:
        if of not in self._lists:
            self._lists[of] = list(suspects(self.problem, of))
        return self._lists[of]

    def theirs(self, name: str, word: str, change: Change, positions: Index) -> Theirs | None:
        """A suspect's result; None where it would need rows that were not computed."""
        key = (name, word, "forward", positions.tobytes())
        if key not in self._theirs:
            whole = self.whole
            if change.out is not None and change == Change(out=change.out):
                if len(self.rows) < self.problem.n_q:
                    return None
                # A quarter of the worst case is about what rounding leaves.
                out, sigma = (
                    np.asarray(change.out(x, self.problem))[:, positions]
                    for x in (whole.out, 0.25 * whole.worst)
                )
                found = Theirs(out, sigma, whole.lse[:, positions])
            else:
                got = run(self.problem, change, self.rows[positions], self._wide)
                found = Theirs(got.out, got.sigma, got.lse)
            self._theirs[key] = found
        return self._theirs[key]

    # -- gradients

    @functools.cached_property
    def graded(self) -> Index:
        """The key heads whose gradients are judged: all, or as many as time allows, spread evenly.

        Raises ValueError where one alone is too large.
        """
        kv = int(self.problem.k.shape[0])
        one = self.scores // kv
        if one > GRADIENTS_OF_ONE:
            raise ValueError(
                f"grads: {one} scores of one key head, must be at most {GRADIENTS_OF_ONE} to be "
                "judged"
            )
        count = min(kv, max(1, GRADIENTS // one))
        return np.unique(np.linspace(0, kv - 1, count).astype(np.int64))

    def part(self, kv_heads: Index) -> tuple[Case, Index]:
        """The case of these key heads and of the query heads that read them, and the latter."""
        p = self.problem
        heads = (kv_heads[:, None] * p.group + np.arange(p.group)).ravel()
        problem = dataclasses.replace(
            p, q=p.q[heads], k=p.k[kv_heads], v=p.v[kv_heads], lead=(len(heads),),
            kv_lead=(len(kv_heads),),
        )  # fmt: skip
        return Case(problem, self.plan, self.close, self.xp), heads

    def gradient(self, name: str, word: str, change: Change, dout: Array) -> Slopes:
        key = (name, word, dout.tobytes())
        if key not in self._slopes:
            self._slopes[key] = run_backward(self.problem, change, dout.astype(np.float64))
        return self._slopes[key]

    def gradient_bounds(self, dout: Array) -> dict[str, F64]:
        """Derived bounds of dq, dk and dv; dout (H, N_q, D_v)."""
        key = np.ascontiguousarray(dout).tobytes()
        if key not in self._slope_bounds:
            shape = (*self.problem.lead, self.problem.n_q, self.problem.d_v)
            plans = None if self.plan is None else [self.plan]
            self._slope_bounds[key] = gradient_envelope(self.problem, dout.reshape(shape), plans)
        return self._slope_bounds[key]

    def certified(self, positions: Index, count: int = 2) -> dict[str, Any]:
        """How well the exact values are known: some rows again in ball arithmetic, if installed."""
        if not oracle.has_flint() or not len(positions):
            return {"rows": 0, "radius": None, "difference": None}
        from emulation.oracle import certified

        lo, hi = self.problem.band()
        picks = [p for p in positions if hi[self.rows[p]] > lo[self.rows[p]]]
        picks = [
            picks[i] for i in np.linspace(0, len(picks) - 1, min(count, len(picks))).astype(int)
        ]
        worst, radius = 0.0, 0.0
        for i, p in enumerate(picks):
            head = i % self.problem.heads
            proved = certified.forward(self.problem, self.rows[p : p + 1], head)
            ours = self.whole.out[head, p]
            worst = max(worst, float(np.abs(proved.out[0, 0] - ours).max()))
            radius = max(radius, proved.radius)
        return {"rows": len(picks), "radius": radius, "difference": worst}
