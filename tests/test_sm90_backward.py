"""The Hopper backward: bits equal to the emulator's under the same Plan, whatever else runs; on any
machine, that its kernels compile as they must.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import planner, sm80_backward, sm90_backward
from cuflash.compiler import compile_kernel, multiprocessors, source_dir
from cuflash.problem import GpuProblem
from cuflash.sm80_forward import FIXED
from cuflash.sm90_backward import (
    INSTANCES,
    Shape,
    backward_instantiation,
    interleaved_heads,
    shape_of,
    shared_bytes,
)
from cuflash.sm90_forward import SHARED_BYTES, TARGET
from emulation.backward import flash_vjp
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Array, Problem
from emulation.samples import sample
from tests.on_gpu import assert_same, dout_of, uneven_means
from tests.test_sm80_backward import check as check_launcher
from tests.test_sm90_forward import FAILURES, hopper

gpu = pytest.mark.gpu
#: Head dimension and shape: all that fit in shared memory.
SHAPES = [(d, Shape(rows)) for d, rows in ((64, 128), (64, 64), (64, 32), (128, 64), (128, 32))]
MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (100, 30)}]


def plan_of(
    dtype: str,
    width: int,
    numerics: dict[str, str] | None = None,
    order: Any = "descending",
    center: int = 0,
) -> Plan:
    """A Plan that these kernels run for the larger head dimension."""
    keys = next(tile for d, tile in planner.BACKWARD_HOPPER.items() if width <= d)
    fields: dict[str, Any] = {**FIXED, "format": dtype, "tile_n": 64, "stale_limit": 14}
    tiles = BackwardPlan(tile_m=32, tile_n=keys, dq_order=order, center=center)
    return Plan(numerics=Numerics.of(numerics), backward=tiles, **fields)


def check(
    inputs: tuple[Array, Array, Array], plan: Plan, shape: Shape | None = None, **options: Any
) -> None:
    """The gradients of the Hopper kernels against the emulator's."""
    hopper()
    launch = functools.partial(sm90_backward.backward, shape=shape)
    check_launcher(inputs, plan, launch=launch, **options)


PARTS = 12  # so that processes share what takes minutes


@pytest.mark.parametrize("part", range(PARTS))
def test_every_instantiation_compiles_without_spills(part: int) -> None:
    for instantiation in tuple(dict.fromkeys(sm90_backward.instantiations()))[part::PARTS]:
        log = compile_kernel(*instantiation[:2], TARGET, instantiation.options).log
        name = instantiation.name_expression
        assert (log.spill_stores, log.spill_loads, log.stack) == (0, 0, 0), name
        assert not [note for note in log.notes if note.startswith(FAILURES)], name


@pytest.mark.parametrize("softcap", [False, True])
def test_shared_memory_fits(softcap: bool) -> None:
    widths = (64, 96, 128, 192, 256)
    for d in widths:
        for d_v in widths:
            plan = plan_of("bfloat16", max(d, d_v))
            assert shared_bytes(plan, d, d_v, shape_of(d, d_v, softcap)) <= SHARED_BYTES


def test_shared_memory_is_counted_as_the_kernels_do(tmp_path: Path) -> None:
    shapes = {
        (d, d_v, shape_of(d, d_v, softcap)) for d, d_v in INSTANCES for softcap in (False, True)
    }
    claims = []
    for d, d_v, shape in shapes | {(d, d, shape) for d, shape in SHAPES}:
        plan = plan_of("bfloat16", max(d, d_v))
        name = backward_instantiation(plan, d, d_v, False, shape).name_expression
        found = re.search(r"<(.*?>)", name)
        assert found, name
        size = shared_bytes(plan, d, d_v, shape)
        claims.append(f'static_assert({found[1]}::kBytes == {size}, "{d} {d_v} {shape.rows}");')
    shutil.copytree(source_dir(), tmp_path / "cuda")
    includes = '#include "sm90/backward.cu"\n#include "sm90/backward_wide.cu"\n'
    kernel = 'extern "C" __global__ void sizes() {}\n'
    text = includes + "\n".join(claims) + "\n" + kernel
    (tmp_path / "cuda" / "sizes.cu").write_text(text, encoding="utf-8")
    compile_kernel("sizes.cu", "sizes", TARGET, root=tmp_path / "cuda")


