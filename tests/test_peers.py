"""Other people's kernels as Plans: recorded outputs of an H200, 0 differing bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from emulation import Plan, Problem, attribute, flash, oracle, plan_of
from emulation.bounds import forward_bound
from emulation.problem import Array
from emulation.samples import sample
from tests.cases import assert_within

GOLDEN = Path(__file__).parent / "golden" / "peers_h200.npz"
with np.load(GOLDEN) as _z:
    RECORDED: dict[str, Array] = {name: _z[name] for name in _z.files}
CASES = sorted({name.split("/")[1] for name in RECORDED if name.startswith("in/")})


def differing(plan: Plan, kernel: str, case: str) -> tuple[int, int]:
    """Elements of O and of LSE whose bits differ from the recording."""
    q, k, v = (RECORDED[f"in/{case}/{n}"].view(ml_dtypes.bfloat16) for n in "qkv")
    out, lse = flash(q, k, v, plan=plan, causal=case.endswith("causal"))
    out_bits, lse_bits = RECORDED[f"{kernel}/{case}/o"], RECORDED[f"{kernel}/{case}/l"]
    return (
        int((out.view(np.uint16) != out_bits).sum()),
        int((lse.view(np.uint32) != lse_bits.view(np.uint32)).sum()),
    )


def recorded_plan(kernel: str, case: str) -> Plan:
    q, k, v = (RECORDED[f"in/{case}/{n}"].view(ml_dtypes.bfloat16) for n in "qkv")
    return plan_of(kernel, q, k, v, causal=case.endswith("causal"))


@pytest.mark.parametrize("kernel", ["fa3", "fa2", "cudnn"])
@pytest.mark.parametrize("case", CASES)
def test_recorded_bits(kernel: str, case: str) -> None:
    assert differing(recorded_plan(kernel, case), kernel, case) == (0, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"direction": "left-to-right"},
        {"tile_n": 64},
        {"score": "unfused"},
        {"alpha": "references"},
        {"row_sum_order": "tile"},
        {"join": "01+23"},
        {"step": 8},
        {"arch": "sm80"},
        {"lse": "sum"},
    ],
    ids=str,
)
def test_recordings_discriminate(changed: dict[str, str | int]) -> None:
    """Every field of the Plan is seen by the data: another value gives other bits."""
    fields = recorded_plan("fa3", "d128_n300_causal").to_json() | changed
    assert sum(differing(Plan.from_json(fields), "fa3", "d128_n300_causal")) > 0


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("masks", [{}, {"causal": "top-left"}], ids=str)
def test_memory_efficient_is_bounded_and_attributed(d: int, masks: dict[str, Any]) -> None:
    """Beyond D = 128 O waits in memory, and the last tile is folded in."""
    q, k, v = sample("rising", n=150, n_k=300, d=d, dtype="bfloat16")
    plan = plan_of("efficient", q, k, v, **masks)
    out, lse = flash(q, k, v, plan=plan, **masks)
    exact = oracle.attention(q, k, v, **masks)
    bounds = forward_bound(Problem.of(q, k, v, **masks), plan)
    assert_within("out", out, exact, bounds[0])
    assert_within("lse", lse, exact, bounds[1])
    found = attribute(q, k, v, plan=plan, **masks)
    assert found.residual_share < 1e-6
    assert np.array_equal(found.observed, out.astype(np.float64))


@pytest.mark.parametrize("field", ["score", "row_sum_order", "finish", "lse", "step"])
def test_memory_efficient_fields_are_seen(field: str) -> None:
    """Every field that sets this kernel apart changes bits."""
    q, k, v = sample("normal", n=64, n_k=300, d=192, dtype="float16")
    plan = plan_of("efficient", q, k, v)
    plan = dataclasses.replace(plan, numerics=dataclasses.replace(plan.numerics, out="float32"))
    others = {"score": "unfused", "row_sum_order": "tile", "finish": "multiply", "lse": "reference"}
    other = Plan.from_json(plan.to_json() | {field: others.get(field)})
    a, b = (flash(q, k, v, plan=p) for p in (plan, other))
    assert a[0].tobytes() + a[1].tobytes() != b[0].tobytes() + b[1].tobytes()


def test_split_keys() -> None:
    """With little work FlashAttention-2 cuts the keys; rows stay independent of each other."""
    q, k, v = sample("normal", n=70, n_k=1000, d=128, heads=2, dtype="bfloat16")
    plan = plan_of("fa2-split", q, k, v)
    assert plan.splits > 1
    assert plan.tile_n == 128
    out, lse = flash(q, k, v, plan=plan)
    exact = oracle.attention(q, k, v)
    whole = forward_bound(Problem.of(q, k, v), plan_of("fa2", q, k, v))
    assert_within("out", out, exact, 2 * whole[0])
    assert_within("lse", lse, exact, 2 * whole[1])
    part = flash(q[:, 30:40], k, v, plan=plan)
    assert part[0].tobytes() == np.ascontiguousarray(out[:, 30:40]).tobytes()
    assert out.tobytes() != flash(q, k, v, plan=plan_of("fa2", q, k, v))[0].tobytes()
    with pytest.raises(ValueError, match=r"plan\.splits"):
        attribute(q, k, v, plan=plan)
    with pytest.raises(ValueError, match=r"plan\.splits"):
        forward_bound(Problem.of(q, k, v), plan)


@pytest.mark.parametrize(
    ("heads", "n_q", "n_k", "splits"), [(100, 64, 1024, True), (212, 64, 1024, False),
                                        (1, 64, 256, False), (1, 64, 257, True)],
)  # fmt: skip
def test_when_keys_are_split(heads: int, n_q: int, n_k: int, splits: bool) -> None:
    """Never with more than 211 blocks of 64 queries (132 processors), or with one tile of keys."""
    x = np.zeros((heads, n_q, 64), np.float16)
    k = np.zeros((heads, n_k, 64), np.float16)
    plan = plan_of("fa2-split", x, k, k)
    assert (plan.splits > 1) == splits
    assert plan.tile_n == (256 if splits else 128)


def test_unknown_kernel() -> None:
    x = np.zeros((4, 16), np.float16)
    with pytest.raises(
        ValueError,
        match=r"kernel: got 'fa9', must be one of 'fa3', 'fa2', 'cudnn', 'efficient', 'triton', ",
    ):
        plan_of("fa9", x, x, x)
    with pytest.raises(ValueError, match="q: dtype float32"):
        plan_of("fa3", *[x.astype(np.float32)] * 3)
