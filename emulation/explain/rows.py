"""Which rows are looked at closely when there are more than time allows."""

from __future__ import annotations

import numpy as np

from emulation.explain.exact import Index
from emulation.problem import Problem


def sampled(problem: Problem, count: int) -> Index:
    """At most `count` queries, in ascending order, the same for every head and every call.

    Of these some are the first and the last, and the rest spread evenly.
    """
    n = problem.n_q
    if n <= count:
        return np.arange(n)
    ends = max(1, count // 8)
    chosen = set(range(ends)) | set(range(n - ends, n))
    left = count - len(chosen)
    if left > 0:
        chosen |= set(np.linspace(0, n - 1, left, dtype=np.int64).tolist())
    return np.array(sorted(chosen), np.int64)
