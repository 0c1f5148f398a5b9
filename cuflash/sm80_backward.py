"""Launches the backward kernels of cuda/sm80: delta, then dK and dV, then dQ. No atomics, no order
left to the scheduler: the same bits on every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
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
    padded,
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
    + [(name, np.float32) for name in ("c", "cap", "scale")],
    align=True,
)

#: Rows of the two workspaces are padded to this, so that any block of rows may read them.
PITCH = 128
#: Queries of a step where the Plan's tile_m cuts sums.
TILES_M = (16, 32, 64, 128)
#: Rows of a CTA of the dQ kernel: four warps of m16.
DQ_ROWS = 64


@dataclass(frozen=True)
class Kernel:
    """One instantiation with its launch: keys or rows of a CTA and dynamic shared memory."""

    instantiation: Instantiation
    rows: int
    shared: int = 0


@dataclass(frozen=True)
class Limits:
    """Shared memory of the device in bytes: of one block, and of a multiprocessor."""

    block: int = 232_448
    multiprocessor: int = 233_472

    @staticmethod
    def of_device() -> Limits:
        """Of the current device."""
        found = cupy().cuda.Device().attributes
        return Limits(
            int(found["MaxSharedMemoryPerBlockOptin"]),
            int(found["MaxSharedMemoryPerMultiprocessor"]),
        )

    def stages(self, fixed: int, stage: int) -> int:
        """Two if two blocks with two stages fit a multiprocessor (a block has 1 kB for the system),
        else one: a second block hides as much as a second stage.
        """
        return 2 if 2 * (fixed + 2 * stage + 1024) <= self.multiprocessor else 1


def tile_bytes(rows: int, width: int) -> int:
    """Of cuflash::Tile."""
    return rows * (width + 8) * 2


def map_bytes(rows: int, width: int) -> int:
    """Of cuflash::SpecialMap."""
    return rows * width // 4


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


def key_kernels(plan: Plan, d: int, d_v: int, softcap: bool, limits: Limits) -> Iterator[Kernel]:
    """dK and dV in one pass, or one pass for each where the accumulators would not fit."""
    d, d_v = padded(d), padded(d_v)
    cut = plan.numerics.p == "split" or plan.numerics.accumulate == "promoted"
    both, narrow = d + d_v <= 256, d + d_v <= 128
    rows, keys = 32, 64
    if cut:
        rows = plan.backward.tile_m
    elif narrow and not softcap:
        keys = 128  # two m16 a warp: half the reads of Q and dO from shared memory
    elif both and not (softcap and not narrow):
        rows = 64
    for what in ("kBoth",) if both else ("kValues", "kKeys"):
        fixed = tile_bytes(keys, d) + (tile_bytes(keys, d_v) if what != "kValues" else 0)
        fixed += map_bytes(rows, d) + map_bytes(rows, d_v) if both else 0
        stage = max(tile_bytes(rows, d), map_bytes(rows, d_v))
        stage += max(tile_bytes(rows, d_v), map_bytes(rows, d))
        stages = limits.stages(fixed, stage)
        shape = f"cuflash::{HALVES[plan.format]},{d},{d_v},{rows},{keys},{stages}"
        name = (
            f"cuflash::sm80::keys_and_values<cuflash::sm80::KeyShape<{shape}>,"
            f"{backward_arithmetic(plan)},cuflash::sm80::Gradient::{what},{tail(plan, softcap)}>"
        )
        yield Kernel(Instantiation("sm80/backward_dkdv.cu", name), keys, fixed + stages * stage)


def query_kernel(plan: Plan, d: int, d_v: int, softcap: bool, limits: Limits) -> Kernel:
    """dQ."""
    d, d_v, tile_n = padded(d), padded(d_v), plan.backward.tile_n
    fixed = tile_bytes(DQ_ROWS, d) + tile_bytes(DQ_ROWS, d_v)
    stage = tile_bytes(tile_n, d) + max(tile_bytes(tile_n, d_v), map_bytes(tile_n, d))
    stages = limits.stages(fixed, stage)
    shape = f"cuflash::{HALVES[plan.format]},{d},{d_v},{DQ_ROWS},{tile_n},{stages}"
    name = (
        f"cuflash::sm80::queries<cuflash::sm80::QueryShape<{shape}>,"
        f"{backward_arithmetic(plan)},{tail(plan, softcap)}>"
    )
    return Kernel(Instantiation("sm80/backward_dq.cu", name), DQ_ROWS, fixed + stages * stage)


def check_backward(plan: Plan, kernels: Iterable[Kernel], limits: Limits) -> None:
    """ValueError for a Plan whose tiles these kernels do not run on this device."""
    check_plan(plan)
    cut = plan.numerics.p == "split" or plan.numerics.accumulate == "promoted"
    if cut and plan.backward.tile_m not in TILES_M:
        allowed = ", ".join(map(str, TILES_M))
        raise ValueError(
            f"plan.backward.tile_m: got {plan.backward.tile_m}, must be one of {allowed} on the "
            "sm80 kernels"
        )
    for kernel in kernels:
        if kernel.shared > limits.block:
            tiles = f"{plan.backward.tile_m} and {plan.backward.tile_n}"
            raise ValueError(
                f"plan.backward.tile_m, tile_n: {tiles} need {kernel.shared} bytes of shared "
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
    softcap = p.softcap is not None
    first = delta_kernel(plan, p.d_v)
    over_keys = list(key_kernels(plan, p.d, p.d_v, softcap, limits))
    over_queries = query_kernel(plan, p.d, p.d_v, softcap, limits)
    check_backward(plan, [*over_keys, over_queries], limits)
    kernels = [first, *over_keys, over_queries]
    functions = [load(compile_kernel(*k.instantiation[:2], target())) for k in kernels]

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

    params = gradient_params(p, plan, {"dout": dout, "dq": dq, "dk": dk, "dv": dv})
    params["lse2"], params["delta"], params["pitch"] = lse2.data.ptr, delta.data.ptr, pitch

    grids = [-(-heads * pitch // first.rows)]
    grids += [-(-p.n_k // k.rows) * p.batch * p.kv_heads for k in over_keys]
    grids += [-(-p.n_q // over_queries.rows) * heads]
    structs = [ones] + [params] * (len(kernels) - 1)
    for kernel, function, grid, struct in zip(kernels, functions, grids, structs, strict=True):
        if kernel.shared > 48 * 1024:
            function.max_dynamic_shared_size_bytes = kernel.shared
        function((grid,), (THREADS,), (struct,), shared_mem=kernel.shared)


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
            tiles = dataclasses.replace(plan.backward, tile_n=64 if d <= 128 else 32)
            plan = dataclasses.replace(plan, backward=tiles)
            yield delta_kernel(plan, d).instantiation
            for kernel in key_kernels(plan, d, d, False, Limits()):
                yield kernel.instantiation
            yield query_kernel(plan, d, d, False, Limits()).instantiation
