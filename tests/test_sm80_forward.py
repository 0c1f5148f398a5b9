"""The forward kernel on a GPU: bits equal to the emulator's under the same Plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import emulation
from emulation import Numerics, Plan
from emulation.problem import Array, dtype_name
from emulation.samples import KINDS, sample
from tests.first_step import explained
from tests.on_gpu import assert_same, forward

pytestmark = pytest.mark.gpu


def check(
    q: Array, k: Array, v: Array, *, numerics: Numerics | None = None, **options: Any
) -> None:
    """cuflash on CuPy arrays against the emulator under cuflash's Plan."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    plan: Plan = cuflash.plan(*on_gpu, numerics=numerics, **options)
    out_dtype = np.float32 if plan.numerics.out == "float32" else q.dtype
    out = cupy.full((*q.shape[:-1], v.shape[-1]), np.nan, out_dtype)
    out, lse = cuflash.attention(*on_gpu, numerics=numerics, return_lse=True, out=out, **options)
    want = emulation.flash(q, k, v, plan=plan, **options)
    got = cupy.asnumpy(out), cupy.asnumpy(lse)
    said = explained(forward, q, k, v, plan, options, got, want)
    if said is not None:
        pytest.fail(said)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dimensions(d: int, dtype: str, causal: bool) -> None:
    check(*sample("normal", n=300, d=d, heads=2, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "reference", ["row-max", "power-of-two", "stale", "lazy", "tie-safe", "final"]
)
def test_references(kind: str, reference: str, dtype: str) -> None:
    q, k, v = sample(kind, n=200, n_k=333, d=64, dtype=dtype)
    for row_sum in ("rounded", "unrounded"):
        numerics = Numerics.of({"reference": reference, "row_sum": row_sum})
        check(q, k, v, numerics=numerics, causal=row_sum == "rounded")


@pytest.mark.parametrize("numerics", [
    {"p": "split"}, {"exp2": "polynomial"}, {"exp2": "mixed"}, {"accumulate": "promoted"},
    {"out": "float32"}, {"p": "split", "accumulate": "promoted", "reference": "stale"},
    {"row_sum": "unrounded", "accumulate": "promoted"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_numerics(numerics: dict[str, str], d: int) -> None:
    for kind in ("normal", "rising"):
        q, k, v = sample(kind, n=150, n_k=290, d=d, heads=2, dtype="bfloat16")
        check(q, k, v, numerics=Numerics.of(numerics), causal=True)


@pytest.mark.parametrize("options", [
    {"causal": "top-left"}, {"window": (17, 5)}, {"window": (100, None), "causal": True},
    {"window": (None, 0)}, {"softcap": 3.0}, {"softcap": 50.0, "causal": True}, {"scale": 1.7},
    {"causal": "top-left", "window": (3, 0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (65, 64), (130, 70), (70, 257), (128, 128)])
def test_masks_and_lengths(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    n_q, n_k = lengths
    check(*sample("normal", n=n_q, n_k=n_k, d=64, heads=2, dtype="float16"), **options)


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (7, 1), (71, 1)])
def test_gqa_and_batches(heads: tuple[int, int]) -> None:
    h, h_kv = heads
    q = sample("normal", n=70, d=64, heads=2 * h, dtype="bfloat16")[0].reshape(2, h, 70, 64)
    k, v = (
        x.reshape(2, h_kv, 90, 64)
        for x in sample("normal", n=90, d=64, heads=2 * h_kv, dtype="bfloat16", seed=1)[1:]
    )
    check(q, k, v, causal=True)


@pytest.mark.parametrize("widths", [(64, 128), (128, 64), (192, 128), (40, 72), (16, 256)])
def test_value_width_differs(widths: tuple[int, int]) -> None:
    d, d_v = widths
    q, k, _ = sample("normal", n=100, d=d, dtype="bfloat16")
    v = sample("normal", n=100, d=d_v, dtype="bfloat16", seed=2)[2]
    check(q, k, v, causal=True)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("accumulate", ["tensor-core", "promoted"])
def test_specials_behind_the_mask(special: float, accumulate: str) -> None:
    """A row depends on what it sees: NaN and Inf in other rows of K and V reach nothing."""
    q, k, v = sample("normal", n=200, d=64, dtype="bfloat16")
    numerics = Numerics.of({"accumulate": accumulate})
    v[0, [50, 130, 131], [3, 7, 20]] = special
    check(q, k, v, numerics=numerics, causal=True)
    k[0, 160, 5] = special
    check(q, k, v, numerics=numerics, causal=True)
    check(q, k, v, numerics=numerics, window=(10, 10))


def test_strides_and_layouts() -> None:
    cupy = pytest.importorskip("cupy")
    import cuflash

    q, k, v = sample("normal", n=130, d=64, heads=4, dtype="float16")
    plain = [cupy.asarray(x.reshape(2, 2, 130, 64)) for x in (q, k, v)]
    want, want_lse = cuflash.attention(*plain, causal=True, return_lse=True)
    swapped = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in plain]
    variants = {
        "bnhd": (swapped, "bnhd"),
        "views": ([x.swapaxes(1, 2) for x in swapped], "bhnd"),
        "padded": ([cupy.pad(x, [(0, 0)] * 3 + [(0, 16)])[..., :64] for x in plain], "bhnd"),
        "unaligned": ([cupy.pad(x, [(0, 0)] * 3 + [(3, 6)])[..., 3:67] for x in plain], "bhnd"),
        "fortran": ([cupy.asfortranarray(x) for x in plain], "bhnd"),
        "negative": ([cupy.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in plain], "bhnd"),
    }
    for name, (arrays, layout) in variants.items():
        out, lse = cuflash.attention(*arrays, causal=True, return_lse=True, layout=layout)
        if layout == "bnhd":
            out = out.swapaxes(1, 2)
        assert_same(f"{name} out", cupy.asnumpy(out), cupy.asnumpy(want))
        lse = lse.reshape(want_lse.shape) if lse.shape == want_lse.shape else lse.swapaxes(1, 2)
        assert_same(f"{name} lse", cupy.asnumpy(lse), cupy.asnumpy(want_lse))
    broadcast = [cupy.broadcast_to(x[:1, :1], x.shape) for x in plain]
    same = cuflash.attention(*broadcast, causal=True)
    alone = cuflash.attention(*(x[:1, :1] for x in plain), causal=True)
    for b in range(2):
        for h in range(2):
            assert_same("broadcast", cupy.asnumpy(same[b, h]), cupy.asnumpy(alone[0, 0]))


def test_captured_activations() -> None:
    from emulation.samples import capture

    for dtype in ("float16", "bfloat16"):
        q, k, v, options = capture(dtype)
        assert dtype_name(q.dtype) == dtype
        for reference in ("row-max", "stale", "power-of-two"):
            check(q, k, v, numerics=dataclasses.replace(Numerics(), reference=reference), **options)
