"""GpuProblem: the emulator's Problem for arrays on a GPU, with strides instead of copies; and the
checks that both kinds of array share (layout, out).

Kernels read rows of 16-byte pieces. An input is copied to a contiguous array, on the device, if
its last axis has not unit stride, its address or a stride is no multiple of 16 bytes, or a stride
is negative. All else is read where it lies, including strides of 0 (broadcast heads or rows).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from emulation.plan import Plan
from emulation.problem import Array, Problem, Window, numpy_dtype

ALIGNMENT = 16
LAYOUTS = ("bhnd", "bnhd")
OVERLAP_WORK = 100_000
"""Steps of NumPy's overlap solver before two arrays count as overlapping."""


def is_cupy(x: Any) -> bool:
    """Whether x is a CuPy array, without importing CuPy."""
    return any(t.__module__.partition(".")[0] == "cupy" for t in type(x).__mro__)


def check_arrays(q: Any, k: Any, v: Any) -> bool:
    """True for three CuPy arrays, False for three NumPy arrays; TypeError for anything else."""
    if not is_cupy(q) and not isinstance(q, np.ndarray):
        raise TypeError(f"q: got {_kind(q)}, must be a NumPy or CuPy array")
    check_beside("k", k, q)
    check_beside("v", v, q)
    return is_cupy(q)


def check_beside(name: str, x: Any, q: Any) -> None:
    """TypeError or ValueError unless x is an array of q's kind on q's device."""
    if is_cupy(x) != is_cupy(q) or not (is_cupy(x) or isinstance(x, np.ndarray)):
        raise TypeError(f"{name}: got {_kind(x)}, must be {_kind(q)} like q")
    if is_cupy(x) and x.device.id != q.device.id:
        raise ValueError(f"{name}: on device {x.device.id}, must be on device {q.device.id} like q")


def _kind(x: Any) -> str:
    found = type(x)
    return f"{found.__module__.partition('.')[0]}.{found.__name__}".removeprefix("builtins.")


def check_layout(layout: Any) -> Literal["bhnd", "bnhd"]:
    """The layout, or ValueError."""
    for known in LAYOUTS:
        if isinstance(layout, str) and layout == known:
            return known  # type: ignore[return-value]  # LAYOUTS holds the literals
    raise ValueError(f"layout: got {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}")


def swapped(x: Any, layout: str) -> Any:
    """A view of x with its axes as bhnd, or from bhnd back in the layout: the swap is its own
    inverse. (N, D) has no heads to move.

    >>> swapped(np.zeros((2, 100, 8, 64)), "bnhd").shape
    (2, 8, 100, 64)
    """
    return x.swapaxes(-3, -2) if layout == "bnhd" and x.ndim >= 3 else x


