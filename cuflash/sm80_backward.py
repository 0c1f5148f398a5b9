"""Launches the backward kernels of cuda/sm80: delta, then the three gradients in one pass. Tiles of
keys add to dQ in the Plan's order, so that no bit is left to the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import compile_kernel, cupy, load
from cuflash.launch import Instantiation
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import (
    BAND,
    HALVES,
    STRIDES,
    THREADS,
    arithmetic,
    band_of,
    check_plan,
    flag,
    strides_of,
    target,
)
from emulation.backward import gradient_scale
from emulation.flash import constants, machine_of
from emulation.plan import Plan

DELTA_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("dout", "out", "rest", "lse", "dlse", "lse2", "delta")]
    + [(f"{name}_strides", STRIDES) for name in ("dout", "out", "rest")]
    + [(name, np.int32) for name in ("batch", "heads", "n_q", "d_v", "pitch")],
    align=True,
)
TENSORS = ("q", "k", "v", "dout", "dq", "dk", "dv")
GRADIENT_PARAMS = np.dtype(
    [(name, np.uint64) for name in (*TENSORS, "lse2", "delta")]
    + [(f"{name}_strides", STRIDES) for name in TENSORS]
    + [("band", BAND)]
    + [(name, np.int32) for name in ("heads", "group", "d", "d_v", "pitch", "tile_n", "descending")]
    + [(name, np.float32) for name in ("c", "cap", "scale")]
    + [(name, np.uint64) for name in ("sums", "turns", "tickets")]
    + [("interleave", np.int32)],
    align=True,
)

#: Rows of the two workspaces are padded to this, so that any block of rows may read them.
PITCH = 128
#: Queries of a step where the Plan's tile_m cuts sums.
TILES_M = (16, 32, 64, 128)
#: Shared memory of the gradient kernel beside its tiles, in bytes.
STATIC = 16
#: Head dimensions that the kernel is made for.
WIDTHS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Kernel:
    """One instantiation with its launch: rows of a CTA or a step, dynamic shared memory, warps."""

    instantiation: Instantiation
    rows: int
    shared: int = 0
    warps: int = 4


@dataclass(frozen=True)
class Limits:
    """The device: bytes of shared memory that a block may have, and multiprocessors."""

    block: int = 232_448
    multiprocessors: int = 132

    @staticmethod
    def of_device() -> Limits:
        """Of the current device."""
        found = cupy().cuda.Device().attributes
        return Limits(
            int(found["MaxSharedMemoryPerBlockOptin"]),
            int(found["MultiProcessorCount"]),
        )


def tile_bytes(rows: int, width: int) -> int:
    """Of cuflash::Tile."""
    return rows * (width + 8) * 2


def backward_arithmetic(plan: Plan) -> str:
    """cuflash::Arithmetic without the choices that only the forward makes."""
    numerics = dataclasses.replace(plan.numerics, reference="row-max", row_sum="rounded")
    return arithmetic(dataclasses.replace(plan, numerics=numerics))


def tail(plan: Plan, softcap: bool) -> str:
    """The last template arguments."""
    return f"{flag(softcap)},{flag(plan.numerics.out == 'float32')}"


def delta_chunks(d_v: int) -> int:
    """Chunks of 8 columns that delta sums as a tree: a power of two."""
    chunks = 1
    while chunks * 8 < d_v:
        chunks *= 2
    return chunks


def delta_kernel(plan: Plan, d_v: int) -> Kernel:
    """delta and LSE in log2 units."""
    chunks = delta_chunks(d_v)
    out = flag(plan.numerics.out == "float32")
    name = f"cuflash::sm80::delta<cuflash::{HALVES[plan.format]},{chunks},{out}>"
    return Kernel(Instantiation("sm80/backward_delta.cu", name), THREADS // chunks)


def width_of(width: int) -> int:
    """A head dimension as the kernel holds it: warps share its columns in sixteens."""
    return next(w for w in WIDTHS if width <= w)


def gradient_kernel(plan: Plan, d: int, d_v: int, softcap: bool, limits: Limits) -> Kernel:
    """dQ, dK and dV: the most rows of a step, then the most stages, that fit."""
    d, d_v, keys = width_of(d), width_of(d_v), plan.backward.tile_n
    parts = 2 if plan.numerics.p == "split" else 1
    if parts == 2 or plan.numerics.accumulate == "promoted":
        choices = [(plan.backward.tile_m, stages) for stages in (2, 1)]
    else:
        rows = [128, 64, 32] if max(d, d_v) <= 64 and not softcap else [64, 32]
        choices = [(m, stages) for m in rows for stages in (2, 1)]
    for m, stages in choices:
        stage = tile_bytes(m, d) + tile_bytes(m, d_v) + 8 * m
        shared = tile_bytes(keys, d) + tile_bytes(keys, d_v) + 2 * parts * tile_bytes(m, keys)
        if shared + stages * stage + STATIC <= limits.block:
            break
    warps = 8 if m * keys >= 4096 or keys * (d + d_v) > 16384 else 4
    shape = f"cuflash::{HALVES[plan.format]},{d},{d_v},{m},{keys},{warps},{stages},{parts}"
    name = (
        f"cuflash::sm80::gradients<cuflash::sm80::GradientShape<{shape}>,"
        f"{backward_arithmetic(plan)},{tail(plan, softcap)}>"
    )
    instantiation = Instantiation("sm80/backward_gradients.cu", name)
    return Kernel(instantiation, m, shared + stages * stage, warps)


def check_backward(plan: Plan, kernel: Kernel, limits: Limits) -> None:
    """ValueError for a Plan whose tiles these kernels do not run on this device."""
    check_plan(plan)
    cut = plan.numerics.p == "split" or plan.numerics.accumulate == "promoted"
    if cut and plan.backward.tile_m not in TILES_M:
        allowed = ", ".join(map(str, TILES_M))
        raise ValueError(
            f"plan.backward.tile_m: got {plan.backward.tile_m}, must be one of {allowed} on the "
            "sm80 kernels"
        )
    if kernel.shared + STATIC > limits.block:
        tiles = f"{plan.backward.tile_m} and {plan.backward.tile_n}"
        raise ValueError(
            f"plan.backward.tile_m, tile_n: {tiles} need {kernel.shared + STATIC} bytes of shared "
            f"memory, must need at most {limits.block} on this device"
        )


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
    cp, p, limits = cupy(), problem, Limits.of_device()
    first = delta_kernel(plan, p.d_v)
    kernel = gradient_kernel(plan, p.d, p.d_v, p.softcap is not None, limits)
    check_backward(plan, kernel, limits)
    functions = [
        load(compile_kernel(*k.instantiation[:2], target(), k.instantiation.options))
        for k in (first, kernel)
    ]

    pitch = -(-p.n_q // PITCH) * PITCH
    heads = p.batch * p.heads
    lse2, delta = cp.empty((2, heads, pitch), np.float32)
    given = {"dout": dout, "out": out, "rest": rest}
    ones = np.zeros(1, DELTA_PARAMS)
    for name, x in (given | {"lse": lse, "dlse": dlse, "lse2": lse2, "delta": delta}).items():
        ones[name] = 0 if x is None else x.data.ptr
    for name, x in given.items():
        ones[f"{name}_strides"] = strides_of(x)
    for name, size in (("batch", p.batch), ("heads", p.heads), ("n_q", p.n_q), ("d_v", p.d_v)):
        ones[name] = size
    ones["pitch"] = pitch

    blocks, tiles = -(-p.n_q // kernel.rows), -(-p.n_k // plan.backward.tile_n)
    sums = cp.empty(heads * blocks * kernel.rows * width_of(p.d), np.float32)
    counts = cp.zeros(heads * blocks + 1, np.int32)
    params = gradient_params(p, plan, {"dout": dout, "dq": dq, "dk": dk, "dv": dv})
    params["lse2"], params["delta"], params["pitch"] = lse2.data.ptr, delta.data.ptr, pitch
    params["sums"], params["turns"] = sums.data.ptr, counts.data.ptr
    params["tickets"] = counts[-1:].data.ptr
    params["interleave"] = interleaved_heads(tiles, limits)
    if some_row_sees_nothing(p):
        dq.fill(0)

    functions[0]((-(-heads * pitch // first.rows),), (THREADS,), (ones,))
    if kernel.shared > 48 * 1024:
        functions[1].max_dynamic_shared_size_bytes = kernel.shared
    grid, threads = tiles * p.batch * p.kv_heads, kernel.warps * 32
    functions[1]((grid,), (threads,), (params,), shared_mem=kernel.shared)


def interleaved_heads(tiles: int, limits: Limits) -> int:
    """How many heads to work on at a time: as many as keep the device busy, so that key tiles of
    one head, which wait for each other at its first rows, start one after the other.
    """
    return max(1, limits.multiprocessors // tiles)


def some_row_sees_nothing(p: GpuProblem) -> bool:
    """Whether the first or the last row is masked from every key; if neither is, no row is."""
    n_q, n_k, diagonal, left, right = band_of(p)
    return diagonal + right < 0 or n_q - 1 + diagonal - left >= n_k


def gradient_params(
    p: GpuProblem, plan: Plan, arrays: dict[str, Any]
) -> np.ndarray[Any, np.dtype[Any]]:
    """GradientParams but for the workspaces."""
    machine = machine_of(plan)
    const = constants(machine, p.shapes)
    params = np.zeros(1, GRADIENT_PARAMS)
    for name, x in ({"q": p.q, "k": p.k, "v": p.v} | arrays).items():
        params[name] = x.data.ptr
        params[f"{name}_strides"] = strides_of(x)
    params["band"] = band_of(p)
    params["heads"], params["group"] = p.heads, p.group
    params["d"], params["d_v"] = p.d, p.d_v
    params["tile_n"] = plan.backward.tile_n
    params["descending"] = plan.backward.dq_order == "descending"
    params["c"] = const.c
    params["cap"] = 0 if const.softcap is None else const.softcap
    params["scale"] = gradient_scale(machine, p.shapes, const)
    return params


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with default numerics."""
    for fmt in ("bfloat16", "float16"):
        for d in (32, 64, 80, 96, 128, 192, 256):
            plan = Plan(format=fmt)
            tiles = dataclasses.replace(plan.backward, tile_n=128 if d <= 128 else 64)
            plan = dataclasses.replace(plan, backward=tiles)
            yield delta_kernel(plan, d).instantiation
            yield gradient_kernel(plan, d, d, False, Limits()).instantiation