@pytest.mark.parametrize(
    ("n", "d", "heads"),
    [
        (1024, 64, 16),
        (1024, 128, 16),
        (4096, 64, 8),
        (4096, 256, 4),
        (16384, 128, 2),
        (2**17, 64, 1),
    ],
)
def test_heads_side_by_side(n: int, d: int, heads: int) -> None:
    """Two tiles of keys a multiprocessor, but no more heads than fit into the L2 cache, nor 16."""
    q = np.broadcast_to(np.float16(0), (64, n, d))
    tiles = -(-n // (128 if d <= 128 else 64))
    assert interleaved_heads(Problem.of(q, q, q), tiles, 132) == heads


def test_planner_says_where_they_run() -> None:
    def runs(plan: Plan, d: int, d_v: int) -> bool:
        shapes = [np.broadcast_to(np.float16(0), (100, w)) for w in (d, d, d_v)]
        return planner.runs_hopper_backward(Problem.of(*shapes), plan)

    for d, d_v in INSTANCES:
        for center in (0, 32):
            assert runs(plan_of("float16", max(d, d_v), center=center), d, d_v)
        assert not runs(plan_of("float16", 64 if max(d, d_v) > 128 else 256), d, d_v)
        for numerics in ({"p": "split"}, {"exp2": "mixed"}, {"accumulate": "promoted"}):
            assert not runs(plan_of("float16", max(d, d_v), numerics), d, d_v)


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_head_dimensions(d: int, dtype: str, causal: bool, order: str) -> None:
    inputs = sample("normal", n=300, n_k=400, d=d, heads=2, dtype=dtype)
    check(inputs, plan_of(dtype, d, order=order), causal=causal)


@gpu
@pytest.mark.parametrize(
    "widths", [(64, 128), (128, 64), (192, 128), (40, 72), (16, 256), (256, 8)]
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_value_width_differs(widths: tuple[int, int], softcap: float | None) -> None:
    d, d_v = widths
    q, k, _ = sample("normal", n=200, d=d, dtype="bfloat16")
    v = sample("normal", n=200, d=d_v, dtype="bfloat16", seed=2)[2]
    check((q, k, v), plan_of("bfloat16", max(widths)), causal=True, softcap=softcap)


@gpu
@pytest.mark.parametrize(("d", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_no_shape_changes_a_bit(d: int, shape: Shape, masks: dict[str, Any]) -> None:
    plan = plan_of("bfloat16", d)
    check(sample("outlier", n=500, d=d, heads=2, dtype="bfloat16"), plan, shape, **masks)


@gpu
@pytest.mark.parametrize("numerics", [{"out": "float32"}, {"delta": "rounded"}], ids=str)
@pytest.mark.parametrize("kind", ["rising", "huge", "tiny", "peaked"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_numerics(numerics: dict[str, str], kind: str, d: int) -> None:
    for dtype in ("float16", "bfloat16"):
        inputs = sample(kind, n=150, n_k=290, d=d, dtype=dtype)
        check(inputs, plan_of(dtype, d, numerics), causal=True, dlse=True)


@gpu
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (17, 5)}, {"window": (0, 0)},
    {"window": (100, None), "causal": True}, {"window": (None, 0)}, {"softcap": 3.0},
    {"softcap": 50.0, "causal": True}, {"scale": 1.7}, {"causal": "top-left", "window": (3, 0)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (65, 64), (200, 70), (70, 257), (128, 128)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_masks_and_lengths(options: dict[str, Any], lengths: tuple[int, int], d: int) -> None:
    """Among them rows that see nothing and keys that nobody sees."""
    n_q, n_k = lengths
    inputs = sample("normal", n=n_q, n_k=n_k, d=d, heads=2, dtype="float16")
    check(inputs, plan_of("float16", d), dlse=True, **options)


@gpu
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (7, 1)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gqa_and_batches(heads: tuple[int, int], d: int) -> None:
    h, h_kv = heads
    q = sample("normal", n=170, d=d, heads=2 * h, dtype="bfloat16")[0].reshape(2, h, 170, d)
    k, v = (
        x.reshape(2, h_kv, 190, d)
        for x in sample("normal", n=190, d=d, heads=2 * h_kv, dtype="bfloat16", seed=1)[1:]
    )
    check((q, k, v), plan_of("bfloat16", d), causal=True)
    check((q, k, v), plan_of("bfloat16", d), window=(20, 3), dlse=True)


@gpu
@pytest.mark.parametrize("center", [0, 32])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_specials_behind_the_mask(d: int, center: int) -> None:
    """NaN and Inf reach what sees them, as in a product of what is seen, and nothing else."""
    plan = plan_of("bfloat16", d, center=center)
    q, k, v = sample("normal", n=150, n_k=130, d=d, dtype="bfloat16")
    dout = dout_of(q, v)
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
@pytest.mark.parametrize("center", [0, 32])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_keys_at_minus_infinity(d: int, center: int) -> None:
    """They get P = 0: LSE and delta of rows that see them are finite, and tell nothing."""
    q = sample("normal", n=300, d=d, heads=4, dtype="bfloat16")[0]
    k, v = sample("normal", n=310, d=d, heads=2, dtype="bfloat16", seed=1)[1:]
    q[..., 0] = 1.0
    k[:, [10, 140, 309], 0] = -np.inf
    for masks in ({"causal": True}, {"causal": "top-left"}, {"window": (40, 30)}):
        check((q, k, v), plan_of("bfloat16", d, center=center), **masks)


@gpu
@pytest.mark.parametrize("exponent", [-100, -112, -123])
@pytest.mark.parametrize("rows", [slice(None), slice(0, None, 3), slice(100, 200)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_small_gradients(d: int, rows: slice, exponent: int) -> None:
    """Shares of dQ near and below the smallest normal number, of all rows and of some."""
    q, k, v = sample("normal", n=300, n_k=400, d=d, dtype="bfloat16")
    dout = dout_of(q, v).astype(np.float32)
    dout[:, rows] *= np.float32(2.0**exponent)
    for masks in MASKS:
        plan = plan_of("bfloat16", d, {"out": "float32"})
        check((q, k, v), plan, dout=dout.astype(q.dtype)[None], **masks)


@gpu
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "masks", [*MASKS, {"causal": "top-left"}, {"window": (40, 0), "causal": True}], ids=str
)
def test_centered(d: int, masks: dict[str, Any]) -> None:
    """Ragged lengths, grouped heads, gradients of LSE, both orders; keys with a mean."""
    q = sample("normal", n=250, d=d, heads=4, dtype="bfloat16")[0]
    k, v = (
        (x.astype(np.float32) + 2).astype(q.dtype)
        for x in sample("normal", n=333, d=d, heads=2, dtype="bfloat16", seed=1)[1:]
    )
    plan = plan_of("bfloat16", d, {"out": "float32"}, center=32)
    check((q, k, v), plan, dlse=True, **masks)
    check((q, k, v), plan_of("bfloat16", d, order="ascending", center=32), **masks)
    inputs = sample("peaked", n=70, n_k=40, d=d, dtype="float16")
    check(inputs, plan_of("float16", d, {"delta": "rounded"}, center=32), dlse=True, **masks)


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("masks", [*MASKS, {"causal": "top-left"}], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_centered_in_some_rows(d: int, masks: dict[str, Any], dtype: str) -> None:
    """Heads with and without, and steps, blocks and CTAs that have rows of both kinds."""
    q = sample("normal", n=520, d=d, heads=8, dtype=dtype)[0]
    k, v = sample("normal", n=530, d=d, heads=4, dtype=dtype, seed=1)[1:]
    for numerics in ({}, {"out": "float32"}):
        check((q, uneven_means(k), v), plan_of(dtype, d, numerics, center=32), dlse=True, **masks)


@gpu
@pytest.mark.parametrize(("d", "shape"), SHAPES, ids=str)
def test_centered_in_any_shape(d: int, shape: Shape) -> None:
    q, k, v = sample("normal", n=500, d=d, heads=4, dtype="bfloat16")
    check((q, uneven_means(k), v), plan_of("bfloat16", d, center=32), shape, causal=True)


@gpu
@pytest.mark.parametrize("center", [16, 48, 64, 1024])
@pytest.mark.parametrize(("d", "shape"), [*SHAPES, (256, None)], ids=str)
def test_groups_of_any_size(d: int, shape: Shape | None, center: int) -> None:
    """Of keys that a mean is of: of as many kinds as there may be in a block, or of none."""
    plan = plan_of("bfloat16", d, center=center)
    q, k, v = sample("outlier", n=300, n_k=350, d=d, dtype="bfloat16")
    k = (k.astype(np.float32) + 3).astype(k.dtype)
    for masks in ({"causal": True}, {"window": (90, 20)}):
        check((q, k, v), plan, shape, **masks)


@gpu
@pytest.mark.parametrize(
    "widths", [(64, 128), (128, 64), (192, 128), (40, 72), (16, 256), (256, 8)]
)
def test_centered_where_value_width_differs(widths: tuple[int, int]) -> None:
    d, d_v = widths
    q, k, _ = sample("normal", n=200, d=d, dtype="bfloat16")
    k = (k.astype(np.float32) + 3).astype(k.dtype)
    v = sample("normal", n=200, d=d_v, dtype="bfloat16", seed=2)[2]
    plan = plan_of("bfloat16", max(widths), center=32)
    check((q, k, v), plan, causal=True)
    check((q, k, v), plan, causal=True, softcap=5.0)


@gpu
@pytest.mark.parametrize("exponent", [-112, -123])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_small_gradients_centered(d: int, exponent: int) -> None:
    """Sums of rows of dS are subnormal, of all rows and of some."""
    q, k, v = sample("normal", n=300, n_k=400, d=d, dtype="bfloat16")
    k = (k.astype(np.float32) + 3).astype(k.dtype)
    plan = plan_of("bfloat16", d, {"out": "float32"}, center=32)
    for rows in (slice(None), slice(0, None, 3)):
        dout = dout_of(q, v).astype(np.float32)
        dout[:, rows] *= np.float32(2.0**exponent)
        check((q, k, v), plan, dout=dout.astype(q.dtype)[None], causal=True)


@pytest.fixture(params=[0, 32], ids=["plain", "centered"])
def center(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """`center` of all Plans that the planner makes."""
    made, size = planner._plan, int(request.param)

    def changed(*arguments: Any) -> Plan:
        plan = made(*arguments)
        return replace(plan, backward=replace(plan.backward, center=size))

    monkeypatch.setattr(planner, "_plan", changed)
    return size


def many(d: int, plan: Plan, masks: dict[str, Any]) -> tuple[Callable[[], list[Any]], list[Array]]:
    """A backward with many CTAs, heads alike, and what it must give for one head."""
    cupy = hopper()
    from cuflash import attention_vjp

    q, k, v = sample("normal", n=1024, d=d, dtype="bfloat16")
    dout = dout_of(q, v)
    want = list(flash_vjp(q, k, v, dout, plan=plan, **masks))
    arrays = [cupy.asarray(np.broadcast_to(x, (128, *x.shape[1:]))) for x in (q, k, v, dout)]
    _, vjp = attention_vjp(*arrays[:3], **masks)
    return lambda: list(vjp(arrays[3])), want


def planned(d: int, masks: dict[str, Any]) -> Plan:
    """The Plan of `many`."""
    cupy = hopper()
    import cuflash

    q, k, v = (cupy.asarray(x) for x in sample("normal", n=1024, d=d, dtype="bfloat16"))
    plan = cuflash.plan(q, k, v, **masks)
    assert planner.runs_hopper_backward(GpuProblem.of(q, k, v, **masks).shapes, plan)
    return plan


def assert_heads(got: list[Any], want: list[Array]) -> None:
    """Every head has the bits of the one."""
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        x = x.get()
        assert_same(name, x, np.broadcast_to(y, x.shape))


@gpu
@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_launches(d: int, masks: dict[str, Any], center: int) -> None:
    """Back to back: one head's bits for all heads, every time."""
    plan = planned(d, masks)
    assert plan.backward.center == center
    run, want = many(d, plan, masks)
    for _ in range(20):
        assert_heads(run(), want)


BLOCKER = r"""
extern "C" __global__ void hold(volatile int* stop) {
  extern __shared__ char room[];
  room[0] = 0;
  while (*stop == 0) {
  }
}
"""


@gpu
@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_multiprocessors_left(d: int, masks: dict[str, Any], center: int) -> None:
    """It ends, with the same bits, while another kernel holds all multiprocessors but a few."""
    cupy = hopper()
    plan = planned(d, masks)
    assert plan.backward.center == center
    run, want = many(d, plan, masks)
    stop = cupy.zeros(1, np.int32)
    hold = cupy.RawKernel(BLOCKER, "hold")
    hold.max_dynamic_shared_size_bytes = SHARED_BYTES
    holder, ours, last = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
    with ours:
        run()  # kernels are loaded now, and the stream has memory
    cupy.cuda.Device().synchronize()
    for left in (1, 3, 20):
        stop.fill(0)
        cupy.cuda.Device().synchronize()
        grid = multiprocessors(int(stop.device.id)) - left
        try:
            with holder:
                hold((grid,), (32,), (stop,), shared_mem=SHARED_BYTES)
            with ours:
                got = run()
            ours.synchronize()
        finally:  # no kernel is loaded for it: that could wait for the one that runs
            stop.data.memset_async(1, stop.nbytes, last)
            cupy.cuda.Device().synchronize()
        assert_heads(got, want)
        del got  # the next ones take its memory: new memory could be waited for, too


@gpu
def test_plans_that_do_not_run() -> None:
    inputs = sample("normal", n=20, d=64, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"plan: .* must be what planner\.runs_hopper_backward"):
        check(inputs, plan_of("bfloat16", 256))
    assert sm80_backward.PITCH % 128 == 0  # whole blocks of rows in the bulk loads
