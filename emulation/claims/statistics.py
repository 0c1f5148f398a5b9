"""The statistics that rules are made of: means with standard errors, slopes, Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np

#: Standard errors beyond which a mean is not 0: one chance in 370 where there is nothing.
SIGMAS = 3.0


def sigmas(tests: int) -> float:
    """SIGMAS for the worst of so many independent means: the same chance for all of them together.

    >>> [round(sigmas(n), 2) for n in (1, 5)]
    [3.0, 3.46]
    """
    chance = mpmath.erfc(SIGMAS / mpmath.sqrt(2)) / tests
    return float(mpmath.sqrt(2) * mpmath.erfinv(1 - chance))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean of independent values and its standard error; an error of inf from a single one.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    x = np.asarray(values, np.float64)
    error = float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.inf
    return float(x.mean()), error


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of a power law y ~ x^slope, by least squares of the logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 9)
    2.0
    """
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by bisection; probability above 1/2.

    >>> round(student(0.975, 2), 3), round(student(0.95, 4), 3)
    (4.303, 2.132)
    """
    low, high = 0.0, 1e6
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        x = freedom / (freedom + middle * middle)
        tail = 0.5 * float(mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True))
        low, high = (middle, high) if tail > 1 - probability else (low, middle)
    return high


def equivalent(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Two one-sided t tests at 5 % each: is the mean difference within +-margin?

    Returns mean, 90 % interval (low, high), margin, and `equivalent`; one difference proves
    nothing.

    >>> [equivalent(d, 0.1)["equivalent"] for d in ([0.0, 0.001, -0.001], [0.3, 0.31])]
    [True, False]
    """
    mean, error = mean_and_error(differences)
    if len(differences) < 2:
        return {"mean": mean, "low": None, "high": None, "margin": margin, "equivalent": False}
    half = student(0.95, len(differences) - 1) * error
    low, high = mean - half, mean + half
    inside = -margin < low and high < margin
    return {"mean": mean, "low": low, "high": high, "margin": margin, "equivalent": bool(inside)}


def rms(x: Any) -> float:
    """Root of the mean square."""
    wide = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean(wide * wide)))
