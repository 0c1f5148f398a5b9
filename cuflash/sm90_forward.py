"""The forward of half formats on cuda/sm90: Hopper."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import multiprocessors
from cuflash.counters import counter
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.planner import HOPPER, tile_of
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import (
    BAND,
    HALVES,
    STRIDES,
    arithmetic,
    check_plan,
    common_fields,
    flag,
)
from cuflash.tensor_map import BYTES as MAP_BYTES
from cuflash.tensor_map import tensor_maps
from emulation.plan import Numerics, Plan
from emulation.problem import Problem

TARGET = "sm_90a"
#: Dynamic shared memory that a block of Hopper may have.
SHARED_BYTES = 227 * 1024
#: Head dimensions that the kernel knows; others are filled up with zeros, which change no bit.
WIDTHS = (64, 96, 128, 192, 256)
#: Heads are walked side by side as long as their K and V fit into this much of the L2 cache.
L2_BYTES = 32 * 2**20

MAPS = ("q", "k", "v", "out", "rest")
DIVISOR = [("multiplier", np.uint32), ("shift", np.uint32)]
#: cuflash::sm90::Order.
ORDER_COUNTS = ("works", "blocks", "first_block", "next_block", "whole_sets", "set", "last")
ORDER = [(name, np.int32) for name in (*ORDER_COUNTS, "in_batch", "shift")]
ORDER_BY = ("by_set", "by_head", "by_last", "by_batch", "by_group")
#: The parameters behind the tensor maps.
FIELDS = np.dtype(
    [(name, np.uint64) for name in ("v", "out", "rest", "lse", "counter")]
    + [(f"{name}_strides", STRIDES) for name in ("v", "out", "rest")]
    + [("band", BAND)]
    + ORDER
    + [(name, DIVISOR) for name in ORDER_BY]
    + [(name, np.int32) for name in ("d_v", "masked")]
    + [(name, np.float32) for name in ("c", "cap", "stale_limit")],
    align=True,
)
#: A struct that holds tensor maps is a multiple of their alignment.
PARAMS = np.dtype(
    [
        ("maps", np.void, len(MAPS) * MAP_BYTES),
        ("fields", FIELDS),
        ("end", np.void, -FIELDS.itemsize % 64),
    ]
)


@dataclass(frozen=True)
class Schedule:
    """What changes no bit: sm90::Schedule in cuda/sm90/forward.cu."""

    warpgroups: int
    cluster: int
    stages: int
    q_stages: int
    ping_pong: bool
    early: bool
    joined: bool = True
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


def is_staged(d_v: int) -> bool:
    """Whether O in halves leaves through shared memory: sm90::Shape."""
    return width_of(d_v) <= 128


def shared_bytes(plan: Plan, d: int, d_v: int, schedule: Schedule) -> int:
    """Dynamic shared memory: sm90::Layout."""
    k, v = panels(width_of(d)), panels(width_of(d_v))
    q_slots = schedule.q_stages * schedule.warpgroups
    tiles = 128 * (q_slots * 64 * k + schedule.stages * plan.tile_n * (k + v))
    ones = 2048 if plan.numerics.row_sum == "rounded" else 0
    out = 2 * 64 * 128 * schedule.warpgroups if is_staged(d_v) else 0
    return tiles + out + ones + 8 * (5 * schedule.stages + 2 * q_slots + 5) + 4 * schedule.stages


def schedule_of(d: int, d_v: int, softcap: bool) -> Schedule:
    """The schedule for these head dimensions.

    Registers hold three warpgroups' S, P and O only where O is narrow, and not beside the
    arithmetic of softcap. At 64 columns they take turns at the tensor cores; wider ones are faster
    without, and at 128 if they ask early whether the next tiles are there. Clusters of two CTAs,
    which share every tile of K and V, and a third stage were nowhere faster (bench/NOTES.md).
    """
    width = max(width_of(d), width_of(d_v))
    return Schedule(
        warpgroups=3 if width == 64 and not softcap else 2,
        cluster=1,
        stages=2,
        q_stages=2 if 64 < width < 192 else 1,
        ping_pong=width == 64,
        early=64 < width < 192,
    )


def is_masked(problem: Problem) -> bool:
    """Whether a mask hides keys that exist."""
    return bool(problem.causal) or problem.window not in (None, (None, None))


def divisor(d: int) -> tuple[int, int]:
    """Multiplier and shift by which the kernel divides by d: sm90::Divisor.

    >>> multiplier, shift = divisor(7)
    >>> [n * multiplier >> shift for n in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def forward_instantiation(
    plan: Plan, d: int, d_v: int, softcap: bool, schedule: Schedule
) -> Instantiation:
    """The kernel of a Plan for these head dimensions."""
    ones = schedule.ones if plan.numerics.row_sum == "rounded" else "kNone"
    sizes = f"{width_of(d)},{width_of(d_v)},{plan.tile_n}"
    parts = (
        f"cuflash::sm90::Shape<cuflash::{HALVES[plan.format]},{sizes}>",
        f"cuflash::sm90::Schedule<{schedule.warpgroups},{schedule.cluster},{schedule.stages},"
        f"{schedule.q_stages},{flag(schedule.ping_pong)},{flag(schedule.early)},"
        f"{flag(schedule.joined)},cuflash::sm90::Ones::{ones}>",
        arithmetic(plan),
        flag(softcap),
        flag(plan.numerics.out == "float32"),
    )
    return Instantiation("sm90/forward.cu", f"cuflash::sm90::forward<{','.join(parts)}>")


def order_of(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """sm90::Order: blocks of rows of all heads, which CTAs take as they become free.

    Under a causal mask the late blocks come first, which are the heavy ones, and the first block
    may lack rows; else the last one may, and comes last. Under a mask heads are walked in sets that
    share the L2 cache, their heavy blocks side by side; else one after the other.
    """
    heads, in_batch = problem.heads, problem.lead[-1] if problem.lead else 1
    rows = schedule.block_m * schedule.cluster
    blocks = -(-problem.n_q // rows)
    late = bool(problem.causal)
    together = 1
    if is_masked(problem):
        of_head = 2 * problem.n_k * (problem.d + problem.d_v)
        together = min(max(1, L2_BYTES // of_head) * problem.group, heads)
    whole, last = divmod(heads, together)
    return {
        "works": blocks * heads,
        "blocks": blocks,
        "first_block": blocks - 1 if late else 0,
        "next_block": -1 if late else 1,
        "whole_sets": whole,
        "set": together,
        "last": last,
        "in_batch": in_batch,
        "shift": blocks * rows - -(-problem.n_q // 64) * 64 if late else 0,
        "by_set": divisor(together * blocks),
        "by_head": divisor(together),
        "by_last": divisor(max(1, last)),
        "by_batch": divisor(in_batch),
        "by_group": divisor(problem.group),
    }


@functools.lru_cache(maxsize=256)
def _prepared(
    problem: Problem, plan: Plan, schedule: Schedule | None, device: int
) -> tuple[Launch, tuple[int, ...], tuple[Any, ...]]:
    """What a forward needs beside its arrays: the launch, rows of the boxes of the tensor maps, and
    the tail of its struct.
    """
    check_plan(plan, kernels="sm90")
    for name, allowed in HOPPER.items():
        if getattr(plan.numerics, name) not in allowed:
            raise ValueError(
                f"plan.numerics.{name}: got {getattr(plan.numerics, name)!r}, must be one of "
                f"{', '.join(map(repr, allowed))} on the sm90 kernels"
            )
    d, d_v, softcap = problem.d, problem.d_v, problem.softcap is not None
    s = schedule_of(d, d_v, softcap) if schedule is None else schedule
    order = order_of(problem, s)
    clusters = min(order["works"], multiprocessors(device) // s.cluster)
    launch = Launch(
        forward_instantiation(plan, d, d_v, softcap, s),
        grid=clusters * s.cluster,
        threads=s.threads,
        shared=shared_bytes(plan, d, d_v, s),
    )
    fields = common_fields(problem, plan) | order
    fields |= {"masked": is_masked(problem), "stale_limit": 2.0**plan.stale_limit}
    keys = plan.tile_n // s.cluster
    return launch, (64, keys, keys, 16, 16), tail_of(FIELDS, fields)


def forward(
    problem: GpuProblem,
    plan: Plan,
    out: Any,
    lse: Any,
    rest: Any | None,
    schedule: Schedule | None = None,
) -> None:
    """See `launch.Launcher.forward`."""
    p = problem
    launch, rows, tail = _prepared(p.shapes, plan, schedule, p.device)
    staged = plan.numerics.out == "input" and is_staged(p.d_v)
    mapped = (p.q, p.k, p.v, out if staged else None, rest if staged else None)
    maps = tensor_maps(mapped, plan.format, rows)
    handed_out = counter(p.device)
    fields = packed(FIELDS, (p.v, out, rest), (lse, handed_out), tail)
    params = bytearray(PARAMS.itemsize)
    params[: len(maps)] = maps
    params[len(maps) : len(maps) + FIELDS.itemsize] = fields.tobytes()
    touched = (p.q, p.k, p.v, out, rest, lse, handed_out)
    run((launch,), (np.frombuffer(params, PARAMS),), p.device, touched)


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with the default Plan and the row sums apart."""
    for fmt in ("bfloat16", "float16"):
        for width in WIDTHS:
            for row_sum in ("rounded", "unrounded"):
                numerics = Numerics(row_sum=row_sum)
                plan = Plan(numerics=numerics, format=fmt, tile_n=tile_of("sm90", width))
                schedule = schedule_of(width, width, False)
                yield forward_instantiation(plan, width, width, False, schedule)
