"""Bounds: how far a tiled attention under a Plan may be from the exact one, derived before it runs.

Every rounding that `flash`, `backward` and `standard` make with an fp32 state is bounded by its
worst case and carried to the result; factors (1 + eps) are multiplied up, never dropped. Needed are
only float64 values of the exact result, no computed one, so that the bound judges any
implementation of a Plan: the emulator's, and a kernel's. Notation: see `bound_terms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.backward import check_dout, delta_lanes
from emulation.bound_forward import Forward, accumulated, cast_error, forward, operands, standard
from emulation.bound_terms import (
    EVALUATION,
    EX2,
    F64,
    FLUSH,
    TINY,
    Constants,
    Product,
    Rounding,
    U,
    Walk,
    compounded,
    gamma64,
    total,
)
from emulation.center import SAMPLES, is_centered, mean_sizes
from emulation.oracle.result import check_cotangents, refuse_nonfinite
from emulation.plan import Plan
from emulation.problem import Array, Problem
from emulation.tiled import LN2, LOG2E

__all__ = ["backward_bound", "forward_bound", "standard_bound"]

ROWS = 256  # queries at a time


def _check(problem: Problem, plan: Plan | None = None) -> None:
    """Refuse what no bound is derived for."""
    refuse_nonfinite(problem)
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: got {type(plan).__name__}, must be a Plan")
    if plan.format != problem.dtype:
        raise ValueError(f"plan: format {plan.format}, must be {problem.dtype} like q")
    if plan.algorithm != "tiled":
        raise ValueError(f"plan.algorithm: got {plan.algorithm!r}, must be 'tiled' to be bounded")
    if plan.splits > 1:
        raise ValueError(f"plan.splits: got {plan.splits}, must be 1 to be bounded")
    if plan.state != "float32":
        raise ValueError(f"plan.state: got {plan.state!r}, must be 'float32' to be bounded")
    if plan.numerics.reference == "stale" and 2.0**plan.stale_limit < plan.tile_n / 4:
        # Else a lane of a tile may exceed the limit without a score above the reference.
        raise ValueError(
            f"plan.stale_limit: got {plan.stale_limit}, must be >= log2(tile_n / 4) to be bounded"
        )


def _blocks(problem: Problem) -> Iterator[tuple[slice, Array]]:
    band = np.stack(problem.band())
    for start in range(0, problem.n_q, ROWS):
        rows = slice(start, min(start + ROWS, problem.n_q))
        yield rows, band[:, rows]


def forward_bound(problem: Problem, plan: Plan, *, before_cast: bool = False) -> tuple[F64, F64]:
    """Bounds of |out - exact| (H, N_q, D_v) and |lse - exact| (H, N_q), elementwise, float64.

    They hold for every implementation of `plan` (fp32 state) on every finite input; inf where the
    Plan may overflow or be wrong by more than its own size, 0 for rows that see no key.
    before_cast: of O before it is rounded to the output format. O(N_q N_k D_v) float64 operations.
    Raises ValueError for NaN or Inf that some query sees, for a Plan of another format or with a
    half state, and for a "stale" reference whose limit a tile can exceed without a larger score.

    >>> x = np.eye(64, dtype=np.float16)
    >>> out, lse = forward_bound(Problem.of(x, x, x), Plan(format="float16"))
    >>> out.shape, bool(out.max() < 2**-15), bool(lse.max() < 2**-18)
    ((1, 64, 64), True, True)
    """
    _check(problem, plan)
    out = np.zeros((problem.heads, problem.n_q, problem.d_v))
    lse = np.zeros(out.shape[:2])
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            for rows, band in _blocks(problem):
                f = forward(problem, plan, h, rows, band)
                out[h, rows], lse[h, rows] = f.wide if before_cast else f.out, f.lse
    return out, lse


def standard_bound(problem: Problem) -> tuple[F64, F64]:
    """Bounds of |out - exact| and |lse - exact| for `standard` with state="float32", as
    `forward_bound`.

    >>> x = np.eye(64, dtype=np.float16)
    >>> out, lse = standard_bound(Problem.of(x, x, x))
    >>> bool(out.max() < 2**-15), bool(lse.max() < 2**-18)
    (True, True)
    """
    _check(problem)
    out = np.zeros((problem.heads, problem.n_q, problem.d_v))
    lse = np.zeros(out.shape[:2])
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            for rows, band in _blocks(problem):
                out[h, rows], lse[h, rows] = standard(problem, h, rows, band)
    return out, lse


# -- backward


def _delta_error(plan: Plan, f: Forward, dout: F64, v_terms: F64, dlse: F64) -> tuple[F64, F64]:
    """delta = sum_d dO_d O_d - dLSE (R,) and its error: that of the O which is summed, as a rounded
    part and (delta="full") the rounded remainder, which is exact before its rounding; then a
    thread's chain of fmas (of each part; pairs pass fewer roundings), a tree over the threads, one
    subtraction.
    """
    r = Rounding.of(plan.format)
    o_err, size, parts = f.out, np.abs(f.o) + f.out, 1
    half = plan.numerics.out == "input" and r.relative > 0
    if half and plan.numerics.delta == "full":
        up = np.abs(f.o) + f.wide
        first = r.relative * up + r.absolute
        rest = r.relative * first + r.absolute
        o_err = np.where(up < r.limit, f.wide + rest, np.inf)
        size, parts = up + 2 * first + rest, 2
    lanes, turns = delta_lanes(plan.backward, f.o.shape[1])
    chain = parts * turns * plan.backward.delta_columns
    weight = np.abs(dout)
    rounded = compounded(U, chain + math.log2(lanes)) + gamma64(f.o.shape[1])
    err = (weight * o_err).sum(axis=1) + rounded * (weight * size).sum(axis=1)
    err = err + chain * lanes * TINY + gamma64(f.o.shape[1]) * v_terms
    delta = (dout * f.o).sum(axis=1) - dlse
    return delta, err + np.where(dlse != 0, U * (np.abs(delta) + err), 0.0)


def _query_walk(
    plan: Plan, product: Product, problem: Problem, rows: slice, heads_after: int
) -> tuple[F64, F64, int]:
    """For dV and dK: steps after a query's own (it included), promoted additions after, steps of
    one head; (R,), or (N_k, R) where tiles of keys start at different queries. An unsplit product
    runs through from the first row that sees the tile, or from where the tile starts and once
    round (one step more where that is no multiple of L); the others start anew every tile_m
    queries.
    """
    i, n_q = np.arange(rows.start, rows.stop), problem.n_q
    parts = 2 if plan.numerics.p == "split" else 1
    order = plan.backward
    through = not plan.promotes_gradients and parts * product.passes == 1
    if through and order.queries == "ascending" and order.starts == 1:
        head = product.steps(n_q) + 1
        after = (n_q - 1 - i) // product.length + 2 + heads_after * head
        return after.astype(np.float64), np.zeros(len(i)), head
    tile, per_tile = order.tile_m, parts * product.steps(order.tile_m)
    tiles = -(-n_q // tile)
    within = per_tile - i % tile // product.length
    later = tiles - 1 - i // tile if order.queries == "ascending" else i // tile
    if order.starts > 1:
        first = np.arange(problem.n_k)[:, None] // order.tile_n % order.starts % tiles
        later = (later + first) % tiles
    if through and order.starts > 1:
        within, per_tile = within + 1, per_tile + 1
    left = later + heads_after * tiles
    if plan.promotes_gradients:
        return within.astype(np.float64) + 0 * left, left + 1.0, tiles * per_tile
    return within + left * float(per_tile), 0.0 * left, tiles * per_tile


def _scaled(value: F64, err: F64, scale: float) -> tuple[F64, F64]:
    """A value and its error, times the scale as fp32 holds it."""
    with np.errstate(over="ignore"):
        held = float(np.float32(scale))
    err = err * held + np.abs(value) * abs(held - scale)
    value = value * scale
    return value, err + U * (np.abs(value) + err) + TINY


def _argument_error(problem: Problem, plan: Plan, f: Forward) -> tuple[F64, F64]:
    """Of the exponent's argument (R, N_k) in log2 units: its error, and what it may be at most,
    short of its last roundings.

    The score's own error is that of the forward, whose factor may be another; LSE's is the
    forward's. In natural units every rounding is relative to the same number, and TINY's are
    counted twice for log2 e < 2.
    """
    s, order = f.s, plan.backward
    factors = [Constants.of(problem, plan.c, natural=x).c_held for x in (False, True)]
    c, had = factors[order.natural], factors[plan.score == "scaled"]
    of_score = s.e
    if c != had:
        of_score = s.e + (abs(c / had - 1.0) + 2.0**-51) * (np.abs(s.y) + s.e)
    held = float(np.float32(LOG2E))
    of_lse = f.lse * LOG2E + 2.0**-51 * np.abs(s.lse2)
    if not order.natural:  # LSE log2 e
        of_lse = f.lse * held + np.abs(s.lse2) * (abs(held - LOG2E) + 2.0**-51) * LN2
        of_lse = of_lse + U * (np.abs(s.lse2) + of_lse) + TINY
    x_up = e = of_score + of_lse[:, None]
    gap = s.lse2[:, None] - s.y
    e = e + U * (gap + e) + 2 * TINY
    if order.score in ("unfused", "natural"):
        e = e + U * (np.abs(s.y) + of_score) + 2 * TINY
    if order.natural and order.exponential == "exp2":  # x log2 e
        e = e + ((1 + U) * (1 + abs(held / LOG2E - 1.0)) - 1.0 + 2.0**-51) * (gap + e) + TINY
    return e, x_up


@dataclass(frozen=True, eq=False)
class _Sum:
    """An accumulator before its scaling: exact value, error, and sum of the terms' magnitudes."""

    value: F64
    err: F64
    size: F64

    @staticmethod
    def zeros(*shape: int) -> _Sum:
        return _Sum(np.zeros(shape), np.zeros(shape), np.zeros(shape))

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.value + other.value, self.err + other.err, self.size + other.size)

    def finished(self, plan: Plan, scale: float | None = None) -> F64:
        """Scaled by the held fp32 factor (None: not) and cast; inf where a sum may overflow."""
        value, err = self.value, np.where(self.size + self.err < 2.0**126, self.err, np.inf)
        if scale is not None:
            value, err = _scaled(value, err, scale)
        err = cast_error(value, err, plan.format if plan.numerics.out == "input" else "float32")
        err = np.where(np.isnan(err), np.inf, err * EVALUATION)
        return np.where(self.size == 0, 0.0, err)  # only zeros were added


