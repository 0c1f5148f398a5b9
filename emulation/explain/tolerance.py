"""Elementwise tolerances for tests: how far a correct kernel may be from the exact result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.backward import check_dout
from emulation.explain.envelope import envelope, gradient_envelope
from emulation.explain.exact import F64
from emulation.plan import Plan
from emulation.problem import DTYPES, Problem, dtype_name
from emulation.report.inputs import to_format


@dataclass(frozen=True, eq=False)
class Tolerance:
    """Bounds of |computed - exact|, float64, shaped like what they bound; gradients with dout only.

    inf where a correct kernel may overflow; 0 where it cannot err (a row that sees no key).
    """

    out: F64
    lse: F64
    dq: F64 | None = None
    dk: F64 | None = None
    dv: F64 | None = None


def tolerance(
    q: Any,
    k: Any,
    v: Any,
    *,
    dout: Any = None,
    dtype: str | None = None,
    plan: Plan | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
) -> Tolerance:
    """How far a correct kernel may be from the exact attention of q, k and v, element by element.

    q, k, v and masks as in `flash`; dout (..., N_q, D_v) asks for the gradients' bounds, too.
    dtype: format that the kernel takes ("float16", "bfloat16", "float32"): arrays in another one
    are rounded to it first, and the exact result is that of the rounded ones. plan: whose roundings
    are bounded; None is any kernel that keeps fp32 between its steps and rounds P and the result to
    the format. Bounds are worst cases, derived (see `bounds`), and hold for every finite input.
    O(N_q N_k D_v) float64 operations. Raises TypeError or ValueError naming argument, value, rule.

    >>> x = np.eye(64, dtype=np.float16)
    >>> t = tolerance(x, x, x)
    >>> t.out.shape, bool(t.out.max() < 2**-10), bool(t.lse.max() < 2**-16)
    ((64, 64), True, True)
    """
    if dtype is not None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}, must be one of {', '.join(DTYPES)}")
        q, k, v, dout = (
            x if x is None else in_format(n, x, dtype)
            for n, x in (("q", q), ("k", k), ("v", v), ("dout", dout))
        )
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    plans = None if plan is None else [plan]
    out, lse = envelope(problem, np.arange(problem.n_q), plans)
    shape = (*problem.lead, problem.n_q)
    found = {"out": out.reshape(*shape, problem.d_v), "lse": lse.reshape(shape)}
    if dout is not None:
        check_dout(problem, dout)
        bounds = gradient_envelope(problem, dout, plans)
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        found |= {name: x.reshape(shapes[name]) for name, x in bounds.items()}
    return Tolerance(**found)


def in_format(name: str, x: Any, dtype: str) -> Any:
    """An array in a format, each value rounded once."""
    if not hasattr(x, "dtype") or dtype_name(x.dtype) not in (*DTYPES, "float64"):
        kind = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name}: got {kind}, must be an array of floats")
    return to_format(name, np.asarray(x), dtype)
