"""What `explain` says of an output: findings as data, and the sentences made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulation.explain.exact import F64
from emulation.explain.fit import FITS, Bias, Match, Noise
from emulation.explain.whose import Share

KINDS = ("rounding", "rounding, but biased", "another computation")


@dataclass(frozen=True, eq=False)
class Judgement:
    """One output ("out", "lse", "dq", "dk", "dv") beside its exact value.

    size: elements; checked: those held against a derived bound, of which `outside` are beyond it,
    and `unlikely` beyond what independent roundings reach once in 10^12 such outputs. worst: the
    largest |error| / bound, at `where`. rms, expected: root mean square of the error, and the one
    that rounding leads one to expect. allowed: rms of the bound. chi: mean square of the error in
    units of its expectation, element by element. rows, heads: first and last with an element
    outside. nonfinite: NaN and infinities where the exact value is finite. blocks: the largest
    |error| / bound of blocks of rows and columns.
    """

    output: str
    size: int
    checked: int
    outside: int
    unlikely: int
    worst: float
    where: tuple[int, ...]
    rms: float
    expected: float
    allowed: float
    chi: float
    rows: tuple[int, int] | None
    heads: tuple[int, int] | None
    nonfinite: int
    blocks: F64 = field(repr=False)

    @property
    def wrong(self) -> bool:
        """Whether rounding cannot be all, suspects aside. The LSE's few roundings hang together, so
        that its mean square alone says nothing.
        """
        large = self.output != "lse" and self.chi > FITS
        return bool(self.outside or self.nonfinite or self.unlikely or large)


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """What is to be said of an attention output.

    kind: one of `KINDS`. judgements: by output. suspect: the computation that fits, if rounding
    does not (`where_seen`: in which output), others: what fits less well. noise: random errors that
    are not rounding in the claimed formats. source: group of roundings that dominates, with the
    shares of all. local: a fault of a place, in words. bias: with the source that makes it.
    kernels: whose arithmetic reproduces how many bits, best first.
    """

    kind: str
    judgements: dict[str, Judgement]
    suspect: Match | None = None
    where_seen: str = "out"
    same: tuple[str, ...] = ()
    others: tuple[Match, ...] = ()
    noise: Noise | None = None
    local: str | None = None
    source: str | None = None
    shares: dict[str, float] = field(default_factory=dict)
    bias: Bias | None = None
    bias_source: str | None = None
    kernels: tuple[Share, ...] = ()
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_rounding(self) -> bool:
        return self.kind != KINDS[2]

    @property
    def named(self) -> str | None:
        """The suspect's name, or None."""
        if self.suspect is not None:
            return self.suspect.name
        return self.noise.name if self.noise is not None else None

    def __repr__(self) -> str:
        """One line, with how many elements are beyond the bound; str() says all."""
        named = f": {self.named}" if self.named else ""
        counts = [
            f"{j.output} {j.outside} of {j.checked}"
            for j in self.judgements.values()
            if j.outside or j.output == "out"
        ]
        return f"<Verdict: {self.kind}{named}; beyond: {', '.join(counts)}>"

    def __str__(self) -> str:
        return " ".join(self.sentences())

    def sentences(self) -> list[str]:
        """The verdict, a fact a sentence."""
        said = [f"{self.kind.capitalize()}."]
        for judged in self.judgements.values():
            said.append(_judged(judged))
        said += self._computation()
        if self.source is not None and self.is_rounding:
            share = self.shares.get(self.source, 0.0)
            said.append(f"Most of it is {self.source} ({100 * share:.0f} %).")
        if self.bias is not None:
            said.append(
                f"The error leans toward {self.bias.towards}: on average {abs(self.bias.mean):.2f} "
                f"of its expected size, {_capped(self.bias.deviations)} standard errors from none"
                + (f"; it comes from {self.bias_source}." if self.bias_source else ".")
            )
        if self.kernels:
            best = self.kernels[0]
            lse = "" if best.lse is None else f" and {_percent(best.lse)} of LSE"
            said.append(
                f"Nearest arithmetic: {best.name}, {_percent(best.out)} of O{lse} bit for bit."
            )
        proved = self.facts.get("certified", {})
        if proved.get("rows"):
            said.append(
                f"Of the exact values {proved['rows']} rows were proved in ball arithmetic: radius "
                f"{proved['radius']:.0e}, difference {proved['difference']:.0e}."
            )
        return said + list(self.notes)

    def _computation(self) -> list[str]:
        if self.is_rounding:
            return []
        if self.suspect is None:
            if self.local is not None:
                return [self.local]
            if self.noise is not None:
                return [_noisy(self.noise)]
            return ["None of the known suspects fits."]
        m = self.suspect
        word = f" ({m.variant})" if m.variant else ""
        also = f", which here is the same as: {'; '.join(self.same)}" if self.same else ""
        left = (
            f"what remains is {m.remaining:.2f} of the expected rounding error, "
            f"{m.of_bound:.2g} of the bound"
        )
        place = "" if self.where_seen == "out" else f" in {self.where_seen}"
        if m.fits:
            return [
                f"It is this{place}: {m.name}{word}{also}. That explains "
                f"{explained(m.explained)} of the error and {_percent(m.inside)} of the elements "
                f"concerned; {left}."
            ]
        return [
            f"Most like{place}: {m.name}{word}{also}, which explains "
            f"{explained(m.explained)} of the error; {left}, so there is more."
        ]

    def to_markdown(self, **options: Any) -> str:
        """Tables for a terminal or a Markdown file."""
        from emulation.explain import pages

        return pages.to_markdown(self, **options)

    def to_json(self, **options: Any) -> str:
        """Strict JSON."""
        from emulation.explain import pages

        return pages.to_json(self, **options)

    def to_html(self, **options: Any) -> str:
        """One self-contained page (needs matplotlib)."""
        from emulation.explain import pages

        return pages.to_html(self, **options)


