"""The article's claims, measured: tasks, figures, and a verdict that follows from them by a rule.

`claims()` are the eleven rows and a twelfth of our own; `measure` runs some of them together.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from emulation.claims.claim import Claim, ClaimResult, Plot, Verdict
from emulation.claims.settings import Settings
from emulation.claims.tasks import Done, run_tasks

__all__ = ["Claim", "ClaimResult", "MODULES", "Plot", "Settings", "Verdict", "claims", "measure"]

#: Module of every claim.
MODULES = {
    1: "c01_memory", 2: "c02_exact", 3: "c03_trace", 4: "c04_rescale", 5: "c05_tiles",
    6: "c06_bits", 7: "c07_gradients", 8: "c08_size", 9: "c09_depth", 10: "c10_training",
    11: "c11_bias", 12: "c12_delta",
}  # fmt: skip


def claims(numbers: Sequence[int] | None = None) -> list[Claim]:
    """The claims of these numbers (None: all), in order. Raises ValueError for an unknown one.

    >>> [c.title for c in claims([3])]
    ['The rescale factor']
    """
    for number in numbers or ():
        if number not in MODULES:
            raise ValueError(f"claim: got {number}, must be 1 to {max(MODULES)}")
    chosen = sorted(set(MODULES if numbers is None else numbers))
    return [
        importlib.import_module(f"emulation.claims.{MODULES[number]}").CLAIM for number in chosen
    ]


def measure(
    chosen: Sequence[Claim], settings: Settings, done: Done | None = None
) -> list[ClaimResult]:
    """Run the tasks of all claims together, and judge each. `done` is called after each task."""
    plans = [(claim, claim.tasks(settings)) for claim in chosen]
    outcomes = iter(run_tasks([t for _, tasks in plans for t in tasks], settings, done))
    return [
        claim.conclude(settings, tasks, [next(outcomes) for _ in tasks]) for claim, tasks in plans
    ]
