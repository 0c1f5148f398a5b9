"""The numba path of `rounding`, `tensor_core` and `sfu` for NumPy arrays: same bits, compiled.

Optional: whoever needs it imports it through `rounding.fast_path`. Kernels are single-threaded and
release the GIL; rows are split over a thread pool, which cannot change a result because no output
element is shared.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from emulation.rules import Step

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: Elements (or products) per task below which a second thread costs more than it saves.
GRAIN = 1 << 18
#: Columns of one inner loop: a step of 16 by 256 float64 operands stays in the L1 and L2 caches.
COLUMNS = 256
NEVER = -(1 << 14)  #: exponent of a zero: below every sum of exponents


_config: Any = numba.config


def _cache_dir() -> str:
    """Where compiled code is kept: the user's cache, not the package, whose folder pip could not
    remove any more. Empty, numba's word for its own choice, if the directory is not the user's
    alone: numba runs what it finds there.
    """
    if _config.CACHE_DIR:
        return str(_config.CACHE_DIR)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(
        os.environ.get("CUFLASH_CACHE_DIR") or os.path.join(base, "cuflash"), "numba"
    )
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError:
        return ""
    private = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return path if private and os.access(path, os.W_OK) else ""


# numba reads its setting when a function is decorated; it is put back at the end of this file.
_others, _config.CACHE_DIR = _config.CACHE_DIR, _cache_dir()
_jit = numba.njit(nogil=True, cache=bool(_config.CACHE_DIR), error_model="numpy")


def _split(rows: int, cost: int, task: Callable[[int, int], None]) -> None:
    """task(lo, hi) over all rows; in threads when rows * cost is worth it."""
    parts = min(WORKERS, rows, max(1, rows * cost // GRAIN))
    if parts <= 1:
        task(0, rows)
        return
    edges = [rows * i // parts for i in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        for done in [pool.submit(task, lo, hi) for lo, hi in itertools.pairwise(edges)]:
            done.result()


def _make_fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """llvm.fma.f32: one rounding, by instruction or by library call."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


def _make_bits32(typingctx: Any, x: Any) -> Any:
    """float32 to its uint32 pattern."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


def _make_bits64(typingctx: Any, x: Any) -> Any:
    """float64 to its int64 pattern."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int64))

    return types.int64(types.float64), generate


def _make_float64(typingctx: Any, x: Any) -> Any:
    """int64 pattern to float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float64))

    return types.float64(types.int64), generate


_fma: Any = intrinsic(_make_fma)
_bits32: Any = intrinsic(_make_bits32)
_bits64: Any = intrinsic(_make_bits64)
_float64: Any = intrinsic(_make_float64)


# --- elementwise ----------------------------------------------------------------------------------


def _elementwise(
    kernel: Callable[..., None], shape: tuple[int, ...], inputs: list[Any], *rest: Any
) -> Any:
    """kernel(*inputs, out, *rest) over flat float32 arrays."""
    flat = [np.ascontiguousarray(np.broadcast_to(x, shape), np.float32).reshape(-1) for x in inputs]
    out = np.empty(math.prod(shape), np.float32)
    _split(out.size, 4, lambda lo, hi: kernel(*[x[lo:hi] for x in flat], out[lo:hi], *rest))
    return out.reshape(shape)


@_jit
def _fma_kernel(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = _fma(a[i], b[i], c[i])


def fma(a: Any, b: Any, c: Any) -> Any:
    """See `rounding.fma`, format float32."""
    return _elementwise(_fma_kernel, np.broadcast_shapes(a.shape, b.shape, c.shape), [a, b, c])


@_jit
def _cast_kernel(x: Any, out: Any) -> None:
    for i in range(x.size):
        bits = x[i]
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = (bits | np.uint32(0x7FFF0000)) if nan else rounded


def cast_bfloat16(x: Any) -> Any:
    """See `rounding.cast`, format bfloat16."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint32)
    out = np.empty(flat.size, np.uint32)
    _split(flat.size, 2, lambda lo, hi: _cast_kernel(flat[lo:hi], out[lo:hi]))
    return out.view(np.float32).reshape(x.shape)


# The bit arithmetic below is that of `sfu`, where it is explained.


@_jit
def _ex2_kernel(x: Any, out: Any, table: Any, squares: Any) -> None:
    patterns = out.view(np.uint32)
    inputs = x.view(np.uint32)
    for i in range(x.size):
        bits = np.int64(inputs[i])
        negative, field, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
        shift: Any = min(max(field - 127, -25), 8)
        fixed = mantissa | 0x800000 if field else np.int64(0)
        fixed = fixed << shift if shift >= 0 else fixed >> -shift
        whole = fixed & 0x7FFFFF == 0
        if negative:
            fixed = -fixed if whole else ~fixed
        n, f = fixed >> 23, fixed & 0x7FFFFF
        s, r = f >> 17, f & 0x1FFFF
        value = ((table[s, 0] << 13) + table[s, 1] * r + table[s, 2] * squares[r] + 0x77E2) >> 15
        result = ((n + 127) << 23) + (0 if whole else value & 0x7FFFFF)
        if n < -126:
            result = np.int64(0)
        elif n >= 128:
            result = np.int64(0x7F800000)
        if field == 255 and mantissa:
            result = np.int64(0x7FFFFFFF)
        patterns[i] = result