def _backward(
    problem: Problem, plan: Plan, h: int, rows: slice, band: Array, dout: F64, dlse: F64
) -> tuple[_Sum, _Sum, _Sum]:
    """What a block of queries of one head gives to dQ (all of it), dK and dV."""
    f = forward(problem, plan, h, rows, band)
    product = Product.of(plan.format, plan.arch, plan.step, plan.wide)
    rounding = Rounding.of(plan.format, plan.numerics.p == "split")
    q, k, v = operands(problem, h, rows)
    s, p, seen = f.s, f.p, f.s.seen

    e, x_up = _argument_error(problem, plan, f)
    factor = np.exp2(e) * (1 + EX2)
    p_err = np.where(seen, p * (factor - 1.0) + FLUSH, 0.0)
    p_err = np.where(seen & ~(x_up < 126.0), np.inf, p_err)
    p_up = p + p_err
    p_half = np.where(seen, rounding.error(p_up), 0.0)
    p_half = np.where(p_up < rounding.limit, p_half, np.inf)

    # dS = rn(P rn(dP - delta)), with a softcap times rn(1 - tanh^2), perhaps times the scale.
    terms = np.abs(dout) @ np.abs(v).T
    d_v = problem.d_v
    after = product.steps(d_v) - np.arange(d_v) // product.length
    dp_err = product.error(
        [np.abs(dout)], v.T, after, product.steps(d_v), power=product.powers(dout)
    )
    dp_err = np.where(terms + dp_err < 2.0**126, dp_err + gamma64(d_v) * terms, np.inf)
    delta, delta_err = _delta_error(plan, f, dout, (p * terms).sum(axis=1), dlse)
    gap = dout @ v.T - delta[:, None]
    gap_err = dp_err + delta_err[:, None]
    gap_err += U * (np.abs(gap) + gap_err)
    ds = p * gap
    of_ds = p_err + p_half if plan.backward.ds_p == "rounded" else p_err
    ds_err = of_ds * (np.abs(gap) + gap_err) + p * gap_err
    ds_err += U * (np.abs(ds) + ds_err) + TINY
    if problem.softcap is not None:
        slope = 1.0 - s.tanh**2
        slope_err = (2 * np.abs(s.tanh) + s.tanh_e) * s.tanh_e
        slope_err += U * (slope + slope_err)
        ds_err = ds_err * (slope + slope_err) + np.abs(ds) * slope_err
        ds = ds * slope
        ds_err += U * (np.abs(ds) + ds_err) + TINY
    if plan.backward.scale == "dS":
        ds, ds_err = _scaled(ds, ds_err, problem.scale)
    ds, ds_err = np.where(seen, ds, 0.0), np.where(seen, ds_err, 0.0)
    ds_up = np.abs(ds) + ds_err
    ds_half = np.where(seen, rounding.error(ds_up), 0.0)
    ds_half = np.where(ds_up < rounding.limit, ds_half, np.inf)

    def parts(up: F64) -> list[F64]:
        return [np.where(seen, part, 0.0) for part in rounding.parts(up)]

    ds_parts, p_parts = parts(ds_up), parts(p_up)
    ascending = plan.backward.dq_order == "ascending"
    walk = Walk.of(problem.n_k, plan.backward.tile_n, ascending, band)
    steps = len(ds_parts) * product.steps(walk.tile)
    after_own = np.asarray(steps - walk.inside // product.length, np.float64)
    dq_err = accumulated(product, ds_parts, k, after_own, steps, walk.tiles_after)
    group = problem.group
    later, adds, head = _query_walk(plan, product, problem, rows, group - 1 - h % group)

    def over_queries(value: F64, err: F64, up: list[F64], b: F64) -> _Sum:
        lost = accumulated(product, [x.T for x in up], b, later, head * group, adds)
        size = total(up).T @ np.abs(b)
        return _Sum(value.T @ b, err.T @ np.abs(b) + lost, size)

    dq = _Sum(
        ds @ k,
        (ds_err + ds_half) @ np.abs(k) + dq_err,
        total(ds_parts) @ np.abs(k),
    )
    if is_centered(plan, problem.softcap is not None):
        ones = np.ones((problem.n_k, 1))
        sums = _Sum(
            dlse[:, None],
            (ds_err + ds_half).sum(axis=1, keepdims=True)
            + accumulated(product, ds_parts, ones, after_own, steps, walk.tiles_after),
            total(ds_parts).sum(axis=1, keepdims=True),
        )
        dq = _centered(plan, dq, sums, k, band)
    dk = over_queries(ds, ds_err + ds_half, ds_parts, q)
    return dq, dk, over_queries(p, p_err + p_half, p_parts, dout)


def _centered(plan: Plan, dq: _Sum, sums: _Sum, k: F64, band: Array) -> _Sum:
    """dQ less R c, where R = sums - dLSE is 0 but for its error, and c a sum of keys that rounds
    SAMPLES - 1 times, times an fp32 number.
    """
    sizes, has = mean_sizes(k, band[0], band[1], plan.backward.center)
    c = sizes * (1.0 + compounded(U, SAMPLES)) + SAMPLES * TINY
    r = sums.err + U * (np.abs(sums.value) + sums.err)
    r = np.where(sums.size + np.abs(sums.value) + r < 2.0**126, r, np.inf)
    err = dq.err + r * np.where(sizes > 0, c, 0.0)
    err = err + U * (np.abs(dq.value) + err) + TINY
    moved = _Sum(dq.value, err, dq.size + (sums.size + np.abs(sums.value) + r) * sizes)
    own = has[:, None]
    return _Sum(
        *(np.where(own, getattr(moved, n), getattr(dq, n)) for n in ("value", "err", "size"))
    )


def backward_bound(
    problem: Problem, plan: Plan, dout: Any, dlse: Any = None
) -> tuple[F64, F64, F64]:
    """Bounds of |dq - exact| (H, N_q, D), |dk - exact| (H_kv, N_k, D) and |dv - exact| (H_kv, N_k,
    D_v), elementwise, float64, for `flash_vjp` of this Plan (its forward included).

    dout (..., N_q, D_v) and dlse (..., N_q) as in `flash_vjp`. What holds and what is raised is as
    in `forward_bound`.

    >>> x = np.eye(64, dtype=np.float16)
    >>> bounds = backward_bound(Problem.of(x, x, x), Plan(format="float16"), x)
    >>> [bool(b.max() < 2**-10) for b in bounds]
    [True, True, True]
    """
    _check(problem, plan)
    check_dout(problem, dout, dlse)
    do, dl = check_cotangents(problem, dout, dlse)
    scale = problem.scale if plan.backward.scale == "after" else None
    kv = problem.k.shape[0]
    dq = np.zeros((problem.heads, problem.n_q, problem.d))
    dk, dv = np.zeros((kv, problem.n_k, problem.d)), np.zeros((kv, problem.n_k, problem.d_v))
    with np.errstate(all="ignore"):
        for g in range(kv):
            dk_sum, dv_sum = _Sum.zeros(*dk.shape[1:]), _Sum.zeros(*dv.shape[1:])
            for h in range(g * problem.group, (g + 1) * problem.group):
                for rows, band in _blocks(problem):
                    parts = _backward(problem, plan, h, rows, band, do[h, rows], dl[h, rows])
                    dq[h, rows] = parts[0].finished(plan, scale)
                    dk_sum, dv_sum = dk_sum + parts[1], dv_sum + parts[2]
            dk[g], dv[g] = dk_sum.finished(plan, scale), dv_sum.finished(plan)
    return dq, dk, dv
