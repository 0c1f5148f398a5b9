"""Correct rounding: every elementary operation of the emulator, rounded once.

Values of any format with at most 24 significant bits are held in float32 arrays; the format is an
argument. `round_scalar` and `scalar` are exact rational arithmetic, to be read; the array functions
are tested equal.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from fractions import Fraction
from types import ModuleType
from typing import Any, Literal

import numpy as np

from emulation.formats import BFLOAT16, FLOAT16, FLOAT32, Format, format_of

Mode = Literal["nearest-even", "toward-zero"]
Backend = Literal["numpy", "numba"] | None
MODES = ("nearest-even", "toward-zero")


def check_subnormals() -> None:
    """Raise RuntimeError when this thread flushes subnormals to zero.

    A library built with -ffast-math sets that CPU flag (FTZ/DAZ) for the whole process when it is
    loaded; all results here would then be silently wrong.
    """
    for name in ("float32", "float64"):
        tiny = np.array([np.finfo(name).tiny], name)
        quarter = np.array([0.25], name)
        with np.errstate(under="ignore"):
            made = tiny * quarter  # FTZ would give 0
            read = made / quarter  # DAZ would give 0
        if made.tobytes() == np.zeros(1, name).tobytes() or read.tobytes() != tiny.tobytes():
            raise RuntimeError(
                f"the CPU flushes {name} subnormals to zero (FTZ/DAZ): a library loaded into "
                "this process was probably built with -ffast-math and changed the floating-point "
                "mode; run without it"
            )


check_subnormals()


def namespace(x: Any) -> Any:
    """The array module of x: NumPy, or the one its type comes from (CuPy, never imported here).

    >>> namespace(np.zeros(1)).__name__
    'numpy'
    """
    if isinstance(x, np.ndarray | np.generic | float | int):
        return np
    return sys.modules[type(x).__module__.split(".")[0]]


def _common(*args: Any) -> Any:
    """The array module of the arguments; NumPy unless one of them is another module's array."""
    return next((xp for xp in map(namespace, args) if xp is not np), np)


def fast_path(xp: Any, backend: Backend = None) -> ModuleType | None:
    """`emulation.fast` for NumPy arrays, if numba is installed and `backend` allows it, else None.

    Raises ValueError for an unknown backend, ImportError when "numba" is asked for and missing,
    TypeError when it is asked for arrays that are not NumPy's.
    """
    if backend not in (None, "numpy", "numba"):
        raise ValueError(f'backend: got {backend!r}, must be None, "numpy" or "numba"')
    if backend == "numpy":
        return None
    if xp is not np:
        if backend == "numba":
            raise TypeError(f'backend: "numba" takes NumPy arrays, got {xp.__name__} arrays')
        return None
    module, missing = _load_fast()
    if missing and backend == "numba":
        raise missing
    return module


@functools.cache
def _load_fast() -> tuple[ModuleType | None, ImportError | None]:
    """`emulation.fast`, or why it is missing; looked for once, as a failing import is slow."""
    try:
        return importlib.import_module("emulation.fast"), None
    except ImportError as missing:
        return None, missing


# --- scalars, to be read --------------------------------------------------------------------------


