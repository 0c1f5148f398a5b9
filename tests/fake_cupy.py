"""A stand-in for CuPy over NumPy memory, and for the launchers over the emulator.

Enough to test on a CPU what `cuflash.attention` checks, copies, allocates and passes on.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash.problem import GpuProblem, ready
from emulation.backward import Saved, delta_parts, finite_lse, flash_backward
from emulation.flash import flash_forward
from emulation.plan import Plan
from emulation.problem import Problem
from emulation.tiled import machine_of


class FakeArray(np.ndarray[Any, Any]):
    """Has `data.ptr` and `device.id`, as CuPy arrays have."""

    on = 0

    def __array_finalize__(self, source: Any) -> None:
        self.on = getattr(source, "on", Device.current)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.on)


class Device:
    """The current device, as a context; every one is a Hopper."""

    current = 0
    compute_capability = "90"

    def __init__(self, number: int | None = None) -> None:
        self.number = Device.current if number is None else number

    def __enter__(self) -> Device:
        self.before, Device.current = Device.current, self.number
        return self

    def __exit__(self, *_: Any) -> None:
        Device.current = self.before


def on_gpu(x: Any, device: int = 0) -> FakeArray:
    """x, with its strides, as an array of the fake."""
    found = x.view(FakeArray)
    found.on = device
    return found  # type: ignore[no-any-return]


class Launcher:
    """Counts calls; computes with the emulator; insists on what kernels need."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.inputs: list[Any] = []
        self.ahead: list[Problem] = []
        self.refuses = False  # the Plan, for a backward

    def _problem(self, p: GpuProblem, *arrays: Any) -> Problem:
        assert Device.current == p.device
        assert not p.empty
        for x in (p.q, p.k, p.v, *arrays):
            assert x.ndim == 4
            assert ready(x)
            assert x.device.id == p.device
        self.inputs = [p.q, p.k, p.v]
        q, k, v = (np.asarray(x) for x in (p.q, p.k, p.v))
        masks: dict[str, Any] = {
            "scale": p.scale,
            "causal": p.causal,
            "window": p.window,
            "softcap": p.softcap,
        }
        return Problem.of(q, k, v, **masks)

    def forward(self, problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any) -> None:
        self.calls.append("forward" if rest is None else "forward with rest")
        flat = self._problem(problem, out)
        assert lse.flags.c_contiguous
        found = flash_forward(flat, plan)
        out[...] = found.out.reshape(out.shape)
        lse[...] = found.lse.reshape(lse.shape)
        if rest is not None:
            parts = [delta_parts(plan, found, h)[1] for h in range(flat.heads)]
            rest[...] = np.stack(parts).reshape(rest.shape)

    def backward_launches(self, problem: Problem, plan: Plan, device: int) -> list[Any]:
        self.ahead.append(problem)
        if self.refuses:
            raise ValueError("plan: must be another")
        return []

    def backward(
        self, problem: GpuProblem, plan: Plan, dout: Any, dlse: Any, out: Any, rest: Any, lse: Any,
        dq: Any, dk: Any, dv: Any,
    ) -> None:  # fmt: skip
        self.calls.append("backward")
        flat = self._problem(problem, dout, out, dq, dk, dv)
        heads = (flat.heads, flat.n_q)
        parts = [
            np.asarray(x, np.float32).reshape(*heads, -1) for x in (out, rest) if x is not None
        ]
        flat_lse = np.asarray(lse).reshape(heads)
        m = machine_of(plan)
        saved = Saved(
            lse=lambda h: m.input(finite_lse(flat_lse[h])), o=lambda h: [part[h] for part in parts]
        )
        flat_dout = np.asarray(dout).reshape(*heads, -1)
        flat_dlse = None if dlse is None else np.asarray(dlse).reshape(heads)
        found = flash_backward(m, plan, flat, flat_dout, flat_dlse, saved)
        for target, computed in ((dq, found.dq), (dk, found.dk), (dv, found.dv)):
            target[...] = np.stack(computed).reshape(target.shape)


class NoDeviceError(RuntimeError):
    """What CuPy raises without a driver."""


def install(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Put the fakes where `cuflash` looks for CuPy and the launchers."""
    monkeypatch.setattr(FakeArray, "__module__", "cupy")
    cupy = ModuleType("cupy")
    fields: dict[str, Any] = {
        "ndarray": FakeArray,
        "empty": lambda shape, dtype: np.full(shape, 7, dtype).view(FakeArray),
        "copyto": np.copyto,
        "ascontiguousarray": lambda x: x if x.flags.c_contiguous else x.copy(),
        "cuda": SimpleNamespace(
            Device=Device, runtime=SimpleNamespace(CUDARuntimeError=NoDeviceError)
        ),
    }
    vars(cupy).update(fields)
    launcher = Launcher()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for family in ("sm80", "sm90"):
        monkeypatch.setitem(sys.modules, f"cuflash.{family}", launcher)
    monkeypatch.setattr(Device, "current", 0)
    return launcher
