"""What claims measure on: random and adversarial samples, and captures of real models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulation import samples
from emulation.problem import Array, numpy_dtype

#: Name of the bundled capture.
BUNDLED = "SmolLM2 layer 14 head 4"
#: The capture whose first 1024 positions it is; where a folder has that one, it is the same head.
BUNDLED_OF = "smollm2-135m-layer14-n2048 head 4"


@dataclass(frozen=True)
class Inputs:
    """q (1, rows, D), k and v (1, N, D), dout like q; masks as `attribute` takes them."""

    q: Array
    k: Array
    v: Array
    dout: Array
    masks: dict[str, Any]

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v


def make(
    kind: str,
    *,
    dtype: str,
    seed: int,
    n: int | None = None,
    rows: int | None = None,
    d: int = 64,
    heads: int = 1,
    data: str | None = None,
) -> Inputs:
    """Inputs of a kind of `samples.KINDS`, of the bundled capture, or of "FILE.npz:HEAD" in the
    folder `data`.

    n: keys (a capture's first ones; None for all). rows: only the last so many queries; they see
    what they would see among all. dout is standard normal.
    """
    masks: dict[str, Any] = {}
    if kind in samples.KINDS:
        assert n is not None
        q, k, v = samples.sample(kind, n=rows or n, n_k=n, d=d, heads=heads, dtype=dtype, seed=seed)
    else:
        q, k, v, masks = _capture(kind, dtype, data)
        q, k, v = (x[:, :n] for x in (q, k, v))
        q = q if rows is None else q[:, -rows:]
    drawn = np.random.default_rng([seed, 1]).standard_normal((*q.shape[:-1], v.shape[-1]))
    dout = drawn.astype(np.float32).astype(numpy_dtype(dtype))
    return Inputs(q, k, v, dout, masks)


def _capture(kind: str, dtype: str, data: str | None) -> tuple[Array, Array, Array, dict[str, Any]]:
    if kind == BUNDLED:
        return samples.capture(dtype)
    if data is None:
        raise ValueError(f"data: None, must be the folder that holds {kind}")
    name, _, head = kind.rpartition(":")
    with np.load(Path(data) / name, allow_pickle=False) as z:
        h, group = int(head), z["q"].shape[0] // z["k"].shape[0]
        q, k, v = z["q"][h : h + 1], z["k"][h // group :][:1], z["v"][h // group :][:1]
    q, k, v = (x.astype(np.float32).astype(numpy_dtype(dtype)) for x in (q, k, v))
    return q, k, v, {"causal": _manifest(data)[name]}


def _manifest(data: str) -> dict[str, bool]:
    """File name -> causal, from the folder's manifest.json."""
    with open(Path(data) / "manifest.json", encoding="utf-8") as file:
        return {name: bool(entry["causal"]) for name, entry in json.load(file).items()}


def captures(data: str | None) -> list[str]:
    """The bundled capture, and each other head of each file in a folder's manifest.json."""
    found = [BUNDLED]
    for name in [] if data is None else sorted(_manifest(data)):
        with np.load(Path(str(data)) / name, allow_pickle=False) as z:
            count = int(z["q"].shape[0])
        found += [f"{name}:{head}" for head in range(count)]
    return [kind for kind in found if shown(kind) != BUNDLED_OF]


def heads(kinds: Iterable[str]) -> str:
    """How many heads of how many captures these shown kinds are.

    >>> heads(["normal", "a head 0", "a head 3", "b head 1", "b head 1"])
    '3 heads of 2 captures'
    """
    named = {BUNDLED_OF if kind == BUNDLED else kind for kind in kinds}
    real = {tuple(kind.rpartition(" head ")[::2]) for kind in named if " head " in kind}
    files = {name for name, _ in real}

    def count(n: int, what: str) -> str:
        return f"{n} {what}{'' if n == 1 else 's'}"

    return f"{count(len(real), 'head')} of {count(len(files), 'capture')}"


def shown(kind: str) -> str:
    """A capture's file and head in words.

    >>> shown("minilm-l6-layer00-n512.npz:3"), shown("normal")
    ('minilm-l6-layer00-n512 head 3', 'normal')
    """
    if ".npz:" not in kind:
        return kind
    path, _, head = kind.rpartition(":")
    return f"{path.removesuffix('.npz')} head {head}"
