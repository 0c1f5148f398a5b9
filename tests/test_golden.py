"""Bits that cuflash's kernels gave on an H200: the emulator keeps giving them on any machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emulation import Plan, flash, flash_vjp
from tests.golden_cases import CASES

GOLDEN = Path(__file__).parent / "golden" / "cuflash_h200.npz"


@pytest.mark.parametrize("name", CASES)
def test_recorded_bits(name: str) -> None:
    case = CASES[name]
    q, k, v, dout = case.inputs()
    with np.load(GOLDEN) as z:
        recorded = {x: z[f"{name}/{x}"] for x in ("plan", "out", "lse", "dq", "dk", "dv")}
    plan = Plan.from_json(str(recorded.pop("plan")))
    assert all(getattr(plan.numerics, field) == value for field, value in case.numerics.items())
    out, lse = flash(q, k, v, plan=plan, **case.options)
    dq, dk, dv = flash_vjp(q, k, v, dout, plan=plan, **case.options)
    for x, got in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        want = recorded[x]
        assert got.shape == want.shape
        assert got.view(want.dtype).tobytes() == want.tobytes(), x
