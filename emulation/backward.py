"""Both backward passes, step by step: P recomputed from LSE (flash), and P stored (standard).

One tile of keys at a time walks all rows: dV and dK of the tile stay in the accumulators of the
tensor core over all queries (and over the query heads of a GQA group, in ascending order), while
the tile's share of dQ is a product from zero that is added to dQ in fp32, key tile after key tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import rounding
from emulation.arguments import check_plain, check_progress
from emulation.center import centered, is_centered, row_sums
from emulation.flash import flash_forward, resolve_plan
from emulation.machine import Machine, Node
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Array, Problem, dtype_name, numpy_dtype
from emulation.row_sum import column
from emulation.standard import standard_forward, standard_machine, warp_sum
from emulation.tiled import (
    LOG2E,
    Constants,
    Forward,
    Progress,
    constants,
    halves,
    machine_of,
    row_blocks,
    scores,
    visible,
)


@dataclass(frozen=True)
class Gradients:
    """dq (H, N_q, D), dk (H_kv, N_k, D), dv (H_kv, N_k, D_v): one node a head, after and before the
    output cast.
    """

    dq: list[Node]
    dk: list[Node]
    dv: list[Node]
    dq_wide: list[Node]
    dk_wide: list[Node]
    dv_wide: list[Node]


@dataclass(frozen=True)
class Saved:
    """What the forward leaves to the backward, per query head, as nodes of the machine that runs
    it.
    """

    lse: Callable[[int], Node]  # (N_q,), 0 where a row saw nothing
    o: Callable[[int], Sequence[Node]]  # parts of O (N_q, D_v) that delta sums
    p: Callable[[int], Node] | None = None  # (N_q, N_k), the stored P


def delta_sum(m: Machine, do: Node, parts: Sequence[Node], order: BackwardPlan) -> Node:
    """rowsum(dO * O): sums of `delta_threads`, each of groups of `delta_columns` columns in turn
    (0: a thread for each group), as chains of FMAs or by pairs, joined by halves or neighbours
    first.
    """
    rows, width = m.value(do).shape
    columns = order.delta_columns
    lanes, turns = delta_lanes(order, width)

    def chunked(x: Array) -> Array:
        xp = rounding.namespace(x)
        pad = xp.zeros((rows, turns * lanes * columns - width), x.dtype)
        padded: Array = xp.concatenate([x, pad], axis=1)
        return padded.reshape(rows, turns, lanes, columns)

    do = m.map(do, chunked)
    parts = [m.map(part, chunked) for part in parts]
    acc = m.zeros(m.value(do), (rows, lanes))
    every = slice(None)
    for turn in range(turns):
        for e in range(0, columns, 1 if order.delta_sum == "chain" else 2):
            for part in parts:
                do_e, o_e = (m.take(x, (every, turn, every, e)) for x in (do, part))
                if order.delta_sum == "chain":
                    acc = m.fma("delta", do_e, o_e, acc)
                    continue
                first = m.mul("delta", do_e, o_e)
                do_e, o_e = (m.take(x, (every, turn, every, e + 1)) for x in (do, part))
                acc = m.add("delta", acc, m.fma("delta", do_e, o_e, first))
    while lanes > 1:
        lanes //= 2
        first, second = slice(lanes), slice(lanes, None)
        if order.delta_join == "neighbours":
            first, second = slice(0, None, 2), slice(1, None, 2)
        acc = m.add("delta", m.take(acc, (every, first)), m.take(acc, (every, second)))
    return m.take(acc, (every, 0))


def delta_lanes(order: BackwardPlan, width: int) -> tuple[int, int]:
    """Threads that share a row of delta, and the groups of columns that each of them takes."""
    lanes = order.delta_threads or 1
    while not order.delta_threads and lanes * order.delta_columns < width:
        lanes *= 2
    return lanes, -(-width // (lanes * order.delta_columns))


def query_tiles(order: BackwardPlan, rows: slice, key_tile: int, n_q: int) -> list[slice]:
    """The tiles of queries that touch these rows (which start a tile), in the order in which a tile
    of keys, by number, takes them; as slices of n_q queries.
    """
    size = order.tile_m
    starts = list(range(rows.start, rows.stop, size))
    if order.queries == "descending":
        starts.reverse()
    elif order.starts > 1:
        first = key_tile % order.starts % max(1, -(-n_q // size)) * size
        starts = [i for i in starts if i >= first] + [i for i in starts if i < first]
    return [slice(i, min(i + size, rows.stop)) for i in starts]


def _over_queries(
    m: Machine,
    plan: Plan,
    name: str,
    acc: Node | None,
    parts: list[Node],
    b: Node,
    seen: Array,
    tiles: list[slice],
) -> Node:
    """acc += parts^T b over the rows: parts (R, T), b (R, D), taken by these tiles. Tiles in
    ascending order matter only if promoted, or split into parts or terms.
    """
    split = len(parts) > 1 or (plan.format == "float32" and plan.wide == "split")
    promoted = plan.promotes_gradients
    if not promoted and not split:
        tiles = _joined(tiles)
    for block in tiles:
        b_t = m.transpose(m.take(b, block))
        tile = None if promoted else acc
        for part in parts:
            part_t = m.transpose(m.take(part, block))
            tile = m.dot_seen(name, part_t, b_t, tile, seen[block].T)
        acc = m.add(name, acc, tile) if promoted and acc is not None else tile
    return acc


def _joined(tiles: list[slice]) -> list[slice]:
    """Each tile that another ends at as one with it: one product, without a cut between them."""
    found: list[slice] = []
    for tile in tiles:
        if found and found[-1].stop == tile.start:
            found[-1] = slice(found[-1].start, tile.stop)
        else:
            found.append(tile)
    return found


def _rows_of(lo: Array, hi: Array, tile: slice, align: int) -> slice:
    """The rows that see something of a tile of keys, from a multiple of `align` (where k steps are
    cut).
    """
    touched = np.flatnonzero(np.asarray(((lo < tile.stop) & (hi > tile.start)).tolist(), bool))
    if not len(touched):
        return slice(0, 0)
    return slice(int(touched[0]) // align * align, int(touched[-1]) + 1)


def flash_backward(
    m: Machine,
    plan: Plan,
    problem: Problem,
    dout: Array,
    dlse: Array | None,
    saved: Saved,
    progress: Progress | None = None,
) -> Gradients:
    """Gradients with P recomputed from LSE. dout (H, N_q, D_v), dlse (H, N_q) float32 or None."""
    const = constants(m, problem, plan)
    xp = rounding.namespace(problem.q)
    lo, hi = (xp.asarray(x) for x in problem.band())
    kv_heads, n_k = int(problem.k.shape[0]), problem.n_k
    if plan.algorithm != "tiled":
        raise ValueError(f"plan.algorithm: got {plan.algorithm!r}, must be 'tiled' for gradients")
    order = plan.backward
    scale = gradient_scale(m, problem, const)
    tile_n, tile_m = order.tile_n, order.tile_m
    starts = list(range(0, n_k, tile_n))
    if order.dq_order == "descending":
        starts.reverse()

    dq: list[Node] = [m.zeros(lo, (problem.n_q, problem.d)) for _ in range(problem.heads)]
    q = [m.input(x) for x in problem.q]
    do = [m.input(x) for x in dout]
    lse = [_lse(m, order, saved.lse(h)) for h in range(problem.heads)]
    delta = [
        _delta(m, do[h], saved.o(h), None if dlse is None else dlse[h], order)
        for h in range(problem.heads)
    ]
    center = plan.backward.center if is_centered(plan, problem.softcap is not None) else 0
    ds_sums: list[Node] = [m.zeros(lo, (problem.n_q, 1)) for _ in range(problem.heads)]
    result = Gradients([], [], [], [], [], [])

    def scaled(x: Node) -> Node:
        return x if order.scale == "dS" else m.mul("gradient scaling", x, scale)

    for g in range(kv_heads):
        dk_tiles: dict[int, Node] = {}
        dv_tiles: dict[int, Node] = {}
        for step, start in enumerate(starts):
            tile = slice(start, min(start + tile_n, n_k))
            k, v = m.input(problem.k[g, tile]), m.input(problem.v[g, tile])
            k_t = m.transpose(k)
            dk = m.zeros(lo, (tile.stop - start, problem.d))
            dv = m.zeros(lo, (tile.stop - start, problem.d_v))
            rows = _rows_of(lo, hi, tile, tile_m)
            for h in range(g * problem.group, (g + 1) * problem.group):
                if rows.stop == rows.start:
                    continue
                q_h, do_h, lse_h, delta_h = (
                    m.take(x, rows) for x in (q[h], do[h], lse[h], delta[h])
                )
                columns = xp.arange(tile.start, tile.stop)
                seen = visible(columns, lo[rows], hi[rows])
                s = scores(m, const, q_h, k)
                p = _probabilities(m, order, const, s, column(m, lse_h), seen)
                dp = m.keep("dP rounding", m.dot("dP accumulation", do_h, v))
                p_parts = halves(m, plan, "P rounding", p)
                of_ds = p if order.ds_p == "unrounded" else p_parts[0]
                ds = _score_gradient(m, const, s, of_ds, dp, column(m, delta_h))
                if order.scale == "dS":
                    ds = m.mul("gradient scaling", ds, scale)
                ds = m.select(seen, ds, m.zeros(lo, seen.shape))
                ds_parts = halves(m, plan, "dS rounding", ds)
                walk = query_tiles(order, rows, start // tile_n, problem.n_q)
                walk = [slice(x.start - rows.start, x.stop - rows.start) for x in walk]
                dv = _over_queries(m, plan, "dV accumulation", dv, p_parts, do_h, seen, walk)
                dk = _over_queries(m, plan, "dK accumulation", dk, ds_parts, q_h, seen, walk)
                share = None
                for part in ds_parts:
                    share = m.dot_seen("dQ accumulation", part, k_t, share, seen)
                dq[h] = _added(m, "dQ order", dq[h], share, rows)
                if center:
                    ds_sums[h] = row_sums(m, ds_sums[h], rows, ds_parts, seen)
            dk_tiles[start] = scaled(dk)
            dv_tiles[start] = dv
            if progress is not None:
                progress("backward", (g * len(starts) + step + 1) / (kv_heads * len(starts)))
        held = sorted(dk_tiles)
        result.dk_wide.append(_stacked(m, [dk_tiles[i] for i in held], (0, problem.d)))
        result.dv_wide.append(_stacked(m, [dv_tiles[i] for i in held], (0, problem.d_v)))
    for h in range(problem.heads if center else 0):
        k_h, dlse_h = problem.k[problem.kv_head(h)], None if dlse is None else dlse[h]
        dq[h] = centered(m, dq[h], ds_sums[h], k_h, dlse_h, lo, hi, center)
    result.dq_wide.extend(scaled(x) for x in dq)
    return _cast_all(m, plan.format if plan.numerics.out == "input" else "float32", result)


def gradient_scale(m: Machine, problem: Problem, const: Constants) -> Node:
    """dS is the gradient of scale * q k^T: with a softcap the factor is still scale."""
    return const.scale if problem.softcap is None else m.constant("gradient scaling", problem.scale)


def _lse(m: Machine, order: BackwardPlan, lse: Node) -> Node:
    """LSE in the units of the exponent's argument."""
    if order.natural:
        return lse
    return m.mul("LSE scaling", lse, m.constant("LSE scaling", LOG2E))


