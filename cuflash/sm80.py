"""The kernels of cuda/sm80: any GPU since Ampere. Each call goes to the module of its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cuflash import sm80_backward, sm80_float32, sm80_forward
from cuflash.launch import Instantiation, Launch
from cuflash.problem import GpuProblem
from emulation.plan import Plan
from emulation.problem import Problem


def forward(problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None) -> None:
    """See `launch.Launcher.forward`."""
    module = sm80_float32 if plan.format == "float32" else sm80_forward
    module.forward(problem, plan, out, lse, rest)


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
    _gradients(plan).backward(problem, plan, dout, dlse, out, rest, lse, dq, dk, dv)


def backward_launches(problem: Problem, plan: Plan, device: int) -> Sequence[Launch]:
    """See `launch.Launcher.backward_launches`."""
    found: Sequence[Launch] = _gradients(plan).backward_launches(problem, plan, device)
    return found


def _gradients(plan: Plan) -> Any:
    """The module of a Plan's backward."""
    return sm80_float32 if plan.format == "float32" else sm80_backward


def instantiations() -> Iterable[Instantiation]:
    """A representative list of all three."""
    for module in (sm80_forward, sm80_backward, sm80_float32):
        yield from module.instantiations()
