"""The public calls: check, plan, allocate, launch. NumPy arrays run on the emulator, CuPy arrays on
the GPU; the same call, and under the same Plan the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import compiler, planner
from cuflash.launch import Launcher, compile_ahead, launcher
from cuflash.problem import (
    GpuProblem,
    check_arrays,
    check_beside,
    check_layout,
    check_out,
    contiguous,
    four_axes,
    out_dtype,
    problem_of,
    ready,
    shape_in,
    swapped,
)
from emulation.arguments import check_flag
from emulation.backward import check_dout, flash_vjp
from emulation.flash import flash
from emulation.plan import Numerics, Plan, default_plan
from emulation.problem import Problem

Vjp = Callable[..., tuple[Any, Any, Any]]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    layout: str = "bhnd",
    numerics: Numerics | dict[str, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """softmax(scale * q k^T) v, exact attention.

    q (..., N_q, D), k (..., N_k, D), v (..., N_k, D_v) with 2 to 4 axes, or (B, N, H, D) under
    layout="bnhd"; all NumPy or all CuPy arrays of one dtype: float16, bfloat16 (of ml_dtypes) or
    float32, in native byte order and no subclass. k and v may have fewer heads, a divisor of q's
    (GQA). On the GPU D and D_v are multiples of 8; both are at most 256. Any strides;
    `cuflash.problem` says which are copied.

    scale defaults to 1 / sqrt(D), and is 2^-126 to 2^127. causal: False, True (the last query sees
    the last key) or "top-left". window: (left, right), keys seen beside the diagonal, None is
    unbounded. softcap: scores become softcap * tanh(score / softcap), before the mask; it is at
    most 2^16, since a capped score errs by up to softcap 2^-21 however small it is
    (`emulation.Problem.of` says more). numerics: `emulation.Numerics`, or a dict of its fields.
    out: an array to write to, which must not overlap q, k or v.

    Returns out (..., N_q, D_v) in q's layout and dtype (float32 under numerics out="float32"), or
    (out, lse) with lse (..., N_q), float32, natural logarithm, heads before queries in both
    layouts. A row that sees no key has out 0 and lse -inf; NaN and Inf reach only rows that see
    them. In float32 an Inf acts as NaN: its three bfloat16 terms hold Inf - Inf, so that a row that
    sees one in q or k is NaN, out and lse, and one that sees it in v is NaN in that column. O sums
    P v before it divides by l, so |v| N_k near the format's largest number (of float32, in which O
    is summed) overflows although the exact O would not.

    A GPU call is queued on CuPy's current stream of q's device and does not wait for it. It can be
    captured in a CUDA graph once its kernels are loaded; what a captured call touches stays
    allocated as long as the process, since replays use it. Raises TypeError or ValueError naming
    argument, value and rule, with nothing written; on the GPU also `cuflash.compiler.MissingError`
    with the command that mends it.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> out, lse = attention(x, x, x, causal=True, return_lse=True)
    >>> out[0, :2].tolist(), float(lse[0])
    ([1.0, 0.0], 0.25)
    """
    masks = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    call = _Call.of(q, k, v, masks, layout, numerics, return_lse, out)
    return call.result(*call.forward(gradient=False)[:2])


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    layout: str = "bhnd",
    numerics: Numerics | dict[str, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> tuple[Any, Vjp]:
    """`attention`, and the function that takes gradients back.

    Returns (what `attention` returns, vjp), with vjp(dout, dlse=None) -> (dq, dk, dv): dout like
    out but in q's dtype, dlse float32 like lse; the gradients like q, k and v (float32 under
    numerics out="float32"). q, k, v and out must keep their values until the last call of vjp.
    Deterministic. On the GPU the gradients' kernels, where they are not compiled yet, are compiled
    beside the forward's. In half formats dq of rows whose keys have a large common mean is centred
    (`emulation.center`). Other arguments and errors as in `attention`; vjp checks dout and dlse
    likewise.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> out, vjp = attention_vjp(x, x, x, causal=True)
    >>> [g.shape for g in vjp(np.ones_like(out))]
    [(4, 16), (4, 16), (4, 16)]
    """
    masks = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    call = _Call.of(q, k, v, masks, layout, numerics, return_lse, out)
    saved = call.forward(gradient=True)

    def vjp(dout: Any, dlse: Any = None) -> tuple[Any, Any, Any]:
        return call.backward(dout, dlse, *saved)

    return call.result(*saved[:2]), vjp


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    layout: str = "bhnd",
    numerics: Numerics | dict[str, Any] | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Plan:
    """The Plan that `attention` with these arguments runs, without running it.

    `emulation.flash(..., plan=plan(...))` computes the same bits on a CPU. Arguments and errors as
    in `attention`.

    >>> x = np.zeros((1, 8, 100, 128), np.float16)
    >>> plan(x, x, x).tile_n
    128
    """
    masks = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    return _Call.of(q, k, v, masks, layout, numerics, return_lse, out).plan


class _Call:
    """One checked call. Below, `saved` is (out in the caller's layout, lse, rest, in place), the
    last of the GPU: whether kernels read q, k and v where they lie.
    """

    plan: Plan
    layout: str
    return_lse: bool

    @staticmethod
    def of(
        q: Any,
        k: Any,
        v: Any,
        masks: dict[str, Any],
        layout: Any,
        numerics: Numerics | dict[str, Any] | None,
        return_lse: Any,
        out: Any,
    ) -> _CpuCall | _GpuCall:
        """Check everything; nothing is written or launched."""
        on_gpu = check_arrays(q, k, v)
        layout = check_layout(layout)
        check_flag("return_lse", return_lse)
        call: _CpuCall | _GpuCall
        if on_gpu:
            gpu = GpuProblem.of(q, k, v, layout=layout, **masks)
            arch = planner.arch_of(compiler.capability(gpu.device))
            made, problem = planner.plan_for(gpu, arch, numerics), gpu.shapes
            family = planner.family_of(arch, gpu.dtype, made.numerics)
            call = _GpuCall(made, layout, return_lse, out, gpu, launcher(family))
        else:
            problem = problem_of(q, k, v, layout, **masks)
            made = default_plan(problem, numerics)
            arrays = tuple(swapped(x, layout) for x in (q, k, v))
            call = _CpuCall(made, layout, return_lse, out, problem, arrays, masks)
        if out is not None:
            check_out(out, problem, made, layout, {"q": q, "k": k, "v": v})
        return call

    def result(self, out: Any, lse: Any) -> Any:
        return (out, lse) if self.return_lse else out

    def check_gradients(self, dout: Any, dlse: Any, out: Any) -> Any:
        """dout as bhnd; shape in the caller's layout and place are checked, `check_dout` does the
        rest.
        """
        check_beside("dout", dout, out)
        if dlse is not None:
            check_beside("dlse", dlse, out)
        if dout.shape != out.shape:
            raise ValueError(
                f"dout: shape {tuple(dout.shape)}, must be {tuple(out.shape)} like out"
            )
        return swapped(dout, self.layout)


@dataclass(frozen=True, eq=False)
class _CpuCall(_Call):
    """On the emulator."""

    plan: Plan
    layout: str
    return_lse: bool
    out: Any
    problem: Problem
    arrays: tuple[Any, ...]  # bhnd
    masks: dict[str, Any]

    def forward(self, gradient: bool) -> tuple[Any, Any, Any, bool]:
        out, lse = flash(*self.arrays, plan=self.plan, **self.masks)
        out = swapped(out, self.layout)
        if self.out is not None:
            np.copyto(self.out, out, casting="no")
        return (np.ascontiguousarray(out) if self.out is None else self.out), lse, None, True

    def backward(self, dout: Any, dlse: Any, *saved: Any) -> tuple[Any, Any, Any]:
        dout = self.check_gradients(dout, dlse, saved[0])
        # The emulator runs its forward again: it keeps more than its caller gets.
        q, k, v = self.arrays
        grads = flash_vjp(q, k, v, dout, dlse=dlse, plan=self.plan, **self.masks)
        dq, dk, dv = (np.ascontiguousarray(swapped(g, self.layout)) for g in grads)
        return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _GpuCall(_Call):
    """On the GPU."""

    plan: Plan
    layout: str
    return_lse: bool
    out: Any
    problem: GpuProblem
    kernels: Launcher

    def forward(self, gradient: bool) -> tuple[Any, Any, Any, bool]:
        cp, p = compiler.cupy(), self.problem
        in_place = True
        lead = (p.batch, p.heads, p.n_q)
        with cp.cuda.Device(p.device):
            lse = cp.empty(lead, np.float32)
            own = self.out is None
            out = self._empty(*lead, p.d_v) if own else four_axes(swapped(self.out, self.layout))
            rest = self._rest(gradient, out.shape)
            if p.empty:
                lse.fill(-np.inf)
                out.fill(0)
                if rest is not None:
                    rest.fill(0)
            else:
                written = out if ready(out) else cp.empty(out.shape, out.dtype)
                readable = p.readable()
                in_place = readable is p
                if gradient:
                    compile_ahead(self.kernels, p.shapes, self.plan, p.device)  # type: ignore[arg-type]  # a module
                self.kernels.forward(readable, self.plan, written, lse, rest)
                if written is not out:
                    cp.copyto(out, written)
        if p.axes < 4:
            lse = lse.reshape(lead[4 - p.axes :])
        return (self._given(out) if own else self.out), lse, rest, in_place

    def backward(self, dout: Any, dlse: Any, *saved: Any) -> tuple[Any, Any, Any]:
        cp, p = compiler.cupy(), self.problem
        out, lse, rest, in_place = saved
        dout = self.check_gradients(dout, dlse, out)
        # dout's shape is right; only its dtype and dlse are left to be looked at.
        if dout.dtype != p.q.dtype or dlse is not None:
            check_dout(p.shapes, _shape_of(dout), None if dlse is None else _shape_of(dlse))
        with cp.cuda.Device(p.device):
            dq = self._empty(p.batch, p.heads, p.n_q, p.d)
            dk = self._empty(p.batch, p.kv_heads, p.n_k, p.d)
            dv = self._empty(p.batch, p.kv_heads, p.n_k, p.d_v)
            if p.empty:
                for gradient in (dq, dk, dv):
                    gradient.fill(0)
            else:
                rows = (p.batch, p.heads, p.n_q)
                dlse = None if dlse is None else cp.ascontiguousarray(dlse).reshape(rows)
                self.kernels.backward(
                    p if in_place else p.readable(),
                    self.plan,
                    contiguous(four_axes(dout)),
                    dlse,
                    contiguous(four_axes(swapped(out, self.layout))),
                    rest,
                    lse.reshape(rows),
                    dq,
                    dk,
                    dv,
                )
        return self._given(dq), self._given(dk), self._given(dv)

    def _rest(self, gradient: bool, shape: tuple[int, ...]) -> Any | None:
        """Room for what rounding O leaves, where delta will sum it."""
        numerics = self.plan.numerics
        rounded = numerics.out == "input" and self.plan.format != "float32"
        wanted = gradient and numerics.delta == "full" and rounded
        return compiler.cupy().empty(shape, self.problem.q.dtype) if wanted else None

    def _empty(self, *shape: int) -> Any:
        """An output (B, H, N, width) that is contiguous in the caller's layout."""
        found = compiler.cupy().empty(shape_in(shape, self.layout), out_dtype(self.plan))
        return swapped(found, self.layout)

    def _given(self, x: Any) -> Any:
        """An output of `_empty` with the caller's axes."""
        axes = self.problem.axes
        return swapped(x if axes == 4 else x[(0,) * (4 - axes)], self.layout)


def _shape_of(x: Any) -> Any:
    """x's shape and dtype as a NumPy array without memory, for checks."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