def _probabilities(
    m: Machine, order: BackwardPlan, const: Constants, s: Node, lse: Node, seen: Array
) -> Node:
    """P of a tile of scores and its rows' LSE (R, 1)."""
    factor = const.scale if order.natural else const.c
    if order.score in ("fused", "natural fused"):
        x = m.fma("exponent argument", s, factor, m.map(lse, np.negative))
    else:
        x = m.mul("exponent argument", s, factor)
        x = m.sub("exponent argument", x, lse)
    if order.exponential == "expf":
        return m.exp("exp2", x, seen)
    return m.exp2("exp2", m.mul("exponent argument", x, const.log2e) if order.natural else x, seen)


def _delta(
    m: Machine, do: Node, parts: Sequence[Node], dlse: Array | None, order: BackwardPlan
) -> Node:
    delta = delta_sum(m, do, parts, order)
    return delta if dlse is None else m.sub("delta", delta, m.input(dlse))


def _score_gradient(m: Machine, const: Constants, s: Node, p: Node, dp: Node, delta: Node) -> Node:
    """dS = P (dP - delta), times the softcap's slope 1 - tanh^2."""
    ds = m.mul("dS", p, m.sub("dS", dp, delta))
    if const.softcap is None:
        return ds
    return m.mul("softcap", ds, m.fma("softcap", m.map(s, np.negative), s, np.float32(1)))


