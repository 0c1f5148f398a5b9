"""Tiled attention as a call: checked arguments, blocks of rows through the walk of their Plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation import rounding
from emulation.arguments import check_progress
from emulation.plan import Numerics, Plan, default_plan
from emulation.problem import Array, Problem, numpy_dtype
from emulation.tiled import Forward, Progress, constants, machine_of, row_blocks
from emulation.walks import walk_of


def resolve_plan(
    problem: Problem, plan: Plan | None, numerics: Numerics | dict[str, Any] | None
) -> Plan:
    """The Plan to run, checked against the problem."""
    if plan is None:
        return default_plan(problem, numerics)
    if numerics is not None:
        raise ValueError("numerics: given beside plan, must be None (a plan has its own numerics)")
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {type(plan).__name__}, must be a Plan or None")
    if plan.format != problem.dtype:
        raise ValueError(f"plan: format {plan.format}, must be {problem.dtype} like q")
    if plan.algorithm == "unfused" and problem.softcap is not None:
        raise ValueError(f"softcap: got {problem.softcap}, must be None with an unfused plan")
    return plan


def flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    plan: Plan | None = None,
    numerics: Numerics | dict[str, Any] | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    progress: Progress | None = None,
) -> tuple[Array, Array]:
    """Tiled attention, bit for bit what a kernel with this Plan computes.

    q (..., N_q, D), k (..., N_k, D), v (..., N_k, D_v): float16, bfloat16 or float32, 2 to 4 axes;
    k and v may have fewer heads (GQA). Returns out (..., N_q, D_v), in q's dtype (float32 under
    out="float32"), and lse (..., N_q), float32, natural logarithm. A row that sees no key has out 0
    and lse -inf. NaN and Inf reach only the rows that see them; a row whose scores are all -inf has
    out NaN (0 / 0) and lse -inf (log 0). NumPy or CuPy arrays. plan defaults to cuflash's Hopper
    plan under `numerics`. Raises TypeError or ValueError naming argument, value and rule.

    Source: FlashAttention-2 (Dao 2023), algorithm 1, with the roundings of `Plan`.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> out, lse = flash(x, x, x, causal=True)
    >>> out[0, :2].tolist(), float(lse[0])
    ([1.0, 0.0], 0.25)
    """
    check_progress(progress)
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    plan = resolve_plan(problem, plan, numerics)
    forward = flash_forward(problem, plan, progress=progress)
    shape = (*problem.lead, problem.n_q)
    return forward.out.reshape(*shape, problem.d_v), forward.lse.reshape(shape)


def flash_forward(problem: Problem, plan: Plan, progress: Progress | None = None) -> Forward:
    """`flash` on a checked problem, heads flattened, with O as it was before rounding."""
    xp = rounding.namespace(problem.q)
    m = machine_of(plan)
    const = constants(m, problem, plan)
    lo, hi = (xp.asarray(x) for x in problem.band())
    heads, n_q, d_v = problem.heads, problem.n_q, problem.d_v
    dtype = numpy_dtype(plan.format if plan.numerics.out == "input" else "float32")
    out = xp.zeros((heads, n_q, d_v), dtype)
    o = xp.zeros((heads, n_q, d_v), np.float32)
    lse = xp.full((heads, n_q), -np.inf, np.float32)
    blocks = list(row_blocks(n_q))
    walk = walk_of(plan)
    for h in range(heads):
        k, v = problem.k[problem.kv_head(h)], problem.v[problem.kv_head(h)]
        for i, block in enumerate(blocks):
            rows = walk(m, plan, const, m.input(problem.q[h, block]), k, v, lo[block], hi[block])
            out[h, block], o[h, block] = rows.out.astype(dtype), rows.o
            lse[h, block] = xp.where(rows.started, rows.lse, xp.float32(-np.inf))
            if progress is not None:
                progress("flash", (h * len(blocks) + i + 1) / (heads * len(blocks)))
    return Forward(out, lse, o)