def shape_in(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """A bhnd shape in the layout."""
    if layout == "bhnd" or len(shape) < 3:
        return shape
    return (*shape[:-3], shape[-2], shape[-3], shape[-1])


def problem_of(q: Any, k: Any, v: Any, layout: str, **masks: Any) -> Problem:
    """`emulation.Problem.of` on arrays in any layout; errors give shapes as bhnd."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not 2 <= x.ndim <= 4:
            axes = "([B,] [H,] N, D)" if layout == "bhnd" else "([B,] N, [H,] D)"
            raise ValueError(f"{name}: shape {tuple(x.shape)}, must have 2 to 4 axes: {axes}")
    try:
        return Problem.of(*(swapped(x, layout) for x in (q, k, v)), **masks)
    except ValueError as error:
        if layout == "bhnd":
            raise
        raise ValueError(f"{error} (axes in the order bhnd)") from None


def out_dtype(plan: Plan) -> np.dtype[Any]:
    """Of O and of the gradients."""
    return numpy_dtype(plan.format if plan.numerics.out == "input" else "float32")


# -- out -------------------------------------------------------------------------------


def check_out(out: Any, problem: Problem, plan: Plan, layout: str, inputs: dict[str, Any]) -> None:
    """Check `out` against shape, dtype, place, writability, and overlap with the inputs or itself.

    Raises TypeError or ValueError naming out, what came and the rule.
    """
    check_beside("out", out, inputs["q"])
    shape = shape_in((*problem.lead, problem.n_q, problem.d_v), layout)
    if tuple(out.shape) != shape:
        raise ValueError(f"out: shape {tuple(out.shape)}, must be {shape}")
    if out.dtype != out_dtype(plan):
        raise TypeError(f"out: dtype {out.dtype}, must be {out_dtype(plan)}")
    if not is_cupy(out) and not out.flags.writeable:
        raise ValueError("out: read-only, must be writable")
    if overlaps_itself(out):
        raise ValueError(
            f"out: strides {tuple(out.strides)}, must give every element an address of its own"
        )
    for name, x in inputs.items():
        if overlap(out, x):
            raise ValueError(f"out: shares memory with {name}, must not overlap q, k or v")


def overlaps_itself(x: Any) -> bool:
    """Whether two elements may share an address: axes, smallest stride first, must step over all
    that came before.

    >>> overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3))), overlaps_itself(np.zeros((2, 3)).T)
    (True, False)
    """
    reach = int(x.dtype.itemsize)
    if 0 in x.shape:
        return False
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def _addresses(x: Any) -> Array:
    """A NumPy array at x's addresses; only for asking where it lies, its elements are not read."""
    pointer = int(x.data.ptr) if is_cupy(x) else int(x.__array_interface__["data"][0])
    strides = tuple(int(s) for s in x.strides)
    interface = {
        "shape": tuple(int(n) for n in x.shape),
        "typestr": f"|V{x.dtype.itemsize}",
        "data": (pointer, True),
        "strides": strides,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays share an element's bytes. Exact; True where that is too hard to tell."""
    if 0 in a.shape or 0 in b.shape:
        return False
    try:
        # NumPy's stubs know only the two special values of max_work.
        return bool(np.shares_memory(_addresses(a), _addresses(b), OVERLAP_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


# -- On the GPU ------------------------------------------------------------------------


def ready(x: Any) -> bool:
    """Whether kernels can read or write the 4-D array x where it lies."""
    if 0 in x.shape:
        return True
    size = x.dtype.itemsize
    *outer, inner = (s if n > 1 else None for s, n in zip(x.strides, x.shape, strict=True))
    aligned = all(s is None or (s >= 0 and s % ALIGNMENT == 0) for s in outer)
    return inner in (None, size) and int(x.data.ptr) % ALIGNMENT == 0 and aligned


def element_strides(x: Any) -> tuple[int, int, int]:
    """Strides of batch, head and row in elements; 0 for an axis of one.

    >>> element_strides(np.zeros((1, 4, 10, 64), np.float16))
    (0, 640, 64)
    """
    size = int(x.dtype.itemsize)
    b, h, n = (int(s) // size if c > 1 else 0 for s, c in zip(x.strides, x.shape[:3], strict=False))
    return b, h, n


def four_axes(x: Any) -> Any:
    """A view (B, H, N, D) of (N, D), (H, N, D) or (B, H, N, D)."""
    return x[(None,) * (4 - x.ndim)]


@dataclass(frozen=True, eq=False)
class GpuProblem:
    """A checked problem on one device. Made by `GpuProblem.of`; `readable` makes it kernel-ready.

    q (B, H, N_q, D), k (B, H_kv, N_k, D), v (B, H_kv, N_k, D_v): CuPy arrays of any strides, views
    of what the caller gave. `shapes` is the emulator's Problem of the same shapes, mask and scale,
    over placeholders without memory; `layout` and `axes` (how many) are the caller's.
    """

    q: Any
    k: Any
    v: Any
    shapes: Problem
    layout: Literal["bhnd", "bnhd"]
    axes: int

    @staticmethod
    def of(q: Any, k: Any, v: Any, *, layout: str = "bhnd", **masks: Any) -> GpuProblem:
        """Check CuPy arrays; nothing is copied or launched.

        masks: scale, causal, window, softcap as for `emulation.Problem.of`. Raises its errors, and
        ValueError or TypeError for head dimensions that are no multiples of 8 and for arrays on
        different devices.
        """
        named = {"q": q, "k": k, "v": v}
        order = check_layout(layout)
        shapes = problem_of(_placeholder(q), _placeholder(k), _placeholder(v), order, **masks)
        for name, width in (("q", shapes.d), ("v", shapes.d_v)):
            if width % 8:
                raise ValueError(
                    f"{name}: head dimension {width}, must be a multiple of 8 on the GPU"
                )
        for name in ("k", "v"):
            check_beside(name, named[name], q)
        views = {name: four_axes(swapped(x, order)) for name, x in named.items()}
        return GpuProblem(**views, shapes=shapes, layout=order, axes=int(q.ndim))

    def readable(self) -> GpuProblem:
        """The same problem with those inputs copied that kernels cannot read in place."""
        copies = {name: contiguous(getattr(self, name)) for name in ("q", "k", "v")}
        return dataclasses.replace(self, **copies)

    @property
    def device(self) -> int:
        """Of all arrays."""
        return int(self.q.device.id)

    @property
    def dtype(self) -> str:
        """Format name of q, k and v."""
        return self.shapes.dtype

    @property
    def batch(self) -> int:
        """B."""
        return int(self.q.shape[0])

    @property
    def heads(self) -> int:
        """Query heads of one batch entry."""
        return int(self.q.shape[1])

    @property
    def kv_heads(self) -> int:
        """Key heads of one batch entry; query head h reads key head h // group."""
        return int(self.k.shape[1])

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def n_q(self) -> int:
        """Number of queries."""
        return self.shapes.n_q

    @property
    def n_k(self) -> int:
        """Number of keys."""
        return self.shapes.n_k

    @property
    def d(self) -> int:
        """Head dimension of q and k."""
        return self.shapes.d

    @property
    def d_v(self) -> int:
        """Head dimension of v and of the output."""
        return self.shapes.d_v

    @property
    def scale(self) -> float:
        """Factor of q k^T."""
        return self.shapes.scale

    @property
    def softcap(self) -> float | None:
        """Scores become softcap * tanh(score / softcap)."""
        return self.shapes.softcap

    @property
    def causal(self) -> Literal[False, "bottom-right", "top-left"]:
        """Alignment of the diagonal."""
        return self.shapes.causal

    @property
    def window(self) -> Window | None:
        """(left, right) from the diagonal, inclusive; None is unbounded."""
        return self.shapes.window

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch: no query or no key."""
        return 0 in self.q.shape or 0 in self.k.shape


def _placeholder(x: Any) -> Array:
    """x's shape and dtype over one element."""
    return np.broadcast_to(np.zeros((), x.dtype), tuple(int(n) for n in x.shape))


def contiguous(x: Any) -> Any:
    """x if kernels can read it in place, else a contiguous copy on the device."""
    return x if ready(x) else x.copy(order="C")
