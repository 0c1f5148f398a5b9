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
from emulation.plan import Numerics, Plan
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


def delta_sum(m: Machine, do: Node, parts: Sequence[Node], threads: int = 0) -> Node:
    """rowsum(dO * O): FMA chains of `threads`, each with chunks of 8 columns in turn, joined by
    halves; 0: a thread for each chunk.
    """
    rows, width = m.value(do).shape
    lanes = threads or 1
    while not threads and lanes * 8 < width:
        lanes *= 2
    turns = -(-width // (lanes * 8))

    def chunked(x: Array) -> Array:
        xp = rounding.namespace(x)
        pad = xp.zeros((rows, turns * lanes * 8 - width), x.dtype)
        padded: Array = xp.concatenate([x, pad], axis=1)
        return padded.reshape(rows, turns, lanes, 8)

    do = m.map(do, chunked)
    parts = [m.map(part, chunked) for part in parts]
    acc = m.zeros(m.value(do), (rows, lanes))
    every = slice(None)
    for turn in range(turns):
        for e in range(8):
            for part in parts:
                do_e, o_e = (m.take(x, (every, turn, every, e)) for x in (do, part))
                acc = m.fma("delta", do_e, o_e, acc)
    while lanes > 1:
        lanes //= 2
        low = m.take(acc, (every, slice(lanes)))
        acc = m.add("delta", low, m.take(acc, (every, slice(lanes, None))))
    return m.take(acc, (every, 0))


def _over_queries(
    m: Machine, plan: Plan, name: str, acc: Node | None, parts: list[Node], b: Node, seen: Array
) -> Node:
    """acc += parts^T b over the rows: parts (R, T), b (R, D). Tiles of queries matter only if
    promoted, split into parts or terms, or taken from the last to the first.
    """
    rows = seen.shape[0]
    split = len(parts) > 1 or (plan.format == "float32" and plan.wide == "split")
    ascending = plan.backward.queries == "ascending"
    whole = plan.numerics.accumulate == "tensor-core" and not split and ascending
    starts = range(0, rows, rows if whole else plan.backward.tile_m)
    step = starts.step
    for start in starts if ascending else reversed(starts):
        block = slice(start, min(start + step, rows))
        b_t = m.transpose(m.take(b, block))
        promoted = plan.numerics.accumulate == "promoted"
        tile = None if promoted else acc
        for part in parts:
            part_t = m.transpose(m.take(part, block))
            tile = m.dot_seen(name, part_t, b_t, tile, seen[block].T)
        acc = m.add(name, acc, tile) if promoted and acc is not None else tile
    return acc


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
    const = constants(m, problem)
    xp = rounding.namespace(problem.q)
    lo, hi = (xp.asarray(x) for x in problem.band())
    kv_heads, n_k = int(problem.k.shape[0]), problem.n_k
    if plan.algorithm != "tiled":
        raise ValueError(f"plan.algorithm: got {plan.algorithm!r}, must be 'tiled' for gradients")
    log2e, threads = m.constant("LSE scaling", LOG2E), plan.backward.delta_threads
    scale = gradient_scale(m, problem, const)
    tile_n, tile_m = plan.backward.tile_n, plan.backward.tile_m
    starts = list(range(0, n_k, tile_n))
    if plan.backward.dq_order == "descending":
        starts.reverse()

    dq: list[Node] = [m.zeros(lo, (problem.n_q, problem.d)) for _ in range(problem.heads)]
    q = [m.input(x) for x in problem.q]
    do = [m.input(x) for x in dout]
    lse2 = [m.mul("LSE scaling", saved.lse(h), log2e) for h in range(problem.heads)]
    delta = [
        _delta(m, do[h], saved.o(h), None if dlse is None else dlse[h], threads)
        for h in range(problem.heads)
    ]
    center = plan.backward.center if is_centered(plan, problem) else 0
    ds_sums: list[Node] = [m.zeros(lo, (problem.n_q, 1)) for _ in range(problem.heads)]
    result = Gradients([], [], [], [], [], [])

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
                    m.take(x, rows) for x in (q[h], do[h], lse2[h], delta[h])
                )
                columns = xp.arange(tile.start, tile.stop)
                seen = visible(columns, lo[rows], hi[rows])
                s = scores(m, const, q_h, k)
                if plan.backward.score == "fused":
                    less = m.map(column(m, lse_h), np.negative)
                    x = m.fma("exponent argument", s, const.c, less)
                else:
                    x = m.mul("exponent argument", s, const.c)
                    x = m.sub("exponent argument", x, column(m, lse_h))
                p = m.exp2("exp2", x, seen)
                dp = m.keep("dP rounding", m.dot("dP accumulation", do_h, v))
                ds = _score_gradient(m, const, s, p, dp, column(m, delta_h))
                ds = m.select(seen, ds, m.zeros(lo, seen.shape))
                p_parts = halves(m, plan, "P rounding", p)
                ds_parts = halves(m, plan, "dS rounding", ds)
                dv = _over_queries(m, plan, "dV accumulation", dv, p_parts, do_h, seen)
                dk = _over_queries(m, plan, "dK accumulation", dk, ds_parts, q_h, seen)
                share = None
                for part in ds_parts:
                    share = m.dot_seen("dQ accumulation", part, k_t, share, seen)
                dq[h] = _added(m, "dQ order", dq[h], share, rows)
                if center:
                    ds_sums[h] = row_sums(m, ds_sums[h], rows, ds_parts, seen)
            dk_tiles[start] = m.mul("gradient scaling", dk, scale)
            dv_tiles[start] = dv
            if progress is not None:
                progress("backward", (g * len(starts) + step + 1) / (kv_heads * len(starts)))
        order = sorted(dk_tiles)
        result.dk_wide.append(_stacked(m, [dk_tiles[i] for i in order], (0, problem.d)))
        result.dv_wide.append(_stacked(m, [dv_tiles[i] for i in order], (0, problem.d_v)))
    for h in range(problem.heads if center else 0):
        k_h, dlse_h = problem.k[problem.kv_head(h)], None if dlse is None else dlse[h]
        dq[h] = centered(m, dq[h], ds_sums[h], k_h, dlse_h, lo, hi, center)
    result.dq_wide.extend(m.mul("gradient scaling", x, scale) for x in dq)
    return _cast_all(m, plan.format if plan.numerics.out == "input" else "float32", result)


def gradient_scale(m: Machine, problem: Problem, const: Constants) -> Node:
    """dS is the gradient of scale * q k^T: with a softcap the factor is still scale."""
    return const.scale if problem.softcap is None else m.constant("gradient scaling", problem.scale)


def _delta(m: Machine, do: Node, parts: Sequence[Node], dlse: Array | None, threads: int) -> Node:
    delta = delta_sum(m, do, parts, threads)
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
    const = constants(m, problem)
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


# -- public calls
# -----------------------------------------------------------------------------------


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
