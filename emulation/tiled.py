"""Tiled attention under a Plan, step by step: the algorithm of the kernels, one step a line.

Rows are independent: a block of rows walks the tiles of keys together, and a row that sees nothing
of a tile comes out of it bit for bit as it went in (alpha = 1, P = 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from emulation import rounding
from emulation.machine import Machine, Node
from emulation.plan import C, Plan
from emulation.problem import Array, Problem
from emulation.row_sum import column, join, lane_sum, row_sum

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

#: Rows that walk the tiles together: enough to keep vector code busy, few enough to skip causal
#: tiles.
ROWS = 1024
#: "lazy" follows the max once it grew by more than this in log2 units (FlashAttention-4).
LAZY_LIMIT = 8.0
#: "guarded": from here on a reference in log2 units is too coarse for a fused subtraction.
WIDE_REFERENCE = np.float32(2.0**24)
#: "tie-safe": scores tie when they are within this of the max, in log2 units.
TIE = 2.0**-9

Progress = Callable[[str, float], None]


def arithmetic_of(plan: Plan) -> dict[str, Any]:
    """What a Plan says of the machine, as its arguments."""
    return {
        "arch": plan.arch,
        "step": plan.step,
        "fmt": plan.format if plan.algorithm == "tiled" else "float32",
        "wide": plan.wide,
        "state": plan.state,
        "exp2": plan.numerics.exp2,
    }


def machine_of(plan: Plan) -> Machine:
    """The machine that a Plan names."""
    return Machine(**arithmetic_of(plan))


@dataclass(frozen=True)
class Constants:
    """The problem's constants as the machine holds them: c turns a score into log2 units."""

    c: Node
    scale: Node
    softcap: Node | None  # turns a score into the argument of tanh; the score is then in [-1, 1]
    c_ln2: Node
    log2e: Node
    root: Node  # of the scale


def score_unit(problem: Problem) -> float:
    """What a score S, or with a softcap tanh(S), is multiplied by."""
    return problem.scale if problem.softcap is None else problem.softcap


def unrounded_c(unit: float, rule: C) -> float:
    """scale (or softcap) * log2(e) before its last rounding, by `Plan.c`."""
    if rule == "once":
        return unit * LOG2E
    return float(np.float32(unit)) * (LOG2E if rule == "float scale" else float(np.float32(LOG2E)))


def c_rules(problem: Problem) -> list[C]:
    """Of `Plan.c`, the first for every c that they give: for most head dimensions all give one."""
    unit = score_unit(problem)
    found: dict[float, C] = {}
    for rule in get_args(C):
        found.setdefault(float(np.float32(unrounded_c(unit, rule))), rule)
    return list(found.values())


def constants(m: Machine, problem: Problem, plan: Plan | None) -> Constants:
    """c = scale * log2(e); with a softcap the score becomes tanh(s * scale / softcap), c = softcap
    * log2(e). Without a Plan (standard attention) c is rounded once.
    """
    unit = score_unit(problem)
    given = unrounded_c(unit, "once" if plan is None else plan.c)
    return Constants(
        c=m.constant("score scaling", unit * LOG2E, given),
        scale=m.constant("score scaling", unit),
        softcap=None
        if problem.softcap is None
        else m.constant("softcap", 2.0 * LOG2E * problem.scale / problem.softcap),
        c_ln2=m.constant("LSE", float(np.float32(given)) * LN2),
        log2e=m.constant("score scaling", LOG2E),
        root=m.constant("score scaling", math.sqrt(problem.scale)),
    )


def scores(m: Machine, const: Constants, q: Node, k: Node) -> Node:
    """S = Q K^T, capped. (R, D), (T, D) -> (R, T)."""
    s = m.dot("QK accumulation", q, k)
    s = m.keep("S rounding", s)
    if const.softcap is None:
        return s
    return m.tanh("softcap", m.mul("softcap", s, const.softcap))


def visible(columns: Array, lo: Array, hi: Array) -> Array:
    """(R, T) mask: column inside the row's band."""
    seen: Array = (columns >= lo[:, None]) & (columns < hi[:, None])
    return seen


