"""Exact attention in float64 with single steps replaced: what a wrong computation would give if it
rounded nothing, beside the error that rounding in the claimed format may add to it.

A `Change` is data: which steps differ, each a small function. `Outcome` holds the results of some
rows of every head. Without a change this is the exact attention, and its expected error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation.formats import FORMATS
from emulation.oracle.result import numbers
from emulation.problem import Array, Problem
from emulation.rounding import round_to

F64 = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Scores held at once: 8 MB in float64; on a GPU 512 MB.
CELLS, CELLS_GPU = 1 << 20, 1 << 26
#: Elements of q, k and v that are kept in float64 for the next change.
KEPT = 1 << 24
#: Mean square of the relative error of one rounding to nearest, in units of u^2, for significands
#: spread as those of computed values are (their logarithms uniform): (2^2 / 12) (3/4) / (2 ln 2).
ROUNDING = 0.18
U32 = 2.0**-24


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys a block of rows sees, and what a mask may want to know: seen (R, N_k), rows (R,)
    the queries' numbers, columns (N_k,).
    """

    problem: Problem
    rows: Index
    columns: Index
    seen: Mask


@dataclass(frozen=True)
class Change:
    """Steps that a computation does otherwise; None is as it should be.

    inputs: another problem (values, scale, masks). heads: key head of each query head. sight: other
    visible keys. bias: what hidden keys have as a score, and are summed, instead of being left out.
    score: scores (natural units, capped) of a block. pad: keys of score 0 and value 0 that each row
    (of those whose last key is the last of all, unless pad_all) also sums. weights: P before its
    sum divides it, as P V sees it. tiles: (keys a tile, ascending, what is not rescaled: "O", "l",
    "both"). divided: how often the sum divides O. prob: P after the division. state: the format
    that every step rounds to. out: O (H, N_q, D_v) of all rows, moved or scaled. lse: (L, max of
    the scores) (H, R) each. backward: names of steps that the gradients get wrong. gradients: right
    ones, by name, to what became of them.
    """

    inputs: Callable[[Problem], Problem] | None = None
    heads: Callable[[Problem], Index] | None = None
    sight: Callable[[Sight], Mask] | None = None
    bias: float | None = None
    score: Callable[[F64, Problem], F64] | None = None
    pad: int = 0
    pad_all: bool = False
    weights: Callable[[F64], F64] | None = None
    tiles: tuple[int, bool, str] | None = None
    divided: int = 1
    prob: Callable[[F64], F64] | None = None
    state: str | None = None
    out: Callable[[F64, Problem], F64] | None = None
    lse: Callable[[F64, F64], F64] | None = None
    backward: frozenset[str] = frozenset()
    gradients: Callable[[dict[str, F64], Problem], dict[str, F64]] | None = None


NOTHING = Change()


@dataclass(frozen=True, eq=False)
class Outcome:
    """Of some rows: out (H, R, D_v), lse (H, R); `sigma` (H, R, D_v) the standard deviation that
    rounding adds, `worst` its first-order worst case, of which `p_part` = u sum P |V| is that of
    rounding P; `spread` = u sqrt(sum P^2 V^2); `lse_sigma` (H, R); `half` (H, R, D_v) the standard
    deviation that rounding every step to the format would leave, `coarse` that of rounding P to a
    coarser one (both without a change only).
    """

    out: F64
    lse: F64
    sigma: F64
    worst: F64
    p_part: F64
    spread: F64
    lse_sigma: F64
    half: F64
    coarse: dict[str, F64]


@dataclass(frozen=True, eq=False)
class Weights:
    """One block of one head: scores (R, N_k), P (R, N_k) divided by its sum, LSE and the max."""

    s: F64
    p: F64
    lse: F64
    top: F64
    seen: Mask
    slope: F64 | None


