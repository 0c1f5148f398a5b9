"""Which step of a forward is the first to differ from the emulator's, found by runs that show one
step each: what an assertion of equal bits says when it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emulation import Numerics, Plan, flash
from emulation.problem import Array, Problem
from emulation.tiled import tiles

#: (q, k, v, numerics=..., scale=..., causal=..., window=..., softcap=...) -> out, lse, all NumPy.
Run = Callable[..., tuple[Array, Array]]

#: P / P of another key, each known through one fp32 product with 1 / l: a few roundings.
SAME_RATIO = 2.0**-21


def bits(x: Array) -> Array:
    """The bits of an array as integers."""
    return np.ascontiguousarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def differing(got: Array, want: Array) -> Array:
    """Where bits differ; any NaN equals any NaN."""
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert got.shape == want.shape, (got.shape, want.shape)
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    found: Array = (bits(got) != bits(want)) & ~both_nan
    return found


@dataclass(frozen=True)
class _Row:
    """One query and the keys that it may see, [low, high) of them, apart from everything else."""

    kernel: Run
    plan: Plan
    q: Array  # (1, 1, D)
    k: Array  # (1, high, D): tiles are counted from key 0
    v: Array  # (1, high, D_v)
    low: int
    scale: float
    softcap: float | None

    @property
    def high(self) -> int:
        return int(self.k.shape[1])

    def compare(
        self, q: Array, k: Array, v: Array, numerics: Numerics, **masks: Any
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """(out, lse) of the kernel and of the emulator."""
        plan = replace(self.plan, numerics=numerics)
        with np.errstate(all="ignore"):
            want = flash(q, k, v, plan=plan, **masks)
        return self.kernel(q, k, v, numerics=numerics, **masks), want

    def whole(self, v: Array, numerics: Numerics) -> Any:
        """The row on other values v, (H, high, D_v)."""
        heads = (len(v), 1, 1)
        window = (self.high - 1 - self.low, None)
        masks = {"causal": True, "window": window, "scale": self.scale, "softcap": self.softcap}
        return self.compare(np.tile(self.q, heads), np.tile(self.k, heads), v, numerics, **masks)

    def keys_apart(self, numerics: Numerics, **masks: Any) -> Array:
        """Keys, each a problem of its own with one score, whose LSE differs."""
        keys = self.k[0, self.low :, None]
        q = np.tile(self.q, (len(keys), 1, 1))
        v = np.ones((len(keys), 1, self.v.shape[2]), self.v.dtype)
        (_, got), (_, want) = self.compare(q, keys, v, numerics, **masks)
        return self.low + np.flatnonzero(differing(got, want))

    def lse_of_zeros_agrees(self) -> bool:
        """Whether LSE is right where S = 0, P = 1 and l = 1."""
        zeros = replace(self, k=np.zeros_like(self.k[:, :1]), low=0)
        return not len(zeros.keys_apart(self.plan.numerics))

    def weights(self, first: int, last: int) -> tuple[Array, Array]:
        """P / l of keys [first, last), first the start of a tile, by values of an identity matrix:
        the kernel's and the emulator's.
        """
        low = max(first, self.low)
        part = replace(self, k=self.k[:, first:last], low=low - first)
        numerics = replace(self.plan.numerics, out="float32")
        (got, _), (want, _) = part.whole(identity(last - first, self.v), numerics)
        chosen = slice(low - first, last - first)
        return got.reshape(-1)[chosen], want.reshape(-1)[chosen]

    def visits(self) -> Iterator[slice]:
        """Tiles in the order in which the row walks them."""
        return tiles(self.high, self.plan.tile_n, self.plan.direction, self.low, self.high)


def identity(keys: int, like: Array) -> Array:
    """Slices (H, keys, D_v) of an identity matrix: out of head h, column j is P / l of key h D_v +
    j.
    """
    width = like.shape[-1]
    count = -(-keys // width)
    eye = np.eye(keys, count * width, dtype=np.float32).astype(like.dtype)
    return np.ascontiguousarray(eye.reshape(keys, count, width).swapaxes(0, 1))


def first_step(
    kernel: Run,
    q: Array,
    k: Array,
    v: Array,
    plan: Plan,
    masks: dict[str, Any],
    at: tuple[int, int],
) -> str:
    """The name of the first step that differs for query at[1] of head at[0] (all leading axes
    flattened), a colon, and where.

    Steps in order: mask (the row apart from the others is right), S, score scaling, softcap, P, l,
    rescale, O (the product P V), output cast, LSE. A P that differs by less than its rounding to a
    half format, or by less than 2^-21 where it is not rounded, shows in l. "LSE" includes an
    unrounded l that nothing else uses.
    """
    problem = Problem.of(q, k, v, **masks)
    head, row = at
    lo, hi = (int(edge[row]) for edge in problem.band())
    if lo == hi:
        return f"mask: row {row} sees no key, must have out 0 and LSE -inf"
    g = problem.kv_head(head)
    alone = _Row(
        kernel, plan, problem.q[None, head, row : row + 1], problem.k[None, g, :hi],
        problem.v[None, g, :hi], lo, problem.scale, problem.softcap,
    )  # fmt: skip
    (out, lse), (want, want_lse) = alone.whole(alone.v, plan.numerics)
    wrong_out, wrong_lse = differing(out, want).any(), differing(lse, want_lse).any()
    if not (wrong_out or wrong_lse):
        return f"mask: row {row} of head {head} alone, on keys {lo} to {hi - 1}, agrees"
    if alone.lse_of_zeros_agrees():  # else LSE shows itself instead of a score
        for name, found in _scores(alone):
            if len(found):
                return f"{name}: key {int(found[0])}, and {len(found) - 1} more"
    for tile in alone.visits():
        got, expected = alone.weights(tile.start, tile.stop)
        if differing(got, expected).any():
            return _of_weights(got, expected, max(tile.start, lo))
    got, expected = alone.weights(0, hi)
    if differing(got, expected).any():
        key = lo + int(np.flatnonzero(differing(got, expected))[0])
        return f"rescale: P / l of key {key} in the whole row, not in its tile alone"
    (out, _), (want, _) = alone.whole(alone.v, replace(plan.numerics, out="float32"))
    if differing(out, want).any():
        return f"O: column {int(np.argwhere(differing(out, want))[0][-1])}, before the output cast"
    return "output cast: O agrees in float32" if wrong_out else "LSE: P, l and O agree"


def _scores(row: _Row) -> Iterator[tuple[str, Array]]:
    """Where a score alone differs: as it is (by scale ln 2, c = 1), scaled, capped."""
    numerics = replace(row.plan.numerics, reference="row-max")
    yield "S", row.keys_apart(numerics, scale=math.log(2.0))
    yield "score scaling", row.keys_apart(numerics, scale=row.scale)
    if row.softcap is not None:
        yield "softcap", row.keys_apart(numerics, scale=row.scale, softcap=row.softcap)


def _of_weights(got: Array, want: Array, first: int) -> str:
    """P or l of one tile: a wrong l moves all P / l together."""
    top = int(np.argmax(want))
    with np.errstate(all="ignore"):
        here, there = (x.astype(np.float64) / float(x[top]) for x in (got, want))
        wrong = ~(np.abs(here - there) <= SAME_RATIO * there)
    if wrong.any():
        return f"P: key {first + int(np.flatnonzero(wrong)[0])}, and {int(wrong.sum()) - 1} more"
    return f"l: the tile of key {first}, 1 / l {got[top]!r} and {want[top]!r} of its largest P"


def explained(
    kernel: Run,
    q: Array,
    k: Array,
    v: Array,
    plan: Plan,
    masks: dict[str, Any],
    got: tuple[Array, Array],
    want: tuple[Array, Array],
) -> str | None:
    """None where out and lse have equal bits; else how many differ, the first of them, and the
    first step that does.
    """
    wrong = [differing(x, y) for x, y in zip(got, want, strict=True)]
    if not any(w.any() for w in wrong):
        return None
    rows = wrong[0].any(axis=-1) | wrong[1]
    n_q = rows.shape[-1]
    head, row = (int(i) for i in np.argwhere(rows.reshape(-1, n_q))[0])
    counts = ", ".join(
        f"{name}: {int(w.sum())} of {w.size} differ"
        for name, w in zip(("out", "lse"), wrong, strict=True)
    )
    step = first_step(kernel, q, k, v, plan, masks, (head, row))
    return f"{counts}; first in head {head}, row {row}; first step that differs: {step}"
