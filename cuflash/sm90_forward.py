"""The forward of half formats on cuda/sm90: Hopper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import compile_kernel, cupy, load
from cuflash.launch import Instantiation
from cuflash.planner import HOPPER, tile_of
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import (
    BAND,
    HALVES,
    STRIDES,
    arithmetic,
    band_of,
    check_plan,
    flag,
    strides_of,
)
from cuflash.tensor_map import BYTES as MAP_BYTES
from cuflash.tensor_map import tensor_map
from emulation.flash import constants, machine_of
from emulation.plan import Numerics, Plan

TARGET = "sm_90a"
#: Dynamic shared memory that a block of Hopper may have.
SHARED_BYTES = 227 * 1024
#: Head dimensions that the kernel knows; others are filled up with zeros, which change no bit.
WIDTHS = (64, 96, 128, 192, 256)
#: Heads are walked side by side as long as their K and V fit into this much of the L2 cache.
L2_BYTES = 32 * 2**20
MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount

MAPS = ("q", "k", "v", "out")
FIELDS: list[tuple[Any, ...]] = (
    [("maps", np.uint8, (len(MAPS), MAP_BYTES))]
    + [(name, np.uint64) for name in ("v", "out", "rest", "lse", "counter")]
    + [(f"{name}_strides", STRIDES) for name in ("v", "out", "rest")]
    + [("band", BAND)]
    + [(name, np.int32) for name in ("heads", "group", "d_v")]
    + [(name, np.int32) for name in ("works", "heads_together", "masked")]
    + [(name, np.float32) for name in ("c", "cap", "stale_limit")]
)
#: A struct that holds tensor maps is a multiple of their alignment.
PARAMS = np.dtype([*FIELDS, ("end", np.uint8, (-np.dtype(FIELDS, align=True).itemsize % 64,))])


@dataclass(frozen=True)
class Schedule:
    """What changes no bit: sm90::Schedule in cuda/sm90/forward.cu."""

    warpgroups: int
    cluster: int
    stages: int
    q_stages: int
    dynamic: bool
    ping_pong: bool
    ones: str = "kApart"

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.warpgroups + 1)


def width_of(d: int) -> int:
    """A head dimension as the kernel holds it."""
    return next(width for width in WIDTHS if d <= width)


def panels(width: int) -> int:
    """Panels of 64 columns."""
    return -(-width // 64)


def shared_bytes(plan: Plan, d: int, d_v: int, schedule: Schedule) -> int:
    """Dynamic shared memory: sm90::Layout."""
    k, v = panels(width_of(d)), panels(width_of(d_v))
    q_slots = schedule.q_stages * schedule.warpgroups
    tiles = 128 * (q_slots * 64 * max(k, v) + schedule.stages * plan.tile_n * (k + v))
    ones = 2048 if plan.numerics.row_sum == "rounded" else 0
    return tiles + ones + 8 * (5 * schedule.stages + 2 * q_slots + 5) + 4 * schedule.stages


def schedule_of(problem: GpuProblem, plan: Plan) -> Schedule:
    """The schedule for a problem.

    Two CTAs of a cluster share every tile of K and V, which saves power where there is much to
    share. Under a mask work is handed out as CTAs become free.
    """
    width = max(width_of(problem.d), width_of(problem.d_v))
    masked = is_masked(problem)
    warpgroups = 3 if width == 64 else 2
    share = width > 64 and problem.n_q > (2048 if masked else 512)
    schedule = Schedule(
        warpgroups=warpgroups,
        cluster=2 if share else 1,
        stages=2,
        q_stages=2,
        dynamic=masked,
        ping_pong=width < 192,
    )
    if shared_bytes(plan, problem.d, problem.d_v, schedule) > SHARED_BYTES:
        schedule = dataclasses.replace(schedule, q_stages=1)
    return schedule


def is_masked(problem: GpuProblem) -> bool:
    """Whether a mask hides keys that exist."""
    return bool(problem.causal) or problem.window not in (None, (None, None))


def forward_instantiation(
    plan: Plan, d: int, d_v: int, softcap: bool, schedule: Schedule
) -> Instantiation:
    """The kernel of a Plan for these head dimensions."""
    ones = schedule.ones if plan.numerics.row_sum == "rounded" else "kNone"
    sizes = f"{width_of(d)},{width_of(d_v)},{plan.tile_n}"
    parts = (
        f"cuflash::sm90::Shape<cuflash::{HALVES[plan.format]},{sizes}>",
        f"cuflash::sm90::Schedule<{schedule.warpgroups},{schedule.cluster},{schedule.stages},"
        f"{schedule.q_stages},{flag(schedule.dynamic)},{flag(schedule.ping_pong)},"
        f"cuflash::sm90::Ones::{ones}>",
        arithmetic(plan),
        flag(softcap),
        flag(plan.numerics.out == "float32"),
    )
    return Instantiation("sm90/forward.cu", f"cuflash::sm90::forward<{','.join(parts)}>")


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a device."""
    return int(cupy().cuda.runtime.deviceGetAttribute(MULTIPROCESSORS, device))


