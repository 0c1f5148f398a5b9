"""The backward kernels: bits equal to the emulator's under the same Plan; registers on any machine.

Most tests give the kernels the emulator's O and LSE, so that a difference is the backward's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import compiler, planner, sm80_backward
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import FIXED
from emulation.backward import delta_parts, flash_vjp
from emulation.flash import flash_forward
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Array, Problem
from emulation.samples import sample
from tests.on_gpu import assert_same, uneven_means

gpu = pytest.mark.gpu


def poison_pool(cupy: Any) -> None:
    """Leaves NaN in the memory that the next workspaces get."""
    for size in (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20):
        blocks = [cupy.full(size, np.nan, np.float32) for _ in range(4)]
        del blocks


def plan_of(
    dtype: str, numerics: dict[str, str] | None = None, backward: BackwardPlan | None = None
) -> Plan:
    """A Plan of the current device's arithmetic."""
    pytest.importorskip("cupy")
    arch = planner.RULES[planner.arch_of(compiler.capability())]
    fields: dict[str, Any] = {
        **FIXED,
        "format": dtype,
        "arch": arch,
        "tile_n": 64,
        "stale_limit": 14,
    }
    plan = Plan(numerics=Numerics.of(numerics), **fields)
    tiles = BackwardPlan(tile_m=32, tile_n=64) if backward is None else backward
    return dataclasses.replace(plan, backward=tiles)


def check(
    inputs: tuple[Array, Array, Array],
    plan: Plan,
    *,
    dout: Array | None = None,
    dlse: bool = False,
    launch: Callable[..., None] = sm80_backward.backward,
    **masks: Any,
) -> None:
    """The three gradients of a launcher against the emulator, everything that is written poisoned
    before.
    """
    cupy = pytest.importorskip("cupy")
    q, k, v = (x if x.ndim == 4 else x[None] for x in inputs)
    rng = np.random.default_rng(5)
    lead = q.shape[:3]
    if dout is None:
        dout = rng.standard_normal((*lead, v.shape[-1])).astype(np.float32).astype(q.dtype)
    slope = rng.standard_normal(lead).astype(np.float32) if dlse else None
    problem = Problem.of(q, k, v, **masks)
    with np.errstate(all="ignore"):
        forward = flash_forward(problem, plan)
        want = flash_vjp(q, k, v, dout, dlse=slope, plan=plan, **masks)
        rest = None
        if plan.numerics.delta == "full" and plan.numerics.out == "input":
            parts = [delta_parts(plan, forward, h)[1] for h in range(problem.heads)]
            rest = np.stack(parts).astype(q.dtype).reshape(dout.shape)
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    got = [cupy.full(x.shape, np.nan, forward.out.dtype) for x in (q, k, v)]
    poison_pool(cupy)
    launch(
        GpuProblem.of(*on_gpu, **masks),
        plan,
        cupy.asarray(dout),
        None if slope is None else cupy.asarray(slope),
        cupy.asarray(forward.out.reshape(dout.shape)),
        None if rest is None else cupy.asarray(rest),
        cupy.asarray(forward.lse.reshape(lead)),
        *got,
    )
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_same(name, cupy.asnumpy(x), y)


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dimensions(d: int, dtype: str, causal: bool) -> None:
    inputs = sample("normal", n=300, d=d, heads=2, dtype=dtype)
    for table in (planner.BACKWARD["sm80"], planner.BACKWARD_SMALL):
        tile_m, tile_n = next(tiles for width, tiles in table.items() if d <= width)
        tiles = BackwardPlan(tile_m=tile_m, tile_n=tile_n, dq_order="descending")
        check(inputs, plan_of(dtype, backward=tiles), causal=causal)


