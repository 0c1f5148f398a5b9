"""Whether an output fits an exact result up to rounding, and which suspect's result it fits better.

Everything is judged in units of the expected error: with z = (out - exact) / sigma, rounding alone
has a mean square of z near 1. A suspect whose exact result differs by d from the right one is
looked for with a matched filter: the coefficient a that makes a d nearest to the error, with its
standard error over rows or columns (roundings of one may hang together). Rounding gives 0, the
suspect 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from emulation.explain.exact import F64

#: Mean square of z up to which an error is what rounding is expected to leave: twice the expected
#: rms error. Known kernels lie between 0.2 and 1.1 on every kind of input (bench/results).
FITS = 4.0
#: Standard errors of a by which a suspect must stand out of the rounding.
SIGNIFICANT = 8.0
#: What d must come to, in sigma and over all elements, for two computations to be told apart.
APART = 10.0
CLIP = 1e12


@dataclass(frozen=True)
class Match:
    """How a suspect's exact result fits.

    score: log-likelihood of the output under it (higher is better). explained: share of the energy
    of the error that it takes away. inside: share of the elements outside the bound that are within
    `FITS` of it. remaining: rms of (out - suspect) in sigma; of_bound: in units of the bound (rms).
    coefficient, deviation: a and its standard error. fits: the rest is rounding.
    """

    name: str
    variant: str
    score: float
    explained: float
    inside: float
    remaining: float
    of_bound: float
    coefficient: float
    deviation: float
    fits: bool

    @property
    def significant(self) -> bool:
        """Whether the error holds this suspect's difference whole, beyond what rounding can do."""
        sure = abs(self.coefficient) >= SIGNIFICANT * self.deviation
        return sure and abs(self.coefficient - 1.0) <= 4 * self.deviation + 0.05


@dataclass(frozen=True, eq=False)
class Observed:
    """Rows of an output beside the exact ones: (H, R, D) each; bound is what any correct kernel
    keeps; outside where it is not kept.
    """

    out: F64
    exact: F64
    sigma: F64
    bound: F64

    @property
    def outside(self) -> F64:
        return np.asarray(~(np.abs(self.out - self.exact) <= self.bound))


def chi_square(error: F64, sigma: F64) -> float:
    """Mean square of z; elements that cannot err (sigma 0) count where they do."""
    with np.errstate(all="ignore"):
        z = np.where(error == 0, 0.0, np.abs(error) / sigma)
    return (
        float(np.mean(np.minimum(np.where(np.isnan(z), np.inf, z) ** 2, CLIP))) if z.size else 0.0
    )


def _likelihood(error: F64, sigma: F64) -> float:
    """Log-likelihood, element by element capped: one that cannot be explained is just wrong."""
    safe = np.maximum(sigma, 1e-300)
    with np.errstate(all="ignore"):
        z = np.minimum(np.where(error == 0, 0.0, (error / safe) ** 2), CLIP)
    return float(-0.5 * np.sum(z) - np.sum(np.log(safe)))


def match(seen: Observed, name: str, variant: str, theirs: F64, sigma: F64) -> Match | None:
    """How well a suspect's result (H, R, D) fits; None where it cannot be told from the right one,
    or is not finite.
    """
    if not np.isfinite(theirs).all():
        return None
    both = np.maximum(np.maximum(seen.sigma, sigma), 1e-300)
    error, d = (seen.out - seen.exact) / both, (theirs - seen.exact) / both
    size = float(np.sum(d * d))
    if not size > APART**2:
        return None
    a = float(np.sum(error * d)) / size
    deviation = max(_deviation(error * d, d * d, a, axis) for axis in (1, 2))
    rest = seen.out - theirs
    before, after = (float(np.sum(np.minimum(x * x, CLIP))) for x in (error, error - d))
    outside = seen.outside
    near = np.abs(rest) <= np.sqrt(FITS) * 2.5 * sigma
    bound = np.maximum(seen.bound, 1e-300)
    with np.errstate(all="ignore"):
        of_bound = float(np.sqrt(np.mean(np.minimum((rest / bound) ** 2, CLIP))))
    chi = chi_square(rest, sigma)
    return Match(
        name=name,
        variant=variant,
        score=_likelihood(rest, sigma),
        explained=1.0 - after / before if before else 0.0,
        inside=float(near[outside].mean()) if outside.any() else float(near.mean()),
        remaining=float(np.sqrt(chi)),
        of_bound=of_bound,
        coefficient=a,
        deviation=deviation,
        fits=chi <= FITS,
    )


