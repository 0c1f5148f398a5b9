"""Between the public calls and the kernels: what a launcher module (`cuflash.sm80`) offers."""

from __future__ import annotations

import contextlib
import functools
import importlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from cuflash.compiler import Wanted, ahead, cupy, kernels
from cuflash.problem import GpuProblem, element_strides
from emulation.plan import Plan
from emulation.problem import Problem


class Instantiation(NamedTuple):
    """One kernel as `compiler.compile_kernel` takes it; `compile_kernel(*i[:2], arch, i[2])`."""

    source: str
    name_expression: str
    options: tuple[str, ...] = ()


class Launch(NamedTuple):
    """One kernel with its launch: blocks, threads of a block, and dynamic shared memory in bytes
    (a property of the instantiation).
    """

    instantiation: Instantiation
    grid: int
    threads: int
    shared: int = 0


#: What captured kernels read and write: a graph's replays may come at any time.
_captured: list[Any] = []


def run(
    launches: Sequence[Launch],
    structs: Sequence[np.ndarray[Any, Any]],
    device: int,
    touched: Iterable[Any],
) -> None:
    """The kernels one after the other on the current stream of the current device, whose number is
    `device`; each has one argument, a struct, with addresses of the arrays in `touched`. All are
    compiled and loaded before the first starts, so that an error writes nothing.

    Where the stream is being captured, these arrays' memory is never given back: else whoever gets
    it next would find it overwritten by a replay.
    """
    functions = kernels(_wanted(launches), device)
    stream = cupy().cuda.get_current_stream()
    if stream.ptr not in (0, 1) and stream.is_capturing():  # the legacy stream cannot be captured
        _captured.extend(x for x in touched if x is not None)
    for function, each, params in zip(functions, launches, structs, strict=True):
        function((each.grid,), (each.threads,), (params,), shared_mem=each.shared)


#: Codes of `struct` for the scalars of parameter structs.
CODES = {np.dtype(np.uint64): "Q", np.dtype(np.int64): "q", np.dtype(np.int32): "i"}
CODES |= {np.dtype(np.uint32): "I", np.dtype(np.float32): "f"}


def _wanted(launches: Sequence[Launch]) -> list[Wanted]:
    return [(*each.instantiation, each.shared) for each in launches]


@functools.lru_cache(maxsize=256)
def compile_ahead(family: Launcher, problem: Problem, plan: Plan, device: int) -> None:
    """Starts to compile the backward's kernels, so that a forward whose gradient will be asked for
    compiles its own beside them. Does not wait; what is wrong, the backward says when it is called.
    """
    with contextlib.suppress(ValueError):
        ahead(_wanted(family.backward_launches(problem, plan, device)), device)


def _scalars(dtype: np.dtype[Any], start: int = 0) -> Iterator[tuple[int, np.dtype[Any]]]:
    """The scalars of a struct by address."""
    if dtype.names is None:
        yield start, dtype
        return
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]  # type: ignore[index]  # there are names
        yield from _scalars(field, start + offset)


@functools.lru_cache(maxsize=16)
def _packer(dtype: np.dtype[Any]) -> struct.Struct:
    """The same layout for `struct`, which fills a struct five times faster than NumPy."""
    code, end = "<", 0
    for offset, scalar in _scalars(dtype):
        code += "x" * (offset - end) + CODES[scalar]
        end = offset + scalar.itemsize
    return struct.Struct(code + "x" * (dtype.itemsize - end))


def packed(
    dtype: np.dtype[Any], strided: Sequence[Any], plain: Sequence[Any], tail: tuple[Any, ...]
) -> np.ndarray[Any, np.dtype[Any]]:
    """A parameter struct: addresses of the arrays in `strided` and `plain`, strides of those in
    `strided`, then `tail` (see `tail_of`). None is a null pointer. struct.error for a wrong count.
    """
    values = [0 if x is None else x.data.ptr for x in (*strided, *plain)]
    for x in strided:
        values += (0, 0, 0) if x is None else element_strides(x)
    return np.frombuffer(bytearray(_packer(dtype).pack(*values, *tail)), dtype)


def tail_of(dtype: np.dtype[Any], fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The scalars of a parameter struct behind its addresses and strides, which follow from shapes
    and Plan; `fields` gives its fields by name and may give more.

    >>> strides = np.dtype([("row", np.int64)])
    >>> struct = np.dtype([("q", np.uint64), ("q_strides", strides), ("d", np.int32)])
    >>> tail_of(struct, {"d": 64, "d_v": 32})
    (64,)
    """
    names = dtype.names or ()
    first = 1 + max(i for i, name in enumerate(names) if name.endswith("_strides"))
    found: list[Any] = []
    for name in names[first:]:
        value = fields[name]
        found += value if isinstance(value, tuple) else (value,)
    return tuple(found)


class Launcher(Protocol):
    """Kernels of one family. Called with the problem's device current, on CuPy's current stream.

    Arrays are CuPy's, (batch, heads, N, width), last axis contiguous, every row on a 16-byte
    boundary; other strides are free (`problem.element_strides`). Everything is allocated and
    checked; nothing is empty. A launcher checks the Plan and compiles before it launches, so that
    an error writes nothing, and it never waits for the device.
    """

    def forward(
        self, problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None
    ) -> None:
        """out (B, H, N_q, D_v) in the Plan's output format; lse (B, H, N_q) float32, contiguous;
        rest: like out, contiguous, what rounding O to the input format left, or None if not asked.
        """

    def backward(
        self,
        problem: GpuProblem,
        plan: Plan,
        dout: Any,
        dlse: Any | None,
        out: Any,
        rest: Any | None,
        lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
    ) -> None:
        """dq (B, H, N_q, D), dk (B, H_kv, N_k, D), dv (B, H_kv, N_k, D_v) in the output format.

        dout (B, H, N_q, D_v) in the input format; dlse (B, H, N_q) float32, contiguous, or None;
        out, rest and lse as the forward left them (lse -inf where a row saw nothing).
        """

    def backward_launches(self, problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
        """What `backward` runs. Raises its ValueErrors about the Plan."""

    def instantiations(self) -> Iterable[Instantiation]:
        """A representative list, for compiling without a GPU."""


def launcher(family: str) -> Launcher:
    """The launcher module of a kernel family ("sm80", "sm90"), imported when first asked for."""
    return cast(Launcher, importlib.import_module(f"cuflash.{family}"))
