"""The float32 kernels: bits equal to the emulator's under the same Plan, forward and backward;
registers and shared memory on any machine.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import emulation
from cuflash import compiler, sm80_float32
from cuflash.sm80_forward import check_plan
from emulation import Numerics, Plan
from emulation.plan import BackwardPlan, default_plan
from emulation.problem import Array, Problem
from emulation.samples import KINDS, sample
from tests.on_gpu import assert_same

gpu = pytest.mark.gpu

PROMOTED = Numerics(accumulate="promoted")


def inputs(kind: str, **sizes: Any) -> tuple[Array, Array, Array]:
    return sample(kind, dtype="float32", **sizes)


def check(
    q: Array,
    k: Array,
    v: Array,
    *,
    numerics: Numerics | dict[str, str] | None = None,
    dlse: bool = False,
    **options: Any,
) -> None:
    """All results of cuflash on CuPy arrays against the emulator under cuflash's Plan."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    plan: Plan = cuflash.plan(*on_gpu, numerics=numerics, **options)
    out = cupy.full((*q.shape[:-1], v.shape[-1]), np.nan, np.float32)
    (out, lse), vjp = cuflash.attention_vjp(
        *on_gpu, numerics=numerics, return_lse=True, out=out, **options
    )
    with np.errstate(all="ignore"):
        want, want_lse = emulation.flash(q, k, v, plan=plan, **options)
    assert_same("lse", cupy.asnumpy(lse), want_lse)
    assert_same("out", cupy.asnumpy(out), want)
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(want.shape).astype(np.float32)
    slope = rng.standard_normal(want_lse.shape).astype(np.float32) if dlse else None
    got = vjp(cupy.asarray(dout), None if slope is None else cupy.asarray(slope))
    with np.errstate(all="ignore"):
        grads = emulation.flash_vjp(q, k, v, dout, dlse=slope, plan=plan, **options)
    for name, x, y in zip(("dq", "dk", "dv"), got, grads, strict=True):
        assert_same(name, cupy.asnumpy(x), y)