def _exponent(x: Fraction) -> int:
    """floor(log2 x) for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= Fraction(2) ** e else e - 1


def round_scalar(x: Fraction | float, fmt: Any = FLOAT32, mode: Mode = "nearest-even") -> float:
    """x rounded once to fmt.

    NaN stays NaN. An infinity stays itself, or NaN where the format has none (E4M3). The sign of
    zero is kept, and a negative number that rounds to zero gives -0. Overflow: to nearest, a value
    that would round to the number past the largest finite one gives infinity (NaN without
    infinities); toward zero, it gives the largest finite. Raises ValueError for an unknown mode.

    >>> round_scalar(Fraction(1) + Fraction(1, 2**8) + Fraction(1, 2**40), "bfloat16")
    1.0078125
    >>> round_scalar(65520.0, "float16"), round_scalar(65520.0, "float16", "toward-zero")
    (inf, 65504.0)
    """
    f = format_of(fmt)
    _check_mode(mode)
    if isinstance(x, float) and not math.isfinite(x):
        return x if f.has_inf else math.nan
    if x == 0:
        return float(x)
    sign = -1.0 if x < 0 else 1.0
    magnitude = abs(Fraction(x))
    ulp = Fraction(2) ** (max(_exponent(magnitude), f.emin) - f.precision + 1)
    # round() of a Fraction is round half to even; a Fraction floors exactly.
    steps = round(magnitude / ulp) if mode == "nearest-even" else magnitude // ulp
    if steps * ulp > Fraction(f.max):
        if mode == "toward-zero":
            return sign * f.max
        return sign * math.inf if f.has_inf else math.nan
    return sign * float(steps * ulp)


def scalar(op: str, *args: float, fmt: Any = FLOAT32, mode: Mode = "nearest-even") -> float:
    """One operation on float32 values (or narrower), exact, then rounded once to fmt.

    op is "add", "sub", "mul", "div", "sqrt" or "fma" (a * b + c). NaN, infinities and the signs of
    zeros are those of IEEE 754. Raises ValueError for an unknown op.

    >>> scalar("fma", 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60) == 1 + 2.0**-11 + 2.0**-23
    True
    """
    if op not in ("add", "sub", "mul", "div", "sqrt", "fma"):
        raise ValueError(f"op: got {op!r}, must be add, sub, mul, div, sqrt or fma")
    args = tuple(float(x) for x in args)
    # The same operation in float64 settles what has no rational value: NaN, infinities, and the
    # signs of zeros. No product or quotient of float32 values leaves the range of float64.
    with np.errstate(all="ignore"):
        a, b, c = (np.float64(x) for x in (*args, 0.0, 0.0)[:3])
        shadow = float(
            {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b, "fma": a * b + c}[op]
            if op != "sqrt"
            else np.sqrt(a)
        )
    if not all(map(math.isfinite, args)) or not math.isfinite(shadow):
        return round_scalar(shadow, fmt, mode)
    exact = [Fraction(x) for x in args]
    if op == "sqrt":
        value = _sqrt_odd(exact[0])
    elif op == "div":
        value = exact[0] / exact[1]
    elif op == "mul":
        value = exact[0] * exact[1]
    elif op == "fma":
        value = exact[0] * exact[1] + exact[2]
    else:
        value = exact[0] + exact[1] if op == "add" else exact[0] - exact[1]
    return round_scalar(value, fmt, mode) if value else math.copysign(0.0, shadow)


def _sqrt_odd(x: Fraction) -> Fraction:
    """sqrt(x) with over 100 bits, rounded to odd: on the same side of every shorter number as the
    root.
    """
    scale = 2**240  # x is a multiple of 2^-149 or coarser, so x * scale^2 is an integer
    n = int(x * scale**2)
    root = math.isqrt(n)
    return Fraction(root if root * root == n else root | 1, scale)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, must be one of {', '.join(MODES)}")


# --- float32 <-> float64 without arithmetic -------------------------------------------------------


def widen(x: Any) -> Any:
    """float32 (or float16, bfloat16) array to float64, exact; NaN stays NaN.

    Outside NumPy it goes through integers, because compilers of elementwise GPU kernels are told to
    flush float32 subnormals (-ftz=true), conversions included.

    >>> float(widen(np.float32([2.0**-149]))[0]) == 2.0**-149
    True
    """
    xp = namespace(x)
    if xp is np:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return np.asarray(x).astype(np.float64)
    if x.dtype != np.float32:  # 16-bit formats: no subnormals of their own are flushed in float64
        return x.astype(np.float64) if x.dtype == np.float16 else widen(_from_bits16(x))
    bits = x.view(np.int32).astype(np.int64)
    field = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    # Exponent field 255 (NaN, Inf) goes to 2047, the others move from bias 127 to 1023.
    wide = xp.where(field == 255, 2047, field + 896) << 52 | mantissa << 29
    magnitude = xp.where(field == 0, (mantissa.astype(np.float64) * 2.0**-149).view(np.int64), wide)
    return (magnitude | (bits & 0x80000000) << 32).view(np.float64)


def _from_bits16(x: Any) -> Any:
    """A bfloat16 array of another module as float32 values."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(x: Any) -> Any:
    """float64 array whose values are float32 values (or NaN) to float32, exact, subnormals
    included.

    >>> float(narrow(np.array([2.0**-149]))[0]) == 2.0**-149
    True
    """
    xp = namespace(x)
    if xp is np:
        with np.errstate(invalid="ignore"):
            return x.astype(np.float32)
    bits = x.view(np.int64)
    sign = (bits >> 32) & 0x80000000
    field = (bits >> 52) & 0x7FF
    mantissa = (bits >> 29) & 0x7FFFFF
    # A NaN whose payload lies below bit 29 must not become an infinity.
    mantissa = xp.where(x != x, 0x7FFFFF, mantissa)
    small = abs(x) < 2.0**-126
    steps = (xp.where(small, abs(x), 0.0) * 2.0**149).astype(np.int64)
    magnitude = xp.where(field == 2047, 255, field - 896) << 23 | mantissa
    out = xp.where(small, steps, magnitude) | sign
    return out.astype(np.uint32).view(np.float32)


