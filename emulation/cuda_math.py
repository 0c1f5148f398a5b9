"""CUDA's single-precision expf and logf (its default, not -use_fast_math), step by step.

Both are short sequences of fp32 operations that the compiler writes out in place: kernels that call
`expf` or `logf` have these bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation import rounding, sfu

F = np.float32

#: 2^23, and log2 e / 252: expf finds its integer part by one saturated and one floored FMA.
_SHIFT = F(12582913.0)
_LOG2E_252 = np.array(0x3BBB989D, np.uint32).view(F)
_LOG2E_HIGH, _LOG2E_LOW = (np.array(x, np.uint32).view(F) for x in (0x3FB8AA3B, 0x32A57060))

#: Of logf: 2/3 below 1 starts the octave; coefficients of log1p from the last to the second.
_TWO_THIRDS = 0x3F2AAAAB
_LOG1P = tuple(
    np.array(x, np.uint32).view(F)
    for x in (
        0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22,
        0x3EAAAA78, 0xBF000000,
    )
)  # fmt: skip
_LN2 = np.array(0x3F317218, np.uint32).view(F)


def logf(x: Any) -> Any:
    """ln(x) of a float32 array as CUDA's logf gives it: below one ulp of error.

    logf(0) is -inf, of a negative number NaN, of inf inf; subnormal numbers are scaled first.

    >>> [float(y) for y in logf(np.float32([1.0, 0.0, np.inf]))]
    [0.0, -inf, inf]
    """
    xp = rounding.namespace(x)
    x = xp.asarray(x, dtype=np.float32)
    with np.errstate(all="ignore"):
        small = x < F(2.0**-126)
        a = xp.where(small, rounding.mul(x, F(2.0**23)), x)
        bits = a.view(np.int32).astype(np.int64)
        octave = (bits - _TWO_THIRDS) >> 23
        f = rounding.sub((bits - (octave << 23)).astype(np.int32).view(np.float32), F(1))
        e = octave.astype(np.float32) + xp.where(small, F(-23), F(0))
        r = xp.full_like(f, _LOG1P[0])
        for c in _LOG1P[1:]:
            r = rounding.fma(r, f, c)
        r = rounding.fma(rounding.mul(r, f), f, f)
        y = rounding.fma(e, _LN2, r)
        y = xp.where(x == np.inf, F(np.inf), y)
        y = xp.where(x == 0, F(-np.inf), y)
        return xp.where((x < 0) | xp.isnan(x), F(np.nan), y)


def expf(x: Any) -> Any:
    """e^x of a float32 array as CUDA's expf gives it: two ulp of error at most.

    >>> [float(y) for y in expf(np.float32([0.0, -200.0, -np.inf]))]
    [1.0, 0.0, 0.0]
    """
    xp = rounding.namespace(x)
    x = xp.asarray(x, dtype=np.float32)
    with np.errstate(all="ignore"):
        t = rounding.fma(x, _LOG2E_252, F(0.5))
        t = xp.minimum(xp.maximum(xp.where(xp.isnan(t), F(0), t), F(0)), F(1))
        # fma toward minus infinity, exact in float64: 24 by 8 bits, and a sum below 2^24.
        floored = xp.floor(t.astype(np.float64) * 252.0 + float(_SHIFT)).astype(np.float32)
        n = rounding.sub(floored, F(12583039.0))
        r = rounding.fma(x, _LOG2E_HIGH, -n)
        r = rounding.fma(x, _LOG2E_LOW, r)
        power = (floored.view(np.int32).astype(np.int64) << 23 & 0xFFFFFFFF).astype(np.uint32)
        y = rounding.mul(sfu.ex2(r), power.view(np.float32))
        return xp.where(xp.isnan(x), F(np.nan), y)
