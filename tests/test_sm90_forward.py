"""The Hopper forward on a GPU: bits equal to the emulator's, to the sm80 kernel's under the same
Plan, and to its own under every schedule. What `test_sm80_forward` checks runs on these kernels,
too, where the GPU is a Hopper.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuflash import sm90_forward
from cuflash.compiler import compile_kernel
from cuflash.planner import tile_of
from cuflash.sm90_forward import Schedule, order_of, schedule_of, shared_bytes, width_of
from emulation import Numerics, Plan
from emulation.problem import Array, Problem
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
        schedule = schedule_of(d, d_v, False)
        assert shared_bytes(plan, d, d_v, schedule) <= sm90_forward.SHARED_BYTES


def blocks_in_order(order: dict[str, Any], rows: int) -> Iterator[tuple[int, int]]:
    """Head and first row of every block of rows, in the order taken: what sm90::Work computes."""

    def quotient(n: int, by: str) -> int:
        multiplier, shift = order[by]
        return int(n * multiplier >> shift)

    for work in range(order["works"]):
        in_set = quotient(work, "by_set")
        rest = work - in_set * order["set"] * order["blocks"]
        last = in_set == order["whole_sets"]
        above = quotient(rest, "by_last" if last else "by_head")
        block = order["first_block"] + above * order["next_block"]
        head = in_set * order["set"] + rest - above * order["last" if last else "set"]
        yield head, block * rows - order["shift"]


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (300, 100)}], ids=str)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("n_q", [1, 64, 65, 128, 1000, 4096])
def test_every_row_is_taken_once(n_q: int, cluster: int, masks: dict[str, Any]) -> None:
    """By the causal mask's heavy blocks first, none of which lacks more rows than it has to."""
    for heads, d in itertools.product((1, 5, 70), (64, 128)):
        q = np.zeros((heads, n_q, d), np.float16)
        k = np.zeros((heads, 2**13, d), np.float16)
        problem = Problem.of(q, k, k, **masks)
        schedule = dataclasses.replace(schedule_of(d, d, False), cluster=cluster)
        rows = schedule.block_m * cluster
        taken = np.zeros((heads, n_q), int)
        firsts: dict[int, list[int]] = {}
        for head, first in blocks_in_order(order_of(problem, schedule), rows):
            taken[head, max(first, 0) : max(first + rows, 0)] += 1
            firsts.setdefault(head, []).append(first)
        assert (taken == 1).all(), (heads, d)
        for of_head in firsts.values():
            assert of_head == sorted(of_head, reverse="causal" in masks)
            assert "causal" not in masks or of_head[0] + rows < n_q + 64


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
    plain = dataclasses.replace(schedule_of(d, d, False), q_stages=1)
    either = (False, True)
    for cluster, ping_pong, early, joined in itertools.product((1, 2), either, either, either):
        schedule = dataclasses.replace(
            plain, cluster=cluster, ping_pong=ping_pong, early=early, joined=joined
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
    for cluster, q_stages in itertools.product((1, 2), (1,) if d == 256 else (1, 2)):
        plain = schedule_of(d, d, False)
        schedule = dataclasses.replace(plain, cluster=cluster, q_stages=q_stages)
        for _ in range(20):
            out, lse = launched(q, k, v, schedule, **masks)
            assert_same(f"{schedule} lse", lse, np.broadcast_to(want_lse, lse.shape))
            assert_same(f"{schedule} out", out, np.broadcast_to(want, out.shape))


@pytest.mark.gpu
def test_streams_and_graphs_count_their_work_apart() -> None:
    """Launches that overlap, each problem with as many pieces of work as no other."""
    cupy = hopper()
    import cuflash
    from cuflash import counters
    from cuflash.problem import GpuProblem

    rng = cupy.random.default_rng(0)
    problems, plans, wanted = [], [], []
    for n, d, heads in ((1000, 128, 32), (700, 64, 48), (520, 256, 20), (100, 128, 3)):
        given = [rng.standard_normal((1, heads, n, d)).astype(np.float16) for _ in range(3)]
        problems.append(GpuProblem.of(*given, causal=True, scale=None, window=None))
        plans.append(cuflash.plan(*given, causal=True))
        wanted.append(cuflash.attention(*given, causal=True))

    def call(i: int, out: Any) -> None:
        lse = cupy.empty(out.shape[:3], np.float32)
        sm90_forward.forward(problems[i], plans[i], out, lse, None)

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(5)]
    outs = [[cupy.full_like(want, np.nan) for want in wanted] for _ in streams]
    cupy.cuda.Device().synchronize()
    with streams[0]:
        streams[0].begin_capture()
        for i, out in enumerate(outs[0]):
            call(i, out)
        graph = streams[0].end_capture()
    for turn in range(40):
        graph.launch(streams[turn % 2])
        for s, stream in enumerate(streams[2:], 2):
            with stream:
                for i in range(len(problems)):
                    call((i + s + turn) % len(problems), outs[s][(i + s + turn) % len(problems)])
        streams[turn % 2].synchronize()  # a graph is not launched beside itself
    cupy.cuda.Device().synchronize()
    for s in (0, 2, 3, 4):
        for out, want in zip(outs[s], wanted, strict=True):
            assert_same(f"stream {s}", cupy.asnumpy(out), cupy.asnumpy(want))
    assert not any(int(x[0]) for x in counters._counters.values())


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