def forward(
    problem: GpuProblem,
    plan: Plan,
    out: Any,
    lse: Any,
    rest: Any | None,
    schedule: Schedule | None = None,
) -> None:
    """See `launch.Launcher.forward`."""
    check_plan(plan, kernels="sm90")
    for name, allowed in HOPPER.items():
        if getattr(plan.numerics, name) not in allowed:
            raise ValueError(
                f"plan.numerics.{name}: got {getattr(plan.numerics, name)!r}, must be one of "
                f"{', '.join(map(repr, allowed))} on the sm90 kernels"
            )
    p = problem
    s = schedule_of(p, plan) if schedule is None else schedule
    instantiation = forward_instantiation(plan, p.d, p.d_v, p.softcap is not None, s)
    kernel = load(compile_kernel(*instantiation[:2], TARGET, instantiation.options))
    shared = shared_bytes(plan, p.d, p.d_v, s)
    kernel.max_dynamic_shared_size_bytes = shared

    const = constants(machine_of(plan), p.shapes)
    params = np.zeros(1, PARAMS)
    rows = {"q": 64, "k": plan.tile_n // s.cluster, "v": plan.tile_n // s.cluster, "out": 64}
    for i, (name, x) in enumerate(zip(MAPS, (p.q, p.k, p.v, out), strict=True)):
        if name != "out" or plan.numerics.out == "input":
            params["maps"][0, i] = tensor_map(x, plan.format, rows[name])
    for name, x in {"v": p.v, "out": out, "rest": rest}.items():
        params[name] = 0 if x is None else x.data.ptr
        params[f"{name}_strides"] = strides_of(x)
    works = -(-p.n_q // (s.block_m * s.cluster)) * p.batch * p.heads
    counter = cupy().zeros(1, np.uint32) if s.dynamic else None
    params["counter"] = 0 if counter is None else counter.data.ptr
    params["lse"] = lse.data.ptr
    params["band"] = band_of(p)
    params["heads"], params["group"], params["d_v"] = p.heads, p.group, p.d_v
    params["works"], params["masked"] = works, is_masked(p)
    if s.dynamic:
        bytes_of_head = 2 * p.n_k * (p.d + p.d_v)
        together = max(1, L2_BYTES // bytes_of_head) * p.group
        params["heads_together"] = min(together, p.batch * p.heads)
    else:
        params["heads_together"] = 1
    params["c"] = const.c
    params["cap"] = 0 if const.softcap is None else const.softcap
    params["stale_limit"] = 2.0**plan.stale_limit
    clusters = min(works, multiprocessors(p.device) // s.cluster)
    kernel((clusters * s.cluster,), (s.threads,), (params,), shared_mem=shared)


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with the default Plan and the row sums apart."""
    for fmt in ("bfloat16", "float16"):
        for width in WIDTHS:
            for row_sum in ("rounded", "unrounded"):
                for masked in (False, True):
                    plan = Plan(
                        numerics=Numerics(row_sum=row_sum),
                        format=fmt,
                        tile_n=tile_of("sm90", width),
                    )
                    schedule = Schedule(3 if width == 64 else 2, 1, 2, 1, masked, width < 192)
                    yield forward_instantiation(plan, width, width, False, schedule)
