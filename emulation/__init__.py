"""Bit-true emulation of attention kernels, an exact oracle, and the attribution of every rounding error."""

from emulation import oracle, sfu, tensor_core
from emulation.flash import flash
from emulation.peers import plan_of
from emulation.plan import BackwardPlan, Numerics, Plan, default_plan
from emulation.problem import Problem

__all__ = [
    "BackwardPlan",
    "Numerics",
    "Plan",
    "Problem",
    "default_plan",
    "flash",
    "oracle",
    "plan_of",
    "sfu",
    "tensor_core",
]
