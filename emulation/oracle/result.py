"""What the oracle returns and how its inputs are taken as numbers, shared by all its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation.arguments import check_plain
from emulation.problem import Array, Problem, check_problem, dtype_name

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Exact:
    """The exact output and log-sum-exp of a problem, as pairs of float64 arrays.

    out (lead..., N, D_v) and lse (lead..., N), N being N_q or the number of `rows`, are the float64
    numbers nearest to what was computed; `out_low` and `lse_low` (same shapes) are what that
    rounding left. So |out + out_low - exact| <= out_radius + 2^-100 |exact| elementwise, and
    likewise for lse with lse_radius; out alone is half a unit in the last place further away. The
    float64 tier leaves out_low = 0: its radius includes every rounding. A row that sees no key has
    out = 0 and lse = -inf exactly (lse_low = 0). `radius` is the larger of the two radii, worst
    over all elements. `certified`: the radius was proved by interval arithmetic; otherwise it was
    derived (float64: on the premises listed in `large.py`) or estimated (mpmath). `checked_rows`
    are the (flattened head, query) pairs that a float64 result was compared on with a certified
    one, and `checked_difference` is the largest difference found there in out or lse.
    """

    out: Floats
    lse: Floats
    out_low: Floats
    lse_low: Floats
    out_radius: float
    lse_radius: float
    tier: str
    certified: bool
    checked_rows: tuple[tuple[int, int], ...] = ()
    checked_difference: float = 0.0

    @property
    def radius(self) -> float:
        """Bound of the error of out and lse, low parts included."""
        return max(self.out_radius, self.lse_radius)


@dataclass(frozen=True, eq=False)
class ExactGradients:
    """The exact gradients of a problem: dq, dk, dv shaped like q, k, v, as float64 pairs.

    |dq + dq_low - exact| <= dq_radius + 2^-100 |exact| elementwise, and so on; `radius` is the
    largest of the three. The other fields are those of `Exact`; the rows checked are rows of dq.
    """

    dq: Floats
    dk: Floats
    dv: Floats
    dq_low: Floats
    dk_low: Floats
    dv_low: Floats
    dq_radius: float
    dk_radius: float
    dv_radius: float
    tier: str
    certified: bool
    checked_rows: tuple[tuple[int, int], ...] = ()
    checked_difference: float = 0.0

    @property
    def radius(self) -> float:
        """Bound of the error of dq, dk and dv, low parts included."""
        return max(self.dq_radius, self.dk_radius, self.dv_radius)


class OracleError(AssertionError):
    """Two tiers disagree by more than their radii: a bug here or in a library below."""


def refuse_nonfinite(problem: Problem) -> None:
    """Raise ValueError naming argument and place if some query sees a NaN or an infinity;
    TypeError if it is no Problem.
    """
    check_problem(problem)
    found = problem.nonfinite()
    if found is not None:
        raise ValueError(found)


def numbers(x: Array) -> Floats:
    """Float64 values of q, k or v, which are exact; NaN and Inf (which nobody sees) become 0."""
    values = (
        np.asarray(x).astype(np.float32).astype(np.float64)
    )  # ml_dtypes casts to float32 without warnings
    values[~np.isfinite(values)] = 0.0
    return values


def check_rows(rows: Any, n_q: int) -> Index:
    """The query rows asked for, negative ones counted from the end; None is all of them."""
    if rows is None:
        return np.arange(n_q, dtype=np.int64)
    if not isinstance(rows, Sequence | np.ndarray) or isinstance(rows, str):
        raise TypeError(f"rows: got {type(rows).__name__}, must be a 1-D sequence of integers")
    if isinstance(rows, np.ndarray):
        check_plain("rows", rows)
    index = np.asarray(rows)
    if index.ndim != 1:
        raise ValueError(f"rows: {index.ndim} axes, must be a 1-D sequence of integers")
    if index.size and index.dtype.kind not in "iu":
        raise TypeError(f"rows: dtype {index.dtype}, must be a 1-D sequence of integers")
    for i in index:
        if not -n_q <= i < n_q:
            raise ValueError(f"rows: {i}, must be {-n_q} to {n_q - 1} for {n_q} queries")
    index = index.astype(np.int64)
    return np.where(index < 0, index + n_q, index)


def check_cotangents(problem: Problem, dout: Any, dlse: Any) -> tuple[Floats, Floats]:
    """Check dout (lead..., N_q, D_v) and dlse (lead..., N_q) or None, and flatten to (H, N_q, D_v)
    and (H, N_q).

    A row that sees no key has no gradient: its cotangents are set to 0, whatever they were.
    """
    shape = (*problem.lead, problem.n_q, problem.d_v)
    taken = []
    for name, x, expected in (("dout", dout, shape), ("dlse", dlse, shape[:-1])):
        if x is None and name == "dlse":
            taken.append(np.zeros((problem.heads, problem.n_q)))
            continue
        check_plain(name, x)
        if dtype_name(x.dtype) not in ("float16", "bfloat16", "float32", "float64"):
            raise TypeError(
                f"{name}: dtype {x.dtype}, must be one of float16, bfloat16, float32, float64"
            )
        if tuple(x.shape) != expected:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, must be {expected}")
        wide = np.array(x, np.float64 if dtype_name(x.dtype) == "float64" else np.float32).astype(
            np.float64
        )
        taken.append(wide.reshape(problem.heads, *expected[len(problem.lead) :]))
    lo, hi = problem.band()
    for name, x in zip(("dout", "dlse"), taken, strict=True):
        x[:, hi == lo] = 0.0
        bad = np.argwhere(~np.isfinite(x))
        if len(bad):
            at = tuple(int(i) for i in bad[0])
            place = "(head, row, column)" if len(at) == 3 else "(head, row)"
            raise ValueError(f"{name}: {float(x[at])} at {place} {at}, must be finite")
    return taken[0], taken[1]


def check_range(problem: Problem, dout: Floats, dlse: Floats) -> None:
    """Refuse cotangents whose gradients would leave the range of float64. Scores do not: float32
    inputs under a float32 scale keep them below 2^400.
    """
    q, k, v = (
        float(np.abs(numbers(x)).max(initial=0.0)) for x in (problem.q, problem.k, problem.v)
    )
    with np.errstate(over="ignore"):
        grad = np.abs(dout).max(initial=0.0)
        size = 2 * problem.d_v * grad * v + np.abs(dlse).max(initial=0.0)
        size = max(size * max(1.0, problem.scale * max(q, k)), grad) * problem.n_q * problem.group
        if not size < 2.0**900:
            raise ValueError("dout, dlse: must keep gradients below 2**900")
