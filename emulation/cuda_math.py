"""CUDA's single-precision expf, logf and log2f (its default, not -use_fast_math), step by step.

All are short sequences of fp32 operations that the compiler writes out in place: kernels that call
them have these bits.
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

#: Of log2f: the square root of 1/2 starts the octave; coefficients of log2(1 + f) / f - log2 e.
_ROOT_HALF = 0x3F3504F3
_LOG2P = tuple(
    np.array(x, np.uint32).view(F)
    for x in (
        0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4, 0xBE763C8B, 0x3E93BF99,
        0xBEB8AA49, 0x3EF6384A, 0xBF38AA3B,
    )
)  # fmt: skip


def _octave(x: Any, start: int) -> tuple[Any, Any, Any]:
    """x (float32) = 2^e (1 + f), 1 + f from the number with the bits `start` on; e a float32.

    Subnormal numbers are scaled first: bits and exponent of what is left.
    """
    xp = rounding.namespace(x)
    small = x < F(2.0**-126)
    bits = xp.where(small, rounding.mul(x, F(2.0**23)), x).view(np.int32).astype(np.int64)
    octave = (bits - start) >> 23
    f = rounding.sub((bits - (octave << 23)).astype(np.int32).view(np.float32), F(1))
    return octave.astype(np.float32) + xp.where(small, F(-23), F(0)), f, xp


def _special(x: Any, y: Any, xp: Any) -> Any:
    """The logarithm y of x, with what it is at 0, infinity, NaN and below 0."""
    y = xp.where(x == np.inf, F(np.inf), y)
    y = xp.where(x == 0, F(-np.inf), y)
    return xp.where((x < 0) | xp.isnan(x), F(np.nan), y)


def log2f(x: Any) -> Any:
    """log2(x) of a float32 array as CUDA's log2f gives it: below one ulp of error.

    >>> [float(y) for y in log2f(np.float32([8.0, 0.0, np.inf]))]
    [3.0, -inf, inf]
    """
    x = rounding.namespace(x).asarray(x, dtype=np.float32)
    with np.errstate(all="ignore"):
        e, f, xp = _octave(x, _ROOT_HALF)
        r = xp.full_like(f, _LOG2P[0])
        for c in _LOG2P[1:]:
            r = rounding.fma(r, f, c)
        r = rounding.fma(f, _LOG2E_HIGH, rounding.mul(f, rounding.mul(f, r)))
        return _special(x, rounding.add(e, r), xp)


def logf(x: Any) -> Any:
    """ln(x) of a float32 array as CUDA's logf gives it: below one ulp of error.

    logf(0) is -inf, of a negative number NaN, of inf inf; subnormal numbers are scaled first.

    >>> [float(y) for y in logf(np.float32([1.0, 0.0, np.inf]))]
    [0.0, -inf, inf]
    """
    x = rounding.namespace(x).asarray(x, dtype=np.float32)
    with np.errstate(all="ignore"):
        e, f, xp = _octave(x, _TWO_THIRDS)
        r = xp.full_like(f, _LOG1P[0])
        for c in _LOG1P[1:]:
            r = rounding.fma(r, f, c)
        r = rounding.fma(rounding.mul(r, f), f, f)
        return _special(x, rounding.fma(e, _LN2, r), xp)


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