def _added(m: Machine, name: str, acc: Node, share: Node, rows: slice) -> Node:
    """acc[rows] += share."""
    return m.replace(acc, rows, m.add(name, m.take(acc, rows), share))


def _stacked(m: Machine, nodes: list[Node], empty: tuple[int, int]) -> Node:
    return m.concatenate(nodes) if nodes else m.zeros(np.zeros(0), empty)


def _cast_all(m: Machine, fmt: str, g: Gradients) -> Gradients:
    for narrow, wide in ((g.dq, g.dq_wide), (g.dk, g.dk_wide), (g.dv, g.dv_wide)):
        narrow.extend(m.cast("output cast", x, fmt) for x in wide)
    return g


def standard_backward(
    m: Machine,
    problem: Problem,
    dout: Array,
    dlse: Array | None,
    saved: Saved,
    progress: Progress | None = None,
) -> Gradients:
    """Gradients with the stored P: softmax backward with delta = rowsum(P * dP), then three
    products.
    """
    if saved.p is None:
        raise ValueError("saved.p: None, must give the stored P")
    const = constants(m, problem, None)
    xp = rounding.namespace(problem.q)
    lo, hi = (xp.asarray(x) for x in problem.band())
    columns = xp.arange(problem.n_k)
    scale = gradient_scale(m, problem, const)
    result = Gradients([], [], [], [], [], [])
    for g in range(int(problem.k.shape[0])):
        k, v = m.input(problem.k[g]), m.input(problem.v[g])
        dk = m.zeros(lo, (problem.n_k, problem.d))
        dv = m.zeros(lo, (problem.n_k, problem.d_v))
        for h in range(g * problem.group, (g + 1) * problem.group):
            stored, dq_blocks = saved.p(h), []
            if problem.n_k == 0:
                result.dq_wide.append(m.zeros(lo, (problem.n_q, problem.d)))
                continue
            for block in row_blocks(problem.n_q):
                seen = visible(columns, lo[block], hi[block])
                q, do = m.input(problem.q[h, block]), m.input(dout[h, block])
                p = m.take(stored, block)
                dp = m.keep("dP rounding", m.dot("dP accumulation", do, v))
                delta = warp_sum(m, "delta", m.mul("delta", p, dp))
                if dlse is not None:
                    delta = m.sub("delta", delta, m.input(dlse[h, block]))
                s = None if problem.softcap is None else scores(m, const, q, k)
                ds = _score_gradient(m, const, s, p, dp, column(m, delta))
                ds = m.select(seen, ds, m.zeros(lo, seen.shape))
                ds = m.mul("gradient scaling", ds, scale)
                ds_half = m.cast("dS rounding", ds, m.fmt)
                p_half = m.cast("P rounding", p, m.fmt)
                dq_blocks.append(m.dot_seen("dQ accumulation", ds_half, m.transpose(k), None, seen))
                p_t, ds_t = m.transpose(p_half), m.transpose(ds_half)
                dv = m.dot_seen("dV accumulation", p_t, m.transpose(do), dv, seen.T)
                dk = m.dot_seen("dK accumulation", ds_t, m.transpose(q), dk, seen.T)
            result.dq_wide.append(_stacked(m, dq_blocks, (0, problem.d)))
            if progress is not None:
                progress("backward", (h + 1) / problem.heads)
        result.dk_wide.append(dk)
        result.dv_wide.append(dv)
    return _cast_all(m, m.fmt, result)


