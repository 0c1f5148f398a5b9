"""The small problems whose GPU bits are recorded in tests/golden/cuflash_h200.npz."""

from __future__ import annotations

from typing import Any, NamedTuple

from emulation.problem import Array
from emulation.samples import sample


class GoldenCase(NamedTuple):
    """One problem: how its inputs are drawn, its options and its numerics."""

    kind: str
    dtype: str
    n_q: int
    n_k: int
    d: int
    options: dict[str, Any]
    numerics: dict[str, str]

    def inputs(self) -> tuple[Array, Array, Array, Array]:
        """q, k, v and dout; two query heads on one key head."""
        q, _, _ = sample(self.kind, n=self.n_q, d=self.d, heads=2, dtype=self.dtype, seed=11)
        _, k, v = sample(self.kind, n=self.n_k, d=self.d, dtype=self.dtype, seed=12)
        dout = sample("normal", n=self.n_q, d=self.d, heads=2, dtype=self.dtype, seed=13)[0]
        return q, k, v, dout


def _case(kind: str, dtype: str, n_q: int, n_k: int, d: int, **rest: Any) -> GoldenCase:
    options: dict[str, Any] = {
        x: rest.pop(x) for x in ("causal", "window", "softcap", "scale") if x in rest
    }
    return GoldenCase(kind, dtype, n_q, n_k, d, options, rest)


CASES: dict[str, GoldenCase] = {
    "plain bf16": _case("normal", "bfloat16", 70, 150, 64),
    "plain fp16": _case("normal", "float16", 70, 150, 64, causal=True),
    "D 8": _case("normal", "bfloat16", 40, 100, 8, causal="top-left"),
    "D 80": _case("outlier", "float16", 33, 97, 80, window=(20, 4)),
    "D 128": _case("sink", "bfloat16", 64, 192, 128, causal=True),
    "D 192": _case("normal", "float16", 20, 70, 192),
    "D 256": _case("peaked", "bfloat16", 20, 70, 256, causal=True),
    "softcap": _case("peaked", "bfloat16", 50, 130, 64, softcap=5.0, causal=True),
    "scale": _case("normal", "float16", 30, 90, 32, scale=0.7),
    "empty rows": _case("normal", "bfloat16", 60, 20, 64, causal=True),
    "power-of-two": _case("rising", "bfloat16", 40, 250, 64, reference="power-of-two"),
    "stale": _case("rising", "bfloat16", 40, 250, 64, reference="stale"),
    "stale fp16": _case("rising", "float16", 40, 250, 64, reference="stale"),
    "lazy": _case("rising", "bfloat16", 40, 250, 64, reference="lazy"),
    "tie-safe": _case("tied-max", "bfloat16", 40, 250, 64, reference="tie-safe"),
    "final": _case("rising", "bfloat16", 40, 250, 64, reference="final"),
    "unrounded": _case("normal", "bfloat16", 40, 150, 64, row_sum="unrounded", delta="rounded"),
    "split": _case("normal", "bfloat16", 40, 150, 64, p="split", causal=True),
    "polynomial": _case("normal", "bfloat16", 40, 150, 64, exp2="polynomial"),
    "mixed": _case("normal", "float16", 40, 150, 64, exp2="mixed"),
    "promoted": _case("one-signed", "bfloat16", 40, 250, 64, accumulate="promoted"),
    "float out": _case("normal", "bfloat16", 40, 150, 64, out="float32"),
    "huge": _case("huge", "bfloat16", 40, 90, 64, causal=True),
    "tiny": _case("tiny", "float16", 40, 90, 64),
}
