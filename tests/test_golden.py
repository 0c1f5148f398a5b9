"""Bits that cuflash's kernels gave on an H200: the emulator keeps giving them on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.golden import changed
from cuflash import planner
from emulation import Numerics, Plan, Problem, flash, flash_vjp
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


@pytest.mark.parametrize("name", CASES)
def test_recorded_plans_are_still_chosen(name: str) -> None:
    """Texts that are older than some fields of a Plan are those Plans all the same."""
    case = CASES[name]
    problem = Problem.of(*case.inputs()[:3], **case.options)
    with np.load(GOLDEN) as z:
        recorded = str(z[f"{name}/plan"])
    plan, old = planner._plan(problem, "sm90", Numerics.of(case.numerics)), Plan.from_json(recorded)
    assert old == plan


def test_what_a_fresh_recording_may_change(tmp_path: Path) -> None:
    """Plans are compared as Plans, all else by bits; what is there only once is named."""
    with np.load(GOLDEN) as z:
        names = [n for n in z.files if n.startswith(("plain bf16/", "D 192/"))]
        recorded: dict[str, Any] = {n: z[n] for n in names}
    old, new = tmp_path / "old.npz", tmp_path / "new.npz"
    np.savez(old, **recorded)
    plan = Plan.from_json(str(recorded["D 192/plan"]))
    shorter = plan.to_json()
    del shorter["backward"]["queries"]  # as it is where nothing is said
    text = json.dumps(shorter)

    def saved(**other: Any) -> list[str]:
        np.savez(new, **(recorded | {f"D 192/{n}": x for n, x in other.items()}))
        return changed(new, old)

    assert saved(plan=np.array(text)) == []
    moved = recorded["D 192/out"].copy()
    moved.flat[7] ^= 1
    nan = recorded["D 192/lse"].copy()
    nan[:] = np.nan
    for field in ("c", "arch"):
        other = {"c": "floats", "arch": "sm80"}
        text = json.dumps(plan.to_json() | {field: other[field]})
        assert saved(plan=np.array(text)) == ["D 192/plan"]
    assert saved(out=moved, lse=nan) == ["D 192/lse", "D 192/out"]
    assert saved(dq=recorded["D 192/dq"].astype(np.uint32)) == ["D 192/dq"]
    assert saved(dk=recorded["D 192/dk"].reshape(-1)) == ["D 192/dk"]
    assert saved(more=np.zeros(1)) == ["D 192/more"]
    np.savez(new, **{n: x for n, x in recorded.items() if n != "D 192/dv"})
    assert changed(new, old) == ["D 192/dv"]
