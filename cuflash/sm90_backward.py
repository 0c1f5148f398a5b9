"""Launches the Hopper backward: delta (cuda/sm80), then the gradients in one pass with dQ as fp32
sums that tiles of keys add in the Plan's order, and the conversion of those sums (cuda/sm90).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import cupy, multiprocessors
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.planner import runs_hopper_backward
from cuflash.problem import GpuProblem
from cuflash.sm80_backward import (
    DELTA_PARAMS,
    centered_words,
    check_orders,
    delta_launch,
    gradient_fields,
    pitch_of,
    tail,
)
from cuflash.sm80_forward import BAND, HALVES, STRIDES, check_plan, flag
from cuflash.sm90_forward import is_masked, panels, width_of
from cuflash.tensor_map import BYTES as MAP_BYTES
from cuflash.tensor_map import tensor_maps
from emulation.center import is_centered
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Problem

MAPS = ("q", "k", "v", "dout", "dk", "dv")
STRIDED = ("q", "k", "dout", "dq", "dk", "dv")
COUNTS = ("heads", "group", "d", "d_v", "pitch", "descending", "masked", "interleave", "pieces")
WORKSPACES = ("lse2", "delta", "sums", "turns", "tickets", "row_sums", "dlse", "centered")
#: The parameters of the gradient kernels behind the tensor maps: sm90::BackwardParams.
FIELDS = np.dtype(
    [(name, np.uint64) for name in (*STRIDED, *WORKSPACES)]
    + [(f"{name}_strides", STRIDES) for name in STRIDED]
    + [("band", BAND)]
    + [(name, np.int32) for name in COUNTS]
    + [(name, np.float32) for name in ("c", "cap", "scale")]
    + [("center", np.int32)],
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
#: Of the gradient kernels: two warpgroups of consumers, and one that loads and adds.
GRADIENT_THREADS = 384
#: Parts of the sums of one conversion: kConvertParts.
CONVERT_PARTS = 24
#: Bytes of Q, dO and the sums of dQ that tiles of keys come back to: of the L2 cache, which has 50
#: MB, what stays there beside the rest.
RESIDENT_BYTES = 32 * 2**20
#: Key heads side by side at most. At N = 1k, where 16 have about a tile of keys for each
#: multiprocessor, 32 were 2 to 3 % slower.
MOST_HEADS = 16
#: Head dimensions that are compiled as a check.
INSTANCES = (
    *((64, 64), (96, 96), (128, 128), (64, 128), (128, 64)),
    *((192, 128), (192, 192), (256, 256), (64, 256), (256, 64)),
)


@dataclass(frozen=True)
class Shape:
    """What changes no bit. rows: queries of a step, 64 for wide heads."""

    rows: int


def is_wide(d: int, d_v: int) -> bool:
    """Whether cuda/sm90/backward_wide.cu runs these head dimensions."""
    return max(d, d_v) > 128


def shape_of(d: int, d_v: int, softcap: bool) -> Shape:
    """The shape for these head dimensions: as many rows as registers hold S and dP of, beside dK,
    dV and the slope of a softcap.
    """
    if is_wide(d, d_v):
        return Shape(rows=64)
    narrow = max(width_of(d), width_of(d_v)) == 64
    if softcap:
        return Shape(rows=64 if narrow or width_of(d) == 64 else 32)
    return Shape(rows=128 if narrow else 64)


def part_rows(d: int, shape: Shape) -> int:
    """Queries of one part of the sums: 64 columns by these."""
    return shape.rows // 2 if panels(width_of(d)) == 1 else shape.rows


def parts_of(d: int) -> int:
    """Parts of a block of rows."""
    return max(2, panels(width_of(d)))


def shared_bytes(plan: Plan, d: int, d_v: int, shape: Shape) -> int:
    """Dynamic shared memory: the end of sm90::BackwardShape or WideShape."""
    keys, k, v = plan.backward.tile_n, panels(width_of(d)), panels(width_of(d_v))
    if is_wide(d, d_v):
        tiles = 128 * (keys + 2 * shape.rows) * (k + v) + 6 * shape.rows * keys
        return tiles + 16 * shape.rows + 28 * 8 + 2 * 40  # barriers and words, two tiles' records
    tiles = 128 * (keys + 2 * shape.rows) * (k + v) + 4 * shape.rows * keys
    sums = 2 * parts_of(d) * part_rows(d, shape) * 64 * 4
    # LSE, delta and sums of rows; ones; barriers, tiles of two rounds, what K holds, marks.
    return tiles + sums + 20 * shape.rows + 128 + 8 * 23 + 2 * 40 + 8 + 8 * 12


def backward_instantiation(
    plan: Plan, d: int, d_v: int, softcap: bool, shape: Shape
) -> Instantiation:
    """The gradient kernel of a Plan for these head dimensions."""
    sizes = f"cuflash::{HALVES[plan.format]},{width_of(d)},{width_of(d_v)}"
    flags = f"{flag(softcap)},{tail(plan, softcap)}"
    if is_wide(d, d_v):
        wide = f"cuflash::sm90::WideShape<{sizes}>"
        return Instantiation(
            "sm90/backward_wide.cu", f"cuflash::sm90::backward_wide<{wide},{flags}>"
        )
    tiles = f"cuflash::sm90::BackwardShape<{sizes},{shape.rows}>"
    return Instantiation("sm90/backward.cu", f"cuflash::sm90::backward<{tiles},{flags}>")


def interleaved_heads(p: Problem, tiles: int, processors: int) -> int:
    """How many key heads to work on at a time: enough for two tiles of keys a multiprocessor, so
    that tiles of one head, which wait for each other at its first rows, start one after the other;
    but only as many as stay in the L2 cache, and not more than MOST_HEADS.
    """
    bytes_of_head = p.group * p.n_q * (2 * (p.d + p.d_v) + 4 * p.d)
    wanted = min(2 * processors // tiles, RESIDENT_BYTES // bytes_of_head)
    return max(1, min(wanted, MOST_HEADS))


@dataclass(frozen=True)
class _Prepared:
    """What a backward needs beside its arrays: launches, the tails of their structs, rows of the
    boxes of the tensor maps, elements of the sums of dQ and of those of rows of dS, and blocks of
    rows of all heads.
    """

    launches: tuple[Launch, ...]
    tails: tuple[tuple[Any, ...], ...]
    boxes: tuple[int, ...]
    sums: int
    row_sums: int
    blocks: int


@functools.lru_cache(maxsize=256)
def _prepared(p: Problem, plan: Plan, shape: Shape | None, processors: int) -> _Prepared:
    check_plan(plan, kernels="sm90")
    check_orders(plan, "sm90")
    softcap, keys = p.softcap is not None, plan.backward.tile_n
    if not runs_hopper_backward(p, plan):
        raise ValueError(
            f"plan: {plan.numerics}, {plan.backward} with head dimensions {p.d} and {p.d_v}, must "
            "be what planner.runs_hopper_backward says"
        )
    s = shape_of(p.d, p.d_v, softcap) if shape is None else shape
    parts, tiles = parts_of(p.d), -(-p.n_k // keys)
    pieces, blocks = tiles * (p.heads // p.group), p.heads * -(-p.n_q // s.rows)
    conversions = -(-blocks // (CONVERT_PARTS // parts))
    # A CTA fills the registers of a multiprocessor and goes from tile to tile until none is left:
    # at most `processors` ever get one, and those that start later convert.
    ctas = min(pieces, processors) + min(conversions, processors)
    fields = gradient_fields(p, plan) | {
        "masked": is_masked(p),
        "interleave": interleaved_heads(p, tiles, processors),
        "pieces": pieces,
    }
    launches = (
        delta_launch(p, plan),
        Launch(
            backward_instantiation(plan, p.d, p.d_v, softcap, s),
            ctas,
            GRADIENT_THREADS,
            shared_bytes(plan, p.d, p.d_v, s),
        ),
    )
    return _Prepared(
        launches=launches,
        tails=tuple(tail_of(x, fields) for x in (DELTA_PARAMS, FIELDS)),
        boxes=(s.rows, keys, keys, s.rows, 64, 64),
        sums=blocks * parts * part_rows(p.d, s) * 64,
        row_sums=blocks * s.rows if is_centered(plan, softcap) else 0,
        blocks=blocks,
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
    shape: Shape | None = None,
) -> None:
    """See `launch.Launcher.backward`."""
    cp, p = cupy(), problem
    found = _prepared(p.shapes, plan, shape, multiprocessors(p.device))
    lse2, delta = cp.empty((2, p.batch * p.heads, pitch_of(p.n_q)), np.float32)
    sums = cp.empty(found.sums, np.float32)
    row_sums = cp.empty(found.row_sums, np.float32) if found.row_sums else None
    counts = cp.zeros(found.blocks + 2, np.int32)
    halves = plan.numerics.out == "input"
    mapped = (p.q, p.k, p.v, dout, dk if halves else None, dv if halves else None)
    maps = tensor_maps(mapped, plan.format, found.boxes)
    centered = cp.empty(centered_words(p.shapes), np.uint32) if found.row_sums else None
    plain = (lse, dlse, lse2, delta, centered)
    ones = packed(DELTA_PARAMS, (dout, out, rest, p.k), plain, found.tails[0])
    work = (lse2, delta, sums, counts, counts[-2:], row_sums, dlse, centered)
    fields = packed(FIELDS, (p.q, p.k, dout, dq, dk, dv), work, found.tails[1])
    params = bytearray(PARAMS.itemsize)
    params[: len(maps)] = maps
    params[len(maps) : len(maps) + FIELDS.itemsize] = fields.tobytes()
    touched = (p.q, p.k, p.v, dout, out, rest, lse, dq, dk, dv, *work)
    run(found.launches, (ones, np.frombuffer(params, PARAMS)), p.device, touched)


def backward_launches(problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
    """See `launch.Launcher.backward_launches`."""
    return _prepared(problem, plan, None, multiprocessors(device)).launches


def instantiations() -> Iterable[Instantiation]:
    """A representative list: head dimensions, softcap, float32 gradients and centred dQ."""
    for fmt in ("bfloat16", "float16"):
        for d, d_v in INSTANCES:
            for softcap, center in ((False, 0), (False, 32), (True, 0)):
                for out in ("input", "float32"):
                    tiles = BackwardPlan(tile_n=64 if is_wide(d, d_v) else 128, center=center)
                    numerics = Numerics.of({"out": out})
                    plan = Plan(numerics=numerics, format=fmt, backward=tiles)
                    shape = shape_of(d, d_v, softcap)
                    yield backward_instantiation(plan, d, d_v, softcap, shape)
