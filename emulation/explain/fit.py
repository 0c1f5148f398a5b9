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

from emulation.explain.exact import F64, Mask

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
    def outside(self) -> Mask:
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


def spread(along: F64, energy: F64, a: float, axis: int) -> tuple[float, float]:
    """Standard error of a = sum(along) / sum(energy) if what lies along an axis hangs together: the
    columns of a row, or (weights alike in all rows) the rows of a column; and how many independent
    groups that leaves. inf of fewer than two such groups.
    """
    along, energy = (x.sum(axis=axis) for x in (along, energy))
    size = float(energy.sum())
    groups = size**2 / float(np.sum(energy * energy))
    if not groups > 2.0:
        return np.inf, groups
    rest = float(np.sqrt(np.sum((along - a * energy) ** 2))) / size
    return rest * float(np.sqrt(groups / (groups - 1.0))), groups


def _deviation(along: F64, energy: F64, a: float, axis: int) -> float:
    return spread(along, energy, a, axis)[0]


def sure(excess: float, deviation: float, groups: float, level: float = SIGNIFICANT) -> bool:
    """Whether a number found with this standard error, itself estimated of so many groups, stands
    out as far as `level` known standard errors do: the likelihood ratio of Student's t.

    >>> sure(9.0, 1.0, 1000), sure(9.0, 1.0, 5), sure(9.0, 0.0, 5)
    (True, False, False)
    """
    if not (groups > 2.0 and 0 < deviation < np.inf):
        return False
    ratio = 0.5 * groups * np.log1p((excess / deviation) ** 2 / (groups - 1.0))
    return bool(ratio >= level**2 / 2)


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
#: Standard errors, taken over columns, that go with the rows'.
NOTED = 3.0
#: So many rows all err one way by chance less than once in 10^12, whatever their distribution:
#: 2^(1 - n) <= 1e-12.
LEAST = 41


def bias(seen: Observed) -> Bias | None:
    """The larger of the mean of z and of z sign(exact), if it is one.

    Rows are the evidence, equal ones counting once: below `LEAST` there is none. Where weights are
    alike in all rows, so are their errors, and many rows say what one does: columns must lean
    together, too, if less surely (`NOTED`).
    """
    best = None
    for way in WAYS:
        z = _leaning(seen.out, seen, way)
        rows, columns = _means(z, -1), _means(z, 1)
        different = len(np.unique(rows))
        if different < LEAST:
            continue
        mean = float(rows.mean())
        error = float(rows.std(ddof=1)) / np.sqrt(different)
        surely = sure(abs(mean), error, different) and _together(columns, abs(mean), NOTED)
        if abs(mean) >= BIASED and surely:
            found = Bias(_towards(way, mean), mean, abs(mean) / error)
            if best is None or abs(mean) > abs(best.mean):
                best = found
    return best


WAYS = ("one sign", "zero")


def _towards(way: str, mean: float) -> str:
    if way == "zero":
        return "infinity" if mean > 0 else "zero"
    return "one sign (up)" if mean > 0 else "one sign (down)"


def _leaning(out: F64, seen: Observed, way: str) -> F64:
    """z, or z sign(exact), clipped."""
    with np.errstate(all="ignore"):
        z = np.where(seen.sigma > 0, (out - seen.exact) / seen.sigma, 0.0)
    return np.asarray(np.clip(z * (np.sign(seen.exact) if way == "zero" else 1.0), -30, 30))


def _means(z: F64, axis: int) -> F64:
    """Means along an axis, where they are finite."""
    means = z.mean(axis=axis).ravel()
    return np.asarray(means[np.isfinite(means)])


def _together(columns: F64, excess: float, level: float) -> bool:
    """Whether the columns' mean stands out by their spread."""
    count = len(np.unique(columns))
    return count > 2 and sure(excess, float(columns.std(ddof=1)) / np.sqrt(count), count, level)


def beyond(found: Bias, seen: Observed, models: list[F64]) -> bool:
    """Whether a bias is larger than that of every modelled rounding (H, R, D_v), by `BIASED` and by
    `SURE` standard errors over rows as over columns.
    """
    way = "one sign" if "sign" in found.towards else "zero"
    leans = [0.0, *(float(_means(_leaning(m, seen, way), -1).mean()) for m in models)]
    excess = max(found.mean - max(leans), min(leans) - found.mean)
    columns = _means(_leaning(seen.out, seen, way), 1)
    large = excess >= max(BIASED, SURE * abs(found.mean) / found.deviations)
    return large and _together(columns, excess, SURE)


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


#: Mean squares of places, over the whole's, that random errors of one size keep.
EVEN = 0.2


def parts_of(z: F64) -> F64:
    """Mean squares of each head, of sixths of the rows and of the columns; NaN is left out."""
    parts = [z[h] for h in range(len(z))] if len(z) > 1 else []
    parts += np.array_split(z, min(6, z.shape[1]), axis=1)
    parts += np.array_split(z, min(6, z.shape[2]), axis=2)
    enough = [p for p in parts if np.isfinite(p).sum() >= 64]
    return np.array([float(np.nanmean(p * p)) for p in enough])


def noise(
    seen: Observed, name: str, sigma: F64, variant: str = "", everywhere: bool = False
) -> Noise | None:
    """Whether the error is random with this standard deviation (H, R, D), times one factor.

    As large then for small predictions as for large ones, and 0 on average. everywhere: alike in
    all heads, rows and columns, too, not some right and others not.
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
    if everywhere:
        whole = (seen.out - seen.exact) / np.maximum(sigma, 1e-300)
        places = parts_of(np.where(use, whole, np.nan))
        if places.size and (places.min() < EVEN * size**2 or places.max() > size**2 / EVEN):
            return None
    scale = np.maximum(size * sigma[use], 1e-300)
    score = float(-0.5 * np.sum(np.minimum((z / size) ** 2, CLIP)) - np.sum(np.log(scale)))
    return Noise(name, size, min(parts) / max(parts), score, variant)
