"""CuPy's memory for tests and benchmarks: filled with NaN before it is handed out, or measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

BLOCK = 512  # CuPy's pool rounds sizes up to it


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Everything that CuPy allocates meanwhile in this thread holds NaN, whatever its format:
    outputs, workspaces, and what pads an array to the pool's block.
    """
    import cupy

    pool = cupy.cuda.MemoryPool()

    def malloc(size: int) -> Any:
        rounded = -(-size // BLOCK) * BLOCK
        found = pool.malloc(rounded)
        if rounded:
            found.memset_async(0xFF, rounded)
        return found

    with cupy.cuda.using_allocator(malloc):
        yield


class Peak:
    """Bytes that CuPy had handed out at most, above what it had when this began."""

    def __init__(self) -> None:
        import cupy

        self.pool = cupy.cuda.MemoryPool()
        self.most = self.start = 0

    def malloc(self, size: int) -> Any:
        """For `cupy.cuda.using_allocator`."""
        found = self.pool.malloc(size)
        self.most = max(self.most, self.pool.used_bytes())
        return found

    def restart(self) -> None:
        """From here on."""
        self.most = self.start = self.pool.used_bytes()

    @property
    def bytes(self) -> int:
        """Since the start."""
        return int(self.most - self.start)


@contextlib.contextmanager
def measured() -> Iterator[Peak]:
    """Allocations meanwhile, in this thread."""
    import cupy

    peak = Peak()
    with cupy.cuda.using_allocator(peak.malloc):
        yield peak


def embedded(x: Any) -> Any:
    """The NumPy array x (..., N, D) on the device as a view into NaN: rows of NaN before and after,
    and 16 bytes or more beside every row.
    """
    import cupy

    beside = 16 // x.dtype.itemsize
    shape = (*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 2 * beside)
    wide = cupy.full(shape, cupy.nan, x.dtype)
    view = wide[..., 1:-1, beside:-beside]
    view[...] = cupy.asarray(x)
    return view