# --- arrays ---------------------------------------------------------------------------------------


def _ulp(x: Any, f: Format) -> Any:
    """Spacing of fmt at x, as a float64 power of two; NaN, Inf and overflowing x take the one past
    the range.
    """
    xp = namespace(x)
    power = (x.view(np.int64) & (0x7FF << 52)).view(
        np.float64
    )  # 2^exponent; 0 for subnormals of float64
    return xp.minimum(xp.maximum(power, 2.0**f.emin), 2.0 ** (f.emax + 1)) * 2.0 ** (
        1 - f.precision
    )


def round_to(x: Any, fmt: Any = FLOAT32, mode: Mode = "nearest-even") -> Any:
    """float64 array to the values of fmt, in ONE rounding; float32 array of the same shape.

    NaN, infinities, zeros, overflow and errors as `round_scalar`. Going to bfloat16 through float32
    would round twice: 1 + 2^-8 + 2^-40 first loses its last bit and then looks like a tie.

    >>> float(round_to(np.array([1 + 2.0**-8 + 2.0**-40]), "bfloat16")[0])
    1.0078125
    """
    f = format_of(fmt)
    _check_mode(mode)
    xp = namespace(x)
    if xp is np:
        x = np.asarray(x, np.float64)
    if xp is np and mode == "nearest-even" and f in (FLOAT16, FLOAT32):
        with np.errstate(all="ignore"):
            return x.astype(f.name).astype(np.float32)
    with np.errstate(all="ignore"):
        ulp = _ulp(x, f)  # dividing by it and multiplying again is exact
        y = (xp.rint(x / ulp) if mode == "nearest-even" else xp.trunc(x / ulp)) * ulp
        if mode == "toward-zero":
            y = xp.where(xp.isfinite(x), xp.clip(y, -f.max, f.max), y)
        past = xp.where(x > 0, np.inf, -np.inf) if f.has_inf else np.nan
        y = xp.where(abs(y) > f.max, past, y)
    return narrow(y)


