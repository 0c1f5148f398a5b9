"""The forward of half formats on cuda/sm80, and what the launchers of this family share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuflash.compiler import capability, compile_kernel, load
from cuflash.launch import Instantiation
from cuflash.planner import TILE_N
from cuflash.problem import GpuProblem, element_strides
from emulation.flash import constants, machine_of
from emulation.plan import Plan

INT_MAX = 2**31 - 1
THREADS = 128

#: Rows of a CTA and its warpgroups, by padded head dimension.
BLOCK_M = {128: (256, 2), 256: (128, 2)}

#: The fields of a Plan that these kernels fix, and how.
FIXED: dict[str, Any] = {
    "direction": "right-to-left",
    "score": "guarded",
    "alpha": "references",
    "row_sum_order": "tile",
    "rounded_sum": "matrix",
    "join": "01+23",
    "inverse": "ieee",
    "lse": "sum",
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
    """Rows of a CTA and its warpgroups for a padded head dimension."""
    return next(m for d, m in BLOCK_M.items() if width <= d)


def forward_instantiation(plan: Plan, d: int, d_v: int, softcap: bool) -> Instantiation:
    """The forward kernel of a Plan for these head dimensions."""
    width = max(padded(d), padded(d_v))
    rows, stages = block_m(width)
    sizes = f"{padded(d)},{padded(d_v)},{rows},{plan.tile_n},{stages}"
    shape = f"cuflash::{HALVES[plan.format]},{sizes}"
    out = flag(plan.numerics.out == "float32")
    name = f"cuflash::sm80::Shape<{shape}>,{arithmetic(plan)},{flag(softcap)},{out}"
    return Instantiation("sm80/forward.cu", f"cuflash::sm80::forward<{name}>", tuple(os.environ.get("TUNE","").split()))


def forward_shared_bytes(plan: Plan, d: int, d_v: int) -> int:
    """Dynamic shared memory of the forward: padded Q, K and V."""
    d, d_v, n = padded(d), padded(d_v), plan.tile_n
    rows, stages = block_m(max(d, d_v))
    return 2 * ((rows + stages * n) * (d + 8) + stages * n * (d_v + 8))


def target() -> str:
    """The compile target of the current device."""
    return f"sm_{capability()}"


def strides_of(x: Any) -> tuple[int, int, int]:
    """Strides of a (B, H, N, D) array for a kernel; of no array, zeros."""
    return (0, 0, 0) if x is None else element_strides(x)


def band_of(problem: GpuProblem) -> tuple[int, int, int, int, int]:
    """n_q, n_k, diagonal, left, right: the mask in a kernel's words."""
    left, right = problem.window if problem.window is not None else (None, None)
    if problem.causal:
        right = 0
    diagonal = 0 if problem.causal == "top-left" else problem.n_k - problem.n_q
    left, right = (INT_MAX if x is None else min(INT_MAX, x) for x in (left, right))
    return (problem.n_q, problem.n_k, diagonal, left, right)


def launch(
    instantiation: Instantiation,
    grid: int,
    threads: int,
    shared: int,
    params: np.ndarray[Any, Any],
) -> None:
    """One kernel on the current stream, its parameters as one struct."""
    kernel = load(compile_kernel(*instantiation[:2], target(), instantiation.options))
    if shared > 48 * 1024:
        kernel.max_dynamic_shared_size_bytes = shared
    kernel((grid,), (threads,), (params,), shared_mem=shared)


def forward(problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None) -> None:
    """See `launch.Launcher.forward`."""
    check_plan(plan)
    const = constants(machine_of(plan), problem.shapes)
    params = np.zeros(1, FORWARD_PARAMS)
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out, "rest": rest}
    for name, x in arrays.items():
        params[name] = 0 if x is None else x.data.ptr
        params[f"{name}_strides"] = strides_of(x)
    params["lse"] = lse.data.ptr
    params["band"] = band_of(problem)
    params["heads"], params["group"] = problem.heads, problem.group
    params["d"], params["d_v"] = problem.d, problem.d_v
    params["c"] = const.c
    params["cap"] = 0 if const.softcap is None else const.softcap
    params["stale_limit"] = 2.0**plan.stale_limit
    rows, _ = block_m(max(padded(problem.d), padded(problem.d_v)))
    grid = -(-problem.n_q // rows) * problem.batch * problem.heads
    instantiation = forward_instantiation(
        plan, problem.d, problem.d_v, softcap=problem.softcap is not None
    )
    launch(instantiation, grid, THREADS, forward_shared_bytes(plan, problem.d, problem.d_v), params)


def instantiations() -> Iterable[Instantiation]:
    """A representative list: every head dimension with the default Plan."""
    for plan in (Plan(format="bfloat16"), Plan(format="float16")):
        for d in (32, 64, 80, 96, 128, 192, 256):
            tile_n = next(tile for width, tile in TILE_N["sm80"].items() if d <= width)
            tiled = dataclasses.replace(plan, tile_n=tile_n)
            yield forward_instantiation(tiled, d, d, softcap=False)
