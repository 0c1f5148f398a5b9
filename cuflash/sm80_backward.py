"""Launches the backward kernels of cuda/sm80: delta, then the three gradients in one pass. Tiles of
keys add to dQ in the Plan's order, so that no bit is left to the scheduler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import cupy, multiprocessors, shared_memory
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import (
    BAND,
    HALVES,
    STRIDES,
    THREADS,
    arithmetic,
    band_of,
    check_plan,
    common_fields,
    flag,
)
from emulation.backward import gradient_scale
from emulation.center import is_centered
from emulation.plan import BackwardPlan, Plan
from emulation.problem import Problem
from emulation.tiled import constants, machine_of

DELTA_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("dout", "out", "rest", "k")]
    + [(name, np.uint64) for name in ("lse", "dlse", "lse2", "delta", "centered")]
    + [(f"{name}_strides", STRIDES) for name in ("dout", "out", "rest", "k")]
    + [("band", BAND)]
    + [(name, np.int32) for name in ("batch", "heads", "n_q", "d_v", "pitch")]
    + [(name, np.int32) for name in ("kv_heads", "d", "center", "words", "rule_ctas")],
    align=True,
)
TENSORS = ("q", "k", "v", "dout", "dq", "dk", "dv")


def gradient_params(workspaces: Sequence[str], *more: str) -> np.dtype[Any]:
    """The struct of a gradient kernel with these workspaces; `more` are integers at its end."""
    counts = ("heads", "group", "d", "d_v", "pitch", "tile_n", "descending")
    return np.dtype(
        [(name, np.uint64) for name in (*TENSORS, *workspaces)]
        + [(f"{name}_strides", STRIDES) for name in TENSORS]
        + [("band", BAND)]
        + [(name, np.int32) for name in counts]
        + [(name, np.float32) for name in ("c", "cap", "scale")]
        + [(name, np.int32) for name in more],
        align=True,
    )


WORKSPACES = ("lse2", "delta", "sums", "turns", "tickets", "row_sums", "dlse", "centered")
GRADIENT_PARAMS = gradient_params(WORKSPACES, "interleave", "center")

#: The fields of a BackwardPlan that all kernels fix, and how.
FIXED_BACKWARD: dict[str, Any] = {
    "queries": "ascending", "starts": 1, "accumulate": "forward", "score": "fused",
    "exponential": "exp2", "ds_p": "unrounded", "scale": "after", "delta_threads": 0,
    "delta_columns": 8, "delta_sum": "chain", "delta_join": "halves",
}  # fmt: skip
#: Rows of the two workspaces are padded to this, so that any block of rows may read them.
PITCH = 128
#: Rows for which a warp decides whether dQ is centred: kRuleRows.
RULE_ROWS = 128
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
    def of_device(number: int) -> Limits:
        """Of a device."""
        return Limits(shared_memory(number)[0], multiprocessors(number))


def tile_bytes(rows: int, width: int) -> int:
    """Of cuflash::Tile."""
    return rows * (width + 8) * 2


def backward_arithmetic(plan: Plan) -> str:
    """cuflash::Arithmetic without the choices that only the forward makes."""
    numerics = dataclasses.replace(plan.numerics, reference="row-max", row_sum="rounded")
    return arithmetic(dataclasses.replace(plan, numerics=numerics))


def tail(plan: Plan, softcap: bool) -> str:
    """The last template arguments: float32 gradients, centred dQ."""
    return f"{flag(plan.numerics.out == 'float32')},{flag(is_centered(plan, softcap))}"


def delta_chunks(d_v: int) -> int:
    """Chunks of 8 columns that delta sums as a tree: a power of two."""
    chunks = 1
    while chunks * 8 < d_v:
        chunks *= 2
    return chunks


def delta_kernel(plan: Plan, d_v: int, softcap: bool) -> Kernel:
    """delta and LSE in log2 units, and which rows of dQ are centred, if any may be."""
    chunks = delta_chunks(d_v)
    name = f"cuflash::sm80::delta<cuflash::{HALVES[plan.format]},{chunks},{tail(plan, softcap)}>"
    return Kernel(Instantiation("sm80/backward_delta.cu", name), THREADS // chunks)


def delta_launch(problem: Problem, plan: Plan) -> Launch:
    """delta of all rows."""
    kernel = delta_kernel(plan, problem.d_v, problem.softcap is not None)
    rows = problem.heads * pitch_of(problem.n_q)
    grid = rule_ctas(problem, plan) - (-rows // kernel.rows)
    return Launch(kernel.instantiation, grid, THREADS)


def rule_ctas(problem: Problem, plan: Plan) -> int:
    """CTAs of the delta kernel that decide which rows are centred, a warp for RULE_ROWS of them."""
    if not is_centered(plan, problem.softcap is not None):
        return 0
    warps = centered_words(problem) * 32 // RULE_ROWS
    return -(-warps // (THREADS // 32))


def centered_words(problem: Problem) -> int:
    """32-bit words that have a bit for each row of each key head."""
    return problem.heads // problem.group * pitch_of(problem.n_q) // 32


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
        f"{backward_arithmetic(plan)},{flag(softcap)},{tail(plan, softcap)}>"
    )
    instantiation = Instantiation("sm80/backward_gradients.cu", name)
    return Kernel(instantiation, m, shared + stages * stage, warps)


def check_orders(plan: Plan, kernels: str = "sm80") -> None:
    """ValueError for orders of the backward's sums that these kernels do not have."""
    for name, value in FIXED_BACKWARD.items():
        if (got := getattr(plan.backward, name)) != value:
            raise ValueError(
                f"plan.backward.{name}: got {got!r}, must be {value!r} on the {kernels} kernels"
            )


