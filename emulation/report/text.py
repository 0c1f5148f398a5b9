"""Words and figures shared by every form of the report: how a number looks, which rows a table has.

Markdown, JSON and HTML print the same rows through the same functions, so they cannot disagree.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from emulation.contributions import Attribution, Contribution

RESIDUAL = "residual"
"""Name of the row that closes the sum: what no source accounts for."""

_WORDS = {
    "output cast": "rounding the result to the output format",
    "P rounding": "rounding P before the product with V",
    "rescale": "rescaling the accumulator",
    "summation order": "the additions of P·V and of the row sum",
    "exponential": "the exponential",
    "score": "the scores",
    "normalisation": "the final division",
    "delta": "delta = rowsum(dO·O)",
    "dS rounding": "rounding dS before its products",
    "LSE": "the log-sum-exp",
    "P from forward": "the stored P",
    "dP": "the product dO·V",
    "dS": "the arithmetic of dS",
    RESIDUAL: "what no source accounts for",
}


@dataclass(frozen=True)
class Row:
    """One line of the table; shares are fractions (0.5 is 50 %), None where there is none."""

    kind: Literal["source", "group", "residual", "total"]
    name: str
    group: str
    about: str
    rms: float
    max: float
    mean: float
    before: float | None
    share: float | None


@dataclass(frozen=True)
class Statistics:
    """What signed errors come to. `stderr`: of the mean, elements taken as independent."""

    rms: float
    max: float
    mean: float
    stderr: float

    @staticmethod
    def of(x: NDArray[np.float64]) -> Statistics:
        """Of any shape; zeros for an empty array; NaN where x holds one.

        >>> Statistics.of(np.array([3.0, -4.0, 3.0, -4.0])).max
        4.0
        """
        if not x.size:
            return Statistics(0.0, 0.0, 0.0, 0.0)
        with np.errstate(all="ignore"):
            return Statistics(
                rms(x),
                float(np.max(np.abs(x))),
                float(np.mean(x)),
                float(np.std(x) / math.sqrt(x.size)),
            )


def rms(x: NDArray[np.float64]) -> float:
    """Root of the mean square, whose squares neither overflow nor vanish; 0 for an empty array."""
    top = float(np.max(np.abs(x))) if x.size else 0.0
    if top == 0.0 or not math.isfinite(top):
        return top
    return top * float(np.sqrt(np.mean((x / top) ** 2)))


def inner_share(c: NDArray[np.float64], e: NDArray[np.float64]) -> float | None:
    """<c, e> / <e, e>: the signed part of e that c accounts for; None where e is 0 or infinite."""
    top = float(np.max(np.abs(e))) if e.size else 0.0
    if top == 0.0 or not math.isfinite(top):
        return None
    scaled = e / top
    with np.errstate(all="ignore"):
        return float(np.sum((c / top) * scaled) / np.sum(scaled * scaled))


def printable(text: object, limit: int = 400) -> str:
    """One line that a terminal and a page can show: no control or bidirectional characters.

    >>> printable("a\\x1b[31m\\nb")
    'a�[31m b'
    """
    out = []
    for ch in str(text)[:limit]:
        category = unicodedata.category(ch)
        if ch in "\n\r\t" or category in ("Zl", "Zp"):
            out.append(" ")
        elif category in ("Cc", "Cf", "Cs", "Cn", "Co"):
            out.append("\ufffd")
        else:
            out.append(ch)
    return "".join(out) + ("…" if len(str(text)) > limit else "")


def number(x: float | None) -> str:
    """Three significant digits; 0 only for exactly 0.

    >>> number(2.841e-5), number(0.0), number(-0.5), number(float("nan"))
    ('2.84e-5', '0', '-5.00e-1', 'nan')
    """
    if x is None:
        return "–"
    if x == 0.0:
        return "0"
    if not math.isfinite(x):
        return str(float(x))
    mantissa, exponent = f"{x:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def percent(share: float | None) -> str:
    """A fraction as per cent: one decimal, more where that shows nothing, 0 only for exactly 0.

    >>> percent(0.5834), percent(0.000012), percent(-1.2e-9), percent(0.0)
    ('58.3 %', '0.0012 %', '-1.2e-7 %', '0 %')
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = 100.0 * share
    if value == 0.0:
        return "0 %"
    if abs(value) >= 0.05:
        return f"{value:.1f} %"
    if abs(value) >= 1e-3:
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f} %"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)} %"


def _row(kind: Literal["source", "group"], c: Contribution, before: Contribution | None) -> Row:
    return Row(
        kind,
        printable(c.name),
        printable(c.group),
        printable(c.about),
        float(c.rms),
        float(c.max),
        float(c.mean),
        None if before is None else float(before.share),
        float(c.share),
    )


