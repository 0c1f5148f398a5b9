"""Bit-true emulation of attention kernels, an exact oracle, and the attribution of every rounding
error.
"""

from emulation import oracle, sfu, tensor_core, testing
from emulation.ablation import shapley
from emulation.attribution import attribute
from emulation.backward import flash_vjp, standard_vjp
from emulation.contributions import Attribution, Contribution
from emulation.explain import Tolerance, Verdict, explain, tolerance
from emulation.flash import flash
from emulation.peers import plan_of
from emulation.plan import BackwardPlan, Numerics, Plan, default_plan
from emulation.problem import Problem
from emulation.standard import standard

__all__ = [
    "Attribution",
    "BackwardPlan",
    "Contribution",
    "Numerics",
    "Plan",
    "Problem",
    "Tolerance",
    "Verdict",
    "attribute",
    "default_plan",
    "explain",
    "flash",
    "flash_vjp",
    "oracle",
    "plan_of",
    "sfu",
    "shapley",
    "standard",
    "standard_vjp",
    "tensor_core",
    "testing",
    "tolerance",
]
