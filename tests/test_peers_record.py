"""What `bench.peers_record` writes and compares, on a CPU: emulated kernels in the place of real
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import peers_record
from bench.gpu_kernels import Pair, Task
from bench.peers_record import CASES, COPIES, cases_of, compare, compare_all, record, said, together
from emulation import flash, flash_vjp, plan_of
from emulation.problem import Array

SOME = {n: CASES[n] for n in ("d32_bfloat16_causal", "d32_float16_full", "d40_float16_full")}


def copied(x: Array) -> Array:
    return np.repeat(x, COPIES, axis=0)


def emulate(monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> tuple[Any, Any]:
    """The first copy, emulated, for all; one of dQ has another bit."""

    def one(kernel: str, task: Task) -> tuple[Any, ...]:
        if str(task.q.dtype) == refuses:
            raise RuntimeError(f"no {refuses}\nat all")
        q, k, v = (x[:1] for x in (task.q, task.k, task.v))
        return q, k, v, plan_of(kernel, q, k, v, causal=task.causal)

    def called(kernel: str, task: Task) -> Pair:
        q, k, v, plan = one(kernel, task)
        out, lse = flash(q, k, v, plan=plan, causal=task.causal)
        return copied(out), None if kernel == "math" else copied(lse)

    def gradients(kernel: str, task: Task, dout: Array) -> tuple[Array, ...]:
        q, k, v, plan = one(kernel, task)
        dq, dk, dv = flash_vjp(q, k, v, dout[:1], plan=plan, causal=task.causal)
        dq = copied(dq)
        dq.view(np.uint16)[5, 7, 3] ^= 1
        return dq, copied(dk), copied(dv)

    monkeypatch.setattr(peers_record, "called", called)
    monkeypatch.setattr(peers_record, "gradients", gradients)
    return called, gradients


def of_case(arrays: dict[str, Array], name: str) -> dict[str, Array]:
    return {n.split("/")[1]: x for n, x in arrays.items() if n.startswith(f"{name}/")}


@pytest.mark.parametrize("kernel", ["fa2", "cudnn", "efficient"])
def test_an_emulated_kernel_has_all_bits(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its Plan; a copy whose bits differ is counted."""
    emulate(monkeypatch)
    arrays, refused = record(kernel, SOME)
    assert refused == {}
    for name, case in SOME.items():
        held = of_case(arrays, name)
        assert ("dk" in held) == case.gradients == ("dq_same" in held)
        assert held["out_same"] == COPIES
        assert held.get("dq_same", COPIES - 1) == COPIES - 1
        found = compare(kernel, case, held)
        assert {x["its plan"] for x in found.values()} == {1.0}
        if case.d == 40 and kernel != "efficient":  # c as a product of two floats is another one
            assert found["lse"]["c floats" if kernel == "fa2" else "c once"] < 1.0
        if case.gradients:
            assert len(found["dk"]) > 30
            assert min(found["dk"].values()) < 1.0
        held["lse"].view(np.uint32)[7] ^= 1 << 18
        changed = compare(kernel, case, held)
        assert changed["lse"]["its plan"] == 1 - 1 / peers_record.N
        if case.gradients:  # they are formed from the recorded LSE
            assert changed["dv"]["its plan"] < 1.0


def test_other_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    name = "d40_float16_full"
    held = of_case(record("fa2", {name: SOME[name]})[0], name)
    held["inputs"] = np.array("0")
    with pytest.raises(ValueError, match="fa2, d40_float16_full: recorded of inputs other than"):
        compare("fa2", SOME[name], held)


def test_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One for every kernel, with what it refused; FlashAttention-3's gradients from results of
    their own.
    """
    called, gradients = emulate(monkeypatch, refuses="float16")

    def of_fa3(task: Task, dout: Array) -> dict[str, Array]:
        out, lse = called("fa3", task)
        lse.view(np.uint32)[:, 9] ^= 1 << 18
        grads = gradients("fa3", task, dout)
        return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    monkeypatch.setattr(peers_record, "fa3_with_gradients", of_fa3)
    monkeypatch.setattr(peers_record, "versions", lambda: {"torch": "2"})
    monkeypatch.setattr(peers_record, "CASES", SOME)
    monkeypatch.setattr(peers_record, "KERNELS", ("fa2", "fa3"))
    assert peers_record.write_all(tmp_path) == 0
    said = capsys.readouterr().out
    assert said.count("refused from d32_float16_full on: RuntimeError: no float16") == 2
    assert said.count("copies differ in ['dq']") == 2
    files = [tmp_path / f"peers_{kernel}.npz" for kernel in ("fa2", "fa3")]
    assert compare_all(files, "", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    told = "out 1.000000 (also 2: c once), lse 1.000000 (also 2: c once), dq 1.000000 (also"
    assert lines[0].startswith(f"fa2, d32_bfloat16_causal: {told}")
    assert "saved_lse 0.997396 (also 2: c once), dq 0.9" in lines[3]
    assert lines[6].startswith("fa2, 3 cases together: out 1.000000")
    assert "saved_lse 0.997396" in lines[7]
    assert compare_all(files, "fa3, d40", 1) == 0
    assert capsys.readouterr().out.startswith("fa3, d40_float16_full: ")


def test_math_has_a_forward_only_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(peers_record, "gradients", lambda kernel, task, dout: (dout, dout, dout))
    name = "d32_float16_full"
    held = of_case(record("math", {name: SOME[name]})[0], name)
    assert {"out", "dq", "dk", "dv"} <= set(held)
    assert "lse" not in held
    assert compare("math", SOME[name], held) == {"out": {"its plan": 1.0}}


def test_what_is_said() -> None:
    """Whether another choice gives more, as much or less."""
    own = {"its plan": 0.5}
    assert said({"out": own}) == "out 0.500000"
    assert said({"dk": own | {"a": 0.25, "b": 0.75}}) == "dk 0.500000 (best 0.750000: b)"
    assert said({"dk": own | {"a": 0.25, "b": 0.375}}) == "dk 0.500000 (next 0.375000: b)"
    assert said({"dk": own | {"a": 0.5, "b": 0.5}}) == "dk 0.500000 (also 2: a)"


def test_cases_together() -> None:
    """A choice that a case does not list is the Plan's own there."""
    cases = [{"dk": {"its plan": 0.5, "a": 1.0}}, {"dk": {"its plan": 1.0, "b": 0.0}}, {}]
    assert together(cases) == {"dk": {"its plan": 0.75, "a": 1.0, "b": 0.25}}


def test_cases() -> None:
    """Every one has another name; without gradients are head dimensions with more than one c."""
    assert len(cases_of("fa2")) == 6 * 2 * 2 + 4 * 2
    assert len(cases_of("math")) == len(CASES) == len(cases_of("fa2")) + 2 * 4 * 2
    assert sum(c.gradients for c in CASES.values()) == 24
