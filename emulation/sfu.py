"""The special function unit: ex2, rcp and lg2 `.approx.ftz.f32`, bit for bit, and an ex2 of FMAs.

All three functions follow one recipe: the mantissa picks a slice of a table, and (A << s) +- B r +-
C r^2 + const, with a squarer that drops low partial products, gives the result's mantissa. The
recipe is that of the G80 unit in envytools (nvhw/sfu.c); the integers were derived from an H200's
outputs by bench/derive_sfu_tables.py.
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation import rounding
from emulation.arguments import check_plain
from emulation.rounding import Backend, fast_path, namespace, narrow

NAN_BITS = 0x7FFFFFFF
MANTISSA = 0x7FFFFF
ONE = 1 << 23


@dataclass(frozen=True)
class Unit:
    """The constants of one function.

    result = ((A << shift) + b_sign B r + c_factor C sq(r << up) + const) >> drop, where r is the
    low `bits` of the 23-bit mantissa and the rest picks the slice; sq takes 17-bit numbers.
    """

    name: str
    bits: int
    up: int
    shift: int
    b_sign: int
    c_factor: int
    const: int
    drop: int


UNITS = {
    "ex2": Unit("ex2", bits=17, up=0, shift=13, b_sign=1, c_factor=1, const=0x77E2, drop=15),
    "rcp": Unit("rcp", bits=16, up=1, shift=13, b_sign=-1, c_factor=1, const=0x47E7, drop=15),
    "lg2": Unit("lg2", bits=17, up=0, shift=12, b_sign=1, c_factor=-2, const=0x3345, drop=2),
}

#: ex2_polynomial: 2^f = 1 + f (P[4] + f (P[3] + ...)), highest power first;
#: bench/derive_ex2_polynomial.py.
POLYNOMIAL: tuple[float, ...] = (
    0.0018695347243919969,
    0.009013495407998562,
    0.05580100417137146,
    0.24016466736793518,
    0.6931512355804443,
)


@functools.cache
def table(name: str) -> NDArray[np.int64]:
    """The integers A, B, C of every slice of "ex2" (64), "rcp" (128) or "lg2" (64): int64 (slices,
    3).

    >>> table("rcp").shape
    (128, 3)
    """
    with (
        (importlib.resources.files("emulation") / "data" / "sfu.npz").open("rb") as file,
        np.load(file) as data,
    ):
        out = np.asarray(data[name], np.int64)
    out.flags.writeable = False
    return out


def truncated_square(r: Any) -> Any:
    """About r^2 / 2^19 of 17-bit integers, as the hardware's squarer: each partial product is cut
    before adding.

    >>> truncated_square(np.array([2**16, 2**17 - 1])).tolist()
    [8192, 32759]
    """
    xp = namespace(r)
    total = xp.zeros_like(r)
    for i in range(17):
        total = total + (r >> (18 - i)) * ((r >> i) & 1)
    return total >> 1


@functools.cache
def squares() -> NDArray[np.int64]:
    """`truncated_square` of every 17-bit number."""
    out: NDArray[np.int64] = truncated_square(np.arange(1 << 17, dtype=np.int64))
    out.flags.writeable = False
    return out


def evaluate(mantissa: Any, name: str) -> Any:
    """The recipe over int64 mantissas in [0, 2^23), by integer arithmetic alone.

    ex2: 24 bits of 2^f, leading one included. rcp: 2^24 times 1/(1 + f). lg2: 2^36 times log2(1 +
    f).
    """
    xp, u = namespace(mantissa), UNITS[name]
    integers = xp.asarray(table(name))
    slices, r = mantissa >> u.bits, (mantissa & ((1 << u.bits) - 1))
    wide = r << u.up
    square = squares()[wide] if xp is np else truncated_square(wide)
    a, b, c = (integers[:, i][slices] for i in range(3))
    value = (a << u.shift) + u.b_sign * b * r + u.c_factor * c * square + u.const
    return value >> u.drop


def _check(x: Any) -> None:
    """TypeError unless it is an array, or a number."""
    if not isinstance(x, np.generic | float | int):
        check_plain("x", x, "a float32 array")


def _fields(x: Any) -> tuple[Any, Any, Any, Any]:
    """Sign (0 or 1), exponent field, mantissa as int64, and the array module."""
    _check(x)
    xp = namespace(x)
    if xp is np:
        x = np.asarray(x, np.float32)
    bits = x.view(np.int32).astype(np.int64)
    return (bits >> 31) & 1, (bits >> 23) & 0xFF, bits & MANTISSA, xp


def _from_bits(bits: Any) -> Any:
    return bits.astype(np.uint32).view(np.float32)


def ex2(x: Any, *, backend: Backend = None) -> Any:
    """2^x as `ex2.approx.ftz.f32`; float32 array of the shape of x.

    NaN gives NaN 0x7fffffff, +Inf gives +Inf, -Inf gives +0; subnormals and zeros give exactly 1;
    x < -126 gives +0 (subnormal results are flushed), x >= 128 gives +Inf. Within 1.4 ulp: over a
    binade of x > 0, 61.1% of the results are correctly rounded, 38.9% one ulp high, 0.04% one low.
    For x < 0, |x| is cut to 23 fraction bits and complemented: a bias of about -1e-7.

    >>> ex2(np.float32([0.0, -1.0, -126.5, 128.0, -0.5])).tolist()
    [1.0, 0.5, 0.0, inf, 0.7071067094802856]
    """
    negative, field, mantissa, xp = _fields(x)
    fast = fast_path(xp, backend)
    if fast:
        return fast.ex2(x, table("ex2"), squares())
    # |x| in fixed point with 23 fraction bits, truncated. |x| >= 256 is beyond every interesting
    # value.
    full = xp.where(field == 0, 0, mantissa | ONE)
    shift = xp.clip(field - 127, -25, 8)
    fixed = xp.where(shift >= 0, full << xp.maximum(shift, 0), full >> xp.maximum(-shift, 0))
    whole = (fixed & MANTISSA) == 0
    signed = xp.where(negative == 0, fixed, xp.where(whole, -fixed, ~fixed))
    n = signed >> 23
    bits = (n + 127 << 23) + (evaluate(signed & MANTISSA, "ex2") & MANTISSA)
    bits = xp.where(whole, n + 127 << 23, bits)
    bits = xp.where(n < -126, 0, xp.where(n >= 128, 0x7F800000, bits))
    return _from_bits(xp.where((field == 255) & (mantissa != 0), NAN_BITS, bits))


def rcp(x: Any, *, backend: Backend = None) -> Any:
    """1 / x as `rcp.approx.ftz.f32`; float32 array of the shape of x.

    NaN gives NaN 0x7fffffff, +-Inf gives +-0, zeros and subnormals give an infinity of their sign;
    subnormal results are flushed to zeros. Otherwise within 1 ulp: 86.8% correctly rounded.

    >>> rcp(np.float32([4.0, -0.0, np.inf, 2.0**126, 2.0**127])).tolist()
    [0.25, -inf, 0.0, 1.1754943508222875e-38, 0.0]
    """
    negative, field, mantissa, xp = _fields(x)
    fast = fast_path(xp, backend)
    if fast:
        return fast.rcp(x, table("rcp"), squares())
    s = evaluate(mantissa, "rcp")
    one = s >= 1 << 24
    # s 2^-24 lies in [1/2, 1]; at 1 the exponent is one higher.
    exponent = xp.where(one, 254 - field, 253 - field)
    bits = (exponent << 23) + xp.where(one, 0, s & MANTISSA)
    bits = xp.where((exponent <= 0) | (field == 255), 0, bits)
    bits = xp.where(field == 0, 0x7F800000, bits) | negative << 31
    return _from_bits(xp.where((field == 255) & (mantissa != 0), NAN_BITS, bits))


def lg2(x: Any, *, backend: Backend = None) -> Any:
    """log2(x) as `lg2.approx.ftz.f32`; float32 array of the shape of x.

    NaN and x < 0 give NaN 0x7fffffff, +Inf gives +Inf; zeros and subnormals of either sign give
    -Inf; lg2(1) is +0. The 36 fraction bits of the table are cut to 24 significant ones, after a
    complement where the result is negative.

    >>> lg2(np.float32([1.0, 8.0, 0.0, 2.0**-126])).tolist()
    [0.0, 3.0, -inf, -125.99999237060547]
    """
    negative, field, mantissa, xp = _fields(x)
    fast = fast_path(xp, backend)
    if fast:
        return fast.lg2(x, table("lg2"), squares())
    fixed = (field - 127 << 36) + evaluate(mantissa, "lg2")
    below = fixed < 0
    magnitude = xp.where(below, ~fixed, fixed).astype(np.float64)  # at most 43 bits: exact
    cut = (magnitude.view(np.int64) & ~((1 << 29) - 1)).view(np.float64) * 2.0**-36
    value = narrow(xp.where(below, -cut, cut)).view(np.uint32).astype(np.int64)
    value = xp.where((field == 127) & (mantissa == 0), 0, value)
    value = xp.where(field == 255, 0x7F800000, value)
    nan = ((field == 255) & (mantissa != 0)) | ((negative == 1) & (field != 0))
    value = xp.where(field == 0, 0xFF800000, value)
    return _from_bits(xp.where(nan, NAN_BITS, value))


def ex2_polynomial(x: Any, *, backend: Backend = None) -> Any:
    """2^x by a polynomial of degree 5 in float32 FMAs; float32 array of the shape of x.

    NaN stays NaN, +Inf and x >= 128 give +Inf, -Inf and x < -126 give +0 (as `ex2`, which flushes);
    integers give exact powers of two. Elsewhere the relative error is at most about 2^-22.7.

    In a kernel, all of it IEEE: n = floor(x) (add 1.5 * 2^23 rounding down, subtract it), f = x - n
    rounded to nearest, Horner in `__fmaf_rn`, then n << 23 added to the bits; x < -126 and NaN are
    selected beside it.

    >>> ex2_polynomial(np.float32([3.0, -126.0, -126.5, 128.0])).tolist()
    [8.0, 1.1754943508222875e-38, 0.0, inf]
    """
    _check(x)
    xp = namespace(x)
    fast = fast_path(xp, backend)
    if fast:
        return fast.ex2_polynomial(x, np.asarray(POLYNOMIAL, np.float32))
    wide = rounding.widen(np.asarray(x, np.float32) if xp is np else x)
    clamped = xp.clip(xp.where(wide == wide, wide, 0.0), -127.0, 128.0)
    n = xp.floor(clamped)
    f = rounding.round_to(
        clamped - n
    )  # exact but for -2^-2 < x < 0, where float64 rounds where float32 would
    p = xp.full(f.shape, POLYNOMIAL[0], np.float32)
    for coefficient in (*POLYNOMIAL[1:], 1.0):
        p = rounding.fma(p, f, coefficient, backend=backend)
    bits = p.view(np.uint32).astype(np.int64) + (n.astype(np.int64) << 23)
    bits = xp.where(wide < -126, 0, bits)
    return _from_bits(xp.where(wide == wide, bits, NAN_BITS))
