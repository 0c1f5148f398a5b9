"""`explain` on arrays of a GPU, and what `bench.explain --gpu` counts, on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import explain_gpu
from bench.explain_gpu import (
    Run,
    backwards,
    compared,
    differentiated,
    orders,
    parts,
    plan_for,
    tasks,
)
from bench.gpu_kernels import Task
from emulation import Problem, explain, flash, flash_vjp, plan_of
from emulation.explain.case import Case
from emulation.explain.exact import glance
from emulation.explain.whose import emulated
from emulation.samples import sample


class _Array:
    """What `explain` may use of a CuPy array."""

    __module__ = "cupy"

    def __init__(self, x: Any) -> None:
        self.held = x

    def get(self) -> Any:
        return self.held


def fake_cupy(calls: list[int]) -> Any:
    """NumPy under CuPy's names; every transfer back is counted."""
    names = {
        n: getattr(np, n) for n in ("asarray", "concatenate", "abs", "tanh", "arange", "where")
    }
    names |= {n: getattr(np, n) for n in ("exp", "log")}

    def asnumpy(x: Any) -> Any:
        calls.append(x.size)
        return x

    return SimpleNamespace(asnumpy=asnumpy, **names)


def test_glance_on_a_gpu() -> None:
    q, k, v = sample("outlier", n=70, n_k=90, d=16, heads=4, dtype="bfloat16")
    for masks in ({}, {"causal": True}, {"window": (9, 4)}, {"softcap": 5.0}):
        problem = Problem.of(q, k[:2], v[:2], **masks)
        calls: list[int] = []
        a, b = glance(problem, np.arange(70)), glance(problem, np.arange(70), fake_cupy(calls))
        assert calls
        assert np.array_equal(a.out, b.out)
        assert np.array_equal(a.lse, b.lse)
        assert np.array_equal(a.worst, b.worst)


def test_explain_takes_arrays_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same verdict; exact values are computed where q is."""
    q, k, v = sample("normal", n=48, d=16, heads=2, dtype="float16")
    plan = plan_of("fa3", q, k, v, causal=True)
    out, lse = flash(q, k, v, plan=plan, causal=True)
    grads = flash_vjp(q, k, v, q, plan=plan, causal=True)
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(calls))
    there = [_Array(x) for x in (q, k, v, out)]
    given: dict[str, Any] = {"lse": _Array(lse), "dout": _Array(q), "causal": True}
    found = explain(*there, grads=[_Array(x) for x in grads], **given)
    here = explain(q, k, v, out, lse=lse, grads=grads, dout=q, causal=True)
    assert calls
    assert str(found) == str(here)
    named = {n: _Array(x) for n, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    assert str(explain(*there, grads=named, **given)) == str(here)


def test_more_rows_on_a_gpu() -> None:
    x = np.zeros((1, 20000, 16), np.float16)
    problem = Problem.of(x, x, x)
    assert len(Case(problem).rows) < 20000
    assert len(Case(problem, xp=fake_cupy([])).rows) == 20000


@pytest.mark.parametrize("kernel", ["fa3", "fa2", "cudnn", "efficient", "triton", "math"])
def test_bits_are_counted(kernel: str) -> None:
    """None differ of an output made by the Plan, one does after one bit is turned."""
    q, k, v = sample("rising", n=130, d=32, heads=4, dtype="bfloat16")
    task = Task("rising", q, k[:2], v[:2], True)
    plan = plan_for(kernel, task.q, task.k, task.v, True)
    problem = Problem.of(task.q, task.k, task.v, causal=True)
    got = emulated(problem, plan, np.arange(130))
    assert compared(task, plan, got) == [q.size, 0, 4 * 130, 0]
    pieces = list(parts(task, got, 2))
    assert [len(p.q) for p, _ in pieces] == [4]
    got[0].view(np.uint16)[3, 7, 5] ^= 1
    got[1].view(np.uint32)[2, 9] ^= 1
    assert compared(task, plan, got) == [q.size, 1, 4 * 130, 1]
    assert compared(task, plan, (got[0], None)) == [q.size, 1, 0, 0]


def test_tasks_are_of_every_kind() -> None:
    """Random ones, groups of heads, other lengths, both formats, captures."""
    some = [t for t, _ in zip(tasks(None), range(13), strict=False)]
    assert {str(t.q.dtype) for t in some} == {"bfloat16", "float16"}
    assert any(len(t.k) < len(t.q) for t in some)
    assert any(t.q.shape[1] != t.k.shape[1] for t in some)
    assert any(t.causal for t in some)
    assert any(t.group.startswith("capture") for t in some)


def test_backward_order_is_told() -> None:
    """Of a backward in FlashAttention-2's order its own Plan has all bits, others have not."""
    q, k, v = sample("normal", n=200, d=96, dtype="bfloat16")
    plan = plan_of("fa2", q, k, v)
    assert plan.backward.queries == "descending"
    grads = flash_vjp(q, k, v, q, plan=plan)
    found = differentiated(Task("normal", q, k, v, False), q, plan, grads)
    assert found["its plan"] == [k.size, k.size, v.size]
    for word in ("queries ascending", "score natural fused", "scale dS", "ds_p rounded"):
        assert found[word][1] < k.size, word
    assert found["scale dS"][2] == found["ds_p rounded"][2] == v.size
    assert len({p for _, p in orders(plan)}) == len(list(orders(plan))) == len(found)