def _capped(deviations: float) -> str:
    return "over 100" if deviations > 100 else f"{deviations:.0f}"


def _noisy(noise: Noise) -> str:
    told = (
        f"weights thrown away at random, rate {noise.rate:.2f}"
        if noise.name.startswith("dropout")
        else f"errors {noise.size:.1f} times as large as that predicts"
    )
    word = f" to {noise.variant}" if noise.variant else ""
    return (
        f"It looks like this: {noise.name}{word} ({told}); small and large elements agree "
        f"within a factor of {1 / noise.evenness:.1f}."
    )


def explained(share: float) -> str:
    """The share of an error that a suspect takes away, where it takes any.

    >>> explained(0.5), explained(-1024.7)
    ('50.0 %', 'nothing')
    """
    return _percent(share) if share > 0 else "nothing"


def _percent(share: float) -> str:
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    shown = f"{100 * share:.1f} %"
    return f"{100 * share:.5f} %" if shown in ("100.0 %", "0.0 %") else shown


def _judged(j: Judgement) -> str:
    if j.nonfinite:
        return f"{j.output}: {j.nonfinite} of {j.size} elements are not finite where they must be."
    place = ", ".join(map(str, j.where))
    head = (
        f"{j.output}: rms error {j.rms:.2e}, expected {j.expected:.2e}; "
        f"{j.outside} of {j.checked} elements beyond the bound"
    )
    if j.outside and j.rows is not None and j.heads is not None:
        seen = f"{_span('row', j.rows)} of {_span('head', j.heads)}"
        return f"{head} ({seen}), at worst {j.worst:.3g} times at ({place})."
    more = f", {j.unlikely} beyond what independent roundings reach" if j.unlikely else ""
    return f"{head}{more}, at most {j.worst:.2f} of it at ({place})."


def _span(what: str, ends: tuple[int, int]) -> str:
    first, last = ends
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def blocks(ratio: F64, rows: int = 96, columns: int = 48) -> F64:
    """The largest of blocks of rows and columns, over heads: (H, N, D) -> at most (rows, columns).

    >>> blocks(np.ones((2, 300, 3))).shape
    (96, 3)
    """
    flat = ratio.max(axis=0)
    for axis, most in ((0, rows), (1, columns)):
        length = flat.shape[axis]
        edges = np.unique(np.linspace(0, length, min(most, length) + 1).astype(int))
        flat = np.maximum.reduceat(flat, edges[:-1], axis=axis)
    return np.asarray(flat)
