"""Gradients that are right but for what became of them: signs, factors, places, and the sums of
dK and dV kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from emulation.explain.exact import F64, NOTHING, Change, Slopes, weigh
from emulation.explain.fit import Observed
from emulation.formats import FORMATS
from emulation.oracle.result import numbers
from emulation.problem import Problem

Values = dict[str, F64]

#: Queries between two roundings of a sum.
STEPS = (16, 32, 64, 128)


def _times(factor: Callable[[Problem], float], *names: str) -> Change:
    def gradients(x: Values, p: Problem) -> Values:
        return x | {n: factor(p) * x[n] for n in names}

    return Change(gradients=gradients)


def _swapped(x: Values, p: Problem) -> Values:
    return x | {"dk": x["dv"], "dv": x["dk"]}


def _signs(problem: Problem) -> dict[str, Change]:
    return {n: _times(lambda p: -1.0, n) for n in ("dq", "dk", "dv")} | {
        "dq and dk": _times(lambda p: -1.0, "dq", "dk")
    }


def _scales(problem: Problem) -> dict[str, Change]:
    once: dict[str, Change] = {}
    for n in ("dq", "dk"):
        once[f"{n} not scaled"] = _times(lambda p: 1.0 / p.scale, n)
        once[f"{n} scaled twice"] = _times(lambda p: p.scale, n)
    return once


def _mean(problem: Problem) -> dict[str, Change]:
    if problem.group == 1:
        return {}
    return {"dk and dv": _times(lambda p: 1.0 / p.group, "dk", "dv")}


#: Suspects of the backward that move right gradients: name to changes.
MOVED: dict[str, Callable[[Problem], dict[str, Change]]] = {
    "wrong sign": _signs,
    "one gradient's scale": _scales,
    "dK and dV swapped": lambda p: {"": Change(gradients=_swapped)} if p.d == p.d_v else {},
    "mean over a group for its sum": _mean,
}


def moved(right: Slopes, change: Change, problem: Problem) -> Slopes:
    """Right gradients and their expected errors as a change moves them."""
    assert change.gradients is not None
    sigma = {n: np.abs(x) for n, x in change.gradients(right.sigma, problem).items()}
    value = change.gradients(right.value, problem)
    # A factor is applied before the cast or after it: the cast counts as that of the result.
    fmt = FORMATS[problem.dtype]
    for n, x in value.items():
        ulp = np.ldexp(1.0, np.maximum(np.frexp(np.abs(x))[1] - 1, fmt.emin) - fmt.precision + 1)
        sigma[n] = np.sqrt(sigma[n] ** 2 + ulp * ulp / 12)
    return Slopes(value, sigma)


def factors(seen: dict[str, Observed]) -> Iterator[tuple[str, str, Values, Values]]:
    """Each gradient times the number that fits it: (name, word, values, expected errors)."""
    for name, x in seen.items():
        weight = x.exact / np.maximum(x.sigma, 1e-300) ** 2
        size = float(np.sum(weight * x.exact))
        if not size > 0:
            continue
        factor = float(np.sum(weight * x.out)) / size
        if not abs(factor) > 2.0**-20:
            continue
        value = {n: y.exact for n, y in seen.items()} | {name: factor * x.exact}
        sigma = {n: y.sigma for n, y in seen.items()}
        sigma[name] = x.sigma * max(1.0, abs(factor))
        yield name, f"{name} x {factor:.4f}", value, sigma


def accumulated(problem: Problem, dout: F64) -> dict[str, dict[int, F64]]:
    """Expected errors of dk and dv whose sums over so many queries round to the format each time:
    by name, by queries a step (of `STEPS`). dout (H, N_q, D_v).
    """
    fmt = FORMATS[problem.dtype]
    band = problem.band()
    found: dict[str, dict[int, F64]] = {"dk": {}, "dv": {}}
    for step in (s for s in STEPS if 2 * s <= problem.n_q):
        square = {"dk": np.zeros(problem.k.shape), "dv": np.zeros(problem.v.shape)}
        for h in range(problem.heads):
            g = problem.kv_head(h)
            q, k, v = numbers(problem.q[h]), numbers(problem.k[g]), numbers(problem.v[g])
            sums = {"dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
            for start in range(0, problem.n_q, step):
                rows = np.arange(start, min(start + step, problem.n_q))
                w = weigh(problem, NOTHING, q[rows], k, rows, band)
                do = dout[h, rows]
                ds = w.p * (do @ v.T - (do * (w.p @ v)).sum(axis=1, keepdims=True))
                ds = ds if w.slope is None else ds * w.slope
                sums["dk"] += ds.T @ q[rows] * problem.scale
                sums["dv"] += w.p.T @ do
                touched = np.expand_dims(w.seen.any(axis=0), 1)
                for n, x in sums.items():
                    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, fmt.emin)
                    ulp = np.ldexp(1.0, exponent - fmt.precision + 1)
                    square[n][g] += np.where(touched, ulp * ulp / 12, 0.0)
        for n, x in square.items():
            found[n][step] = np.sqrt(x)
    return found