def test_a_backward_tile_changes_bits() -> None:
    """Descending by 64 is not descending by 128."""
    q, k, v = sample("normal", n=256, d=32, dtype="float16")
    plan = plan_of("fa2", q, k, v)
    assert plan.backward.tile_m == 128
    other = dataclasses.replace(plan, backward=dataclasses.replace(plan.backward, tile_m=64))
    a, b = (flash_vjp(q, k, v, q, plan=p) for p in (plan, other))
    assert a[2].tobytes() != b[2].tobytes()


class _Here:
    """A pool that works at once."""

    def submit(self, f: Any, *args: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(f(*args))
        return done


def test_backward_shares_are_apart_by_format_and_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right without a mask only is not half right everywhere."""

    def gradients(kernel: str, task: Task, dout: Any) -> Any:
        q, k, v, do = (x[:2] for x in (task.q, task.k, task.v, dout))
        if kernel != "fa2":
            raise RuntimeError("none")
        plan = plan_of("fa2", q, k, v, causal=task.causal)
        grads = flash_vjp(q, k, v, do, plan=plan, causal=task.causal)
        return tuple(-x for x in grads) if task.causal else grads

    monkeypatch.setattr(explain_gpu, "gradients", gradients)
    monkeypatch.setattr(explain_gpu, "WIDTHS", (32,))
    monkeypatch.setattr(explain_gpu, "SMALL", (100, 2))
    run = Run(_Here(), 1e6)  # type: ignore[arg-type]
    found = backwards(run)
    assert set(found) == {
        f"fa2, D 32, {t}, {m}" for t in ("bfloat16", "float16") for m in ("full", "causal")
    }
    for name, x in found.items():
        assert (x["its plan"] == [1.0, 1.0]) == name.endswith("full")
        assert max(x["its plan"]) < 0.1 or name.endswith("full")
    assert not any("math" in word for word in run.refused)


def test_bits_that_are_another_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted apart from those that no known kernel has."""

    def judged(task: Task, kernel: str, got: Any) -> tuple[str, str, list[str]]:
        names = {"normal": [kernel], "tiny": ["another"]}.get(task.group, [])
        return kernel, "rounding", names

    monkeypatch.setattr(explain_gpu, "judged", judged)
    monkeypatch.setattr(explain_gpu, "called", lambda kernel, task: (task.q, None))
    found = explain_gpu.verdicts(Run(_Here(), 1e6))  # type: ignore[arg-type]
    assert found["whose"]["triton"] == found["all bits another's"]["triton"] == 4
