"""The kernels of cuda/sm90, Hopper's own: the forward of half formats, and the backward where it
runs; else that of cuda/sm80.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cuflash import sm80_backward, sm90_backward, sm90_forward
from cuflash.launch import Instantiation, Launch
from cuflash.planner import runs_hopper_backward
from cuflash.problem import GpuProblem
from cuflash.sm90_forward import forward
from emulation.plan import Plan
from emulation.problem import Problem

__all__ = ["backward", "backward_launches", "forward", "instantiations"]


def backward(
    problem: GpuProblem,
    plan: Plan,
    dout: Any,
    dlse: Any | None,
    out: Any,
    rest: Any | None,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """See `launch.Launcher.backward`."""
    module = _gradients(problem.shapes, plan)
    module.backward(problem, plan, dout, dlse, out, rest, lse, dq, dk, dv)


def backward_launches(problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
    """See `launch.Launcher.backward_launches`."""
    found: Sequence[Launch] = _gradients(problem, plan).backward_launches(problem, plan, device)
    return found


def _gradients(problem: Problem, plan: Plan) -> Any:
    """The module of a problem's backward."""
    return sm90_backward if runs_hopper_backward(problem, plan) else sm80_backward


def instantiations() -> Iterable[Instantiation]:
    """A representative list of both."""
    yield from sm90_forward.instantiations()
    yield from sm90_backward.instantiations()
