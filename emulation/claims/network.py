"""A pre-norm transformer in float64 around one attention, so that only that attention rounds.

Runs on NumPy and CuPy arrays. q, k and v are rounded to bf16 before every attention, exact ones
included: what differs is attention alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from emulation import rounding

#: (q, k, v), each (H, N, D) bf16 -> (H, N, D) float64.
Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; the MLP is `down` relu(`up`)."""

    q: Any
    k: Any
    v: Any
    out: Any
    up: Any
    down: Any


def random_layers(seed: int, layers: int, width: int, norm: bool) -> list[Layer]:
    """Normal weights, scaled by fan-in; what a layer adds by 1 / sqrt(2 layers), as GPT-2 does."""
    rng = np.random.default_rng(seed)
    shrink = 1.0 / np.sqrt(2 * layers) if norm else 1.0

    def weight(rows: int, columns: int, scale: float = 1.0) -> Any:
        return rng.standard_normal((rows, columns)) * (scale / np.sqrt(rows))

    return [
        Layer(
            q=weight(width, width),
            k=weight(width, width),
            v=weight(width, width),
            out=weight(width, width, shrink),
            up=weight(width, 2 * width),
            down=weight(2 * width, width, shrink),
        )
        for _ in range(layers)
    ]


def forward(x: Any, layers: Sequence[Layer], heads: int, norm: bool, attend: Attend) -> list[Any]:
    """The residual stream (N, C) after every layer."""
    xp = rounding.namespace(x)

    def normed(y: Any) -> Any:
        return y / xp.sqrt((y * y).mean(axis=1, keepdims=True) + 1e-6) if norm else y

    def split(y: Any) -> Any:
        y = y.reshape(y.shape[0], heads, -1).swapaxes(0, 1)
        return xp.ascontiguousarray(y.astype(np.float32)).astype(ml_dtypes.bfloat16)

    stream = []
    for layer in layers:
        h = normed(x)
        o = attend(split(h @ layer.q), split(h @ layer.k), split(h @ layer.v))
        x = x + o.swapaxes(0, 1).reshape(x.shape) @ layer.out
        x = x + xp.maximum(normed(x) @ layer.up, 0) @ layer.down
        stream.append(x)
    return stream


def exact(q: Any, k: Any, v: Any) -> Any:
    """Causal attention in float64 of the given bf16 numbers."""
    xp = rounding.namespace(q)
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    n = q.shape[1]
    s = q @ k.swapaxes(1, 2) / q.shape[2] ** 0.5
    s = xp.where(xp.tril(xp.ones((n, n), bool)), s, -np.inf)
    p = xp.exp(s - s.max(axis=2, keepdims=True))
    return p @ v / p.sum(axis=2, keepdims=True)


def windowed(q: Any, k: Any, v: Any) -> Any:
    """`exact` over the nearest eighth of the keys only."""
    xp = rounding.namespace(q)
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    n = q.shape[1]
    seen = xp.tril(xp.ones((n, n), bool)) & ~xp.tril(xp.ones((n, n), bool), -(n // 8) - 1)
    s = xp.where(seen, q @ k.swapaxes(1, 2) / q.shape[2] ** 0.5, -np.inf)
    p = xp.exp(s - s.max(axis=2, keepdims=True))
    return p @ v / p.sum(axis=2, keepdims=True)