# -- public calls ---------------------------------------------------------------------------------


def check_dout(problem: Problem, dout: Any, dlse: Any = None) -> tuple[Array, Array | None]:
    """dout (H, N_q, D_v) and dlse (H, N_q) float32 or None, checked against the problem."""
    shape = (*problem.lead, problem.n_q, problem.d_v)
    check_plain("dout", dout)
    if tuple(dout.shape) != shape:
        raise ValueError(f"dout: shape {tuple(dout.shape)}, must be {shape} like out")
    if dtype_name(dout.dtype) != problem.dtype:
        raise TypeError(f"dout: dtype {dout.dtype}, must be {problem.dtype} like q")
    dout = dout.reshape(problem.heads, problem.n_q, problem.d_v)
    if dlse is None:
        return dout, None
    check_plain("dlse", dlse, "a float32 array")
    if dtype_name(dlse.dtype) != "float32":
        raise TypeError(f"dlse: got {dlse.dtype}, must be float32")
    if tuple(dlse.shape) != shape[:-1]:
        raise ValueError(f"dlse: shape {tuple(dlse.shape)}, must be {shape[:-1]} like lse")
    return dout, dlse.reshape(problem.heads, problem.n_q)


def finite_lse(lse: Array) -> Array:
    """LSE with 0 for rows that saw nothing (their P is masked, so the value does not matter)."""
    xp = rounding.namespace(lse)
    finite: Array = xp.where(lse == -np.inf, xp.float32(0), lse)
    return finite


