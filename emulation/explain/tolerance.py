"""Elementwise tolerances for tests: how far a correct kernel may be from the exact result."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.arguments import echo
from emulation.backward import check_dout
from emulation.explain.envelope import envelope, gradient_envelope
from emulation.explain.exact import F64
from emulation.peers import plan_of
from emulation.plan import Plan
from emulation.problem import DTYPES, Problem, dtype_name
from emulation.report.inputs import to_format
from emulation.report.work import FORMATS


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
    dtype: Any = None,
    plan: Plan | str | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
) -> Tolerance:
    """How far a correct kernel may be from the exact attention of q, k and v, element by element.

    q, k, v and masks as in `flash`; dout (..., N_q, D_v) asks for the gradients' bounds, too.
    dtype: format that the kernel takes ("float16", "bfloat16", "float32"; "fp16", "bf16", "fp32"):
    arrays in another one are rounded to it first, and the exact result is that of the rounded ones.
    plan: whose roundings are bounded, a `Plan` or a name of `plan_of`; None is any kernel that
    keeps fp32 between its steps and rounds P and the result to the format. Bounds are worst cases,
    derived (see `bounds`), and hold for every finite input. O(N_q N_k D_v) float64 operations.
    Raises TypeError or ValueError naming argument, value, rule.

    >>> x = np.eye(64, dtype=np.float16)
    >>> t = tolerance(x, x, x)
    >>> t.out.shape, bool(t.out.max() < 2**-10), bool(t.lse.max() < 2**-16)
    ((64, 64), True, True)
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        check_kind(name, x)
    if dtype is not None:
        fmt = format_named(dtype)
        q, k, v, dout = (
            x if x is None else in_format(n, x, fmt)
            for n, x in (("q", q), ("k", k), ("v", v), ("dout", dout))
        )
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    claimed = chosen_plan(plan, problem)
    plans = None if claimed is None else [claimed]
    out, lse = envelope(problem, np.arange(problem.n_q), plans)
    shape = (*problem.lead, problem.n_q)
    found = {"out": out.reshape(*shape, problem.d_v), "lse": lse.reshape(shape)}
    if dout is not None:
        check_dout(problem, dout)
        bounds = gradient_envelope(problem, dout, plans)
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        found |= {name: x.reshape(shapes[name]) for name, x in bounds.items()}
    return Tolerance(**found)


def check_kind(name: str, x: Any) -> None:
    """TypeError if it is another library's array; whatever is no array is left to other checks."""
    kind = type(x)
    library = kind.__module__.partition(".")[0]
    if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic) and library != "cupy":
        raise TypeError(f"{name}: got {library}.{kind.__name__}, must be a NumPy or CuPy array")


def format_named(dtype: Any) -> str:
    """A format by its name, short name or NumPy dtype. Raises ValueError.

    >>> format_named("fp16"), format_named(np.float32)
    ('float16', 'float32')
    """
    name = FORMATS.get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str):
        with contextlib.suppress(TypeError):
            name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype: got {echo(dtype)}, must be one of {', '.join(FORMATS)}")
    return name


def chosen_plan(plan: Any, problem: Problem) -> Plan | None:
    """A Plan, that of a kernel's name, or None. Raises TypeError or ValueError."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str):
        raise TypeError(f"plan: got {type(plan).__name__}, must be a Plan, a name or None")
    q, k, v = (
        x.reshape(*lead, *x.shape[1:])
        for x, lead in (
            (problem.q, problem.lead), (problem.k, problem.kv_lead), (problem.v, problem.kv_lead)
        )
    )  # fmt: skip
    try:
        return plan_of(plan, q, k, v, causal=problem.causal, scale=problem.scale)
    except ValueError as error:
        raise ValueError(str(error).replace("kernel: ", "plan: ", 1)) from None


def in_format(name: str, x: Any, dtype: str) -> Any:
    """An array in a format, each value rounded once."""
    if not hasattr(x, "dtype") or dtype_name(x.dtype) not in (*DTYPES, "float64"):
        kind = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{name}: got {kind}, must be an array of floats")
    return to_format(name, np.asarray(x), dtype)
