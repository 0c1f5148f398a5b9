"""A small half-precision kernel with mistakes to order: what `bench.explain` plants.

It shares no code with the suspects of `emulation.explain`: fp32 arithmetic, tiles of keys from left
to right, P rounded to the input format, its own masks, its own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from emulation.formats import FORMATS
from emulation.problem import Array

F32 = np.float32
FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Mistakes:
    """What the kernel does wrong; the defaults are right.

    scale: of the right one to the wrong one. exp: factor of the exponent. see: (i, j, right mask)
    to the mask. hidden: score of hidden keys, which then count. group: key head of query head h of
    H on H_kv. pad: zero keys counted. weight: factor of P per key. rescale: which of O and l are
    rescaled. divide: how often. p: format of P, p_after: of the divided P. inputs: formats of q, k,
    v. drop: dropout rate. lse: (lse, max, log l) to the result. Backward: delta factor, power of
    the scale, masked, every (head of a group counted), slope, dv_from_ds, moved: (dq, dk, dv,
    scale, heads of a group) to the results, sums: queries after which dk and dv round to the format
    (0: never). gain: factor of the output.
    tile: keys a tile.
    """

    scale: Callable[[float, int], float] = lambda scale, d: scale
    exp: float = 1.0
    see: Callable[[Array, Array, Array], Array] = lambda i, j, mask: mask
    hidden: float | None = None
    cap: Callable[[float, float], tuple[float | None, float]] = lambda cap, scale: (cap, scale)
    group: Callable[[int, int, int], int] = lambda h, heads, kv: h // (heads // kv)
    pad: int = 0
    weight: Callable[[Array], Array] | None = None
    rescale: str = "Ol"
    divide: int = 1
    p: str | None = None
    p_after: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    drop: float = 0.0
    channels: int | None = None
    lse: Callable[[Array, Array, Array], Array] = lambda lse, top, log: lse
    before: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = lambda q, k, v: (q, k, v)
    after: Callable[[Array], Array] = lambda out: out
    delta: float = 1.0
    power: int = 1
    masked: bool = True
    every: bool = True
    slope: bool = True
    dv_from_ds: bool = False
    moved: Callable[[Array, Array, Array, float, int], tuple[Array, Array, Array]] = (
        lambda dq, dk, dv, scale, group: (dq, dk, dv)
    )
    sums: int = 0
    gain: float = 1.0
    tile: int = 64


def to(x: Array, fmt: str | None) -> Array:
    """float32 values of a format; saturating in fp8."""
    if fmt is None:
        return x.astype(F32)
    if fmt in FP8:
        top = FORMATS[fmt].max
        return np.clip(x, -top, top).astype(FP8[fmt]).astype(F32)
    kind: Any = ml_dtypes.bfloat16 if fmt == "bfloat16" else fmt
    with np.errstate(all="ignore"):
        return x.astype(kind).astype(F32)


def mask_of(n_q: int, n_k: int, causal: Any, window: Any) -> tuple[Array, Array, Array]:
    """Query numbers (N_q, 1), key numbers (1, N_k), and who sees whom."""
    i, j = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    at = i + (0 if causal == "top-left" else n_k - n_q)
    seen = np.ones((n_q, n_k), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        seen &= (left is None) | (j >= at - (left or 0))
        seen &= (right is None) | (j <= at + (right or 0))
    return i, j, seen


@dataclass(frozen=True)
class Head:
    """One head's P (N_q, N_k, divided), scores, and results."""

    p: Array
    s: Array
    out: Array
    lse: Array
    slope: Array


