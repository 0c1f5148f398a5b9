"""Planner: GpuProblem + device -> Plan. Every tile choice of the kernels is a table here."""

from __future__ import annotations

import functools
import os
from typing import Any

from cuflash.problem import GpuProblem
from emulation.plan import TILE_N as TILE_N_HOPPER
from emulation.plan import BackwardPlan, Numerics, Plan, default_center, default_plan
from emulation.problem import Problem

#: Rule of the tensor core (`emulation.rules.RULES`) by architecture. sm_120 has no
#: rule of its own yet and takes Blackwell's.
RULES = {
    "sm80": "sm80",
    "sm86": "sm86",
    "sm89": "sm89",
    "sm90": "sm90",
    "sm100": "sm100",
    "sm120": "sm100",
}

#: Keys per tile, by kernel family and head dimension. sm80: what leaves S beside O within 255
#: registers a thread, and Q, K and V within the 99 kB of shared memory that sm_86, sm_89 and sm_120
#: give a block.
TILE_N: dict[str, dict[int, int]] = {
    "sm80": {64: 96, 80: 64, 128: 48, 256: 64},
    "sm90": TILE_N_HOPPER,
}
#: The numerics that the Hopper kernels have; others run on those of sm80, under a Plan of theirs.
HOPPER: dict[str, tuple[str, ...]] = {
    "reference": ("row-max", "power-of-two", "stale"),
    "p": ("input",),
    "exp2": ("hardware",),
    "accumulate": ("tensor-core",),
}
#: Tiles of the backward (queries, keys) by head dimension. Keys: what leaves dK and dV beside P and
#: dS in the registers of eight warps. Queries matter only where sums are cut: what fits in shared
#: memory when P and dS are split.
BACKWARD: dict[str, dict[int, tuple[int, int]]] = {
    "sm80": {64: (64, 128), 128: (32, 128), 256: (32, 64)}
}
#: Keys of a CTA of the Hopper backward, by the larger head dimension: what its kernels take for
#: tile_n.
BACKWARD_HOPPER = {128: 128, 256: 64}
#: Where a block has 99 kB of shared memory.
BACKWARD_SMALL = {64: (64, 64), 128: (32, 64), 256: (32, 32)}

#: The same for float32, whose operands take 6 bytes an element, and for both passes: forward and
#: backward.
TILE_FLOAT32 = {64: 64, 128: 32, 256: 32}
#: Where a block has 99 kB of shared memory.
TILE_FLOAT32_SMALL = {64: 64, 128: 32, 256: 16}
SMALL = ("sm86", "sm89", "sm120")


@functools.lru_cache(maxsize=64)
def arch_of(capability: int) -> str:
    """The architecture of a compute capability: the newest in the table that is not newer.

    >>> arch_of(90), arch_of(87), arch_of(121)
    ('sm90', 'sm86', 'sm120')
    """
    known = [int(arch.removeprefix("sm")) for arch in RULES]
    if capability < min(known):
        raise ValueError(f"arch: got sm_{capability}, must be sm_{min(known)} or newer")
    return f"sm{max(c for c in known if c <= capability)}"


@functools.cache
def portable_only() -> bool:
    """Whether CUFLASH_KERNELS=sm80 leaves the portable kernels alone: to compare them on a Hopper.

    Read once a process. Raises ValueError for a name that is no choice.
    """
    return chosen_kernels() == "sm80"


def chosen_kernels() -> str:
    """CUFLASH_KERNELS as it is now, "" where not set. Raises ValueError for what is no choice."""
    chosen = os.environ.get("CUFLASH_KERNELS", "")
    if chosen not in ("", "sm80"):
        raise ValueError(f"CUFLASH_KERNELS: got {chosen!r}, must be 'sm80' or not set")
    return chosen


def family_of(arch: str, dtype: str, numerics: Numerics) -> str:
    """The kernel family that runs the forward of a format under these numerics.

    >>> [family_of("sm90", "bfloat16", Numerics(p=p)) for p in ("input", "split")]
    ['sm90', 'sm80']
    """
    if arch not in RULES:
        raise ValueError(f"arch: got {arch!r}, must be one of {', '.join(RULES)}")
    hopper = all(getattr(numerics, name) in allowed for name, allowed in HOPPER.items())
    native = arch == "sm90" and dtype != "float32" and hopper
    return "sm90" if native and not portable_only() else "sm80"


def runs_hopper_backward(problem: Problem, plan: Plan) -> bool:
    """Whether cuda/sm90 has a backward for this problem and Plan; else cuda/sm80 runs it."""
    width, numerics = max(problem.d, problem.d_v), plan.numerics
    keys = next((tile for d, tile in BACKWARD_HOPPER.items() if width <= d), None)
    native = all(getattr(numerics, name) in HOPPER[name] for name in ("p", "exp2", "accumulate"))
    return plan.format != "float32" and native and plan.backward.tile_n == keys


def tile_of(family: str, width: int) -> int:
    """Keys per tile of a family's half formats, for the larger of both head dimensions."""
    return next(tile for d, tile in TILE_N[family].items() if width <= d)


def plan_for(
    problem: GpuProblem, arch: str, numerics: Numerics | dict[str, Any] | None = None
) -> Plan:
    """The Plan that runs for this problem on arch ("sm80", "sm86", "sm89", "sm90", "sm100",
    "sm120"). Raises ValueError or TypeError for arch and numerics.
    """
    if numerics is not None:  # else float32 has numerics of its own
        numerics = Numerics.of(numerics)
    return _plan(problem.shapes, arch, numerics)


@functools.lru_cache(maxsize=256)
def _plan(shapes: Problem, arch: str, numerics: Numerics | None) -> Plan:
    """Remembered by the Problem itself, which is one object for equal calls."""
    family = family_of(arch, shapes.dtype, Numerics.of(numerics))
    width = max(shapes.d, shapes.d_v)
    if shapes.dtype == "float32":
        table = TILE_FLOAT32_SMALL if arch in SMALL else TILE_FLOAT32
        tile = next(tile for d, tile in table.items() if width <= d)
        tiles = BackwardPlan(tile_m=tile, tile_n=tile)
    else:
        tile = tile_of(family, width)
        found = BACKWARD_SMALL if arch in SMALL else BACKWARD["sm80"]
        rows, keys = next(tile for d, tile in found.items() if width <= d)
        # A causal tile of keys starts at its diagonal: a block of rows meets late keys first.
        tiles = BackwardPlan(
            tile_m=rows, tile_n=keys, dq_order="descending", center=default_center(shapes)
        )
    return default_plan(shapes, numerics, arch=RULES[arch], tile_n=tile, backward=tiles)
