"""A small causal language model of characters, in PyTorch, around an attention of choice.

fp32 but for attention, whose q, k and v are rounded to bf16 whichever attention it is, so that runs
differ in attention alone. Every other operation is deterministic: one-hot products, no scatter.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

torch: Any = importlib.import_module("torch")

#: (q, k, v), each (B, H, N, D) bf16 -> (B, H, N, D), causal.
Attend = Callable[[Any, Any, Any], Any]
HELD_OUT = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of model and batches."""

    layers: int
    width: int
    heads: int
    n: int
    batch: int


@functools.cache
def text() -> Any:
    """Real text as symbols 0 to 95: what `pydoc_data.topics` holds, other characters left out."""
    from pydoc_data.topics import topics

    joined = "".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(joined.encode("ascii", "ignore"), np.uint8).astype(np.int64)
    codes = np.where(codes == 10, 127, codes)
    return codes[codes >= 32] - 32


SYMBOLS = 96


def exact(q: Any, k: Any, v: Any) -> Any:
    """softmax attention in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(_masked(s), -1) @ v


def standard(q: Any, k: Any, v: Any) -> Any:
    """Unfused attention as PyTorch code has it: S and P in the input's format, softmax in fp32."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(_masked(s), -1, dtype=torch.float32).to(q.dtype) @ v


def windowed(q: Any, k: Any, v: Any) -> Any:
    """`exact` over the nearest eighth of the keys only."""
    q, k, v = (x.double() for x in (q, k, v))
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(_masked(s, max(1, s.shape[-1] // 8)), -1) @ v


def _masked(s: Any, window: int | None = None) -> Any:
    n = s.shape[-1]
    seen = torch.ones(n, n, dtype=torch.bool, device=s.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return s.masked_fill(~seen, float("-inf"))


class Model:
    """Weights in one list, so that distances are plain; pre-norm, ReLU, untied."""

    def __init__(self, shape: Shape, seed: int, device: str) -> None:
        rng = np.random.default_rng(seed)
        c, self.shape = shape.width, shape

        def weight(rows: int, columns: int, scale: float = 1.0) -> Any:
            x = rng.standard_normal((rows, columns)) * (scale / rows**0.5)
            return torch.tensor(x, dtype=torch.float32, device=device, requires_grad=True)

        shrink = (2 * shape.layers) ** -0.5
        self.ends = [weight(SYMBOLS, c, SYMBOLS**0.5 / 2), weight(shape.n, c, shape.n**0.5 / 8)]
        self.ends.append(weight(c, SYMBOLS))
        self.layers = [
            [weight(c, 3 * c), weight(c, c, shrink), weight(c, 4 * c), weight(4 * c, c, shrink)]
            for _ in range(shape.layers)
        ]
        self.weights = [*self.ends, *(w for layer in self.layers for w in layer)]

    def loss(self, symbols: Any, attend: Attend) -> Any:
        """Mean cross entropy in nats of the next symbol; symbols (B, N + 1)."""
        before, after = symbols[:, :-1], symbols[:, 1:]
        batch, n = before.shape
        one_hot = torch.nn.functional.one_hot
        x = one_hot(before, SYMBOLS).float() @ self.ends[0] + self.ends[1]
        for qkv, out, up, down in self.layers:
            h = _normed(x) @ qkv
            parts = h.reshape(batch, n, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
            o = attend(*(y.to(torch.bfloat16) for y in parts.unbind(0)))
            x = x + o.float().transpose(1, 2).reshape(batch, n, -1) @ out
            x = x + torch.relu(_normed(x) @ up) @ down
        logs = torch.log_softmax(_normed(x) @ self.ends[2], -1)
        return -(logs * one_hot(after, SYMBOLS)).sum(-1).mean()

    def flat(self) -> Any:
        """All weights as one float64 vector."""
        return torch.cat([w.detach().double().flatten() for w in self.weights])


def _normed(x: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Batches:
    """Sequences drawn at random from the training part; the same for the same seed."""

    def __init__(self, shape: Shape, seed: int, device: str) -> None:
        self.rng, self.shape, self.device = np.random.default_rng(seed), shape, device
        self.data = text()[: int(len(text()) * (1 - HELD_OUT))]

    def draw(self) -> Any:
        starts = self.rng.integers(0, len(self.data) - self.shape.n - 1, self.shape.batch)
        found = np.stack([self.data[s : s + self.shape.n + 1] for s in starts])
        return torch.from_numpy(found).to(self.device)


def held_out(shape: Shape, count: int, device: str) -> Any:
    """Evenly spaced sequences of the part that nobody trains on: (count, N + 1)."""
    data = text()[int(len(text()) * (1 - HELD_OUT)) :]
    starts = np.linspace(0, len(data) - shape.n - 1, count).astype(int)
    found = np.stack([data[s : s + shape.n + 1] for s in starts])
    return torch.from_numpy(found).to(device)