@gpu
@pytest.mark.parametrize(
    "widths", [(64, 128), (128, 64), (192, 128), (40, 72), (16, 256), (256, 8)]
)
def test_value_width_differs(widths: tuple[int, int]) -> None:
    d, d_v = widths
    q, k, _ = sample("normal", n=100, d=d, dtype="bfloat16")
    v = sample("normal", n=100, d=d_v, dtype="bfloat16", seed=2)[2]
    check((q, k, v), plan_of("bfloat16", backward=BackwardPlan(tile_m=32, tile_n=32)), causal=True)


@gpu
@pytest.mark.parametrize("numerics", [
    {"delta": "rounded"}, {"p": "split"}, {"exp2": "polynomial"}, {"exp2": "mixed"},
    {"accumulate": "promoted"}, {"out": "float32"}, {"out": "float32", "delta": "rounded"},
    {"p": "split", "accumulate": "promoted"}, {"reference": "stale", "row_sum": "rounded"},
    {"p": "split", "accumulate": "promoted", "exp2": "mixed", "out": "float32"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numerics(numerics: dict[str, str], d: int, dtype: str) -> None:
    for tiles in (BackwardPlan(tile_m=32, tile_n=32), BackwardPlan(tile_m=64, tile_n=64)):
        q, k, v = sample("rising", n=150, n_k=190, d=d, dtype=dtype)
        check((q, k, v), plan_of(dtype, numerics, tiles), causal=True, dlse=True)


@gpu
@pytest.mark.parametrize("tile_m", [16, 32, 64, 128])
@pytest.mark.parametrize("tile_n", [16, 48, 64, 80, 128])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_tiles(tile_m: int, tile_n: int, order: Any) -> None:
    tiles = BackwardPlan(tile_m=tile_m, tile_n=tile_n, dq_order=order)
    inputs = sample("normal", n=150, n_k=270, d=64, dtype="bfloat16")
    for numerics in ({"exp2": "mixed"}, {"p": "split"}, {"accumulate": "promoted"}):
        check(inputs, plan_of("bfloat16", numerics, tiles), causal=True)


@gpu
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (17, 5)}, {"window": (0, 0)},
    {"window": (100, None), "causal": True}, {"window": (None, 0)}, {"softcap": 3.0},
    {"softcap": 50.0, "causal": True}, {"scale": 1.7}, {"causal": "top-left", "window": (3, 0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (65, 64), (200, 70), (70, 257), (128, 128)])
@pytest.mark.parametrize("d", [64, 128])
def test_masks_and_lengths(options: dict[str, Any], lengths: tuple[int, int], d: int) -> None:
    """Among them rows that see nothing and keys that nobody sees."""
    n_q, n_k = lengths
    inputs = sample("normal", n=n_q, n_k=n_k, d=d, heads=2, dtype="float16")
    check(inputs, plan_of("float16"), dlse=True, **options)


@gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (7, 1)])
def test_gqa_and_batches(heads: tuple[int, int]) -> None:
    h, h_kv = heads
    q = sample("normal", n=70, d=64, heads=2 * h, dtype="bfloat16")[0].reshape(2, h, 70, 64)
    k, v = (
        x.reshape(2, h_kv, 90, 64)
        for x in sample("normal", n=90, d=64, heads=2 * h_kv, dtype="bfloat16", seed=1)[1:]
    )
    check((q, k, v), plan_of("bfloat16"), causal=True)
    check((q, k, v), plan_of("bfloat16"), window=(20, 3), dlse=True)