def ex2(x: Any, table: Any, squares: Any) -> Any:
    """See `sfu.ex2`."""
    return _elementwise(_ex2_kernel, np.shape(x), [x], table, squares)


@_jit
def _rcp_kernel(x: Any, out: Any, table: Any, squares: Any) -> None:
    patterns = out.view(np.uint32)
    inputs = x.view(np.uint32)
    for i in range(x.size):
        bits = np.int64(inputs[i])
        negative, field, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
        s, r = mantissa >> 16, mantissa & 0xFFFF
        value = (
            (table[s, 0] << 13) - table[s, 1] * r + table[s, 2] * squares[r << 1] + 0x47E7
        ) >> 15
        exponent = 253 - field
        if value >= 1 << 24:
            exponent, value = exponent + 1, np.int64(0)
        result = (exponent << 23) + (value & 0x7FFFFF)
        if exponent <= 0 or field == 255:
            result = np.int64(0)
        if field == 0:
            result = np.int64(0x7F800000)
        result |= negative << 31
        if field == 255 and mantissa:
            result = np.int64(0x7FFFFFFF)
        patterns[i] = result


def rcp(x: Any, table: Any, squares: Any) -> Any:
    """See `sfu.rcp`."""
    return _elementwise(_rcp_kernel, np.shape(x), [x], table, squares)


@_jit
def _lg2_kernel(x: Any, out: Any, table: Any, squares: Any) -> None:
    patterns = out.view(np.uint32)
    inputs = x.view(np.uint32)
    for i in range(x.size):
        bits = np.int64(inputs[i])
        negative, field, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
        s, r = mantissa >> 17, mantissa & 0x1FFFF
        value = ((table[s, 0] << 12) + table[s, 1] * r - 2 * table[s, 2] * squares[r] + 0x3345) >> 2
        fixed = ((field - 127) << 36) + value
        sign = np.int64(0)
        if fixed < 0:
            sign, fixed = np.int64(1) << 31, ~fixed
        wide = _bits64(np.float64(fixed) * 2.0**-36)
        result = ((((wide >> 52) - 896) << 23) | ((wide >> 29) & 0x7FFFFF)) | sign
        if field == 127 and mantissa == 0:
            result = np.int64(0)
        if field == 255:
            result = np.int64(0x7F800000)
        if (field == 255 and mantissa) or (negative and field):
            result = np.int64(0x7FFFFFFF)
        if field == 0:
            result = np.int64(0xFF800000)
        patterns[i] = result


def lg2(x: Any, table: Any, squares: Any) -> Any:
    """See `sfu.lg2`."""
    return _elementwise(_lg2_kernel, np.shape(x), [x], table, squares)


@_jit
def _polynomial_kernel(x: Any, out: Any, coefficients: Any) -> None:
    patterns = out.view(np.uint32)
    for i in range(x.size):
        value = x[i]
        clamped = (
            min(max(value, np.float32(-127)), np.float32(128)) if value == value else np.float32(0)
        )
        n = np.floor(clamped)
        f = np.float32(clamped - n)
        p = coefficients[0]
        for k in range(1, coefficients.size):
            p = _fma(p, f, coefficients[k])
        p = _fma(p, f, np.float32(1))
        result = np.int64(_bits32(p)) + (np.int64(n) << 23)
        if value < np.float32(-126):
            result = np.int64(0)
        patterns[i] = result if value == value else np.int64(0x7FFFFFFF)


def ex2_polynomial(x: Any, coefficients: Any) -> Any:
    """See `sfu.ex2_polynomial`."""
    return _elementwise(_polynomial_kernel, np.shape(x), [x], coefficients)


# --- products -------------------------------------------------------------------------------------


@_jit
def _chain_kernel(a: Any, bt: Any, d: Any) -> None:
    for i in range(a.shape[0]):
        row = d[i]
        for k in range(a.shape[1]):
            x, y = a[i, k], bt[k]
            for j in range(row.size):
                row[j] = _fma(x, y[j], row[j])


def fma_chain(a: Any, b: Any, d: Any, lead: tuple[int, ...]) -> Any:
    """See `tensor_core.fma_chain`; d is overwritten."""
    for a2, b2, d2 in _pages(np.asarray(a, np.float32), np.asarray(b, np.float32), d, lead):
        bt = np.ascontiguousarray(b2.T)
        rows = np.ascontiguousarray(a2)
        _split(
            len(rows),
            bt.size,
            lambda lo, hi, x=rows, y=bt, z=d2: _chain_kernel(x[lo:hi], y, z[lo:hi]),  # type: ignore[misc]
        )
    return d