def _deviation(along: F64, energy: F64, a: float, axis: int) -> float:
    """Standard error of a = sum(along) / sum(energy) if what lies along an axis hangs together: the
    columns of a row, or (weights alike in all rows) the rows of a column. inf of fewer than two
    such groups.
    """
    along, energy = (x.sum(axis=axis) for x in (along, energy))
    size = float(energy.sum())
    groups = size**2 / float(np.sum(energy * energy))
    if not groups > 2.0:
        return np.inf
    spread = float(np.sqrt(np.sum((along - a * energy) ** 2))) / size
    return spread * float(np.sqrt(groups / (groups - 1.0)))


def ranked(found: Iterable[Match | None]) -> list[Match]:
    """Best first: those that leave only rounding by likelihood, the others by what they explain."""
    matches = [m for m in found if m is not None]
    return sorted(matches, key=lambda m: (not m.fits, -m.score if m.fits else -m.explained))


def same_result(first: Match, other: Match) -> bool:
    """Whether two suspects are one computation here: every figure is equal."""
    return abs(first.score - other.score) <= 1e-9 * max(1.0, abs(first.score))


@dataclass(frozen=True)
class Bias:
    """A mean of the error that independent roundings would not leave.

    towards: "zero" (magnitudes too small), "infinity", or "one sign". mean: of z with that sign.
    deviations: the mean over its standard error, taken over rows.
    """

    towards: str
    mean: float
    deviations: float


#: A bias must be this large in sigma, and stand out by this many standard errors.
BIASED, SURE = 0.15, 8.0


def bias(seen: Observed) -> Bias | None:
    """The larger of the mean of z and of z sign(exact), if it is one."""
    with np.errstate(all="ignore"):
        z = np.where(seen.sigma > 0, (seen.out - seen.exact) / seen.sigma, 0.0)
    best = None
    for what, sign in (("one sign", np.ones_like(z)), ("zero", np.sign(seen.exact))):
        rows = np.clip(z * sign, -30, 30).mean(axis=-1).ravel()
        mean = float(rows.mean()) if rows.size else 0.0
        error = float(rows.std() / np.sqrt(max(1, rows.size))) or 1e-300
        name = "infinity" if what == "zero" and mean > 0 else what
        if what == "one sign":
            name = "one sign (up)" if mean > 0 else "one sign (down)"
        found = Bias(name, mean, abs(mean) / error)
        sure = abs(mean) >= BIASED and found.deviations >= SURE
        if sure and (best is None or abs(mean) > abs(best.mean)):
            best = found
    return best


@dataclass(frozen=True)
class Noise:
    """Random errors of a known shape: `size` in units of what the shape predicts, `evenness` of six
    groups of elements, from small to large predictions (smallest over largest), and the
    log-likelihood. variant: a format.
    """

    name: str
    size: float
    evenness: float
    score: float
    variant: str = ""

    @property
    def rate(self) -> float:
        """Of dropout: weights thrown away with a rate p leave p / (1 - p) sum P^2 V^2."""
        odds = self.size**2
        return odds / (1.0 + odds)


def noise(seen: Observed, name: str, sigma: F64, variant: str = "") -> Noise | None:
    """Whether the error is random with this standard deviation (H, R, D), times one factor.

    As large then for small predictions as for large ones, and 0 on average.
    """
    use = (sigma > 0) & np.isfinite(seen.out)
    if use.sum() < 64:
        return None
    z = (seen.out[use] - seen.exact[use]) / sigma[use]
    order = np.argsort(sigma[use])
    parts = [float(np.mean(part**2)) for part in np.array_split(z[order], 6)]
    size = float(np.sqrt(np.median(parts)))
    if not size > 0 or min(parts) < 0.35 * size**2 or max(parts) > 3 * size**2:
        return None
    if abs(float(z.mean())) > 0.25 * size:
        return None
    scale = np.maximum(size * sigma[use], 1e-300)
    score = float(-0.5 * np.sum(np.minimum((z / size) ** 2, CLIP)) - np.sum(np.log(scale)))
    return Noise(name, size, min(parts) / max(parts), score, variant)
