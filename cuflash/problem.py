"""GpuProblem: the emulator's Problem for arrays on a GPU, with strides instead of copies; and the
checks that both kinds of array share (layout, out).

Kernels read rows of 16-byte pieces. An input is copied to a contiguous array, on the device, if
its last axis has not unit stride, its address or a stride is no multiple of 16 bytes, or a stride
is negative. All else is read where it lies, including strides of 0 (broadcast heads or rows).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import NoneType, SimpleNamespace
from typing import Any, Literal

import numpy as np

from emulation.arguments import check_plain, echo
from emulation.plan import Plan
from emulation.problem import Array, Problem, Window, numpy_dtype

ALIGNMENT = 16
LAYOUTS = ("bhnd", "bnhd")
OVERLAP_WORK = 100_000
"""Steps of NumPy's overlap solver before two arrays count as overlapping."""


#: Types whose equal values mean the same to every check: what a remembered check may be keyed by.
PLAIN = (NoneType, bool, int, float, str)


def is_cupy(x: Any) -> bool:
    """Whether x is a CuPy array, without importing CuPy."""
    kind = type(x)
    if kind.__module__ == "cupy":
        return True
    return kind is not np.ndarray and any(
        t.__module__.partition(".")[0] == "cupy" for t in kind.__mro__
    )


def check_arrays(q: Any, k: Any, v: Any) -> bool:
    """True for three CuPy arrays, False for three NumPy arrays; TypeError for anything else."""
    on_gpu = is_cupy(q)
    if not on_gpu:
        if not isinstance(q, np.ndarray):
            raise TypeError(f"q: got {_kind(q)}, must be a NumPy or CuPy array")
        check_plain("q", q)
    _check_kind("k", k, q)
    _check_kind("v", v, q)
    return on_gpu


def _check_kind(name: str, x: Any, q: Any) -> None:
    """TypeError unless x is an array of q's kind."""
    if type(x) is type(q):
        return
    on_gpu = is_cupy(x)
    if on_gpu != is_cupy(q) or not (on_gpu or isinstance(x, np.ndarray)):
        raise TypeError(f"{name}: got {_kind(x)}, must be {_kind(q)} like q")
    if not on_gpu:  # an array of NumPy's, but of another type than q, which is a plain one
        check_plain(name, x)


def check_beside(name: str, x: Any, q: Any) -> None:
    """TypeError or ValueError unless x is an array of q's kind on q's device."""
    _check_kind(name, x, q)
    if is_cupy(x):
        check_device(name, x, int(q.device.id))


def check_device(name: str, x: Any, device: int) -> None:
    """ValueError unless the CuPy array x is on q's device."""
    own = x.device.id
    if own != device:
        raise ValueError(f"{name}: on device {own}, must be on device {device} like q")


def _kind(x: Any) -> str:
    found = type(x)
    return f"{found.__module__.partition('.')[0]}.{found.__name__}".removeprefix("builtins.")


def check_layout(layout: Any) -> Literal["bhnd", "bnhd"]:
    """The layout, or ValueError."""
    for known in LAYOUTS:
        if isinstance(layout, str) and layout == known:
            return known  # type: ignore[return-value]  # LAYOUTS holds the literals
    raise ValueError(f"layout: got {echo(layout)}, must be one of {', '.join(map(repr, LAYOUTS))}")


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
    extent = _extent(out) if 0 not in out.shape else (0, 0)
    for name, x in inputs.items():
        if overlap(out, x, extent):
            raise ValueError(f"out: shares memory with {name}, must not overlap q, k or v")


def overlaps_itself(x: Any) -> bool:
    """Whether two elements may share an address: axes, smallest stride first, must step over all
    that came before.

    >>> overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3))), overlaps_itself(np.zeros((2, 3)).T)
    (True, False)
    """
    if x.flags.c_contiguous:
        return False
    reach = int(x.dtype.itemsize)
    if 0 in x.shape:
        return False
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def _pointer(x: Any) -> int:
    return int(x.data.ptr) if is_cupy(x) else int(x.__array_interface__["data"][0])


def _extent(x: Any) -> tuple[int, int]:
    """First byte of an array that is not empty, and one past its last."""
    low = _pointer(x)
    if x.flags.c_contiguous:
        return low, low + x.nbytes
    high = low + x.dtype.itemsize
    for stride, size in zip(x.strides, x.shape, strict=True):
        if stride >= 0:
            high += stride * (size - 1)
        else:
            low += stride * (size - 1)
    return low, high


