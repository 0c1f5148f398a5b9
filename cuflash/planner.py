"""Planner: GpuProblem + device -> Plan. Every tile choice of the kernels is a table here."""

from __future__ import annotations

from typing import Any

from cuflash.problem import GpuProblem
from emulation.plan import Numerics, Plan, default_plan

#: Rule of the tensor core (`emulation.tensor_core.RULES`) by architecture. sm_120 has no
#: rule of its own yet and takes Blackwell's.
RULES = {
    "sm80": "sm80",
    "sm86": "sm86",
    "sm89": "sm89",
    "sm90": "sm90",
    "sm100": "sm100",
    "sm120": "sm100",
}

#: Keys per tile, by kernel family and head dimension. sm80: two stages of K and V beside Q must fit
#: in the 99 kB of shared memory that sm_86, sm_89 and sm_120 give a block, and S beside O in 255
#: registers a thread; with 64 queries a block that leaves 64 keys up to 128 columns, then 32.
TILE_N: dict[str, dict[int, int]] = {"sm80": {64: 64, 128: 64, 192: 32, 256: 32}}


def arch_of(capability: int) -> str:
    """The architecture of a compute capability: the newest in the table that is not newer.

    >>> arch_of(90), arch_of(87), arch_of(121)
    ('sm90', 'sm86', 'sm120')
    """
    known = [int(arch.removeprefix("sm")) for arch in RULES]
    if capability < min(known):
        raise ValueError(f"arch: got sm_{capability}, must be sm_{min(known)} or newer")
    return f"sm{max(c for c in known if c <= capability)}"


def family_of(arch: str) -> str:
    """The kernel family that runs on an architecture."""
    if arch not in RULES:
        raise ValueError(f"arch: got {arch!r}, must be one of {', '.join(RULES)}")
    return "sm80"


def plan_for(
    problem: GpuProblem, arch: str, numerics: Numerics | dict[str, Any] | None = None
) -> Plan:
    """The Plan that runs for this problem on arch ("sm80", "sm86", "sm89", "sm90", "sm100",
    "sm120"). Raises ValueError or TypeError for arch and numerics.
    """
    table = TILE_N[family_of(arch)]
    width = max(problem.d, problem.d_v)
    tile_n = next(tile for d, tile in table.items() if width <= d)
    return default_plan(problem.shapes, numerics, arch=RULES[arch], tile_n=tile_n)
