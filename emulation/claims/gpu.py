"""CuPy and the kernels, brought only by tasks that need a GPU."""

from __future__ import annotations

import importlib
from typing import Any


def load(kernels: str) -> tuple[Any, Any]:
    """CuPy, and the module of kernels (`Settings.kernels`)."""
    return importlib.import_module("cupy"), importlib.import_module(kernels)


def available() -> bool:
    """Whether CuPy can be imported and sees a device.

    >>> available() in (True, False)
    True
    """
    try:
        cp = importlib.import_module("cupy")
        return int(cp.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # no CuPy, no driver, no device: each has errors of its own
        return False


def exact(cp: Any, q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """softmax(q k^T / sqrt(D)) v of (H, N, D) arrays in float64 on the GPU, in blocks of rows."""
    q, k, v = (cp.asarray(x).astype(cp.float64) for x in (q, k, v))
    rows = max(1, (1 << 28) // (q.shape[0] * k.shape[1]))
    out = cp.empty((*q.shape[:-1], v.shape[-1]))
    shift = k.shape[1] - q.shape[1]
    for start in range(0, q.shape[1], rows):
        block = slice(start, min(start + rows, q.shape[1]))
        s = q[:, block] @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
        if causal:
            seen = cp.arange(k.shape[1]) <= cp.arange(block.start, block.stop)[:, None] + shift
            s = cp.where(seen, s, -cp.inf)
        p = cp.exp(s - s.max(axis=-1, keepdims=True))
        out[:, block] = p @ v / p.sum(axis=-1, keepdims=True)
    return out
