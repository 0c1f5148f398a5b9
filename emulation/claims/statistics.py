"""The statistics that rules are made of: means with standard errors, slopes, Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np

#: Standard errors beyond which a mean is not 0: one chance in 370 where there is nothing.
SIGMAS = 3.0


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
    """Quantile of Student's t.

    >>> round(student(0.975, 2), 3), round(student(0.95, 4), 3)
    (4.303, 2.132)
    """
    tail = 2 * (1 - probability)

    def excess(t: Any) -> Any:
        x = freedom / (freedom + t * t)
        return mpmath.betainc(freedom / 2, 0.5, 0, x, regularized=True) - tail

    return float(mpmath.findroot(excess, (0.01, 1e4), solver="anderson", tol=1e-18))


def equivalent(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Two one-sided t tests at 5 % each: is the mean difference within +-margin?

    Returns mean, 90 % interval (low, high), margin, and `equivalent`; one difference proves
    nothing.

    >>> equivalent([0.0, 0.001, -0.001], 0.1)["equivalent"], equivalent([0.3, 0.31], 0.1)["equivalent"]
    (True, False)
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