@gpu
@pytest.mark.parametrize("d", [8, 32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dimensions(d: int, causal: bool) -> None:
    check(*inputs("normal", n=200, d=d, heads=2), causal=causal)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "reference", ["row-max", "power-of-two", "stale", "lazy", "tie-safe", "final"]
)
def test_references(kind: str, reference: str) -> None:
    q, k, v = inputs(kind, n=100, n_k=233, d=64)
    for accumulate in ("promoted", "tensor-core"):
        numerics = Numerics.of({"reference": reference, "accumulate": accumulate})
        check(q, k, v, numerics=numerics, causal=accumulate == "promoted")


@gpu
@pytest.mark.parametrize("numerics", [
    {"p": "split"}, {"exp2": "polynomial"}, {"exp2": "mixed"}, {"accumulate": "promoted"},
    {"out": "float32"}, {"delta": "rounded"}, {"row_sum": "unrounded", "accumulate": "promoted"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 128])
def test_numerics(numerics: dict[str, str], d: int) -> None:
    for kind in ("normal", "rising"):
        check(*inputs(kind, n=150, n_k=190, d=d, heads=2), numerics=numerics, causal=True)


@gpu
@pytest.mark.parametrize("options", [
    {"causal": "top-left"}, {"window": (17, 5)}, {"window": (100, None), "causal": True},
    {"window": (None, 0)}, {"softcap": 3.0}, {"softcap": 50.0, "causal": True}, {"scale": 1.7},
    {"causal": "top-left", "window": (3, 0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (65, 64), (130, 70), (70, 257), (128, 128)])
def test_masks_and_lengths(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    n_q, n_k = lengths
    check(*inputs("normal", n=n_q, n_k=n_k, d=64, heads=2), dlse=True, **options)


@gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (7, 1)])
def test_gqa_and_batches(heads: tuple[int, int]) -> None:
    h, h_kv = heads
    q = inputs("normal", n=70, d=64, heads=2 * h)[0].reshape(2, h, 70, 64)
    k, v = (
        x.reshape(2, h_kv, 90, 64) for x in inputs("normal", n=90, d=64, heads=2 * h_kv, seed=1)[1:]
    )
    check(q, k, v, causal=True)


@gpu
@pytest.mark.parametrize("widths", [(64, 128), (128, 64), (192, 128), (40, 72), (16, 256)])
def test_value_width_differs(widths: tuple[int, int]) -> None:
    d, d_v = widths
    q, k, _ = inputs("normal", n=100, d=d)
    check(q, k, inputs("normal", n=100, d=d_v, seed=2)[2], causal=True)


@gpu
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("accumulate", ["tensor-core", "promoted"])
def test_specials(special: float, accumulate: str) -> None:
    """A row depends on what it sees: NaN and Inf in other rows of Q, K and V reach nothing."""
    q, k, v = inputs("normal", n=200, d=64)
    numerics = {"accumulate": accumulate}
    v[0, [50, 130, 131], [3, 7, 20]] = special
    check(q, k, v, numerics=numerics, causal=True)
    k[0, 160, 5] = special
    check(q, k, v, numerics=numerics, causal=True)
    check(q, k, v, numerics=numerics, window=(10, 10))
    q[0, 77, 9] = special
    check(q, k, v, numerics=numerics, causal=True)


@gpu
@pytest.mark.parametrize("scales", [(1e30, 1e-30, 1e36), (1e-30, 1e30, 1e-36), (0, 1, 3.4e38)])
def test_range(scales: tuple[float, float, float]) -> None:
    drawn = inputs("normal", n=70, d=64)
    with np.errstate(over="ignore"):
        q, k, v = (x * np.float32(s) for x, s in zip(drawn, scales, strict=True))
    v = np.clip(v, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    check(q, k, v)
    check(q, k[:, :1], v[:, :1])


@gpu
def test_strides_and_layouts() -> None:
    cupy = pytest.importorskip("cupy")
    import cuflash

    plain = [cupy.asarray(x.reshape(2, 2, 90, 64)) for x in inputs("normal", n=90, d=64, heads=4)]
    want, vjp = cuflash.attention_vjp(*plain, causal=True)
    want_grads = vjp(want)
    swapped = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in plain]
    variants = {
        "bnhd": (swapped, "bnhd"),
        "views": ([x.swapaxes(1, 2) for x in swapped], "bhnd"),
        "padded": ([cupy.pad(x, [(0, 0)] * 3 + [(0, 16)])[..., :64] for x in plain], "bhnd"),
        "unaligned": ([cupy.pad(x, [(0, 0)] * 3 + [(3, 6)])[..., 3:67] for x in plain], "bhnd"),
    }
    for name, (arrays, layout) in variants.items():
        out, vjp = cuflash.attention_vjp(*arrays, causal=True, layout=layout)
        results = [out, *vjp(out)]
        if layout == "bnhd":
            results = [x.swapaxes(1, 2) for x in results]
        for x, y in zip(results, (want, *want_grads), strict=True):
            assert_same(name, cupy.asnumpy(cupy.ascontiguousarray(x)), cupy.asnumpy(y))


# -- without a GPU


@pytest.mark.parametrize("limit", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("d", [8, 64, 96, 128, 192, 256])
def test_shared_memory_fits(d: int, limit: int) -> None:
    x = np.broadcast_to(np.zeros((), np.float32), (1, d))
    tile = 64 if d <= 64 else 32 if d <= 128 or limit > 101_376 else 16
    plan = default_plan(Problem.of(x, x, x), backward=BackwardPlan(tile, tile), tile_n=tile)
    kernels = [sm80_float32.forward_kernel(plan, d, d, False, limit)]
    kernels += [
        sm80_float32.gradient_kernel(plan, what, d, d, False, limit)
        for what in sm80_float32.GRADIENTS
    ]
    assert all(kernel.shared <= limit for kernel in kernels)


def test_too_large_a_tile_is_refused() -> None:
    x = np.zeros((1, 256), np.float32)
    plan = default_plan(Problem.of(x, x, x), tile_n=64)
    with pytest.raises(ValueError, match=r"plan\.tile_n: 64 needs \d+ bytes of shared memory"):
        sm80_float32.forward_kernel(plan, 256, 256, False, 101_376)


@pytest.mark.parametrize("field", [{"rounded_sum": "matrix"}, {"wide": "fma"}])
def test_plans_that_no_kernel_runs(field: dict[str, Any]) -> None:
    x = np.zeros((1, 64), np.float32)
    name = next(iter(field))
    plan = default_plan(Problem.of(x, x, x), **field)
    with pytest.raises(ValueError, match=rf"plan\.{name}: got .* on the float32 kernels"):
        check_plan(plan, sm80_float32.FIXED_FLOAT32, "float32")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_spills(arch: str) -> None:
    """Up to 128 columns; beyond, a few words outside the products."""
    pytest.importorskip("cuda.bindings.nvrtc")
    for instantiation in sm80_float32.instantiations():
        compiled = compiler.compile_kernel(*instantiation[:2], arch)
        widths = [int(x) for x in re.findall(r"[<,](\d+)", instantiation.name_expression)]
        most = 0 if max(widths) <= 128 else 64
        assert compiled.log.spill_stores <= most, (instantiation.name_expression, arch)
