"""Split keys (FlashAttention-2): ranges walked on their own, normalised, joined by their LSE."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from emulation import rounding
from emulation.cuda_math import expf, logf
from emulation.machine import Machine, Node
from emulation.plan import Plan
from emulation.problem import Array
from emulation.tiled import Constants, Rows, flash_rows


def merge(parts: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """O (R, D_v) and LSE (R,) of parts O_s and LSE_s, -inf where a part saw nothing; float32.

    LSE = logf(sum_s expf(LSE_s - max)) + max, the sum a tree over the next power of two of lanes,
    the largest distance first; O = sum_s expf(LSE_s - LSE) O_s, a chain of FMAs in ascending order.
    A row that no part saw has O = 0 and LSE = -inf.

    >>> o, lse = merge([np.float32([[2.0]]), np.float32([[4.0]])], [np.float32([0.0])] * 2)
    >>> float(o[0, 0]), float(lse[0]) == float(np.float32(np.log(2)))
    (3.0, True)
    """
    xp = rounding.namespace(lses[0])
    top = lses[0]
    for x in lses[1:]:
        top = xp.maximum(top, x)
    seen = top != -np.inf
    top = xp.where(seen, top, xp.float32(0))
    lanes = [expf(rounding.sub(x, top)) for x in lses]
    while len(lanes) & (len(lanes) - 1):
        lanes.append(xp.zeros_like(top))
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [rounding.add(lanes[i], lanes[i + half]) for i in range(half)]
    lse = rounding.add(logf(xp.where(seen, lanes[0], xp.float32(1))), top)
    o = xp.zeros_like(parts[0])
    for part, x in zip(parts, lses, strict=True):
        weight = xp.where(seen, expf(rounding.sub(x, lse)), xp.float32(0))
        o = rounding.fma(weight[:, None], part, o)
    return o, xp.where(seen, lse, xp.float32(-np.inf))


def split_rows(
    m: Machine, plan: Plan, const: Constants, q: Node, k: Array, v: Array, lo: Array, hi: Array
) -> Rows:
    """`flash_rows` in plan.splits ranges of keys, merged. Values only: no errors are tracked."""
    xp = rounding.namespace(lo)
    count = -(-k.shape[0] // plan.tile_n)
    each = -(-count // plan.splits) * plan.tile_n
    part = dataclasses.replace(plan, splits=1)
    found = []
    for start in range(0, plan.splits * each, each):
        low, high = (xp.clip(x, start, start + each) for x in (lo, hi))
        some = high > low
        low, high = xp.where(some, low, 0), xp.where(some, high, 0)
        found.append(flash_rows(m, part, const, q, k, v, low, high))
    lses = [xp.where(r.started, r.lse, xp.float32(-np.inf)) for r in found]
    o, lse = merge([r.o for r in found], lses)
    out_format = plan.format if plan.numerics.out == "input" else "float32"
    return Rows(o, m.cast("output cast", o, out_format), lse, hi > lo)
