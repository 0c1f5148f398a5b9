"""Centred dQ: less what the errors of a row of dS make of the part that keys have in common.

dQ_i = scale (sum_j dS_ij k_j - R_i c_i), R_i = sum_j dS_ij - dLSE_i, c_i near a mean key. In real
arithmetic R_i = 0. Computed, R_i is what the errors of row i of dS add up to: those of rounding it,
and that of delta. They meet the mean of the keys, so that dQ errs by R_i times it; with that taken
off, errors of dS meet only what keys differ by. dK and dV keep their bits. Under a softcap a row of
dS, multiplied by its slopes, has no such sum: dQ stays plain.

c_i is SHARE of the mean of SAMPLES keys, evenly spread over the keys that the row sees, cut to
whole groups of `center` keys. So it depends on the first and last key that row i sees, and on seen
keys alone; a row that sees no whole group has no c_i, and its dQ stays plain. SHARE: the mean
itself serves best the rows whose largest dS are of keys like most others; rows that rest on a sink,
whose key is small, want less of it.

Only rows whose samples have much in common are centred: |sum of them|^2 > SAMPLES THRESHOLD times
the sum of their |key|^2. Other rows have nothing to gain, and kernels skip R for blocks of them.
Where samples are 0, NaN or infinite this is false, and dQ plain bit for bit, whatever R would be.

A dS that overflows gives NaN in a centred row where plain dQ may be infinite.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from emulation import rounding
from emulation.machine import Machine, Node
from emulation.plan import Plan
from emulation.problem import Array

SOURCE = "dQ centering"
#: Keys that a mean is of, and the part of it that c is: powers of two, whose quotient rounds
#: nothing.
SAMPLES, SHARE = 16, 0.5
#: What part of the samples' size their mean must exceed, in squares. Of independent keys without a
#: mean it is 1 / SAMPLES on average.
THRESHOLD = 0.5
#: Threads that share the columns, four each, where sizes are summed: a warp.
LANES = 32


def is_centered(plan: Plan, softcap: bool) -> bool:
    """Whether dQ is centred under this Plan, with or without a softcap."""
    return plan.backward.center > 0 and not softcap


def sampled_keys(lo: Array, hi: Array, center: int) -> tuple[Array, Array, Array]:
    """Of rows that see [lo, hi) (R,): the samples of each kind of row (C, SAMPLES), ascending; each
    row's kind (R,); and whether it has a mean (R,).

    With s and e the first and the last multiple of `center` in [lo, hi], sample t is
    s + (2 t + 1) (e - s) // (2 SAMPLES).

    >>> keys, kind, has = sampled_keys(np.array([0, 0]), np.array([63, 130]), 64)
    >>> has.tolist(), keys[kind[1]].tolist()[:4]
    ([False, True], [4, 12, 20, 28])
    """
    xp = rounding.namespace(lo)
    first = -(-lo // center) * center
    length = hi // center * center - first
    has = length > 0
    first, length = (xp.where(has, x, 0).astype(np.int64) for x in (first, length))
    # One number for both; lengths are below 2^31.
    kinds, kind = xp.unique(first * 2**31 + length, return_inverse=True)
    first, length = kinds // 2**31, kinds % 2**31
    odd = 2 * xp.arange(SAMPLES) + 1
    return first[:, None] + odd * length[:, None] // (2 * SAMPLES), kind.reshape(-1), has


def has_large_mean(samples: Array) -> Array:
    """The rule, (C,), of samples (C, SAMPLES, D) in fp32 in a warp's order: lane l sums the columns
    4 l to 4 l + 3 (of 128 at a time), then lanes join by exclusive or of 16, 8, 4, 2, 1.

    >>> has_large_mean(np.stack([np.ones((16, 8)), np.zeros((16, 8))])).tolist()
    [True, False]
    """
    xp = rounding.namespace(samples)
    with np.errstate(over="ignore", invalid="ignore"):
        x = samples.astype(np.float32)
        total, size = x[:, 0], xp.square(x[:, 0])
        for t in range(1, SAMPLES):
            total, size = total + x[:, t], rounding.fma(x[:, t], x[:, t], size)
        of_mean = of_keys = xp.zeros((len(x), LANES), np.float32)
        pad = -x.shape[2] % (4 * LANES)
        total, size = (
            xp.pad(y, ((0, 0), (0, pad))).reshape(len(x), -1, LANES, 4) for y in (total, size)
        )
        for start, column in itertools.product(range(total.shape[1]), range(4)):
            mean, keys = total[:, start, :, column], size[:, start, :, column]
            of_mean = rounding.fma(mean, mean, of_mean)
            of_keys = of_keys + keys
        for half in (16, 8, 4, 2, 1):  # a butterfly's sums are the same in all lanes
            of_mean, of_keys = (y[:, :half] + y[:, half:] for y in (of_mean, of_keys))
        large: Array = of_mean[:, 0] > np.float32(SAMPLES * THRESHOLD) * of_keys[:, 0]
    return large


def row_sums(m: Machine, sums: Node, rows: slice, parts: list[Node], seen: Array) -> Node:
    """sums (N_q, 1) and in `rows` those of a tile of dS (R, T), in parts, as the tensor core sums
    them: dS times a column of ones, from zero, then added in fp32.
    """
    xp = rounding.namespace(seen)
    ones = m.input(xp.ones((1, seen.shape[1]), np.float32))
    share = None
    for part in parts:
        share = m.dot_seen(SOURCE, part, ones, share, seen)
    return m.replace(sums, rows, m.add(SOURCE, m.take(sums, rows), share))


def centered(
    m: Machine,
    dq: Node,
    sums: Node,
    k: Array,
    dlse: Array | None,
    lo: Array,
    hi: Array,
    center: int,
) -> Node:
    """dq (N_q, D) before its scaling, less R c: k (N_k, D), sums (N_q, 1), dlse (N_q,) or None."""
    xp = rounding.namespace(lo)
    keys, kind, has = sampled_keys(lo, hi, center)
    if not bool(has.any()):
        return dq
    has = has & has_large_mean(k[keys])[kind]
    every = slice(None)
    samples = m.input(k[keys])  # (C, SAMPLES, D)
    mean = m.take(samples, (every, 0))
    for t in range(1, SAMPLES):
        mean = m.add(SOURCE, mean, m.take(samples, (every, t)))
    mean = m.take(m.mul(SOURCE, mean, np.float32(SHARE / SAMPLES)), kind)
    if dlse is not None:
        sums = m.sub(SOURCE, sums, m.input(dlse[:, None]))
    moved = m.fma(SOURCE, m.map(sums, np.negative), mean, dq)
    return m.select(xp.broadcast_to(has[:, None], m.value(dq).shape), moved, dq)


def mean_sizes(k: Any, lo: Array, hi: Array, center: int) -> tuple[Array, Array]:
    """Of float64 keys (N_k, D): what bounds each row's exact c (R, D), 0 where it has none; and
    whether it has one (R,).
    """
    keys, kind, has = sampled_keys(lo, hi, center)
    if not has.any():
        return np.zeros((len(has), k.shape[1])), has
    has = has & has_large_mean(k[keys])[kind]
    sizes: Array = SHARE * np.abs(k)[keys].mean(axis=1)[kind]
    return np.where(has[:, None], sizes, 0.0), has
