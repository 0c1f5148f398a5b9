"""Launches the backward kernels of cuda/sm80: delta, then dK and dV, then dQ. No atomics, no order
left to the scheduler: the same bits on every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import cupy, shared_memory
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import (
    BAND,
    HALVES,
    STRIDES,
    THREADS,
    arithmetic,
    check_plan,
    common_fields,
    flag,
    padded,
)
from emulation.backward import gradient_scale
from emulation.flash import constants, machine_of
from emulation.plan import Plan
from emulation.problem import Problem

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
    def of_device(number: int) -> Limits:
        """Of a device."""
        return Limits(*shared_memory(number))

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
    p = problem
    launches, delta_tail, tail = _prepared(p.shapes, plan, Limits.of_device(p.device))
    lse2, delta = cupy().empty((2, p.batch * p.heads, pitch_of(p.n_q)), np.float32)
    work = (lse2, delta)
    ones = packed(DELTA_PARAMS, (dout, out, rest), (lse, dlse, *work), delta_tail)
    params = packed(GRADIENT_PARAMS, (p.q, p.k, p.v, dout, dq, dk, dv), work, tail)
    run(launches, [ones] + [params] * (len(launches) - 1), p.device)


@functools.lru_cache(maxsize=256)
def _prepared(
    problem: Problem, plan: Plan, limits: Limits
) -> tuple[tuple[Launch, ...], tuple[Any, ...], tuple[Any, ...]]:
    """What a backward needs beside its arrays: launches, and the tails of both structs."""
    p, softcap = problem, problem.softcap is not None
    first = delta_kernel(plan, p.d_v)
    over_keys = list(key_kernels(plan, p.d, p.d_v, softcap, limits))
    over_queries = query_kernel(plan, p.d, p.d_v, softcap, limits)
    check_backward(plan, [*over_keys, over_queries], limits)
    grids = [(first, p.heads * pitch_of(p.n_q), 1)]
    grids += [(found, p.n_k, p.heads // p.group) for found in over_keys]
    grids += [(over_queries, p.n_q, p.heads)]
    launches = [
        Launch(found.instantiation, -(-rows // found.rows) * heads, THREADS, found.shared)
        for found, rows, heads in grids
    ]
    fields = gradient_fields(p, plan)
    return tuple(launches), tail_of(DELTA_PARAMS, fields), tail_of(GRADIENT_PARAMS, fields)


def pitch_of(n_q: int) -> int:
    """Rows of a head in the two workspaces."""
    return -(-n_q // PITCH) * PITCH


def gradient_fields(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Fields of DeltaParams and GradientParams that name no array."""
    machine = machine_of(plan)
    fields = common_fields(problem, plan)
    return fields | {
        "tile_n": plan.backward.tile_n,
        "descending": plan.backward.dq_order == "descending",
        "scale": gradient_scale(machine, problem, constants(machine, problem)),
        "pitch": pitch_of(problem.n_q),
        "batch": problem.heads // fields["heads"],
        "n_q": problem.n_q,
    }


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
