"""All claims measured once at the smallest size, for the tests of rules, pages and commands."""

from __future__ import annotations

import copy
import functools
from typing import Any

from emulation.claims import Settings, claims, measure
from emulation.claims.claim import Claim, ClaimResult

SETTINGS = Settings(size="tiny", kernels="cuflash", workers=2)


@functools.cache
def tiny() -> dict[int, ClaimResult]:
    """Results by number."""
    return {r.number: r for r in measure(claims(), SETTINGS)}


def figures(number: int) -> tuple[Claim, Any]:
    """A claim, and a copy of its figures to be changed."""
    return claims([number])[0], copy.deepcopy(tiny()[number].figures)