class Wide:
    """Arrays of one problem in float64, converted once: most changes leave them as they are."""

    def __init__(self, problem: Problem) -> None:
        self._own = (problem.k, problem.v)
        self._keep = problem.k.size + problem.v.size <= KEPT
        self._known: dict[tuple[int, int], F64] = {}
        self._squares: dict[tuple[int, int], tuple[F64, F64]] = {}

    def of(self, x: Array, g: int) -> F64:
        """x[g]."""
        if not (self._keep and any(x is own for own in self._own)):
            return numbers(x[g])
        key = (id(x), g)
        if key not in self._known:
            self._known[key] = numbers(x[g])
        return self._known[key]

    def squares(self, x: Array, g: int, v: F64) -> tuple[F64, F64]:
        """v^2 and |v| of v = x[g] (as it is used)."""
        key = (id(x), g)
        if v is not self._known.get(key):
            return v * v, np.abs(v)
        if key not in self._squares:
            self._squares[key] = (v * v, np.abs(v))
        return self._squares[key]


def blocks(rows: Index, n_k: int, cells: int = CELLS) -> Iterator[slice]:
    """Positions in `rows`, so many at a time that their scores fit."""
    step = max(1, cells // max(1, n_k))
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


def _to(x: F64, fmt: str | None) -> F64:
    return x if fmt is None else np.asarray(round_to(x, fmt)).astype(np.float64)


def weigh(
    problem: Problem, change: Change, q: F64, k: F64, rows: Index, band: tuple[Index, Index]
) -> Weights:
    """Scores and P of a block: q (R, D), k (N_k, D)."""
    columns = np.arange(len(k))
    lo, hi = (x[rows] for x in band)
    seen = (columns >= lo[:, None]) & (columns < hi[:, None])
    if change.sight is not None:
        seen = change.sight(Sight(problem, rows, columns, seen))
    s = _to(_to(q @ k.T, change.state) * problem.scale, change.state)
    slope = None
    if problem.softcap is not None:
        bent = np.tanh(s / problem.softcap)
        s, slope = problem.softcap * bent, 1.0 - bent * bent
    if change.score is not None:
        s = change.score(s, problem)
    if change.bias is not None:
        s, counted = np.where(seen, s, change.bias), np.ones_like(seen)
    else:
        counted = seen
    padded = np.zeros(len(rows))
    if change.pad:
        padded = np.where((hi == len(k)) | change.pad_all, float(change.pad), 0.0)
    top = np.where(counted, s, -np.inf).max(axis=1, initial=-np.inf)
    top = np.where(padded > 0, np.maximum(top, 0.0), top)
    some = np.isfinite(top)
    base = np.where(some, top, 0.0)
    x = _to(np.where(counted, s - base[:, None], -np.inf), change.state)
    w = _to(np.exp(x), change.state)
    if change.tiles is not None:
        return _tiled(change, s, w, counted, base, slope)
    total = w.sum(axis=1)
    if change.pad:
        total = total + padded * np.exp(-base)
    total = _to(total, change.state)
    if change.weights is not None:
        w = change.weights(w)
    safe = np.where(total > 0, total, 1.0)
    p = w if change.divided == 0 else w / safe[:, None] ** change.divided
    p = _to(p, change.state)
    if change.prob is not None:
        p = change.prob(p)
    lse = np.where(total > 0, base + np.log(safe), -np.inf)
    return Weights(s, p, lse, base, counted, slope)


def _tiled(change: Change, s: F64, w: F64, seen: Mask, top: F64, slope: F64 | None) -> Weights:
    """P of a walk over tiles that forgets to rescale: each tile counts as its own running max has
    it.
    """
    assert change.tiles is not None
    size, ascending, missing = change.tiles
    starts = list(range(0, s.shape[1], size))
    running = np.full(len(s), -np.inf)
    of_o, of_l = np.zeros_like(w), np.zeros_like(w)
    for start in starts if ascending else reversed(starts):
        tile = slice(start, start + size)
        here = np.where(seen[:, tile], s[:, tile], -np.inf).max(axis=1, initial=-np.inf)
        running = np.maximum(running, here)
        base = np.where(np.isfinite(running), running, 0.0)
        lifted = np.where(seen[:, tile], np.exp(s[:, tile] - base[:, None]), 0.0)
        of_o[:, tile] = lifted if missing in ("O", "both") else w[:, tile]
        of_l[:, tile] = lifted if missing in ("l", "both") else w[:, tile]
    total = of_l.sum(axis=1)
    safe = np.where(total > 0, total, 1.0)
    lse = np.where(total > 0, top + np.log(safe), -np.inf)
    return Weights(s, of_o / safe[:, None], lse, top, seen, slope)


def changed(problem: Problem, change: Change) -> tuple[Problem, Index]:
    """The problem that is computed, and the key head of each query head."""
    if change.inputs is not None:
        problem = change.inputs(problem)
    if change.heads is not None:
        return problem, change.heads(problem)
    return problem, np.arange(problem.heads) // problem.group


def run(problem: Problem, change: Change, rows: Index, wide: Wide | None = None) -> Outcome:
    """Out, LSE and the expected error of the given rows of every head.

    A change that moves rows of O computes all of them. wide: of this problem. Expected error, one
    element: P rounded to the format (ROUNDING u^2 sum P^2 V^2), the output cast (ulp^2 / 12), and
    fp32 (every exponent errs by u32 (1 + |S|), with all P of one sign).
    """
    fmt = FORMATS[problem.dtype]
    asked = rows
    if change.out is not None:
        rows = np.arange(problem.n_q)
    work, heads = changed(problem, change)
    band = work.band()
    n, d_v = len(rows), work.d_v
    out, lse = np.zeros((work.heads, n, d_v)), np.full((work.heads, n), -np.inf)
    square, size, slack, half = (np.zeros(out.shape) for _ in range(4))
    lse_sigma = np.zeros(lse.shape)
    narrower = coarser(problem.dtype) if change is NOTHING else []
    coarse = {name: np.zeros(out.shape) for name in narrower}
    wide = wide or Wide(problem)
    last, k, v, v2, size_v = -1, *(np.zeros((0, 0)) for _ in range(4))
    with np.errstate(all="ignore"):
        for h in range(work.heads):
            g = int(heads[h])
            if g != last:
                last, k = g, wide.of(work.k, g)
                v = _to(wide.of(work.v, g), change.state)
                v2, size_v = wide.squares(work.v, g, v)
            for part in blocks(rows, len(k)):
                q = numbers(work.q[h, rows[part]])
                w = weigh(work, change, q, k, rows[part], band)
                near = U32 * w.p * (1.0 + np.abs(np.where(w.seen, w.s, 0.0)))
                out[h, part] = w.p @ v
                square[h, part] = (w.p * w.p) @ v2
                size[h, part] = w.p @ size_v
                slack[h, part] = near @ size_v
                if change is NOTHING:
                    half[h, part] = _half_state(w, v, out[h, part])
                    for name, x in coarse.items():
                        x[h, part] = np.sqrt(_coarse(w, name) @ v2)
                row = near.sum(axis=1) + U32 * (1 + np.abs(np.where(w.lse > -np.inf, w.lse, 0.0)))
                lse_sigma[h, part] = row
                lse[h, part] = w.lse if change.lse is None else change.lse(w.lse, w.top)
        if change.out is not None:
            out = change.out(out, problem)[:, asked]
            lse, lse_sigma = lse[:, asked], lse_sigma[:, asked]
            square, size, slack = (x[:, asked] for x in (square, size, slack))
    u = fmt.unit_roundoff if fmt.bits == 16 else 0.0
    exponent = np.frexp(np.abs(out))[1] - 1
    ulp = np.ldexp(1.0, np.maximum(exponent, fmt.emin) - fmt.precision + 1)
    sigma = np.sqrt(ROUNDING * u * u * square + ulp * ulp / 12 + slack * slack)
    worst = u * size + ulp / 2 + 4 * slack
    half = u * np.sqrt(ROUNDING * half)
    return Outcome(out, lse, sigma, worst, u * size, u * np.sqrt(square), lse_sigma, half, coarse)


def coarser(dtype: str) -> list[str]:
    """Formats that lose something of this one.

    >>> coarser("float16")
    ['bfloat16', 'e4m3', 'e5m2']
    """
    own = FORMATS[dtype].precision
    names = ("tf32", "float16", "bfloat16", "e4m3", "e5m2")
    return [n for n in names if FORMATS[n].precision < own]


def _coarse(w: Weights, name: str) -> F64:
    """Variance of P rounded to a format, as it stands before its sum divides it."""
    fmt = FORMATS[name]
    top = np.maximum(w.p.max(axis=1, initial=0.0), 1e-300)[:, None]
    exponent = np.frexp(w.p / top)[1] - 1
    ulp = np.ldexp(top, np.maximum(exponent, fmt.emin) - fmt.precision + 1)
    # Below half the smallest number P itself is lost.
    return np.asarray(np.minimum(ulp * ulp / 12, w.p * w.p))


def _half_state(w: Weights, v: F64, o: F64) -> F64:
    """Variance, in units of one rounding's, if S, scaled S, S - max, P, l and O are rounded: an
    exponent errs by its size, and all of a row's P share what l has lost (some 6 additions).
    """
    s = np.where(w.seen, w.s, 0.0)
    x = np.where(w.seen, w.s - w.top[:, None], 0.0)
    p2 = w.p * w.p * (2.0 * s * s + x * x + 2.0)
    spread = p2 @ (v * v) - 2 * o * (p2 @ v) + o * o * p2.sum(axis=1, keepdims=True)
    return np.asarray(np.maximum(spread, 0.0) + 8.0 * o * o)


@dataclass(frozen=True, eq=False)
class Glance:
    """Exact out (H, R, D_v) and lse (H, R) of some rows; `worst`: what rounding P and the result
    can do at first order.
    """

    out: F64
    lse: F64
    worst: F64


def glance(problem: Problem, rows: Index, xp: Any = np) -> Glance:
    """The exact values alone, of many rows: two products a block, over the keys that it sees.

    xp: the array module that computes, NumPy or CuPy; the problem and the results are NumPy's.
    """
    fmt = FORMATS[problem.dtype]
    u = fmt.unit_roundoff
    lo, hi = problem.band()
    out = np.zeros((problem.heads, len(rows), problem.d_v))
    lse, size = np.full(out.shape[:2], -np.inf), np.zeros(out.shape)
    cells = CELLS if xp is np else CELLS_GPU
    host = (lambda x: x) if xp is np else xp.asnumpy
    last = -1
    k: Any = None
    values: Any = None
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            g = problem.kv_head(h)
            if g != last:
                last, k, v = g, xp.asarray(numbers(problem.k[g])), xp.asarray(numbers(problem.v[g]))
                values = xp.concatenate([v, xp.abs(v)], axis=1)
            for part in blocks(rows, problem.n_k, cells):
                at = rows[part]
                some = hi[at] > lo[at]
                if not some.any():
                    continue
                start, stop = int(lo[at][some].min()), int(hi[at].max())
                s = xp.asarray(numbers(problem.q[h, at])) @ k[start:stop].T
                s *= problem.scale
                if problem.softcap is not None:
                    s = problem.softcap * xp.tanh(s / problem.softcap)
                if lo[at].max() > start or hi[at].min() < stop:
                    j = xp.arange(start, stop)
                    low, high = (xp.asarray(x[at])[:, None] for x in (lo, hi))
                    s[(j < low) | (j >= high)] = -np.inf
                seen = xp.asarray(some)
                top = xp.where(seen, s.max(axis=1), 0.0)
                s -= top[:, None]
                xp.exp(s, out=s)
                total = xp.where(seen, s.sum(axis=1), 1.0)
                both = host(s @ values[start:stop] / total[:, None])
                out[h, part], size[h, part] = both[:, : problem.d_v], both[:, problem.d_v :]
                lse[h, part] = host(xp.where(seen, top + xp.log(total), -np.inf))
    return Glance(out, lse, u * (size + np.abs(out)) + fmt.smallest_subnormal)


@dataclass(frozen=True, eq=False)
class Slopes:
    """Gradients of all rows, dq (H, N_q, D), dk (H_kv, N_k, D), dv (H_kv, N_k, D_v), each with its
    expected error.
    """

    value: dict[str, F64]
    sigma: dict[str, F64]


def run_backward(problem: Problem, change: Change, dout: F64) -> Slopes:
    """Gradients of a computation whose forward, or backward alone, has a change.

    "mask" in change.backward: the backward alone sees change.sight, with the forward's LSE.
    Expected error: P and dS rounded to the format (independent), delta from a rounded O, the cast.
    """
    fmt = FORMATS[problem.dtype]
    work, heads = changed(problem, change)
    band = work.band()
    wrong = change.backward
    shapes = {"dq": work.q.shape, "dk": work.k.shape, "dv": work.v.shape}
    value = {n: np.zeros(s) for n, s in shapes.items()}
    square = {n: np.zeros(s) for n, s in shapes.items()}
    slack = {n: np.zeros(s) for n, s in shapes.items()}
    rows = np.arange(work.n_q)
    u = fmt.unit_roundoff if fmt.bits == 16 else 0.0
    factor = work.scale ** {"scale missing": 0, "scale twice": 2}.get(
        next((w for w in wrong if w.startswith("scale")), ""), 1
    )
    other = dataclasses.replace(change, backward=frozenset())
    forward = dataclasses.replace(other, sight=None) if "mask" in wrong else other
    last: dict[int, int] = {int(g): h for h, g in enumerate(heads)}
    with np.errstate(all="ignore"):
        for h in range(work.heads):
            g = int(heads[h])
            q, k, v = numbers(work.q[h]), numbers(work.k[g]), numbers(work.v[g])
            for part in blocks(rows, len(k)):
                w = weigh(work, forward, q[part], k, rows[part], band)
                p = w.p
                if "mask" in wrong:
                    full = weigh(work, other, q[part], k, rows[part], band)
                    lse = np.where(np.isfinite(w.lse), w.lse, np.inf)
                    p = np.where(full.seen, np.exp(full.s - lse[:, None]), 0.0)
                do = dout[h, part]
                o = w.p @ v
                dp, delta = do @ v.T, (do * o).sum(axis=1)
                if "delta missing" in wrong:
                    delta = np.zeros_like(delta)
                if "delta sign" in wrong:
                    delta = -delta
                gap = dp - delta[:, None]
                ds = p * gap
                if w.slope is not None and "softcap slope missing" not in wrong:
                    ds = ds * w.slope
                for name, x in (("dq", ds @ k * factor), ("dk", ds.T @ q[part] * factor)):
                    if name == "dq":
                        value[name][h, part] = x
                    elif "one head" not in wrong or last[g] == h:
                        value[name][g] += x
                if "one head" not in wrong or last[g] == h:
                    value["dv"][g] += (ds if "dv from dS" in wrong else p).T @ do
                shift = u * u * ROUNDING * ((do * o) ** 2).sum(axis=1)[:, None]
                variance = ROUNDING * u * u * ds * ds + p * p * shift
                near = (
                    U32
                    * p
                    * (1.0 + np.abs(np.where(w.seen, w.s, 0.0)))
                    * (np.abs(gap) + np.abs(do) @ np.abs(v).T)
                )
                square["dq"][h, part] = (variance @ (k * k)) * factor**2
                square["dq"][h, part] += (p @ np.abs(k)) ** 2 * shift * factor**2
                square["dk"][g] += variance.T @ (q[part] ** 2) * factor**2
                square["dv"][g] += ROUNDING * u * u * (p * p).T @ (do * do)
                slack["dq"][h, part] = near @ np.abs(k) * abs(factor)
                slack["dk"][g] += near.T @ np.abs(q[part]) * abs(factor)
                slack["dv"][g] += (
                    U32 * (p * (1.0 + np.abs(np.where(w.seen, w.s, 0.0)))).T @ np.abs(do)
                )
    sigma = {}
    for name, x in value.items():
        exponent = np.frexp(np.abs(x))[1] - 1
        ulp = np.ldexp(1.0, np.maximum(exponent, fmt.emin) - fmt.precision + 1)
        sigma[name] = np.sqrt(square[name] + ulp * ulp / 12 + slack[name] ** 2)
    return Slopes(value, sigma)


def subset(x: Array, rows: Index) -> F64:
    """Rows of (H, N, D) or (H, N) as float64."""
    return np.asarray(x[:, rows]).astype(np.float64)