def head(
    m: Mistakes, q: Array, k: Array, v: Array, fmt: str, scale: float, causal: Any, window: Any,
    softcap: float | None, rng: np.random.Generator,
) -> Head:  # fmt: skip
    """One head: q (N_q, D), k (N_k, D), v (N_k, D_v) float32 holding values of fmt."""
    n_q, n_k = len(q), len(k)
    i, j, right = mask_of(n_q, n_k, causal, window)
    seen = m.see(i, j, right)
    factor, cap = F32(m.scale(scale, q.shape[1])), softcap
    if softcap is not None:
        cap, other = m.cap(softcap, scale)
        factor = F32(other)
    width = m.channels or q.shape[1]
    s = (q[:, :width] @ k[:, :width].T) * factor
    slope = np.ones_like(s)
    if cap is not None:
        bent = np.tanh(s / F32(cap))
        s, slope = F32(cap) * bent, 1 - bent * bent
    s = s * F32(m.exp)
    if m.hidden is not None:
        s, seen = np.where(seen, s, F32(m.hidden)), np.ones_like(seen)
    top = np.full(n_q, -np.inf, F32)
    of_o, of_l = np.zeros((n_q, v.shape[1]), F32), np.zeros(n_q, F32)
    for start in range(0, n_k, m.tile):
        part = slice(start, start + m.tile)
        st = np.where(seen[:, part], s[:, part], F32(-np.inf))
        new = np.maximum(top, st.max(axis=1))
        base = np.where(np.isfinite(new), new, F32(0))
        alpha = np.where(np.isfinite(top), np.exp(top - base), F32(0)).astype(F32)
        p = np.exp(st - base[:, None]).astype(F32)
        if m.weight is not None:
            p = p * m.weight(j[0, part]).astype(F32)
        used = p
        if m.drop:
            used = p * (rng.random(p.shape) >= m.drop) / F32(1 - m.drop)
        used = to(to(used, m.p), fmt)
        of_o = of_o * (alpha[:, None] if "O" in m.rescale else F32(1)) + used @ v[part]
        of_l = of_l * (alpha if "l" in m.rescale else F32(1)) + p.sum(axis=1, dtype=F32)
        top = new
    base = np.where(np.isfinite(top), top, F32(0))
    if m.pad:
        last = seen[:, -1] if causal else np.ones(n_q, bool)
        up = np.where(last, np.maximum(base, 0), base)
        of_o, of_l = of_o * np.exp(base - up)[:, None], of_l * np.exp(base - up)
        of_l = of_l + np.where(last, m.pad * np.exp(-up), 0).astype(F32)
        base = up
    with np.errstate(all="ignore"):
        total = np.where(of_l > 0, of_l, F32(1))
        out = of_o / total[:, None] ** m.divide if m.divide else of_o
        out = out * F32(m.gain)
        log = np.log(total)
        lse = np.where(of_l > 0, m.lse(base + log, base, log), F32(-np.inf))
        full = np.where(seen, np.exp(s - (base + log)[:, None]), F32(0))
    if m.p_after is not None:
        full = to(full, m.p_after)
        out = full @ v
    return Head(full.astype(F32), s, to(out, fmt), lse.astype(F32), slope)


def forward(
    m: Mistakes, q: Array, k: Array, v: Array, *, causal: Any = False, window: Any = None,
    softcap: float | None = None, scale: float | None = None, seed: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Out (H, N_q, D_v) in q's dtype and lse (H, N_q); q (H, N_q, D), k and v (H_kv, N_k, ...)."""
    fmt, scale = str(q.dtype), q.shape[-1] ** -0.5 if scale is None else scale
    rng = np.random.default_rng(seed)
    q, k, v = m.before(q, k, v)
    wide = {n: to(x.astype(F32), m.inputs.get(n)) for n, x in zip("qkv", (q, k, v), strict=True)}
    outs, lses = [], []
    for h in range(len(q)):
        g = m.group(h, len(q), len(k))
        found = head(
            m, wide["q"][h], wide["k"][g], wide["v"][g], fmt, scale, causal, window, softcap, rng
        )
        outs.append(found.out)
        lses.append(found.lse)
    return m.after(np.stack(outs)).astype(q.dtype), np.stack(lses)


def backward(
    m: Mistakes, q: Array, k: Array, v: Array, dout: Array, *, causal: Any = False,
    window: Any = None, softcap: float | None = None, scale: float | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk, dv in q's dtype, the forward being right; P and dS rounded to it for products."""
    fmt, scale = str(q.dtype), q.shape[-1] ** -0.5 if scale is None else scale
    right = Mistakes()
    wide_q, wide_k, wide_v, wide_do = (x.astype(F32) for x in (q, k, v, dout))
    dq, dk, dv = (np.zeros(x.shape, F32) for x in (q, k, v))
    rng = np.random.default_rng(0)
    group = len(q) // len(k)
    for h in range(len(q)):
        g = h // group
        args = (wide_q[h], wide_k[g], wide_v[g], fmt, scale)
        found = head(right, *args, causal, window, softcap, rng)
        seen = m.see(*mask_of(q.shape[1], k.shape[1], causal, window)) | (not m.masked)
        lse = np.where(np.isfinite(found.lse), found.lse, F32(np.inf))
        p = np.where(seen, np.exp(found.s - lse[:, None]), 0).astype(F32)
        do = wide_do[h]
        delta = F32(m.delta) * (do * found.out).sum(axis=1)
        ds = p * (do @ wide_v[g].T - delta[:, None])
        if m.slope:
            ds = ds * found.slope
        half_p, half_ds = to(p, fmt), to(ds, fmt)
        by = F32(scale**m.power)
        with np.errstate(all="ignore"):
            dq[h] = half_ds @ wide_k[g] * by
            if m.every or h % group == group - 1:
                step = m.sums or q.shape[1]
                for start in range(0, q.shape[1], step):
                    part = slice(start, start + step)
                    dk[g] += half_ds[part].T @ wide_q[h, part] * by
                    dv[g] += (half_ds if m.dv_from_ds else half_p)[part].T @ do[part]
                    if m.sums:
                        dk[g], dv[g] = to(dk[g], fmt), to(dv[g], fmt)
    dq, dk, dv = m.moved(dq, dk, dv, scale, group)
    return tuple(to(x, fmt).astype(q.dtype) for x in (dq, dk, dv))  # type: ignore[return-value]