def tiles(n_k: int, tile_n: int, direction: str, first: int, last: int) -> Iterator[slice]:
    """The tiles of keys that [first, last) touches, in the Plan's direction. Tiles are aligned to
    key 0.
    """
    starts = range(first // tile_n * tile_n, last, tile_n)
    for start in reversed(starts) if direction == "right-to-left" else starts:
        yield slice(start, min(start + tile_n, n_k))


@dataclass(frozen=True)
class Reference:
    """What a row subtracts from its scores: r in log2 units, m the score it came from."""

    m: Node
    r: Node
    started: Array  # the row has seen a score above -inf


def weighs(m: Machine, s: Node, seen: Array) -> Array:
    """Rows (R,) that see a score other than -inf, which would weigh 2^-inf = 0 under any reference
    and so cannot be one.
    """
    found: Array = (seen & (m.value(s) != -np.inf)).any(axis=1)
    return found


def _log2_units(m: Machine, plan: Plan, const: Constants, s: Node) -> Node:
    """A score in log2 units, rounded: s c, or s times scale and log2 e."""
    if plan.score == "scaled":
        return m.mul("exponent argument", m.mul("exponent argument", s, const.scale), const.log2e)
    return m.mul("exponent argument", s, const.c)


def _follow(
    m: Machine, plan: Plan, const: Constants, old: Reference, s: Node, seen: Array
) -> Reference:
    """The reference of a tile, before any redo."""
    xp = rounding.namespace(seen)
    policy = plan.numerics.reference
    sees = weighs(m, s, seen)
    started = old.started | sees
    first = started & ~old.started
    if policy == "final" or (policy == "stale" and not bool(first.any())):
        return Reference(old.m, old.r, started)
    top = m.top(s, seen)
    grew = first | (sees & (m.value(top) > m.value(old.m)))
    new_m = m.select(grew, top, old.m)
    new_r = _log2_units(m, plan, const, new_m)
    r = m.value(new_r)
    move: Array
    if policy == "stale":
        new_r = m.shifted(new_r, xp.ceil(r))
        move = first
    elif policy == "lazy":
        move = first | (sees & (rounding.sub(r, m.value(old.r)) > LAZY_LIMIT))
    elif policy == "power-of-two":
        new_r = m.shifted(new_r, xp.ceil(r))
        move = sees
    elif policy == "tie-safe":
        near = rounding.fma(m.value(s), m.value(const.c), -r[:, None]) >= -TIE
        tied = (near & seen).sum(axis=1) > 1
        new_r = m.shifted(new_r, xp.where(tied, xp.floor(r) + xp.float32(1), r))
        move = first | (sees & (m.value(new_r) > m.value(old.r)))
    else:
        move = sees
    # A reference that comes out the same is the same: nothing is rescaled, nor in exact arithmetic.
    turn = move & (first | _moved(m, plan, old, Reference(new_m, new_r, started)))
    return Reference(m.select(move, new_m, old.m), m.select(turn, new_r, old.r), started)


def _moved(m: Machine, plan: Plan, old: Reference, new: Reference) -> Array:
    """Whether alpha has to be formed: the quantity that the Plan forms it from has changed."""
    if plan.alpha == "maxima":
        return m.differ(old.m, new.m)
    return m.differ(old.r, new.r)


def _alpha(m: Machine, plan: Plan, const: Constants, old: Reference, new: Reference) -> Node | None:
    """alpha = 2^(r_old - r_new), or None where no row's reference moved and nothing is to be
    rescaled.
    """
    moved = old.started & _moved(m, plan, old, new)
    if not bool(moved.any()):
        return None
    if plan.alpha == "maxima":
        x = m.mul("alpha", m.sub("alpha", old.m, new.m), const.c)
        # Real arithmetic subtracts the references that were used; rounding m c made them differ a
        # little.
        x = m.linear("alpha", m.value(x), (1.0, old.r), (-1.0, new.r))
    else:
        x = m.sub("alpha", old.r, new.r)
    x = m.select(moved, x, m.zeros(moved, moved.shape))
    return m.exp2("alpha", x)


def _probabilities(
    m: Machine, plan: Plan, const: Constants, s: Node, ref: Reference, seen: Array,
    diagonal: Array | None = None,
) -> tuple[Node, Node]:  # fmt: skip
    """x = s c - r and P = 2^x, P = 0 where not seen. diagonal (R,): rows not to be fused."""
    r = column(m, ref.r)
    every = plan.score in ("unfused", "scaled")
    apart = abs(m.value(r)) >= WIDE_REFERENCE if diagonal is None else diagonal[:, None]
    if every or ((plan.score == "guarded" or plan.diagonal) and bool(apart.any())):
        x = m.sub("exponent argument", _log2_units(m, plan, const, s), r)
        if not every:
            fused = m.fma("exponent argument", s, const.c, m.map(r, np.negative))
            x = m.select(apart, x, fused)
    else:
        x = m.fma("exponent argument", s, const.c, m.map(r, np.negative))
    return x, m.exp2("exp2", x, seen)


def halves(m: Machine, plan: Plan, name: str, x: Node) -> list[Node]:
    """x as the tensor core takes it: rounded to the input format, or split into a high and a low
    part. In float32 it is an operand like any other.
    """
    high = m.cast(name, x, plan.format)
    if plan.numerics.p == "input" or plan.format == "float32":
        return [high]
    return [high, m.cast(name, m.sub(name, x, high), plan.format)]


def _accumulate(
    m: Machine, plan: Plan, names: tuple[str, str], acc: Node, alpha: Node | None,
    parts: list[Node], b: Node, seen: Array,
) -> Node:  # fmt: skip
    """acc = acc alpha + sum(parts) b^T; names: source of the sum, source of the rescale."""
    a = None if alpha is None else column(m, alpha)
    if plan.numerics.accumulate == "tensor-core":
        if a is not None:
            acc = m.mul(names[1], acc, a)
        for part in parts:
            acc = m.dot_seen(names[0], part, b, acc, seen)
        return acc
    tile = None
    for part in parts:
        tile = m.dot_seen(names[0], part, b, tile, seen)
    if a is None:
        return m.add(names[0], acc, tile)
    return m.fma(names[0], acc, a, tile, product=names[1])


@dataclass(frozen=True)
class Rows:
    """A block of rows after its last tile."""

    o: Node  # (R, D_v), normalised, before the output cast
    out: Node  # (R, D_v), in the output format
    lse: Node  # (R,); 0 where a row saw nothing
    started: Array  # (R,): saw a key


def flash_rows(
    m: Machine, plan: Plan, const: Constants, q: Node, k: Array, v: Array, lo: Array, hi: Array
) -> Rows:
    """Attention of a block of rows: q (R, D), k (N_k, D), v (N_k, D_v), band [lo, hi) per row."""
    rows, n_k = m.value(q).shape[0], k.shape[0]
    sees = hi > lo
    first, last = (int(lo[sees].min()), int(hi[sees].max())) if bool(sees.any()) else (0, 0)
    visits = list(tiles(n_k, plan.tile_n, plan.direction, first, last))
    xp = rounding.namespace(lo)

    def seen_of(tile: slice) -> Array:
        columns = xp.arange(tile.start, tile.stop)
        return visible(columns, lo, hi)

    ref = Reference(m.zeros(lo, (rows,)), m.zeros(lo, (rows,)), xp.zeros(rows, bool))
    if plan.numerics.reference == "final":
        ref = _final_reference(m, plan, const, ref, q, k, visits, seen_of)
    o = m.zeros(lo, (rows, v.shape[1]))
    lanes = m.zeros(lo, (rows, 4))  # l of the unrounded P
    weights = m.zeros(lo, (rows, 1))  # l of the rounded P, summed by the tensor core
    rounded_lanes = m.zeros(lo, (rows, 4))  # or by the lanes
    ones = m.input(xp.ones((1, plan.tile_n), np.float32))

    for tile in visits:
        seen = seen_of(tile)
        s = scores(m, const, q, m.input(k[tile]))
        old, ref = ref, _follow(m, plan, const, ref, s, seen)
        diagonal = None
        if plan.diagonal:
            diagonal = tile.start >= (hi - 1) // plan.diagonal * plan.diagonal
        x, p = _probabilities(m, plan, const, s, ref, seen, diagonal)
        if plan.numerics.reference == "stale":
            ref, p = _redo(m, plan, const, ref, s, x, p, seen)
        alpha = _alpha(m, plan, const, old, ref)
        lanes = row_sum(m, plan, lanes, alpha, p)
        parts = halves(m, plan, "P rounding", p)
        if plan.numerics.row_sum == "rounded":
            if plan.rounded_sum == "matrix":
                ones_t = m.take(ones, (slice(None), slice(tile.stop - tile.start)))
                weights = _accumulate(
                    m, plan, ("row sum", "rescale of l"), weights, alpha, parts, ones_t, seen
                )
            else:
                p_seen = parts[0] if len(parts) == 1 else m.add("row sum", parts[0], parts[1])
                rounded_lanes = row_sum(m, plan, rounded_lanes, alpha, p_seen)
        v_t = m.transpose(m.input(v[tile]))
        if plan.finish == "fold":
            ends = sees & (hi > tile.start) & (hi <= tile.start + plan.tile_n)
            if plan.direction == "right-to-left":
                ends = sees & (lo >= tile.start) & (lo < tile.start + plan.tile_n)
            o = _fold(m, plan, o, alpha, parts, v_t, seen, ends, lanes)
            continue
        o = _accumulate(m, plan, ("PV accumulation", "rescale of O"), o, alpha, parts, v_t, seen)

    one = xp.ones(rows, np.float32)
    l_exact = m.select(sees, join(m, plan, "row sum", lanes), one)
    if plan.numerics.row_sum == "unrounded":
        l_out = l_exact
    elif plan.rounded_sum == "matrix":
        l_out = m.select(sees, m.take(weights, (slice(None), 0)), one)
    else:
        l_out = m.select(sees, join(m, plan, "row sum", rounded_lanes), one)
    if plan.finish == "multiply":
        inverse = m.reciprocal("reciprocal", l_out, plan.inverse)
        o = m.mul("final multiply", o, column(m, inverse))
    out_format = plan.format if plan.numerics.out == "input" else "float32"
    out = m.cast("output cast", o, out_format)
    return Rows(o, out, _lse(m, plan, const, ref, l_exact), sees)


def _fold(
    m: Machine, plan: Plan, o: Node, alpha: Node | None, parts: list[Node], b: Node, seen: Array,
    ends: Array, lanes: Node,
) -> Node:  # fmt: skip
    """o alpha + P V of a tile, in rows that end with it times 1 / l."""
    xp = rounding.namespace(seen)
    tile = None
    for part in parts:
        tile = m.dot_seen("PV accumulation", part, b, tile, seen)
    a = m.constant("alpha", 1.0) if alpha is None else column(m, alpha)
    later = m.fma("PV accumulation", o, a, tile, product="rescale of O")
    if not bool(ends.any()):
        return later
    l_row = m.select(ends, join(m, plan, "row sum", lanes), xp.ones(len(ends), np.float32))
    inverse = column(m, m.reciprocal("reciprocal", l_row, plan.inverse))
    last = m.mul("final multiply", m.mul("final multiply", inverse, a), o)
    last = m.fma("final multiply", inverse, tile, last)
    return m.select(ends[:, None], last, later)


def _final_reference(
    m: Machine, plan: Plan, const: Constants, ref: Reference, q: Node, k: Array,
    visits: list[slice], seen_of: Callable[[slice], Array],
) -> Reference:  # fmt: skip
    """A first pass for the exact max of each row."""
    top, started = ref.m, ref.started
    for tile in visits:
        seen = seen_of(tile)
        s = scores(m, const, q, m.input(k[tile]))
        here, sees = m.top(s, seen), weighs(m, s, seen)
        grew = sees & (~started | (m.value(here) > m.value(top)))
        top, started = m.select(grew, here, top), started | sees
    return Reference(top, _log2_units(m, plan, const, top), ref.started)


def _redo(
    m: Machine, plan: Plan, const: Constants, ref: Reference, s: Node, x: Node, p: Node,
    seen: Array,
) -> tuple[Reference, Node]:  # fmt: skip
    """Rows whose tile sum grew too large move their reference up by a whole power of two and redo
    the tile.
    """
    xp = rounding.namespace(seen)
    sums = lane_sum(Machine(), "row sum", m.value(p))
    move = ~(sums <= 2.0**plan.stale_limit).all(axis=1) & seen.any(axis=1)
    if not bool(move.any()):
        return ref, p
    top = xp.where(seen, m.value(x), xp.float32(-np.inf)).max(axis=1)
    jump = xp.where(move & xp.isfinite(top), xp.maximum(xp.ceil(top), xp.float32(0)), xp.float32(0))
    ref = Reference(ref.m, m.shifted(ref.r, rounding.add(m.value(ref.r), jump)), ref.started)
    return ref, _probabilities(m, plan, const, s, ref, seen)[1]


def _lse(m: Machine, plan: Plan, const: Constants, ref: Reference, l_exact: Node) -> Node:
    """LSE = ln2 (r + log2 l) in the Plan's form."""
    value = Machine(state=m.state)
    if plan.lse == "natural":
        ln_l = m.log("LSE", l_exact)
        of_r = value.div("LSE", m.value(ref.r), value.constant("LSE", LOG2E))
        return m.linear("LSE", value.add("LSE", of_r, m.value(ln_l)), (LN2, ref.r), (1.0, ln_l))
    log2_l = m.log2("LSE", l_exact, "cuda" if plan.lse == "log2f" else "hardware")
    ln2 = value.constant("LSE", LN2)
    l2, r, top = m.value(log2_l), m.value(ref.r), m.value(ref.m)
    if plan.lse in ("sum", "log2f"):
        lse = value.mul("LSE", value.add("LSE", r, l2), ln2)
    elif plan.lse == "reference":
        lse = value.fma("LSE", r, ln2, value.mul("LSE", l2, ln2))
    else:
        factor = m.value(const.scale if plan.lse == "scale" else const.c_ln2)
        lse = value.fma("LSE", top, factor, value.mul("LSE", l2, ln2))
    return m.linear("LSE", lse, (LN2, ref.r), (LN2, log2_l))


def row_blocks(n_q: int, rows: int = ROWS) -> Iterator[slice]:
    """Blocks of rows; where they are cut changes no bit."""
    for start in range(0, n_q, rows):
        yield slice(start, min(start + rows, n_q))


@dataclass(frozen=True)
class Forward:
    """All heads: out (H, N_q, D_v) in the output dtype, lse (H, N_q), o float32 before the cast."""

    out: Array
    lse: Array
    o: Array