def check_backward(plan: Plan, kernel: Kernel, limits: Limits) -> None:
    """ValueError for a Plan whose tiles these kernels do not run on this device."""
    check_plan(plan)
    check_orders(plan)
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
    cp, p = cupy(), problem
    found = _prepared(p.shapes, plan, Limits.of_device(p.device))
    lse2, delta = cp.empty((2, p.batch * p.heads, pitch_of(p.n_q)), np.float32)
    sums = cp.empty(found.sums, np.float32)
    row_sums = cp.empty(found.row_sums, np.float32) if found.row_sums else None
    counts = cp.zeros(found.blocks + 1, np.int32)
    centered = cp.empty(centered_words(p.shapes), np.uint32) if found.row_sums else None
    ones = packed(
        DELTA_PARAMS, (dout, out, rest, p.k), (lse, dlse, lse2, delta, centered), found.delta_tail
    )
    work = (lse2, delta, sums, counts, counts[-1:], row_sums, dlse, centered)
    arrays = (p.q, p.k, p.v, dout, dq, dk, dv)
    params = packed(GRADIENT_PARAMS, arrays, work, found.tail)
    if found.unseen:
        dq.fill(0)
    touched = (*arrays, *work, out, rest, lse)
    run(found.launches, (ones, params), p.device, touched)


def backward_launches(problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
    """See `launch.Launcher.backward_launches`."""
    return _prepared(problem, plan, Limits.of_device(device)).launches


@dataclass(frozen=True)
class _Prepared:
    """What a backward needs beside its arrays: launches, the tails of both structs, elements of
    the sums of dQ and of those of rows of dS, blocks of rows of all heads, and whether some row
    sees nothing.
    """

    launches: tuple[Launch, ...]
    delta_tail: tuple[Any, ...]
    tail: tuple[Any, ...]
    sums: int
    row_sums: int
    blocks: int
    unseen: bool


@functools.lru_cache(maxsize=256)
def _prepared(problem: Problem, plan: Plan, limits: Limits) -> _Prepared:
    p = problem
    softcap = p.softcap is not None
    kernel = gradient_kernel(plan, p.d, p.d_v, softcap, limits)
    check_backward(plan, kernel, limits)
    blocks, tiles = p.heads * -(-p.n_q // kernel.rows), -(-p.n_k // plan.backward.tile_n)
    fields = gradient_fields(p, plan) | {"interleave": interleaved_heads(tiles, limits)}
    grid = tiles * (p.heads // p.group)
    return _Prepared(
        launches=(
            delta_launch(p, plan),
            Launch(kernel.instantiation, grid, kernel.warps * 32, kernel.shared),
        ),
        delta_tail=tail_of(DELTA_PARAMS, fields),
        tail=tail_of(GRADIENT_PARAMS, fields),
        sums=blocks * kernel.rows * width_of(p.d),
        row_sums=blocks * kernel.rows if is_centered(plan, softcap) else 0,
        blocks=blocks,
        unseen=some_row_sees_nothing(p),
    )


def interleaved_heads(tiles: int, limits: Limits) -> int:
    """How many heads to work on at a time: as many as keep the device busy, so that key tiles of
    one head, which wait for each other at its first rows, start one after the other.
    """
    return max(1, limits.multiprocessors // tiles)


def some_row_sees_nothing(p: Problem) -> bool:
    """Whether the first or the last row is masked from every key; if neither is, no row is."""
    n_q, n_k, diagonal, left, right = band_of(p)
    return diagonal + right < 0 or n_q - 1 + diagonal - left >= n_k


def pitch_of(n_q: int) -> int:
    """Rows of a head in the two workspaces."""
    return -(-n_q // PITCH) * PITCH


def gradient_fields(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Fields of DeltaParams and GradientParams that name no array."""
    machine = machine_of(plan)
    fields = common_fields(problem, plan)
    return fields | {
        "tile_n": plan.backward.tile_n,
        "center": plan.backward.center,
        "descending": plan.backward.dq_order == "descending",
        "scale": gradient_scale(machine, problem, constants(machine, problem, plan)),
        "pitch": pitch_of(problem.n_q),
        "kv_heads": fields["heads"] // problem.group,
        "words": centered_words(problem),
        "rule_ctas": rule_ctas(problem, plan),
        "batch": problem.heads // fields["heads"],
        "n_q": problem.n_q,
    }


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with default numerics, with centred dQ and
    without.
    """
    for fmt in ("bfloat16", "float16"):
        for d in (32, 64, 80, 96, 128, 192, 256):
            for center in (0, 32):
                tiles = BackwardPlan(tile_n=128 if d <= 128 else 64, center=center)
                plan = Plan(format=fmt, backward=tiles)
                yield delta_kernel(plan, d, False).instantiation
                yield gradient_kernel(plan, d, d, False, Limits()).instantiation
