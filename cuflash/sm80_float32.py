"""Launches the float32 kernels of cuda/sm80: any GPU since Ampere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import compile_kernel, cupy, load
from cuflash.launch import Instantiation
from cuflash.problem import GpuProblem
from cuflash.sm80_backward import PITCH, delta_chunks, gradient_params
from cuflash.sm80_forward import (
    BAND,
    FIXED,
    STRIDES,
    arithmetic,
    band_of,
    check_plan,
    flag,
    padded,
    strides_of,
    target,
)
from emulation.flash import constants, machine_of
from emulation.plan import BackwardPlan, Plan, default_plan
from emulation.problem import Problem

#: The fields of a Plan that these kernels fix, and how.
FIXED_FLOAT32: dict[str, Any] = FIXED | {"rounded_sum": "lanes", "wide": "split"}
#: Rows of a CTA, 16 a warp; the largest that fits the device's shared memory is taken.
ROWS = (64, 32, 16)

FORWARD_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("q", "k", "v", "out", "lse")]
    + [(f"{name}_strides", STRIDES) for name in ("q", "k", "v", "out")]
    + [("band", BAND)]
    + [(name, np.int32) for name in ("heads", "group", "d", "d_v")]
    + [(name, np.float32) for name in ("c", "cap", "stale_limit")],
    align=True,
)
DELTA_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("dout", "out", "lse", "dlse", "lse2", "delta")]
    + [(f"{name}_strides", STRIDES) for name in ("dout", "out")]
    + [(name, np.int32) for name in ("batch", "heads", "n_q", "d_v", "pitch")],
    align=True,
)

DELTA_THREADS = 256
#: One kernel each: dQ, dK, dV.
GRADIENTS = ("kQueries", "kKeys", "kValues")


@dataclass(frozen=True)
class Kernel:
    """One instantiation with its launch: rows of a CTA and dynamic shared memory."""

    instantiation: Instantiation
    rows: int
    shared: int = 0
    threads: int = DELTA_THREADS


def shared_limit() -> int:
    """Bytes of shared memory that the current device gives a block."""
    return int(cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])


def term_bytes(rows: int, width: int) -> int:
    """The three terms of a tile."""
    return 3 * rows * (width + 8) * 2


def stream_bytes(rows: int, width: int) -> int:
    """A tile that passes by: its terms, the tile as it arrives, and the map of specials."""
    return term_bytes(rows, width) + rows * width * 4 + rows * width // 4


def chosen(plan: Plan) -> str:
    """The Plan's numerics as cuflash::Arithmetic, without what float32 does not ask: whether P is
    rounded, and which P is summed.
    """
    numerics = dataclasses.replace(plan.numerics, row_sum="unrounded", p="input")
    return arithmetic(dataclasses.replace(plan, numerics=numerics))


def forward_kernel(plan: Plan, d: int, d_v: int, softcap: bool, limit: int) -> Kernel:
    """The forward of a Plan for these head dimensions and bytes of shared memory."""
    d, d_v = padded(d), padded(d_v)
    stream = stream_bytes(plan.tile_n, max(d, d_v))
    rows = _rows("plan.tile_n", plan.tile_n, term_bytes(1, d), stream, limit)
    name = (
        f"cuflash::sm80::forward<cuflash::sm80::Shape<{d},{d_v},{rows},{plan.tile_n}>,"
        f"{chosen(plan)},{flag(softcap)}>"
    )
    shared = rows * term_bytes(1, d) + stream
    return Kernel(Instantiation("sm80/forward_float32.cu", name), rows, shared, 2 * rows)


def _rows(name: str, tile: int, row: int, stream: int, limit: int) -> int:
    """Rows of a CTA that fit beside the stream, or ValueError."""
    for rows in ROWS:
        if rows * row + stream <= limit:
            return rows
    raise ValueError(
        f"{name}: {tile} needs {ROWS[-1] * row + stream} bytes of shared memory, must need at most "
        f"{limit} on this device"
    )


def prepare(kernel: Kernel) -> Any:
    """The kernel, compiled and loaded."""
    return load(compile_kernel(*kernel.instantiation[:2], target()))


def launch(kernel: Kernel, grid: int, params: np.ndarray[Any, Any]) -> None:
    """One kernel on the current stream; params is its one argument, a struct of the source."""
    function = prepare(kernel)
    if kernel.shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = kernel.shared
    function((grid,), (kernel.threads,), (params,), shared_mem=kernel.shared)


def forward(problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None) -> None:
    """See `launch.Launcher.forward`. Nothing is rounded, so there is no rest."""
    check_plan(plan, FIXED_FLOAT32, "float32")
    p = problem
    kernel = forward_kernel(plan, p.d, p.d_v, p.softcap is not None, shared_limit())
    const = constants(machine_of(plan), p.shapes)
    params = np.zeros(1, FORWARD_PARAMS)
    for name, x in {"q": p.q, "k": p.k, "v": p.v, "out": out}.items():
        params[name] = x.data.ptr
        params[f"{name}_strides"] = strides_of(x)
    params["lse"] = lse.data.ptr
    params["band"] = band_of(p)
    params["heads"], params["group"] = p.heads, p.group
    params["d"], params["d_v"] = p.d, p.d_v
    params["c"] = const.c
    params["cap"] = 0 if const.softcap is None else const.softcap
    params["stale_limit"] = 2.0**plan.stale_limit
    grid = -(-p.n_q // kernel.rows) * p.batch * p.heads
    launch(kernel, grid, params)


def delta_kernel(d_v: int) -> Kernel:
    """delta and LSE in log2 units."""
    chunks = delta_chunks(d_v)
    name = f"cuflash::sm80::delta_float32<{chunks}>"
    return Kernel(
        Instantiation("sm80/backward_float32.cu", name), DELTA_THREADS // chunks, 0, DELTA_THREADS
    )


def gradient_kernel(plan: Plan, what: str, d: int, d_v: int, softcap: bool, limit: int) -> Kernel:
    """One gradient: `what` of `GRADIENTS`."""
    d, d_v = padded(d), padded(d_v)
    field = "tile_n" if what == "kQueries" else "tile_m"
    tile = getattr(plan.backward, field)
    stream = stream_bytes(tile, max(d, d_v))
    row = term_bytes(1, d) + (0 if what == "kValues" else term_bytes(1, d_v))
    rows = _rows(f"plan.backward.{field}", tile, row, stream, limit)
    shape = f"cuflash::sm80::Gradient::{what},{d},{d_v},{rows},{tile}"
    numerics = dataclasses.replace(plan.numerics, reference="row-max")
    name = (
        f"cuflash::sm80::gradient_float32<cuflash::sm80::GradientShape<{shape}>,"
        f"{chosen(dataclasses.replace(plan, numerics=numerics))},{flag(softcap)}>"
    )
    shared = rows * row + stream
    return Kernel(Instantiation("sm80/backward_float32.cu", name), rows, shared, 2 * rows)


def backward(
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
    """See `launch.Launcher.backward`."""
    check_plan(plan, FIXED_FLOAT32, "float32")
    p, limit = problem, shared_limit()
    pitch = -(-p.n_q // PITCH) * PITCH
    heads = p.batch * p.heads
    lse2, delta = cupy().empty((2, heads, pitch), np.float32)
    work = {"lse2": lse2, "delta": delta}
    ones = np.zeros(1, DELTA_PARAMS)
    for name, x in ({"dout": dout, "out": out, "lse": lse, "dlse": dlse} | work).items():
        ones[name] = 0 if x is None else x.data.ptr
    ones["dout_strides"], ones["out_strides"] = strides_of(dout), strides_of(out)
    for name, size in (("batch", p.batch), ("heads", p.heads), ("n_q", p.n_q), ("d_v", p.d_v)):
        ones[name] = size
    ones["pitch"] = pitch

    params = gradient_params(p, plan, {"dout": dout, "dq": dq, "dk": dk, "dv": dv})
    params["lse2"], params["delta"], params["pitch"] = lse2.data.ptr, delta.data.ptr, pitch

    first = delta_kernel(p.d_v)
    kernels = {
        what: gradient_kernel(plan, what, p.d, p.d_v, p.softcap is not None, limit)
        for what in GRADIENTS
    }
    for kernel in (first, *kernels.values()):
        prepare(kernel)  # so that an error writes nothing
    launch(first, -(-heads * pitch // first.rows), ones)
    for what, kernel in kernels.items():
        rows, count = (p.n_q, heads) if what == "kQueries" else (p.n_k, p.batch * p.kv_heads)
        launch(kernel, -(-rows // kernel.rows) * count, params)


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with the default Plan, on 99 kB and on 227 kB."""
    for d in (32, 64, 80, 128, 192, 256):
        x = np.broadcast_to(np.zeros((), np.float32), (1, d))
        for limit in (101_376, 232_448):
            tile = 16 if d > 128 and limit < 200_000 else 64 if d <= 64 else 32
            backward_plan = BackwardPlan(tile_m=tile, tile_n=tile)
            plan = default_plan(Problem.of(x, x, x), tile_n=tile, backward=backward_plan)
            yield forward_kernel(plan, d, d, False, limit).instantiation
            for what in GRADIENTS:
                yield gradient_kernel(plan, what, d, d, False, limit).instantiation
        yield delta_kernel(d).instantiation