def _addresses(x: Any) -> Array:
    """A NumPy array at x's addresses; only for asking where it lies, its elements are not read."""
    pointer = _pointer(x)
    strides = tuple(int(s) for s in x.strides)
    interface = {
        "shape": tuple(int(n) for n in x.shape),
        "typestr": f"|V{x.dtype.itemsize}",
        "data": (pointer, True),
        "strides": strides,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def overlap(a: Any, b: Any, extent: tuple[int, int] | None = None) -> bool:
    """Whether two arrays share an element's bytes. Exact; True where that is too hard to tell.
    extent: a's, if known.
    """
    if 0 in a.shape or 0 in b.shape:
        return False
    (a_low, a_high), (b_low, b_high) = _extent(a) if extent is None else extent, _extent(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    try:
        # NumPy's stubs know only the two special values of max_work.
        return bool(np.shares_memory(_addresses(a), _addresses(b), OVERLAP_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


# -- On the GPU ------------------------------------------------------------------------


def ready(x: Any) -> bool:
    """Whether kernels can read or write the 4-D array x where it lies."""
    shape = x.shape
    if 0 in shape:
        return True
    *outer, inner = x.strides
    for stride, count in zip(outer, shape, strict=False):  # the last axis is apart
        if count > 1 and (stride < 0 or stride % ALIGNMENT):
            return False
    return (inner == x.dtype.itemsize or shape[-1] == 1) and int(x.data.ptr) % ALIGNMENT == 0


def element_strides(x: Any) -> tuple[int, int, int]:
    """Strides of batch, head and row in elements; 0 for an axis of one.

    >>> element_strides(np.zeros((1, 4, 10, 64), np.float16))
    (0, 640, 64)
    """
    size = int(x.dtype.itemsize)
    (b, h, n, _), (b_count, h_count, n_count, _) = x.strides, x.shape
    return (
        b // size if b_count > 1 else 0,
        h // size if h_count > 1 else 0,
        n // size if n_count > 1 else 0,
    )


def four_axes(x: Any) -> Any:
    """A view (B, H, N, D) of (N, D), (H, N, D) or (B, H, N, D)."""
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


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
    device: int

    @staticmethod
    def of(
        q: Any,
        k: Any,
        v: Any,
        *,
        layout: str = "bhnd",
        scale: float | None = None,
        causal: Any = False,
        window: Any = None,
        softcap: float | None = None,
    ) -> GpuProblem:
        """Check CuPy arrays; nothing is copied or launched.

        scale, causal, window, softcap as for `emulation.Problem.of`. Raises its errors, and
        ValueError or TypeError for head dimensions that are no multiples of 8 and for arrays on
        different devices.
        """
        order = check_layout(layout)
        kinds = tuple((x.shape, x.dtype) for x in (q, k, v))
        left, right = window if type(window) is tuple and len(window) == 2 else (window, None)
        masks = (scale, causal, window is not left, left, right, softcap)
        check = _checked if all(type(x) in PLAIN for x in masks) else _checked.__wrapped__
        shapes = check(*kinds, order, *masks)
        device = int(q.device.id)
        check_device("k", k, device)
        check_device("v", v, device)
        if order != "bhnd":
            q, k, v = swapped(q, order), swapped(k, order), swapped(v, order)
        axes = q.ndim
        return GpuProblem(four_axes(q), four_axes(k), four_axes(v), shapes, order, axes, device)

    def readable(self) -> GpuProblem:
        """The same problem with those inputs copied that kernels cannot read in place."""
        q, k, v = contiguous(self.q), contiguous(self.k), contiguous(self.v)
        if q is self.q and k is self.k and v is self.v:
            return self
        return dataclasses.replace(self, q=q, k=k, v=v)

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


Kind = tuple[tuple[int, ...], np.dtype[Any]]  # an array's shape and dtype


@functools.lru_cache(maxsize=256, typed=True)
def _checked(
    q: Kind,
    k: Kind,
    v: Kind,
    layout: str,
    scale: Any,
    causal: Any,
    pair: bool,
    left: Any,
    right: Any,
    softcap: Any,
) -> Problem:
    """The Problem of arrays of these kinds, with what only the GPU asks; errors are not remembered.
    The window is (left, right), or what stands in left if it is no pair.
    """
    q_, k_, v_ = (np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in (q, k, v))
    window = (left, right) if pair else left
    masks = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    shapes = problem_of(q_, k_, v_, layout, **masks)
    for name, width in (("q", shapes.d), ("v", shapes.d_v)):
        if width % 8:
            raise ValueError(f"{name}: head dimension {width}, must be a multiple of 8 on the GPU")
    return shapes


def contiguous(x: Any) -> Any:
    """x if kernels can read it in place, else a contiguous copy on the device."""
    return x if ready(x) else x.copy(order="C")