def rows(attribution: Attribution, *, sources: bool = True) -> list[Row]:
    """The table: groups by falling rms, each followed by its sources; then residual and total.

    A group with one source is that source's line alone. `sources=False` leaves the group lines.
    """
    before = attribution.before_cast
    table: list[Row] = []
    ranked = sorted(attribution.groups.values(), key=lambda g: (-_finite(g.rms), g.name))
    for group in ranked:
        members = [s for s in attribution.sources.values() if s.group == group.name]
        members.sort(key=lambda s: (-_finite(s.rms), s.name))
        if len(members) != 1 or not sources:
            table.append(_row("group", group, before.groups.get(group.name) if before else None))
        if sources:
            for s in members:
                table.append(_row("source", s, before.sources.get(s.name) if before else None))
    error = Statistics.of(attribution.error)
    rest = Statistics.of(attribution.residual)
    table.append(
        Row(
            "residual",
            RESIDUAL,
            "",
            "what no source accounts for",
            rest.rms,
            rest.max,
            rest.mean,
            inner_share(before.residual, before.error) if before else None,
            inner_share(attribution.residual, attribution.error),
        )
    )
    whole = inner_share(attribution.error, attribution.error)
    about = "the first minus the second" if is_difference(attribution) else "observed − exact"
    before_whole = inner_share(before.error, before.error) if before else None
    table.append(
        Row(
            "total",
            "total",
            "",
            about,
            error.rms,
            error.max,
            error.mean,
            before_whole,
            whole,
        )
    )
    return table


def _finite(x: float) -> float:
    return float(x) if math.isfinite(x) else math.inf


def install(extra: str) -> str:
    """The command, in the checkout, that installs one of its extras.

    >>> install("report")
    "python -m pip install '.[report]'"
    """
    return f"python -m pip install '.[{extra}]'"


def is_difference(attribution: Attribution) -> bool:
    """Whether this is one algorithm minus another, rather than minus the exact values."""
    return " - " in attribution.algorithm


def noun(attribution: Attribution) -> str:
    """What the figures are about: "error", or "difference"."""
    return "difference" if is_difference(attribution) else "error"


def sides(attribution: Attribution) -> str:
    """Which of two algorithms is the first; empty for one algorithm."""
    if not is_difference(attribution):
        return ""
    first, second = attribution.algorithm.split(" - ", 1)
    return f"Every difference is {first} (the first) minus {second} (the second)."


def dtype_of(part: Attribution) -> str:
    """The format of an output's values; the LSE is float32 whatever the inputs are."""
    if part.output == "lse":
        return "float32"
    wide = part.plan is not None and part.plan.numerics.out == "float32"
    if wide and is_difference(part):
        return f"float32 (the first) and {part.dtype} (the second)"
    return "float32" if wide else part.dtype


def title(attribution: Attribution) -> str:
    """The question that the report answers."""
    if is_difference(attribution):
        one, other = attribution.algorithm.split(" - ", 1)
        return f"Why {one} and {other} attention differ"
    return f"Where the error of {attribution.algorithm} attention comes from"


def headline(attribution: Attribution) -> str:
    """The verdict as two sentences: the groups of 5 % or more, then rescaling and the rest."""
    what = noun(attribution)
    if not np.any(attribution.error):
        return f"There is no {what}: all values are equal."
    shares = {g.name: float(g.share) for g in attribution.groups.values()}
    shares[RESIDUAL] = inner_share(attribution.residual, attribution.error) or 0.0
    if not (np.all(np.isfinite(attribution.error)) and np.all(np.isfinite(list(shares.values())))):
        return f"The {what} is not finite, so it cannot be shared out."
    big = sorted((n for n, s in shares.items() if abs(s) >= 0.05), key=lambda n: -shares[n])
    parts = [f"{100 * shares[n]:.0f} % of the {what} comes from {_say(n)}" for n in big[:1]]
    parts += [f"{100 * shares[n]:.0f} % from {_say(n)}" for n in big[1:]]
    start = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
    rest = sum(s for n, s in shares.items() if n not in big and n != "rescale")
    # To the precision of the groups above: a sum of what is left over would be a figure of noise.
    tail = f"everything else together {percent(rest) if abs(rest) >= 5e-4 else 'below 0.05 %'}"
    if "rescale" in shares and "rescale" not in big:
        tail = f"rescaling contributes {percent(shares['rescale'])}, {tail}"
    elif "rescale" not in shares and attribution.plan is not None:
        tail = f"rescaling rounds nothing; {tail}"
    start = start or f"No group reaches 5 % of the {what}"
    return f"{start}. {tail[0].upper()}{tail[1:]}."


def _say(group: str) -> str:
    return _WORDS.get(group, printable(group))


def parts_of(attribution: Attribution) -> dict[str, Attribution]:
    """Every output's attribution, the main one first; {output: itself} where there are no parts."""
    parts = {attribution.output: attribution}
    parts.update({n: p for n, p in attribution.parts.items() if n != attribution.output})
    return parts


def plan_of(attribution: Attribution) -> dict[str, Any]:
    """The plan as plain data; {} for an algorithm without one."""
    return {} if attribution.plan is None else dict(attribution.plan.to_json())


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested data as (dotted name, text) pairs in the order given.

    >>> flatten({"a": {"b": 1}, "c": None})
    [('a.b', '1'), ('c', '–')]
    """
    pairs: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{printable(key)}"
        if isinstance(value, Mapping) and value:
            pairs += flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            pairs.append((name, ", ".join(printable(v) for v in value) or "–"))
        else:
            pairs.append((name, "–" if value is None else printable(value)))
    return pairs
