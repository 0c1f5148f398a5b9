"""Which suspect an output holds: forward, LSE, gradients, and random errors of a known shape."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from emulation.explain import fit, fitted, slopes
from emulation.explain.case import Case
from emulation.explain.exact import F64, NOTHING, Index
from emulation.explain.fit import Match, Observed
from emulation.explain.verdict import Judgement
from emulation.formats import FORMATS
from emulation.problem import Array

#: Of the suspects that look best on some rows, so many are compared on all close rows.
KEPT = 8
DROPOUT, HALF = "dropout left on", "all state in half precision"
#: Mean square of z of dv beyond what known correct kernels leave (1.28, bench/results).
LARGE = 1.3
SUMS = "backward: dK and dV summed up in half precision"
FACTOR = "backward: a gradient times a constant"
COARSE = "P rounded to another format before normalisation"

Found = tuple[Match | None, tuple[str, ...], tuple[Match, ...]]


def random_errors(
    case: Case, seen: Observed, close: Index, lse_wrong: bool = False
) -> fit.Noise | None:
    """Random errors that are not rounding in the claimed formats: dropout (which leaves LSE as it
    is), or half precision kept between all steps.
    """
    near = case.near(close)
    found = []
    if not lse_wrong:
        found = [fit.noise(seen, DROPOUT, near.spread / unit(case.problem.dtype), everywhere=True)]
    found += [fit.noise(seen, HALF, near.half)]
    for fmt, sigma in near.coarse.items():
        found.append(fit.noise(seen, COARSE, sigma, fmt))
    limits = {DROPOUT: (0.09, 3.0), HALF: (0.3, 4.0), COARSE: (0.6, 1.7)}
    good = [n for n in found if n is not None and limits[n.name][0] < n.size < limits[n.name][1]]
    return max(good, key=lambda n: n.score, default=None)


def accumulated(
    case: Case, seen: dict[str, Observed], dout: Array, bad: list[str]
) -> fit.Noise | None:
    """Whether the wrong ones of dk and dv err everywhere as sums kept in the format do."""
    if case.problem.dtype == "float32" or not bad or "dq" in bad:
        return None
    # The bulk of the error must be too large, not only what is beyond the bound.
    inside = {n: np.where(seen[n].outside, seen[n].exact, seen[n].out) for n in bad}
    if any(fit.chi_square(inside[n] - seen[n].exact, seen[n].sigma) < LARGE for n in bad):
        return None
    sigmas = slopes.accumulated(case.problem, dout.astype(np.float64))
    found = []
    for step in sigmas["dv"]:
        parts = [
            fit.noise(seen[n], SUMS, np.hypot(sigmas[n][step], seen[n].sigma), str(step))
            for n in bad
        ]
        if all(x is not None and 0.4 < x.size < 2.5 for x in parts):
            found.append(max((x for x in parts if x is not None), key=lambda x: x.score))
    best = max(found, key=lambda n: n.score, default=None)
    return None if best is None else dataclasses.replace(best, variant=case.problem.dtype)


def unit(dtype: str) -> float:
    """Unit roundoff of a half format; 1 for float32."""
    fmt = FORMATS[dtype]
    return fmt.unit_roundoff if fmt.bits == 16 else 1.0


def finite(seen: Observed, top: float = math.inf) -> Observed:
    """With NaN where nothing is known set right, and infinities as the largest number."""
    out = np.where(np.isnan(seen.out), seen.exact, np.clip(seen.out, -top, top))
    return dataclasses.replace(seen, out=np.where(np.isfinite(out), out, seen.exact))


def _fields(seen: Observed) -> tuple[F64, F64, F64, F64]:
    return seen.out, seen.exact, seen.sigma, seen.bound


def of_forward(
    case: Case, seen: Observed, out: Array, close: Index, judged: Judgement, models: list[F64]
) -> Found:
    """The suspect that fits best, others that are the same computation here, and the runners-up."""
    first = case.first_rows(close)
    keep = np.isfinite(out[:, case.rows[first]].astype(np.float64)).all(axis=(0, 2))
    if not keep.any():
        return None, (), ()
    at = np.searchsorted(close, first)
    part = Observed(*(x[:, at][:, keep] for x in _fields(seen)))
    matches: dict[tuple[str, str], Match] = {}
    for name, word, change in case.suspects("forward"):
        theirs = case.theirs(name, word, change, first)
        if theirs is not None:
            m = fit.match(part, name, word, theirs.out[:, keep], theirs.sigma[:, keep])
            if m is not None:
                matches[name, word] = m
    best = fit.ranked(matches.values())[:KEPT]
    best += [m for m in matches.values() if m.significant and m not in best][:KEPT]
    if len(first) < len(close):
        best = _on_close(case, best, seen, out, close)
    return _chosen(best + fitted.of_forward(case, seen, close, models), judged.wrong)


def _on_close(
    case: Case, best: list[Match], seen: Observed, out: Array, close: Index
) -> list[Match]:
    """The same suspects on all close rows."""
    keep = np.isfinite(out[:, case.rows[close]].astype(np.float64)).all(axis=(0, 2))
    whole = Observed(*(x[:, keep] for x in _fields(seen)))
    changes = {(n, w): c for n, w, c in case.suspects("forward")}
    found = []
    for m in best:
        theirs = case.theirs(m.name, m.variant, changes[m.name, m.variant], close)
        if theirs is not None:
            found.append(
                fit.match(whole, m.name, m.variant, theirs.out[:, keep], theirs.sigma[:, keep])
            )
    return fit.ranked(found)


#: Shares that a suspect must explain of the error, and of the elements beyond the bound.
MOST, NEARLY = 0.5, 0.9


def _chosen(best: list[Match], wrong: bool) -> Found:
    """A suspect counts if it leaves only rounding, its difference standing whole in the error; and,
    where rounding is excluded, if it explains half. Of elements beyond the bound it must leave few.
    """

    def counts(m: Match) -> bool:
        if m.significant and m.fits and m.explained > 0 and m.inside >= NEARLY:
            return True
        return wrong and m.explained >= MOST and not (m.fits and m.inside < NEARLY)

    good = [m for m in best if counts(m)]
    if not good:
        return None, (), tuple(fit.ranked(best)[:5])
    fitting = [m for m in good if m.fits]
    top = max(fitting, key=lambda m: m.score) if fitting else fit.ranked(good)[0]
    alike = [m for m in best if m is not top and fit.same_result(top, m)]
    same = tuple(dict.fromkeys(f"{m.name} ({m.variant})" if m.variant else m.name for m in alike))
    others = fit.ranked(m for m in best if m is not top and m not in alike)
    return top, same, tuple(others[:5])


def of_lse(case: Case, lse: Array, close: Index, judged: Judgement) -> Found:
    """The suspect that a wrong LSE holds."""
    near, rows = case.near(close), case.rows[close]
    exact, sigma = near.lse, near.lse_sigma
    keep = np.isfinite(exact).all(axis=0) & np.isfinite(lse[:, rows]).all(axis=0)
    if not keep.any():
        return None, (), ()
    bound = case.bounds(close)[1]
    seen = Observed(
        *(x[:, keep][..., None] for x in (lse[:, rows].astype(np.float64), exact, sigma, bound))
    )
    found = []
    for of in ("lse", "forward"):
        for name, word, change in case.suspects(of):
            if of == "forward" and not judged.wrong:
                continue
            theirs = case.theirs(name, word, change, close)
            if theirs is not None:
                found.append(
                    fit.match(
                        seen, name, word, theirs.lse[:, keep][..., None],
                        np.maximum(sigma[:, keep][..., None], 2.0**-24),
                    )
                )  # fmt: skip
    return _chosen(fit.ranked(found)[:KEPT], judged.wrong) if judged.wrong else (None, (), ())


def of_gradients(case: Case, seen: dict[str, Observed], dout: Array, wrong: bool) -> Found:
    """Suspects of the backward, and (where a gradient is wrong) those of the forward in it."""
    top = FORMATS[case.problem.dtype].max
    seen = {n: finite(x, top) for n, x in seen.items()}
    found: list[Match] = []
    for of in ("backward", "forward"):
        if of == "forward" and (not wrong or any(m.fits for m in found)):
            break
        for name, word, change in case.suspects(of):
            if change.out is not None or change.tiles is not None or change.state is not None:
                continue
            if change.gradients is not None:
                theirs = slopes.moved(case.gradient("", "", NOTHING, dout), change, case.problem)
            else:
                theirs = case.gradient(name, word, change, dout)
            if any(theirs.value[n].shape != x.exact.shape for n, x in seen.items()):
                continue
            called = name if of == "backward" else f"backward: {name}"
            value = {n: np.clip(theirs.value[n], -top, top) for n in seen}
            matches = [
                fit.match(x, called, word, value[n], theirs.sigma[n]) for n, x in seen.items()
            ]
            m = _joint(matches, seen, value, theirs.sigma)
            if m is not None:
                found.append(m)
    best = fit.ranked(found)[: 2 * KEPT]
    chosen = _chosen(best, wrong)
    if not wrong or (chosen[0] is not None and chosen[0].fits):
        return chosen
    for name, word, value, sigma in slopes.factors(seen):
        one = fit.match(seen[name], FACTOR, word, value[name], sigma[name])
        m = _joint([one], seen, value, sigma)
        if m is not None and (m.fits or chosen[0] is None):
            best.append(m)
    return _chosen(best, wrong)


def _joint(
    matches: list[Match | None], seen: dict[str, Observed], value: dict[str, F64],
    sigma: dict[str, F64],
) -> Match | None:  # fmt: skip
    """One match of several outputs: it fits if it fits all of them, those included where the
    suspect changes nothing.
    """
    real = [m for m in matches if m is not None]
    if not real:
        return None
    chi = max(fit.chi_square(x.out - value[n], sigma[n]) for n, x in seen.items())
    top = max(real, key=lambda m: m.explained)
    total = sum(
        float(
            -0.5
            * np.sum(np.minimum(((x.out - value[n]) / np.maximum(sigma[n], 1e-300)) ** 2, 1e12))
        )
        for n, x in seen.items()
    )
    return dataclasses.replace(
        top,
        score=total,
        explained=min(m.explained for m in real),
        remaining=math.sqrt(chi),
        fits=chi <= fit.FITS,
        coefficient=top.coefficient if all(m.significant for m in real) else 0.0,
    )
