"""Which walk over its keys a block of rows takes under a Plan."""

from __future__ import annotations

from collections.abc import Callable

from emulation.machine import Machine, Node
from emulation.plan import Plan
from emulation.problem import Array
from emulation.split import split_rows
from emulation.tiled import Constants, Rows, flash_rows
from emulation.unfused import unfused_rows

#: (machine, plan, constants, q (R, D), k (N_k, D), v (N_k, D_v), band lo and hi (R,)) -> rows.
Walk = Callable[[Machine, Plan, Constants, Node, Array, Array, Array, Array], Rows]


def walk_of(plan: Plan) -> Walk:
    """All keys at once ("unfused"), tile after tile, or that in ranges of keys."""
    if plan.algorithm == "unfused":
        return unfused_rows
    return flash_rows if plan.splits == 1 else split_rows