def cast(x: Any, fmt: Any, *, backend: Backend = None) -> Any:
    """float32 array to the nearest values of fmt, ties to even; float32 array of the same shape.

    NaN, infinities, zeros, overflow and errors as `round_scalar`.

    >>> cast(np.float32([1 + 2.0**-8, 65520.0]), "bfloat16").tolist()
    [1.0, 65536.0]
    """
    f = format_of(fmt)
    xp = namespace(x)
    if xp is np:
        x = np.asarray(x, np.float32)
    if f == FLOAT32:
        return x
    fast = fast_path(xp, backend)
    if fast and f == BFLOAT16:
        return fast.cast_bfloat16(x)
    if f == BFLOAT16:
        bits = x.view(np.uint32)
        # Carry into the kept half decides; a carry out of the mantissa raises the exponent, up to
        # infinity.
        with np.errstate(over="ignore"):  # NaNs of a 0-d array may wrap around; overruled below
            carried = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        rounded = carried & np.uint32(0xFFFF0000)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return xp.where(nan, np.uint32(0x7FFF0000) | bits, rounded).view(np.float32)
    if xp is np and f == FLOAT16:
        with np.errstate(all="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return round_to(widen(x), f)


def _to_odd(s: Any, error: Any) -> Any:
    """float64 sum s and the exact error s lost, as the sum rounded to odd instead of to nearest.

    Boldo and Melquiond, IEEE TC 2008: a last bit that is odd whenever something was lost keeps the
    number off every tie of a narrower format, so the second rounding cannot be fooled.
    """
    xp = namespace(s)
    bits = s.view(np.int64)
    even = (bits & 1) == 0
    inexact = abs(error) > 0  # False for the NaN that infinities leave
    step = xp.where((error > 0) == (s > 0), 1, -1)
    return xp.where(inexact & even, bits + step, bits).view(np.float64)


def _wide_sum(a: Any, b: Any) -> Any:
    """a + b of float64 arrays, rounded to odd (Knuth's TwoSum gives the error)."""
    s = a + b
    t = s - a
    return _to_odd(s, (a - (s - t)) + (b - t))


def _operands(xp: Any, *args: Any) -> list[Any]:
    """The operands as float32 arrays of xp."""
    return [xp.asarray(x, dtype=np.float32) for x in args]


def add(a: Any, b: Any, fmt: Any = FLOAT32) -> Any:
    """a + b of float32 values (arrays or scalars, broadcast), rounded once to fmt; float32 array.

    An operand that is no float32 array is rounded to one first.

    NaN, infinities and signed zeros as IEEE 754; overflow as `round_scalar`.

    >>> float(add(np.float32([1.0]), 2.0**-8, "bfloat16")[0])
    1.0
    """
    xp, f = _common(a, b), format_of(fmt)
    x, y = _operands(xp, a, b)
    with np.errstate(all="ignore"):
        if xp is np and f == FLOAT32:
            return x + y
        return round_to(_wide_sum(widen(x), widen(y)), f)


def sub(a: Any, b: Any, fmt: Any = FLOAT32) -> Any:
    """a - b, otherwise as `add`.

    >>> float(sub(np.float32([1.0]), 2.0**-12, "float16")[0])
    1.0
    """
    xp, f = _common(a, b), format_of(fmt)
    x, y = _operands(xp, a, b)
    with np.errstate(all="ignore"):
        if xp is np and f == FLOAT32:
            return x - y
        return round_to(_wide_sum(widen(x), -widen(y)), f)


def mul(a: Any, b: Any, fmt: Any = FLOAT32) -> Any:
    """a * b, otherwise as `add`.

    >>> float(mul(np.float32([3.0]), 1 / 3)[0])
    1.0
    """
    xp, f = _common(a, b), format_of(fmt)
    x, y = _operands(xp, a, b)
    with np.errstate(all="ignore"):
        if xp is np and f == FLOAT32:
            return x * y
        return round_to(widen(x) * widen(y), f)  # 48 bits: exact in float64


def div(a: Any, b: Any, fmt: Any = FLOAT32) -> Any:
    """a / b, otherwise as `add`; x / 0 is an infinity, 0 / 0 NaN.

    >>> float(div(1.0, np.float32([3.0]), "bfloat16")[0])
    0.333984375
    """
    xp, f = _common(a, b), format_of(fmt)
    x, y = _operands(xp, a, b)
    with np.errstate(all="ignore"):
        if xp is np and f == FLOAT32:
            return x / y
        # Rounded twice, and harmless: a quotient of 24-bit numbers that is no tie of up to 24 bits
        # stays at least 2^-50 of itself away from it (Figueroa 1995; Roux 2014 with subnormal
        # results).
        return round_to(widen(x) / widen(y), f)


def sqrt(a: Any, fmt: Any = FLOAT32) -> Any:
    """Square root of float32 values, rounded once to fmt; NaN below zero, sqrt(-0) is -0.

    >>> float(sqrt(np.float32([2.0]), "float16")[0])
    1.4140625
    """
    xp, f = _common(a), format_of(fmt)
    (x,) = _operands(xp, a)
    with np.errstate(all="ignore"):
        if xp is np and f == FLOAT32:
            return np.sqrt(x)
        return round_to(xp.sqrt(widen(x)), f)  # twice, and harmless, as in `div`


def fma(a: Any, b: Any, c: Any, fmt: Any = FLOAT32, *, backend: Backend = None) -> Any:
    """a * b + c of float32 values (arrays or scalars, broadcast) in ONE rounding to fmt; float32
    array.

    NaN, infinities and signed zeros as IEEE 754; overflow as `round_scalar`. a * b + c in float64
    and then a cast would round twice; here the float64 sum is rounded to odd, which makes the
    second rounding the only one.

    >>> x = np.float32([1 + 2.0**-12])
    >>> float(fma(x, x, 2.0**-60)[0]) == 1 + 2.0**-11 + 2.0**-23
    True
    """
    xp, f = _common(a, b, c), format_of(fmt)
    x, y, z = _operands(xp, a, b, c)
    fast = fast_path(xp, backend)
    if fast and f == FLOAT32:
        return fast.fma(x, y, z)
    with np.errstate(all="ignore"):
        return round_to(_wide_sum(widen(x) * widen(y), widen(z)), f)
