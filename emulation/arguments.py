"""Checks of arguments that every public call shares. Each names argument, value and rule, and takes
whatever it is given: unhashable, ambiguous as a truth value, or too long to print.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np


def echo(x: Any, longest: int = 60) -> str:
    """repr(x) for an error message: on one line, not longer than `longest`.

    >>> echo(10**400, longest=12), echo("a")
    ('100000000...', "'a'")
    """
    try:
        text = " ".join(repr(x).split())
    except ValueError:  # an int of more digits than Python prints
        text = f"a {type(x).__name__} too long to print"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """ValueError naming argument, value and rule, unless value is one of these strings; whatever it
    is, hashable or not.
    """
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name}: got {echo(value)}, must be one of {', '.join(map(repr, allowed))}"
        )


def check_count(name: str, value: Any, least: int) -> None:
    """TypeError or ValueError unless it is an integer >= least."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {echo(value)}, must be an integer >= {least}")
    if value < least:
        raise ValueError(f"{name}: got {echo(value)}, must be an integer >= {least}")


def check_flag(name: str, value: Any) -> None:
    """TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {echo(value)}, must be True or False")


def check_progress(progress: Any) -> None:
    """TypeError unless it is None or can be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: got {echo(progress)}, must be None or a function of two")


def check_plain(name: str, x: Any, rule: str = "an array") -> None:
    """TypeError unless x is an array that holds nothing but numbers in this machine's byte order:
    no list, and no subclass of NumPy's, whose masks, units or products would be dropped (a memmap
    has none).
    """
    kind = type(x)
    if not hasattr(x, "ndim") or not hasattr(x, "dtype") or isinstance(x, np.generic):
        raise TypeError(f"{name}: got {kind.__name__}, must be {rule}")
    plain = kind in (np.ndarray, np.memmap)
    if not plain and isinstance(x, np.ndarray) and kind.__module__ != "cupy":
        raise TypeError(
            f"{name}: got {kind.__module__}.{kind.__qualname__}, must be a plain NumPy array, not "
            "a subclass (np.asarray makes one)"
        )
    if not getattr(x.dtype, "isnative", True):
        raise TypeError(f"{name}: dtype {x.dtype}, must be in native byte order")
