"""What an attribution consists of: contributions, their statistics, and the table they form."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.arguments import echo
from emulation.plan import Plan
from emulation.problem import Array
from emulation.sources import GROUPS, SOURCES
from emulation.tracking import F64

#: Residuals above this share of the error are explained in the notes and in the verdict.
EXPECTED_RESIDUAL = 1e-6


@dataclass(frozen=True, eq=False)
class Contribution:
    """One source's, or one group's, part of the error.

    contribution has the output's shape and keeps its sign; rms, max (of the absolute value) and
    mean (bias) are over all elements; share = <contribution, error> / <error, error>, so that
    shares and the residual's sum to 1.
    """

    name: str
    group: str
    about: str
    contribution: F64
    rms: float
    max: float
    mean: float
    share: float


def contribution_of(name: str, group: str, about: str, part: F64, error: F64) -> Contribution:
    """A part of an error with its statistics."""
    energy = float(np.vdot(error, error))
    return Contribution(
        name=name,
        group=group,
        about=about,
        contribution=part,
        rms=float(np.sqrt(np.mean(part**2))) if part.size else 0.0,
        max=float(np.max(np.abs(part), initial=0.0)),
        mean=float(np.mean(part)) if part.size else 0.0,
        share=float(np.vdot(part, error)) / energy if energy else 0.0,
    )


class Parts(dict[str, "Attribution"]):
    """Attributions by output; a missing one is named, with what there is and why."""

    def __missing__(self, output: Any) -> Attribution:
        raise KeyError(
            f"parts: no {echo(output)}, must be one of {', '.join(map(repr, self))} (gradients "
            "come with dout)"
        )


@dataclass(frozen=True, eq=False)
class Attribution:
    """The error of one output and its parts. Arrays are float64: (..., N, D), or (..., N) for the
    LSE.

    error = observed - exact = sum of sources[...].contribution + residual. `before_cast` is the
    same for the value before the output cast. The attribution that `attribute` returns is that of
    "out"; `parts` holds it and the others ("lse", and with dout "dq", "dk", "dv"). a - b is the
    attribution of the difference of two algorithms.
    """

    output: str
    algorithm: str
    plan: Plan | None
    dtype: str
    observed: F64
    exact: F64
    error: F64
    sources: dict[str, Contribution]
    groups: dict[str, Contribution]
    residual: F64
    residual_share: float
    oracle_radius: float
    notes: tuple[str, ...] = ()
    tiles: Array | None = None
    before_cast: Attribution | None = None
    parts: dict[str, Attribution] = dataclasses.field(default_factory=Parts)

    def __sub__(self, other: Attribution) -> Attribution:
        """e_self - e_other, source by source: why two algorithms differ, neither being exact."""
        if not isinstance(other, Attribution):
            return NotImplemented
        if self.observed.shape != other.observed.shape or self.output != other.output:
            raise ValueError(
                f"other: {other.output} of shape {other.observed.shape}, must be "
                f"{self.output} of shape {self.observed.shape}"
            )
        if not np.array_equal(self.exact, other.exact):
            raise ValueError("other: explains other inputs, must have the same exact values")
        before = None
        if self.before_cast is not None and other.before_cast is not None:
            before = self.before_cast - other.before_cast
        zero = np.zeros(self.error.shape)
        names = [n for n in SOURCES if n in self.sources or n in other.sources]
        difference = assemble(
            output=self.output,
            algorithm=f"{self.algorithm} - {other.algorithm}",
            plan=self.plan,
            dtype=self.dtype,
            observed=self.observed,
            exact=other.observed,
            errors={
                n: (self.sources[n].contribution if n in self.sources else zero)
                - (other.sources[n].contribution if n in other.sources else zero)
                for n in names
            },
            radius=self.oracle_radius + other.oracle_radius,
            tiles=self.tiles,
            before_cast=before,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )
        shared = [n for n in self.parts if n in other.parts and n != self.output]
        parts = {n: self.parts[n] - other.parts[n] for n in shared}
        return with_parts(difference, parts)

    def verdict(self) -> str:
        """The groups in one line, largest first: "output cast 58.7 %, P rounding 41.2 %, ..."; and
        what none accounts for, where that is more than a millionth of the error.
        """
        ranked = sorted(self.groups.values(), key=lambda g: -abs(g.share))
        parts = [f"{g.name} {_percent(g.share)}" for g in ranked]
        if self.residual_share > EXPECTED_RESIDUAL:
            energy = float(np.vdot(self.error, self.error))
            rest = float(np.vdot(self.residual, self.error)) / energy
            parts.append(f"unaccounted for {_percent(rest)}")
        return ", ".join(parts)

    def to_markdown(self) -> str:
        """Tables for a terminal or a Markdown file."""
        from emulation import report

        return report.to_markdown(self)

    def to_json(self) -> str:
        """Strict JSON: statistics of every source and group of every part."""
        from emulation import report

        return report.to_json(self)

    def to_html(self, **options: Any) -> str:
        """One self-contained page with pictures (needs matplotlib)."""
        from emulation import report

        return report.to_html(self, **options)


def _percent(share: float) -> str:
    digits = (
        1
        if abs(share) >= 0.01 or share == 0
        else min(6, 1 - math.floor(math.log10(abs(share)) + 2))
    )
    return f"{100 * share:.{digits}f} %"


def assemble(
    *,
    output: str,
    algorithm: str,
    plan: Plan | None,
    dtype: str,
    observed: F64,
    exact: F64,
    errors: dict[str, F64],
    radius: float,
    tiles: Array | None = None,
    before_cast: Attribution | None = None,
    notes: tuple[str, ...] = (),
) -> Attribution:
    """An Attribution from signed errors by source; what they miss is the residual."""
    error = observed - exact
    residual = error - sum(errors.values(), start=np.zeros(error.shape))
    sources = {
        name: contribution_of(name, SOURCES[name].group, SOURCES[name].about, errors[name], error)
        for name in SOURCES
        if name in errors
    }
    groups = {}
    for group in GROUPS:
        members = [s for s in sources.values() if s.group == group]
        if members:
            part = sum((s.contribution for s in members), start=np.zeros(error.shape))
            about = ", ".join(s.name for s in members)
            groups[group] = contribution_of(group, group, about, part, error)
    norm = float(np.linalg.norm(error))
    return Attribution(
        output=output,
        algorithm=algorithm,
        plan=plan,
        dtype=dtype,
        observed=observed,
        exact=exact,
        error=error,
        sources=sources,
        groups=groups,
        residual=residual,
        residual_share=float(np.linalg.norm(residual)) / norm if norm else 0.0,
        oracle_radius=radius,
        notes=notes,
        tiles=tiles,
        before_cast=before_cast,
    )


def with_parts(main: Attribution, others: dict[str, Attribution]) -> Attribution:
    """`main` with its parts, itself among them."""
    return dataclasses.replace(main, parts=Parts({main.output: main, **others}))
