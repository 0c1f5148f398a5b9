"""The same code on CuPy arrays: bits of the emulator on a GPU equal those on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emulation
from emulation import Numerics, Problem, default_plan
from emulation.problem import Array
from emulation.samples import KINDS, sample

pytestmark = pytest.mark.gpu


def assert_same_bits(on_gpu: Any, on_cpu: Array) -> None:
    import cupy

    host = cupy.asnumpy(on_gpu)
    assert host.dtype == on_cpu.dtype
    assert host.tobytes() == on_cpu.tobytes()


def both(call: Any, arrays: tuple[Array, ...], **options: Any) -> None:
    cupy = pytest.importorskip("cupy")
    got = call(*(cupy.asarray(x) for x in arrays), **options)
    for on_gpu, on_cpu in zip(got, call(*arrays, **options), strict=True):
        assert_same_bits(on_gpu, on_cpu)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward(kind: str, dtype: str) -> None:
    both(emulation.flash, sample(kind, n=100, n_k=130, d=40, heads=2, dtype=dtype), causal=True)
    both(
        emulation.standard, sample(kind, n=100, n_k=130, d=40, heads=2, dtype=dtype), window=(9, 9)
    )


@pytest.mark.parametrize("numerics", [
    {"reference": "row-max", "row_sum": "unrounded", "delta": "rounded"},
    {"reference": "power-of-two"}, {"reference": "stale"}, {"reference": "lazy"},
    {"reference": "tie-safe"}, {"reference": "final"}, {"p": "split"}, {"exp2": "polynomial"},
    {"exp2": "mixed"}, {"accumulate": "promoted"}, {"out": "float32"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["rising", "peaked"])
def test_every_numerics_value(kind: str, numerics: dict[str, str]) -> None:
    q, k, v = sample(kind, n=90, d=64, dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v), Numerics.of(numerics), tile_n=32)
    both(emulation.flash, (q, k, v), plan=plan, softcap=20.0)
    both(emulation.flash_vjp, (q, k, v, q), plan=plan, softcap=20.0)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
def test_standard_states(state: str) -> None:
    q, k, v = sample("normal", n=70, d=64, dtype="float16")
    both(emulation.standard, (q, k, v), state=state, causal=True)
    both(emulation.standard_vjp, (q, k, v, q), state=state, causal=True)


def test_nan_behind_the_mask() -> None:
    q, k, v = sample("normal", n=40, d=32, dtype="float16")
    k[0, 30:], v[0, 30:] = np.nan, np.inf
    both(emulation.flash, (q, k, v), causal=True)
