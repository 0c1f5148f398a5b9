"""The forward of half formats on cuda/sm80, and what the launchers of this family share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuflash.launch import Instantiation, Launch, packed, run, tail_of
from cuflash.planner import TILE_N
from cuflash.problem import GpuProblem
from emulation.plan import Plan
from emulation.problem import Problem
from emulation.tiled import constants, machine_of

INT_MAX = 2**31 - 1
THREADS = 128

#: Rows of a CTA and stages of K and V in shared memory, by padded head dimension: what leaves O, S
#: and the row states in 255 registers, and lets two CTAs share a multiprocessor.
BLOCK_M = {128: (128, 2), 256: (64, 1)}

#: The fields of a Plan that these kernels fix, and how.
FIXED: dict[str, Any] = {
    "algorithm": "tiled",
    "direction": "right-to-left",
    "c": "once",
    "score": "guarded",
    "diagonal": 0,
    "alpha": "references",
    "row_sum_order": "tile",
    "rounded_sum": "matrix",
    "join": "01+23",
    "inverse": "ieee",
    "finish": "multiply",
    "lse": "sum",
    "splits": 1,
    "state": "float32",
    "step": None,
}

HALVES = {"float16": "Fp16", "bfloat16": "Bf16"}
REFERENCES = {
    "row-max": "kRowMax",
    "power-of-two": "kPowerOfTwo",
    "stale": "kStale",
    "lazy": "kLazy",
    "tie-safe": "kTieSafe",
    "final": "kFinal",
}
EXP2 = {"hardware": "kHardware", "polynomial": "kPolynomial", "mixed": "kMixed"}

STRIDES = [("batch", np.int64), ("head", np.int64), ("row", np.int64)]
BAND = [(name, np.int32) for name in ("n_q", "n_k", "diagonal", "left", "right")]
FORWARD_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("q", "k", "v", "out", "rest", "lse")]
    + [(f"{name}_strides", STRIDES) for name in ("q", "k", "v", "out", "rest")]
    + [("band", BAND)]
    + [(name, np.int32) for name in ("heads", "group", "d", "d_v")]
    + [(name, np.float32) for name in ("c", "cap", "stale_limit")],
    align=True,
)


def check_plan(plan: Plan, fixed: dict[str, Any] = FIXED, kernels: str = "sm80") -> None:
    """ValueError for a Plan that kernels with these fixed fields do not run."""
    for name, value in fixed.items():
        if getattr(plan, name) != value:
            raise ValueError(
                f"plan.{name}: got {getattr(plan, name)!r}, must be {value!r} on the {kernels} "
                "kernels"
            )


def padded(width: int) -> int:
    """A head dimension as the kernels hold it: zeros up to a multiple of 16 change no bit."""
    return -(-width // 16) * 16


def flag(value: bool) -> str:
    """A C++ bool."""
    return "true" if value else "false"


def arithmetic(plan: Plan) -> str:
    """The Plan's numerics as cuflash::Arithmetic."""
    n = plan.numerics
    return (
        f"cuflash::Arithmetic<cuflash::Reference::{REFERENCES[n.reference]},"
        f"{flag(n.row_sum == 'rounded')},{flag(n.p == 'split')},"
        f"cuflash::Exp2::{EXP2[n.exp2]},{flag(n.accumulate == 'promoted')}>"
    )


def block_m(width: int) -> tuple[int, int]:
    """Rows of a CTA and stages for a padded head dimension. No bit depends on them."""
    return next(m for d, m in BLOCK_M.items() if width <= d)


def forward_instantiation(plan: Plan, d: int, d_v: int, softcap: bool) -> Instantiation:
    """The forward kernel of a Plan for these head dimensions."""
    width = max(padded(d), padded(d_v))
    rows, stages = block_m(width)
    sizes = f"{padded(d)},{padded(d_v)},{rows},{plan.tile_n},{stages}"
    shape = f"cuflash::{HALVES[plan.format]},{sizes}"
    out = flag(plan.numerics.out == "float32")
    name = f"cuflash::sm80::Shape<{shape}>,{arithmetic(plan)},{flag(softcap)},{out}"
    return Instantiation("sm80/forward.cu", f"cuflash::sm80::forward<{name}>")


def forward_shared_bytes(plan: Plan, d: int, d_v: int) -> int:
    """Dynamic shared memory of the forward: padded Q, K and V."""
    d, d_v, n = padded(d), padded(d_v), plan.tile_n
    rows, stages = block_m(max(d, d_v))
    return 2 * ((rows + stages * n) * (d + 8) + stages * n * (d_v + 8))


def band_of(problem: Problem) -> tuple[int, int, int, int, int]:
    """n_q, n_k, diagonal, left, right: the mask in a kernel's words."""
    left, right = problem.window if problem.window is not None else (None, None)
    if problem.causal:
        right = 0
    diagonal = 0 if problem.causal == "top-left" else problem.n_k - problem.n_q
    left, right = (INT_MAX if x is None else min(INT_MAX, x) for x in (left, right))
    return (problem.n_q, problem.n_k, diagonal, left, right)


def common_fields(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Fields of every parameter struct that follow from the shapes and the Plan."""
    const = constants(machine_of(plan), problem, plan)
    return {
        "band": band_of(problem),
        "heads": problem.lead[-1] if problem.lead else 1,
        "group": problem.group,
        "d": problem.d,
        "d_v": problem.d_v,
        "c": const.c,
        "cap": 0 if const.softcap is None else const.softcap,
    }


@functools.lru_cache(maxsize=256)
def _prepared(problem: Problem, plan: Plan) -> tuple[Launch, tuple[Any, ...]]:
    """What a forward needs beside its arrays: the launch and the tail of its struct."""
    check_plan(plan)
    d, d_v = problem.d, problem.d_v
    rows, _ = block_m(max(padded(d), padded(d_v)))
    launch = Launch(
        forward_instantiation(plan, d, d_v, softcap=problem.softcap is not None),
        grid=-(-problem.n_q // rows) * problem.heads,
        threads=THREADS,
        shared=forward_shared_bytes(plan, d, d_v),
    )
    fields = common_fields(problem, plan) | {"stale_limit": 2.0**plan.stale_limit}
    return launch, tail_of(FORWARD_PARAMS, fields)


def forward(problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None) -> None:
    """See `launch.Launcher.forward`."""
    launch, tail = _prepared(problem.shapes, plan)
    arrays = (problem.q, problem.k, problem.v, out, rest)
    params = packed(FORWARD_PARAMS, arrays, (lse,), tail)
    run((launch,), (params,), problem.device, (*arrays, lse))


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with the default Plan."""
    for plan in (Plan(format="bfloat16"), Plan(format="float16")):
        for d in (32, 64, 80, 96, 128, 192, 256):
            tile_n = next(tile for width, tile in TILE_N["sm80"].items() if d <= width)
            tiled = dataclasses.replace(plan, tile_n=tile_n)
            yield forward_instantiation(tiled, d, d, softcap=False)
