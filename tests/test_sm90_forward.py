"""The Hopper forward on a GPU: bits equal to the emulator's, to the sm80 kernel's under the same
Plan, and to its own under every schedule. What `test_sm80_forward` checks runs on these kernels,
too, where the GPU is a Hopper.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from cuflash import sm90_forward
from cuflash.compiler import compile_kernel
from cuflash.planner import tile_of
from cuflash.sm90_forward import Schedule, shared_bytes, width_of
from emulation import Numerics, Plan
from emulation.problem import Array
from emulation.samples import sample
from tests.on_gpu import assert_same
from tests.test_sm80_forward import check

FAILURES = ("C7508", "C7510", "C7512", "C7513")


def test_every_instantiation_compiles_without_spills() -> None:
    for instantiation in sm90_forward.instantiations():
        log = compile_kernel(*instantiation[:2], sm90_forward.TARGET, instantiation.options).log
        name = instantiation.name_expression
        assert (log.spill_stores, log.spill_loads, log.stack) == (0, 0, 0), name
        assert not [note for note in log.notes if note.startswith(FAILURES)], name


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_shared_memory_fits(d: int) -> None:
    width = width_of(d)
    for d_v in range(8, width + 1, 8):
        plan = Plan(tile_n=tile_of("sm90", width))
        schedule = Schedule(3 if width == 64 else 2, 1, 2, 1, True, True)
        assert shared_bytes(plan, d, d_v, schedule) <= sm90_forward.SHARED_BYTES


def hopper() -> Any:
    """CuPy, on a Hopper."""
    cupy = pytest.importorskip("cupy")
    from cuflash.compiler import capability

    if capability() != 90:
        pytest.skip("no Hopper")
    return cupy


def launched(
    q: Array, k: Array, v: Array, schedule: Schedule | None, numerics: Any = None, **masks: Any
) -> tuple[Array, Array]:
    """Out and LSE of the kernel under a schedule; of the sm80 kernel without one."""
    cupy = hopper()
    import cuflash
    from cuflash import sm80_forward
    from cuflash.problem import GpuProblem

    given = [cupy.asarray(x) for x in (q, k, v)]
    plan = cuflash.plan(*given, numerics=numerics, **masks)
    problem = GpuProblem.of(*given, **{"scale": None, "causal": False, "window": None} | masks)
    out = cupy.full((1, *q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = cupy.full(out.shape[:-1], np.nan, np.float32)
    if schedule is None:
        sm80_forward.forward(problem, plan, out, lse, None)
    else:
        sm90_forward.forward(problem, plan, out, lse, None, schedule=schedule)
    return cupy.asnumpy(out), cupy.asnumpy(lse)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_schedule_changes_a_bit(d: int, causal: bool) -> None:
    q, k, v = sample("outlier", n=700, d=d, heads=3, dtype="bfloat16")
    want, want_lse = launched(q, k, v, None, causal=causal)
    plain = Schedule(3 if d == 64 else 2, 1, 2, 1, False, d < 192)
    choices = itertools.product((1, 2), (False, True), (False, True), (False, True))
    for cluster, dynamic, ping_pong, joined in choices:
        schedule = dataclasses.replace(
            plain, cluster=cluster, dynamic=dynamic, ping_pong=ping_pong, joined=joined
        )
        out, lse = launched(q, k, v, schedule, causal=causal)
        assert_same(f"{schedule} lse", lse, want_lse)
        assert_same(f"{schedule} out", out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (300, 100)}])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_blocks_of_rows_for_each_cta(d: int, masks: dict[str, Any]) -> None:
    """Every schedule, launches back to back: one head's bits for all heads, every time."""
    q, k, v = sample("normal", n=1024, d=d, dtype="bfloat16")
    want, want_lse = launched(q, k, v, None, **masks)
    q, k, v = (np.broadcast_to(x, (128, *x.shape[1:])) for x in (q, k, v))
    for cluster, dynamic in itertools.product((1, 2), (False, True)):
        schedule = Schedule(3 if d == 64 else 2, cluster, 2, 1 if d == 256 else 2, dynamic, d < 256)
        for _ in range(20):
            out, lse = launched(q, k, v, schedule, **masks)
            assert_same(f"{schedule} lse", lse, np.broadcast_to(want_lse, lse.shape))
            assert_same(f"{schedule} out", out, np.broadcast_to(want, out.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_specials_behind_every_edge(d: int, special: float) -> None:
    hopper()
    q, k, v = sample("normal", n=300, d=d, dtype="bfloat16")
    v[0, [10, 100, 190, 299], [3, 7, 20, 21]] = special
    for masks in ({"causal": True}, {"window": (30, 10)}, {"causal": "top-left", "window": (9, 0)}):
        for out in ("input", "float32"):
            check(q, k, v, numerics=Numerics.of({"out": out}), **masks)
