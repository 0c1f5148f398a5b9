"""Between the public calls and the kernels: what a launcher module (`cuflash.sm80`) offers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, cast

from cuflash.problem import GpuProblem
from emulation.plan import Plan


class Instantiation(NamedTuple):
    """One kernel as `compiler.compile_kernel` takes it; `compile_kernel(*i[:2], arch, i[2])`."""

    source: str
    name_expression: str
    options: tuple[str, ...] = ()


class Launcher(Protocol):
    """Kernels of one family. Called with the problem's device current, on CuPy's current stream.

    Arrays are CuPy's, (batch, heads, N, width), last axis contiguous, every row on a 16-byte
    boundary; other strides are free (`problem.element_strides`). Everything is allocated and
    checked; nothing is empty. A launcher checks the Plan and compiles before it launches, so that
    an error writes nothing, and it never waits for the device.
    """

    def forward(
        self, problem: GpuProblem, plan: Plan, out: Any, lse: Any, rest: Any | None
    ) -> None:
        """out (B, H, N_q, D_v) in the Plan's output format; lse (B, H, N_q) float32, contiguous;
        rest: like out, contiguous, what rounding O to the input format left, or None if not asked.
        """

    def backward(
        self,
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
        """dq (B, H, N_q, D), dk (B, H_kv, N_k, D), dv (B, H_kv, N_k, D_v) in the output format.

        dout (B, H, N_q, D_v) in the input format; dlse (B, H, N_q) float32, contiguous, or None;
        out, rest and lse as the forward left them (lse -inf where a row saw nothing).
        """

    def instantiations(self) -> Iterable[Instantiation]:
        """A representative list, for compiling without a GPU."""


def launcher(family: str) -> Launcher:
    """The launcher module of a kernel family ("sm80", "sm90"), imported when first asked for."""
    return cast(Launcher, importlib.import_module(f"cuflash.{family}"))
