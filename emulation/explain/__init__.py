"""A verdict on anybody's attention output: rounding, biased rounding, or another computation."""

from emulation.explain.call import explain
from emulation.explain.tolerance import Tolerance, tolerance
from emulation.explain.verdict import Judgement, Verdict

__all__ = ["Judgement", "Tolerance", "Verdict", "explain", "tolerance"]