def delta_parts(plan: Plan, forward: Forward, h: int) -> list[Array]:
    """What delta sums: the rounded O, and under delta="full" also the remainder that its rounding
    left.
    """
    rounded = forward.out[h].astype(np.float32)
    if (
        plan.numerics.delta == "rounded"
        or plan.numerics.out == "float32"
        or plan.format == "float32"
    ):
        return [rounded]
    rest = rounding.cast(rounding.sub(forward.o[h], rounded), plan.format)
    return [rounded, rest]


def _as_arrays(problem: Problem, dtype: np.dtype[Any], g: Gradients) -> tuple[Array, Array, Array]:
    xp = rounding.namespace(problem.q)
    shapes = (
        (*problem.lead, problem.n_q, problem.d),
        (*problem.kv_lead, problem.n_k, problem.d),
        (*problem.kv_lead, problem.n_k, problem.d_v),
    )
    dq, dk, dv = (
        xp.stack(x).astype(dtype).reshape(shape) if x else xp.zeros(shape, dtype)
        for x, shape in zip((g.dq, g.dk, g.dv), shapes, strict=True)
    )
    return dq, dk, dv


def flash_vjp(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    dlse: Any = None,
    plan: Plan | None = None,
    numerics: Numerics | dict[str, Any] | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    progress: Progress | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `flash`, bit for bit what a kernel with this Plan computes.

    dout (..., N_q, D_v) in q's dtype; dlse (..., N_q) float32, the gradient of LSE, or None.
    Returns dq, dk, dv in the shapes and dtype of q, k, v (float32 under out="float32"). Rows that
    see no key have gradient 0. Other arguments, NaN behaviour and errors as in `flash`.

    Source: FlashAttention-2 (Dao 2023), algorithm 2, with the roundings of `Plan`.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> dq, dk, dv = flash_vjp(x, x, x, x, causal=True)
    >>> dq.shape, float(dv[3, 3]) > 0.25
    ((4, 16), True)
    """
    check_progress(progress)
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    plan = resolve_plan(problem, plan, numerics)
    dout, dlse = check_dout(problem, dout, dlse)
    forward = flash_forward(problem, plan, progress)
    m = machine_of(plan)
    saved = Saved(
        lse=lambda h: m.input(finite_lse(forward.lse[h])),
        o=lambda h: [m.input(x) for x in delta_parts(plan, forward, h)],
    )
    g = flash_backward(m, plan, problem, dout, dlse, saved, progress)
    return _as_arrays(problem, forward.out.dtype, g)


def standard_vjp(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    dlse: Any = None,
    state: str = "float32",
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    progress: Progress | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `standard`, from the stored P. Arguments as in `flash_vjp` and `standard`.

    >>> x = np.eye(4, 16, dtype=np.float16)
    >>> [g.shape for g in standard_vjp(x, x, x, x)]
    [(4, 16), (4, 16), (4, 16)]
    """
    check_progress(progress)
    problem = Problem.of(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    dout, dlse = check_dout(problem, dout, dlse)
    forward, stored = standard_forward(problem, state, progress)
    m = standard_machine(problem, state)
    saved = Saved(lse=lambda h: forward.lse[h], o=lambda h: [], p=lambda h: m.input(stored[h]))
    g = standard_backward(m, problem, dout, dlse, saved, progress)
    return _as_arrays(problem, numpy_dtype(problem.dtype), g)
