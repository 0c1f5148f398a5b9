"""CUtensorMap: how TMA finds boxes of a tensor, encoded by the driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

BYTES = 128
#: Columns of a box: what a row of 128 bytes, the widest swizzle, holds of halves.
COLUMNS = 64

#: CUtensorMapDataType, and the driver's enumerators that every map here has.
FORMATS = {"float16": 6, "bfloat16": 9}
NO_INTERLEAVE, SWIZZLE_128B, L2_PROMOTION_128B, FILL_ZEROS = 0, 3, 2, 0


@functools.cache
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


@functools.lru_cache(maxsize=1024)
def _encoded(
    pointer: int, lengths: tuple[int, ...], steps: tuple[int, ...], fmt: str, rows: int
) -> bytes:
    """The map; a pure function of its arguments, so that calls on the same arrays share it.
    lengths, steps: an array's shape and strides.
    """
    shape = lengths[::-1]
    # The stride of an axis of one is free; the driver wants a multiple of 16.
    outer = zip(steps[-2::-1], lengths[-2::-1], strict=True)
    strides = tuple(s if n > 1 else 16 for s, n in outer)
    room = ctypes.create_string_buffer(BYTES + 63)
    aligned = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    axes = len(shape)
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        FORMATS[fmt],
        axes,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * axes)(*shape),
        (ctypes.c_uint64 * (axes - 1))(*strides),
        (ctypes.c_uint32 * axes)(COLUMNS, rows, *(1,) * (axes - 2)),
        (ctypes.c_uint32 * axes)(*(1,) * axes),
        NO_INTERLEAVE,
        SWIZZLE_128B,
        L2_PROMOTION_128B,
        FILL_ZEROS,
    )
    if error:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {error} for shape {shape}, strides {strides} bytes"
        )
    return ctypes.string_at(aligned, BYTES)


def tensor_map(x: Any, fmt: str, rows: int) -> bytes:
    """The map of a (B, H, N, D) array in boxes of `rows` rows and 64 columns of one head.

    What a box has beyond the array reads as 0 and is not written. The array's last axis is
    contiguous, its address and other strides multiples of 16 bytes (`problem.ready`). Raises
    RuntimeError with the driver's number and the shape.
    """
    return _encoded(x.data.ptr, x.shape, x.strides, fmt, rows)


def tensor_maps(arrays: Sequence[Any], fmt: str, rows: Sequence[int]) -> bytes:
    """The maps of several arrays one after the other; of None, zeros."""
    return b"".join(
        [
            bytes(BYTES) if x is None else tensor_map(x, fmt, n)
            for x, n in zip(arrays, rows, strict=True)
        ]
    )