@gpu
@pytest.mark.parametrize("center", [0, 32])
@pytest.mark.parametrize("numerics", [{}, {"p": "split"}, {"accumulate": "promoted"}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_specials_behind_the_mask(numerics: dict[str, str], d: int, center: int) -> None:
    """NaN and Inf reach what sees them, as in a product of what is seen, and nothing else."""
    rng = np.random.default_rng(0)
    tiles = BackwardPlan(tile_m=32, tile_n=64, dq_order="descending", center=center)
    plan = plan_of("bfloat16", numerics, tiles)
    q, k, v = sample("normal", n=150, n_k=130, d=d, dtype="bfloat16")
    dout = rng.standard_normal(v.shape[:1] + q.shape[1:]).astype(np.float32).astype(q.dtype)
    dout[0, 41, 3], dout[0, 60, 5], dout[0, 61, 5] = np.inf, -np.inf, np.inf
    v[0, 60], v[0, 100, 1] = -np.inf, np.nan
    q[0, :19], dout[0, :10] = np.nan, np.inf  # rows that see nothing
    check((q, k, v), plan, dout=dout[None], causal=True)
    q[0, 30, 2], k[0, 90, 0] = np.nan, -np.inf
    check((q, k, v), plan, dout=dout[None], causal=True)
    check((q, k, v), plan, dout=dout[None], window=(10, 10))
    q[0, 20:, 0] = 1.0  # the key at -inf gets P = 0 everywhere
    check((q, k, v), plan, dout=dout[None], causal=True)


@gpu
@pytest.mark.parametrize("numerics", [
    {}, {"out": "float32"}, {"p": "split"}, {"accumulate": "promoted", "delta": "rounded"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_centered(d: int, numerics: dict[str, str]) -> None:
    """Ragged lengths, grouped heads, gradients of LSE, all masks; keys with a mean."""
    table = planner.BACKWARD_SMALL if numerics else planner.BACKWARD["sm80"]
    tile_m, tile_n = next(tiles for width, tiles in table.items() if d <= width)
    tiles = BackwardPlan(tile_m=tile_m, tile_n=tile_n, dq_order="descending", center=32)
    plan = plan_of("bfloat16", numerics, tiles)
    q = sample("normal", n=190, d=d, heads=4, dtype="bfloat16")[0]
    k, v = (
        (x.astype(np.float32) + 2).astype(q.dtype)
        for x in sample("normal", n=233, d=d, heads=2, dtype="bfloat16", seed=1)[1:]
    )
    masks: dict[str, Any]
    for masks in ({}, {"causal": True}, {"causal": "top-left"}, {"window": (40, 3)}):
        check((q, k, v), plan, dlse="causal" in masks, **masks)
    check((q, k, v), plan, causal=True, softcap=5.0)


@gpu
@pytest.mark.parametrize("numerics", [{}, {"out": "float32"}, {"p": "split"}], ids=str)
@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (100, 30)}], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_centered_in_some_rows(d: int, masks: dict[str, Any], numerics: dict[str, str]) -> None:
    """Heads with and without, and blocks that have rows of both kinds."""
    table = planner.BACKWARD_SMALL if numerics else planner.BACKWARD["sm80"]
    tile_m, tile_n = next(tiles for width, tiles in table.items() if d <= width)
    tiles = BackwardPlan(tile_m=tile_m, tile_n=tile_n, dq_order="descending", center=32)
    q = sample("normal", n=320, d=d, heads=8, dtype="float16")[0]
    k, v = sample("normal", n=333, d=d, heads=4, dtype="float16", seed=1)[1:]
    check((q, uneven_means(k), v), plan_of("float16", numerics, tiles), dlse=True, **masks)


@gpu
@pytest.mark.parametrize("tile_m", [16, 32, 64, 128])
@pytest.mark.parametrize("tile_n", [16, 80, 128])
@pytest.mark.parametrize("center", [16, 48, 64, 1024])
def test_groups_of_any_size(tile_m: int, tile_n: int, center: int) -> None:
    """Of keys that a mean is of: of more kinds than there is room for at once, or of none."""
    tiles = BackwardPlan(tile_m=tile_m, tile_n=tile_n, center=center)
    for d in (64, 128):
        q, k, v = sample("peaked", n=150, n_k=270, d=d, dtype="float16")
        inputs = q, (k.astype(np.float32) + 3).astype(k.dtype), v
        plan = plan_of("float16", {"accumulate": "promoted"}, tiles)
        if d == 64 or tile_m < 128:
            check(inputs, plan, causal=True, dlse=True)
            check(inputs, plan, window=(90, 20))


@gpu
def test_public_calls() -> None:
    """Through cuflash.attention_vjp: every layout gives the same bits."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    q, k, v = sample("normal", n=130, d=64, heads=4, dtype="float16")
    dout = sample("normal", n=130, d=64, heads=4, dtype="float16", seed=3)[0]
    plain = [cupy.asarray(x.reshape(2, 2, 130, 64)) for x in (q, k, v, dout)]
    plan = cuflash.plan(*plain[:3], causal=True)
    want = flash_vjp(*(cupy.asnumpy(x) for x in plain), plan=plan, causal=True)
    swapped = [cupy.ascontiguousarray(x.swapaxes(1, 2)) for x in plain]
    variants = {
        "plain": (plain, "bhnd"),
        "again": (plain, "bhnd"),
        "bnhd": (swapped, "bnhd"),
        "views": ([x.swapaxes(1, 2) for x in swapped], "bhnd"),
        "unaligned": ([cupy.pad(x, [(0, 0)] * 3 + [(3, 6)])[..., 3:67] for x in plain], "bhnd"),
    }
    for name, (arrays, layout) in variants.items():
        _, vjp = cuflash.attention_vjp(*arrays[:3], causal=True, layout=layout)
        for what, x, y in zip(("dq", "dk", "dv"), vjp(arrays[3]), want, strict=True):
            x = x.swapaxes(1, 2) if layout == "bnhd" else x
            assert_same(f"{name} {what}", cupy.asnumpy(x), y)


@gpu
def test_plans_that_do_not_run() -> None:
    inputs = sample("normal", n=20, d=64, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"plan\.backward\.tile_m: got 48"):
        check(inputs, plan_of("bfloat16", {"p": "split"}, BackwardPlan(tile_m=48, tile_n=64)))
    with pytest.raises(ValueError, match=r"plan\.backward\.tile_m, tile_n: 32 and 1024 need"):
        check(inputs, plan_of("bfloat16", backward=BackwardPlan(tile_m=32, tile_n=1024)))


@pytest.mark.parametrize("center", [0, 32])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_nothing_spills(
    d: int, arch: str, center: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    small = arch == "sm_86"
    table = planner.BACKWARD_SMALL if small else planner.BACKWARD["sm80"]
    limits = sm80_backward.Limits(101_376 if small else 166_912 if arch == "sm_80" else 232_448)
    plan = Plan(format="bfloat16", backward=BackwardPlan(*table[d], center=center))
    kernels = [
        sm80_backward.delta_kernel(plan, d, False),
        sm80_backward.gradient_kernel(plan, d, d, False, limits),
    ]
    for kernel in kernels:
        log = compiler.compile_kernel(*kernel.instantiation[:2], arch).log
        name = kernel.instantiation.name_expression
        assert (log.spill_stores, log.spill_loads) == (0, 0), f"{name} for {arch}:\n{log.text}"
        assert kernel.shared + sm80_backward.STATIC <= limits.block


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90"])
def test_every_numerics_fits(d: int, arch: str) -> None:
    """The Plan's tiles leave room for split P and dS in the shared memory of every architecture."""
    block = {"sm80": 166_912, "sm86": 101_376, "sm90": 232_448}[arch]
    table = planner.BACKWARD_SMALL if arch in planner.SMALL else planner.BACKWARD["sm80"]
    for p in ("input", "split"):
        numerics = Numerics.of({"p": p})
        plan = Plan(format="bfloat16", numerics=numerics, backward=BackwardPlan(*table[d]), **FIXED)
        for softcap in (False, True):
            limits = sm80_backward.Limits(block)
            kernel = sm80_backward.gradient_kernel(plan, d, d, softcap, limits)
            sm80_backward.check_backward(plan, kernel, limits)
