"""The exact oracle: what attention and its gradients are in real arithmetic, and how well that is
known.

Three tiers: "mpmath" (readable.py, to be read), "arb" (certified.py, proved) and "float64"
(large.py, for many keys; a derived bound, and some rows compared with "arb").
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from emulation.arguments import check_count, one_of
from emulation.oracle import large, readable
from emulation.oracle.large import float64_attention, float64_gradients
from emulation.oracle.result import (
    Exact,
    ExactGradients,
    Floats,
    Index,
    OracleError,
    check_cotangents,
    check_range,
    check_rows,
    refuse_nonfinite,
)
from emulation.problem import Causal, Problem, Window

__all__ = [
    "Exact",
    "ExactGradients",
    "OracleError",
    "Tier",
    "attention",
    "attention_vjp",
    "float64_attention",
    "float64_gradients",
]

Tier = Literal["auto", "mpmath", "arb", "float64"]
Pair = tuple[Any, Any]  # what float64 holds of a result, and the rest
SMALL = 256 * 256  # scores that "auto" gives to Arb: below a second


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    tier: Tier = "auto",
    rows: Any = None,
    scale: float | None = None,
    causal: Causal = False,
    window: Window | None = None,
    softcap: float | None = None,
    certified_rows: int = 4,
) -> Exact:
    """Exact attention: out = softmax(scale q k^T, capped and masked) v, and lse.

    q (lead..., N_q, D), k (lead..., N_k, D) and v (lead..., N_k, D_v) are float16, bfloat16 or
    float32 arrays, taken as the numbers they are; fewer heads in k and v are shared (GQA). `scale`
    is the float64 number given, 1 / sqrt(D) rounded to float64 by default. softcap * tanh(S /
    softcap) comes before the mask. `rows` picks queries (the same for every head; negative ones
    count from the end) without changing what they see. Returns `Exact`: out (lead..., rows, D_v),
    lse (lead..., rows), both float64 with their low parts, and the radius.

    A row that sees no key gives out = 0, lse = -inf. NaN and Inf that no query sees reach nothing.

    tier: "mpmath" (200 bits, N <= 64, radius estimated), "arb" (radius proved, 1e-30 or better, N
    <= 1024 unless `rows` is given; needs python-flint), "float64" (any N; radius derived from
    a-priori bounds, and `certified_rows` random rows compared with "arb" where python-flint is
    installed). "auto" takes "arb" up to 256 * 256 scores, else "float64".

    Raises ValueError or TypeError that name argument, value and rule, also for NaN and Inf that
    some query of the full problem sees; ImportError if "arb" is asked for without python-flint;
    OracleError if tiers disagree.

    Source: definition of softmax attention; ball arithmetic, Johansson, arXiv 1611.02831.

    >>> x = np.ones((2, 4), np.float16)
    >>> exact = attention(x, x, x)
    >>> exact.out.tolist(), exact.certified, exact.radius < 1e-30
    ([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], True, True)
    >>> exact.lse[0] == 2 + np.log(2)
    np.True_
    """
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    check_count("certified_rows", certified_rows, 0)
    index = check_rows(rows, problem.n_q)
    refuse_nonfinite(problem)
    tier = _choose(tier, problem, len(index), full=rows is None)
    if tier == "mpmath":
        exact = readable.forward(problem, index)
    elif tier == "arb":
        from emulation.oracle import certified

        exact = certified.forward(problem, index)
    else:
        exact = _float64(problem, index, certified_rows)
    shape = (*problem.lead, len(index))
    wide = (*shape, problem.d_v)
    return replace(
        exact,
        out=exact.out.reshape(wide),
        out_low=exact.out_low.reshape(wide),
        lse=exact.lse.reshape(shape),
        lse_low=exact.lse_low.reshape(shape),
    )


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    dlse: Any = None,
    tier: Tier = "auto",
    scale: float | None = None,
    causal: Causal = False,
    window: Window | None = None,
    softcap: float | None = None,
    certified_rows: int = 4,
) -> ExactGradients:
    """Exact gradients of sum(dout * out) + sum(dlse * lse) in q, k and v.

    Arguments and tiers as in `attention`; dout (lead..., N_q, D_v) and dlse (lead..., N_q) may also
    be float64. There is no `rows`: dk and dv are sums over all queries. Returns `ExactGradients`:
    dq, dk, dv shaped like q, k, v, float64 with their low parts, and the radius. With GQA dk and dv
    are summed over the query heads. The rows that the float64 tier compares with Arb are rows of
    dq.

    A row that sees no key has gradient 0, and what stands in its dout and dlse is not read; NaN and
    Inf elsewhere in dout and dlse raise ValueError.

    Source: P = softmax(S), delta = rowsum(dout * out) - dlse, dS = P (dP - delta) (1 - tanh^2 under
    a softcap), dq = scale dS k, dk = scale dS^T q, dv = P^T dout.

    >>> x = np.eye(2, dtype=np.float16)
    >>> exact = attention_vjp(x, x, x, x)
    >>> exact.dq.shape, bool(abs(exact.dv.sum() - 2) < 1e-15), exact.radius < 1e-30
    ((2, 2), True, True)
    """
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    check_count("certified_rows", certified_rows, 0)
    refuse_nonfinite(problem)
    grad, grad_lse = check_cotangents(problem, dout, dlse)
    check_range(problem, grad, grad_lse)
    tier = _choose(tier, problem, problem.n_q, full=True)
    if tier == "mpmath":
        exact = readable.backward(problem, grad, grad_lse)
    elif tier == "arb":
        from emulation.oracle import certified

        exact = certified.backward(problem, grad, grad_lse)
    else:
        exact = _float64_gradients(problem, grad, grad_lse, certified_rows)
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    parts = {f"d{x}{half}": shape for x, shape in shapes.items() for half in ("", "_low")}
    return replace(
        exact, **{name: getattr(exact, name).reshape(shape) for name, shape in parts.items()}
    )


def has_flint() -> bool:
    """Whether python-flint can be imported."""
    try:
        return importlib.util.find_spec("flint") is not None
    except ValueError:  # sys.modules holds None for it
        return False


def _choose(tier: Any, problem: Problem, rows: int, *, full: bool) -> Tier:
    """The tier to use; refuses sizes that would take too long."""
    one_of("tier", tier, get_args(Tier))
    if tier == "auto":
        return "arb" if problem.heads * rows * problem.n_k <= SMALL and has_flint() else "float64"
    longest = max(rows, problem.n_k)
    if tier == "mpmath":
        if longest > readable.LARGEST:
            raise ValueError(
                f'tier: "mpmath" takes N <= {readable.LARGEST}, got {longest}; "arb" is faster'
            )
    elif tier == "arb":
        from emulation.oracle import certified

        if full and longest > certified.LARGEST:
            raise ValueError(
                f'tier: "arb" takes N <= {certified.LARGEST}, got {longest}; '
                'give rows= to `attention`, or take "float64"'
            )
    return tier  # type: ignore[no-any-return]


def _draw(problem: Problem, rows: Index, count: int) -> list[tuple[int, int]]:
    """Some (head, position in rows) pairs of rows that see something, the same for the same
    problem."""
    lo, hi = problem.band()
    seeing = np.flatnonzero(hi[rows] > lo[rows])
    total = problem.heads * len(seeing)
    if not has_flint() or not total:
        return []
    picks = np.random.default_rng(0).choice(total, min(int(count), total), replace=False)
    return [(int(i) // len(seeing), int(seeing[i % len(seeing)])) for i in sorted(picks)]


def _float64(problem: Problem, rows: Index, count: int) -> Exact:
    result = large.forward(problem, rows)
    checked, worst = [], 0.0
    for head, at in _draw(problem, rows, count):
        from emulation.oracle import certified

        proved = certified.forward(problem, rows[at : at + 1], head)
        where = f"head {head}, query {rows[at]}"
        out = _compare(
            f"out, {where}",
            (result.out[head, at], np.zeros(problem.d_v)),
            (proved.out[0, 0], proved.out_low[0, 0]),
            float(result.out_radius[head, at]) + proved.out_radius,
        )
        lse = _compare(
            f"lse, {where}",
            (result.lse[head, at], result.lse_low[head, at]),
            (proved.lse[0, 0], proved.lse_low[0, 0]),
            float(result.lse_radius[head, at]) + proved.lse_radius,
        )
        worst = max(worst, out, lse)
        checked.append((head, int(rows[at])))
    out_radius = float(result.out_radius.max(initial=0.0))
    lse_radius = float(result.lse_radius.max(initial=0.0))
    return Exact(
        out=result.out,
        lse=result.lse,
        out_low=np.zeros_like(result.out),
        lse_low=result.lse_low,
        out_radius=out_radius,
        lse_radius=lse_radius,
        tier="float64",
        certified=False,
        checked_rows=tuple(checked),
        checked_difference=worst,
    )


def _float64_gradients(problem: Problem, dout: Floats, dlse: Floats, count: int) -> ExactGradients:
    result = large.backward(problem, dout, dlse)
    checked, worst = [], 0.0
    for head, row in _draw(problem, np.arange(problem.n_q), count):
        from emulation.oracle import certified

        high, low, radius = certified.query_gradients(
            problem, head, row, dout[head, row], float(dlse[head, row])
        )
        difference = _compare(
            f"dq, head {head}, query {row}",
            (result.dq[head, row], np.zeros(problem.d)),
            (high, low),
            radius + result.dq_radius,
        )
        worst = max(worst, difference)
        checked.append((head, row))
    return ExactGradients(
        dq=result.dq,
        dk=result.dk,
        dv=result.dv,
        dq_low=np.zeros_like(result.dq),
        dk_low=np.zeros_like(result.dk),
        dv_low=np.zeros_like(result.dv),
        dq_radius=result.dq_radius,
        dk_radius=result.dk_radius,
        dv_radius=result.dv_radius,
        tier="float64",
        certified=False,
        checked_rows=tuple(checked),
        checked_difference=worst,
    )


def _compare(name: str, ours: Pair, theirs: Pair, radius: float) -> float:
    """The largest difference of two pairs; OracleError (also for NaN) if it exceeds the radius and
    what pairs drop."""
    difference = float(np.max(np.abs((ours[0] - theirs[0]) + (ours[1] - theirs[1]))))
    if not difference <= radius + 2.0**-100 * float(np.max(np.abs(theirs[0]))):
        raise OracleError(
            f"{name}: float64 differs from the certified value by {difference}, more than {radius}"
        )
    return difference
