"""Launches the float32 kernels of cuda/sm80: any GPU since Ampere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.compiler import cupy, shared_memory
from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.problem import GpuProblem
from cuflash.sm80_backward import (
    check_orders,
    delta_chunks,
    gradient_fields,
    gradient_params,
    pitch_of,
)
from cuflash.sm80_forward import (
    BAND,
    FIXED,
    STRIDES,
    arithmetic,
    check_plan,
    common_fields,
    flag,
    padded,
)
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
GRADIENT_PARAMS = gradient_params(("lse2", "delta"))
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

    def launch(self, rows: int, heads: int) -> Launch:
        """Over all rows of all heads."""
        return Launch(self.instantiation, -(-rows // self.rows) * heads, self.threads, self.shared)


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


@functools.lru_cache(maxsize=256)
def _prepared_forward(problem: Problem, plan: Plan, limit: int) -> tuple[Launch, tuple[Any, ...]]:
    """What a forward needs beside its arrays: the launch and the tail of its struct."""
    check_plan(plan, FIXED_FLOAT32, "float32")
    found = forward_kernel(plan, problem.d, problem.d_v, problem.softcap is not None, limit)
    fields = common_fields(problem, plan) | {"stale_limit": 2.0**plan.stale_limit}
    return found.launch(problem.n_q, problem.heads), tail_of(FORWARD_PARAMS, fields)


def forward(problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None) -> None:
    """See `launch.Launcher.forward`. Nothing is rounded, so there is no rest."""
    launch, tail = _prepared_forward(problem.shapes, plan, shared_memory(problem.device)[0])
    arrays = (problem.q, problem.k, problem.v, out)
    params = packed(FORWARD_PARAMS, arrays, (lse,), tail)
    run((launch,), (params,), problem.device, (*arrays, lse))


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
    p = problem
    launches, delta_tail, tail = _prepared_backward(p.shapes, plan, shared_memory(p.device)[0])
    lse2, delta = cupy().empty((2, p.batch * p.heads, pitch_of(p.n_q)), np.float32)
    work = (lse2, delta)
    ones = packed(DELTA_PARAMS, (dout, out), (lse, dlse, *work), delta_tail)
    arrays = (p.q, p.k, p.v, dout, dq, dk, dv)
    params = packed(GRADIENT_PARAMS, arrays, work, tail)
    touched = (*arrays, *work, out, lse, dlse)
    run(launches, [ones] + [params] * len(GRADIENTS), p.device, touched)


def backward_launches(problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
    """See `launch.Launcher.backward_launches`."""
    return _prepared_backward(problem, plan, shared_memory(device)[0])[0]


@functools.lru_cache(maxsize=256)
def _prepared_backward(
    problem: Problem, plan: Plan, limit: int
) -> tuple[tuple[Launch, ...], tuple[Any, ...], tuple[Any, ...]]:
    """What a backward needs beside its arrays: launches, and the tails of both structs."""
    check_plan(plan, FIXED_FLOAT32, "float32")
    if plan.backward.center:  # no dS is rounded here
        raise ValueError(
            f"plan.backward.center: got {plan.backward.center}, must be 0 on the float32 kernels"
        )
    check_orders(plan, "float32")
    p, softcap = problem, problem.softcap is not None
    launches = [delta_kernel(p.d_v).launch(p.heads * pitch_of(p.n_q), 1)]
    for what in GRADIENTS:
        found = gradient_kernel(plan, what, p.d, p.d_v, softcap, limit)
        over_queries = what == "kQueries"
        rows, heads = (p.n_q, p.heads) if over_queries else (p.n_k, p.heads // p.group)
        launches.append(found.launch(rows, heads))
    fields = gradient_fields(p, plan)
    return tuple(launches), tail_of(DELTA_PARAMS, fields), tail_of(GRADIENT_PARAMS, fields)


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
