"""Launches the Hopper backward: delta (cuda/sm80), the gradients in one pass with dQ as fp32 sums
that tiles of keys add in the Plan's order, and the conversion of those sums (cuda/sm90).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import cupy, multiprocessors
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.planner import runs_hopper_backward
from cuflash.problem import GpuProblem
from cuflash.sm80_backward import (
    DELTA_PARAMS,
    Limits,
    delta_kernel,
    gradient_fields,
    interleaved_heads,
    pitch_of,
)
from cuflash.sm80_forward import BAND, HALVES, STRIDES, THREADS, check_plan, flag
from cuflash.sm90_forward import is_masked, panels, width_of
from cuflash.tensor_map import BYTES as MAP_BYTES
from cuflash.tensor_map import tensor_map
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Problem

MAPS = ("q", "k", "v", "dout", "dk", "dv")
STRIDED = ("q", "k", "dout", "dk", "dv")
COUNTS = ("heads", "group", "d", "d_v", "pitch", "descending", "masked", "interleave")
#: The parameters of the gradient kernels behind the tensor maps: sm90::BackwardParams.
FIELDS = np.dtype(
    [(name, np.uint64) for name in (*STRIDED, "lse2", "delta", "sums", "turns", "tickets")]
    + [(f"{name}_strides", STRIDES) for name in STRIDED]
    + [("band", BAND)]
    + [(name, np.int32) for name in COUNTS]
    + [(name, np.float32) for name in ("c", "cap", "scale")],
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
#: sm90::ConvertParams.
CONVERT_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("dq", "sums", "turns")]
    + [("dq_strides", STRIDES)]
    + [(name, np.int32) for name in ("heads", "blocks", "parts", "block_m", "n_q", "d")]
    + [("scale", np.float32)],
    align=True,
)
#: Of the gradient kernels: two warpgroups of consumers, and one that loads and stores.
GRADIENT_THREADS = 384
CONVERT_THREADS = 128
#: Head dimensions that are compiled as a check.
INSTANCES = (
    *((64, 64), (96, 96), (128, 128), (64, 128), (128, 64)),
    *((192, 128), (192, 192), (256, 256), (64, 256), (256, 64)),
)


@dataclass(frozen=True)
class Shape:
    """What changes no bit. rows: queries of a step. early (cuda/sm90/backward.cu): dV is issued
    before dS is made, and S of the next step behind dK and dQ.
    """

    rows: int
    early: bool = True


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
    return Shape(rows=128, early=False) if narrow else Shape(rows=64)


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
        return (
            128 * (keys + 2 * shape.rows) * (k + v) + 8 * shape.rows * keys + 16 * shape.rows + 176
        )
    tiles = 128 * (keys + 2 * shape.rows) * (k + v) + 4 * shape.rows * keys
    sums = 2 * parts_of(d) * part_rows(d, shape) * 64 * 4
    return tiles + sums + 16 * shape.rows + 8 * 17 + 16


def backward_instantiation(
    plan: Plan, d: int, d_v: int, softcap: bool, shape: Shape
) -> Instantiation:
    """The gradient kernel of a Plan for these head dimensions."""
    sizes = f"cuflash::{HALVES[plan.format]},{width_of(d)},{width_of(d_v)}"
    flags = f"{flag(softcap)},{flag(plan.numerics.out == 'float32')}"
    if is_wide(d, d_v):
        name = f"cuflash::sm90::backward_wide<cuflash::sm90::WideShape<{sizes}>,{flags}>"
        return Instantiation("sm90/backward_wide.cu", name)
    tiles = f"cuflash::sm90::BackwardShape<{sizes},{shape.rows},{flag(shape.early)}>"
    return Instantiation("sm90/backward.cu", f"cuflash::sm90::backward<{tiles},{flags}>")


def convert_instantiation(plan: Plan, rows: int) -> Instantiation:
    """dQ out of its sums, in parts of so many queries."""
    out = flag(plan.numerics.out == "float32")
    name = f"cuflash::sm90::convert<cuflash::{HALVES[plan.format]},{rows},{out}>"
    return Instantiation("sm90/backward_convert.cu", name)


@dataclass(frozen=True)
class _Prepared:
    """What a backward needs beside its arrays: launches, the tails of their structs, rows of the
    boxes of the tensor maps, elements of the sums of dQ, and blocks of rows of all heads.
    """

    launches: tuple[Launch, Launch, Launch]
    tails: tuple[tuple[Any, ...], ...]
    boxes: tuple[int, ...]
    sums: int
    blocks: int


@functools.lru_cache(maxsize=256)
def _prepared(p: Problem, plan: Plan, shape: Shape | None, processors: int) -> _Prepared:
    check_plan(plan, kernels="sm90")
    softcap, keys = p.softcap is not None, plan.backward.tile_n
    if not runs_hopper_backward(p, plan):
        raise ValueError(
            f"plan: {plan.numerics}, {plan.backward} with head dimensions {p.d} and {p.d_v}, must "
            "be what planner.runs_hopper_backward says"
        )
    s = shape_of(p.d, p.d_v, softcap) if shape is None else shape
    parts, part = parts_of(p.d), part_rows(p.d, s)
    of_head, tiles = -(-p.n_q // s.rows), -(-p.n_k // keys)
    fields = gradient_fields(p, plan) | {
        "masked": is_masked(p),
        "interleave": interleaved_heads(tiles, Limits(multiprocessors=processors)),
        "blocks": of_head,
        "parts": parts,
        "block_m": s.rows,
    }
    ones = delta_kernel(plan, p.d_v)
    blocks = p.heads * of_head
    launches = (
        Launch(ones.instantiation, -(-p.heads * pitch_of(p.n_q) // ones.rows), THREADS),
        Launch(
            backward_instantiation(plan, p.d, p.d_v, softcap, s),
            tiles * (p.heads // p.group),
            GRADIENT_THREADS,
            shared_bytes(plan, p.d, p.d_v, s),
        ),
        Launch(convert_instantiation(plan, part), blocks * parts, CONVERT_THREADS),
    )
    return _Prepared(
        launches=launches,
        tails=tuple(tail_of(x, fields) for x in (DELTA_PARAMS, FIELDS, CONVERT_PARAMS)),
        boxes=(s.rows, keys, keys, s.rows, 64, 64),
        sums=blocks * parts * part * 64,
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
    counts = cp.zeros(found.blocks + 1, np.int32)
    halves = plan.numerics.out == "input"
    mapped = (p.q, p.k, p.v, dout, dk if halves else None, dv if halves else None)
    maps = b"".join(
        bytes(MAP_BYTES) if x is None else tensor_map(x, plan.format, n)
        for x, n in zip(mapped, found.boxes, strict=True)
    )
    ones = packed(DELTA_PARAMS, (dout, out, rest), (lse, dlse, lse2, delta), found.tails[0])
    work = (lse2, delta, sums, counts, counts[-1:])
    fields = packed(FIELDS, (p.q, p.k, dout, dk, dv), work, found.tails[1])
    params = bytearray(PARAMS.itemsize)
    params[: len(maps)] = maps
    params[len(maps) : len(maps) + FIELDS.itemsize] = fields.tobytes()
    last = packed(CONVERT_PARAMS, (dq,), (sums, counts), found.tails[2])
    touched = (p.q, p.k, p.v, dout, dlse, out, rest, lse, dq, dk, dv, *work)
    run(found.launches, (ones, np.frombuffer(params, PARAMS), last), p.device, touched)


def instantiations() -> Iterable[Instantiation]:
    """A representative list: head dimensions, softcap and float32 gradients."""
    for fmt in ("bfloat16", "float16"):
        for d, d_v in INSTANCES:
            for softcap in (False, True):
                for out in ("input", "float32"):
                    tiles = BackwardPlan(tile_n=64 if is_wide(d, d_v) else 128)
                    numerics = Numerics.of({"out": out})
                    plan = Plan(numerics=numerics, format=fmt, backward=tiles)
                    shape = shape_of(d, d_v, softcap)
                    yield backward_instantiation(plan, d, d_v, softcap, shape)
                    yield convert_instantiation(plan, part_rows(d, shape))
