"""Row sums of P as four lanes of a quad make them: within a tile, from tile to tile, joined."""

from __future__ import annotations

import numpy as np

from emulation import rounding
from emulation.machine import Machine, Node
from emulation.plan import Plan
from emulation.problem import Array


def column(m: Machine, x: Node) -> Node:
    """(R,) -> (R, 1)."""
    return m.take(x, (slice(None), None))


def lanes_of(m: Machine, p: Node) -> list[Node]:
    """The entries of a tile in the order in which the four lanes of a quad add them: a list of (R,
    4).
    """
    rows, width = m.value(p).shape
    pad = -width % 8

    def quads(x: Array) -> Array:
        xp = rounding.namespace(x)
        x = xp.concatenate([x, xp.zeros((rows, pad), x.dtype)], axis=1) if pad else x
        return x.reshape(rows, -1, 4, 2)

    p = m.map(p, quads)
    every = slice(None)
    return [m.take(p, (every, j, every, e)) for j in range((width + pad) // 8) for e in (0, 1)]


def lane_sum(m: Machine, name: str, p: Node) -> Node:
    """Lane sums of one tile (R, T) -> (R, 4)."""
    first, *rest = lanes_of(m, p)
    t = first
    for p_j in rest:
        t = m.add(name, t, p_j)
    return t


def alone(m: Machine, l_row: Node) -> Node:
    """l of a row (R,) as the first of four lanes (R, 4), which joining does not round."""

    def stacked(x: Array) -> Array:
        xp = rounding.namespace(x)
        found: Array = xp.stack([x, *(xp.zeros_like(x) for _ in range(3))], axis=1)
        return found

    return m.map(l_row, stacked)


def row_sum(m: Machine, plan: Plan, lanes: Node, alpha: Node | None, p: Node) -> Node:
    """l = l alpha + sum of P, four lanes (R, 4), in the Plan's order."""
    if plan.row_sum_order in ("joined", "groups"):
        l_row = m.take(lanes, (slice(None), 0))
        width = m.value(p).shape[1]
        if plan.row_sum_order == "joined":
            t = join(m, plan, "row sum", lane_sum(m, "row sum", p))
            a = np.float32(1) if alpha is None else alpha
            return alone(m, m.fma("row sum", l_row, a, t, product="rescale of l"))
        if alpha is not None:
            l_row = m.mul("rescale of l", l_row, alpha)
        for start in range(0, width, 32):
            group = m.take(p, (slice(None), slice(start, start + 32)))
            t = join(m, plan, "row sum", lane_sum(m, "row sum", group))
            l_row = m.add("row sum", l_row, t)
        return alone(m, l_row)
    a = np.float32(1) if alpha is None else column(m, alpha)
    if plan.row_sum_order == "tile":
        t = lane_sum(m, "row sum", p)
        return m.fma("row sum", lanes, a, t, product="rescale of l")
    first, *rest = lanes_of(m, p)
    lanes = m.fma("row sum", lanes, a, first, product="rescale of l")
    for p_j in rest:
        lanes = m.add("row sum", lanes, p_j)
    return lanes


def join(m: Machine, plan: Plan, name: str, lanes: Node) -> Node:
    """The four lanes of a quad added in the Plan's order: (R, 4) -> (R,)."""
    l0, l1, l2, l3 = (m.take(lanes, (slice(None), g)) for g in range(4))
    if plan.join == "02+13":
        l1, l2 = l2, l1
    return m.add(name, m.add(name, l0, l1), m.add(name, l2, l3))