def _pages(a: Any, b: Any, d: Any, lead: tuple[int, ...]) -> Any:
    """The two-dimensional products of a broadcast one; a shared b makes a single tall product."""
    m, n, k = a.shape[-2], b.shape[-2], a.shape[-1]
    if 0 in d.shape:
        return
    if b.ndim == 2:
        yield np.broadcast_to(a, (*lead, m, k)).reshape(-1, k), b, d.reshape(-1, n)
        return
    tall = np.broadcast_to(a, (*lead, m, k))
    wide = np.broadcast_to(b, (*lead, n, k))
    for at in np.ndindex(*lead):
        yield tall[at], wide[at], d[at]


@_jit
def _mma_kernel(
    a: Any, ea: Any, bt: Any, ebt: Any, d: Any, length: int, bits: int, floor: int, emin_c: int,
    precision: int, emin: int, largest: float, nearest: bool,
) -> None:  # fmt: skip
    columns = d.shape[1]
    top = np.empty(COLUMNS, np.int32)
    up = np.empty(COLUMNS, np.float64)
    total = np.empty(COLUMNS, np.float64)
    value = np.empty(COLUMNS, np.float64)
    ulp_down = 2.0 ** (1 - precision)
    emin_power = 2.0**emin
    for left in range(0, columns, COLUMNS):
        width = min(COLUMNS, columns - left)
        for i in range(a.shape[0]):
            for j in range(width):
                value[j] = d[i, left + j]
            for lo in range(0, a.shape[1], length):
                hi = min(lo + length, a.shape[1])
                for j in range(width):
                    e = np.int32(((_bits64(value[j]) >> 52) & 0x7FF) - 1023)
                    e = max(e, np.int32(emin_c)) if value[j] != 0 else np.int32(floor)
                    top[j] = max(e, np.int32(floor))
                for k in range(lo, hi):
                    e, other = ea[i, k], ebt[k, left : left + width]
                    for j in range(width):
                        top[j] = max(top[j], e + other[j])
                for j in range(width):
                    up[j] = _float64((np.int64(bits + 1023) - top[j]) << 52)
                    total[j] = 0.0 + np.trunc(value[j] * up[j])
                for k in range(lo, hi):
                    x, y = a[i, k], bt[k, left : left + width]
                    for j in range(width):
                        total[j] += np.trunc(x * y[j] * up[j])
                for j in range(width):
                    exact = total[j] / up[j]
                    power = _float64(_bits64(exact) & (0x7FF << 52))
                    ulp = max(power, emin_power) * ulp_down
                    steps = np.rint(exact / ulp) if nearest else np.trunc(exact / ulp)
                    new = steps * ulp + 0.0
                    new = np.copysign(np.inf, new) if abs(new) > largest else new
                    # An accumulator that has overflowed stays infinite.
                    value[j] = value[j] if abs(value[j]) == np.inf else new
            for j in range(width):
                d[i, left + j] = value[j]


def _exponents(x: Any, emin: int) -> Any:
    """The rule's exponent of every finite float64 x as int32; NEVER for zeros."""
    e = ((x.view(np.int64) >> 52) & 0x7FF).astype(np.int32) - np.int32(1023)
    return np.where(x == 0, np.int32(NEVER), np.maximum(e, np.int32(emin)))


def mma(a: Any, b: Any, c: Any, lead: tuple[int, ...], s: Step, exact: Callable[..., Any]) -> Any:
    """See `tensor_core.mma`; `exact` is the NumPy path, which does the rows with NaN or Inf."""
    m, n = a.shape[-2], b.shape[-2]
    d = np.array(np.broadcast_to(c, (*lead, m, n)), np.float32, order="C")  # `_pages` flattens it
    for a2, b2, d2 in _pages(a, b, d, lead):
        bad_rows = ~np.isfinite(a2).all(1) | ~np.isfinite(d2).all(1)
        bad_columns = ~np.isfinite(b2).all(1)
        start = d2.copy() if bad_rows.any() or bad_columns.any() else d2
        _mma_page(a2, b2, d2, s)
        if bad_rows.any():
            d2[bad_rows] = exact(a2[bad_rows], b2, start[bad_rows], s)
        if bad_columns.any():
            d2[:, bad_columns] = exact(a2, b2[bad_columns], start[:, bad_columns], s)
    return d


def _mma_page(a: Any, b: Any, d: Any, s: Step) -> None:
    a = np.ascontiguousarray(np.where(np.isfinite(a), a, 0.0))
    bt = np.ascontiguousarray(np.where(np.isfinite(b), b, 0.0).T)
    ea, ebt = _exponents(a, s.fmt.emin), _exponents(bt, s.fmt.emin)
    emin_c = s.out.emin
    rest = (
        s.length,
        s.fraction_bits,
        s.zero_exponent,
        emin_c,
        s.out.precision,
        s.out.emin,
        s.out.max,
        s.nearest,
    )
    _split(
        len(a), bt.size, lambda lo, hi: _mma_kernel(a[lo:hi], ea[lo:hi], bt, ebt, d[lo:hi], *rest)
    )


_config.CACHE_DIR = _others
