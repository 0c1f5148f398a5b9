"""Other people's kernels as Plans: recorded outputs of an H200, 0 differing bits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from emulation import Plan, flash, plan_of
from emulation.problem import Array

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


def test_unknown_kernel() -> None:
    x = np.zeros((4, 16), np.float16)
    with pytest.raises(
        ValueError,
        match=r"kernel: got 'fa9', must be one of 'fa3', 'fa2', 'cudnn', 'efficient', 'fa2-split'",
    ):
        plan_of("fa9", x, x, x)
    with pytest.raises(ValueError, match="q: dtype float32"):
        plan_of("fa3", *[x.astype(np.float32)] * 3)
