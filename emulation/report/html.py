"""The report as one HTML file that loads nothing: no address, no script, pictures and style inside.

Every text that came from a user or a file passes `_e` before it reaches the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from emulation.report import text
from emulation.report.document import document
from emulation.report.json_report import versions
from emulation.report.style import group_variable

if TYPE_CHECKING:
    from emulation.contributions import Attribution

_SHARES = (
    "A share is ⟨c, e⟩ / ⟨e, e⟩: how much of the {noun} e the contribution c accounts for. Shares "
    "keep their sign and sum to 100 % with the residual. “Before the cast” is the {noun} "
    "before the result was rounded to the output format."
)
_TERMS = (
    ("S", "scores, Q Kᵀ times the scale"),
    ("reference", "subtracted from a row’s scores before the exponential, often their maximum"),
    ("P", "2 to the power of S minus reference, in log2 units: the weights, not yet divided"),
    ("l", "sum of P along a row"),
    ("V", "the values; the output O is P V / l"),
    ("alpha", "multiplies l and O when the reference moves"),
    ("LSE", "log-sum-exp of a row’s scores: reference plus log l"),
)

_HEAD = "".join(
    f'<th scope="col"{kind}>{name}</th>'
    for name, kind in (
        ("source", ""),
        ("group", ' class="text"'),
        ("rms", ""),
        ("max", ""),
        ("mean (bias)", ""),
        ("share before<br>the cast", ""),
        ("share", ""),
        ("what is rounded", ' class="text"'),
    )
)


def _e(value: object) -> str:
    return escape(text.printable(value), quote=True)


def _figures(x: float) -> str:
    """A number for reading rather than copying: 2.84 × 10⁻⁵ with a real exponent."""
    if x == 0 or not math.isfinite(x):
        return _e(text.number(x))
    mantissa, exponent = text.number(x).split("e")
    return f"{mantissa} × 10<sup>{exponent}</sup>".replace("-", "−")


def _minus(shown: str) -> str:
    """Numbers as print sets them: true minus signs, no line break before a per cent sign."""
    return re.sub(r"(?<![\w-])-(?=\d)|(?<=\de)-(?=\d)", "−", shown).replace(" %", "\u00a0%")


def _dot(group: str) -> str:
    return f'<span class="dot" style="background:var({group_variable(group)})"></span>'


def _table(attribution: Attribution) -> str:
    rows = text.rows(attribution)
    grouped = {r.name for r in rows if r.kind == "group"}
    out = [
        '<div class="scroll card" tabindex="0" role="region" aria-label="Table of sources">'
        f"<table><thead><tr>{_HEAD}</tr></thead><tbody>"
    ]
    for row in rows:
        inside = row.kind == "source" and row.group in grouped
        kind = row.kind if row.kind != "source" or inside else "one"
        dot = "" if inside or row.kind == "total" else _dot(row.group or row.name)
        cells = [text.number(row.rms), text.number(row.max), text.number(row.mean)]
        cells += [text.percent(row.before), text.percent(row.share)]
        figures = "".join(f"<td>{_e(_minus(cell))}</td>" for cell in cells)
        group = "" if row.kind != "source" or inside else row.group
        about = "" if row.kind == "group" else row.about
        out.append(
            f'<tr class="{kind}"><th scope="row">{dot}{_e(row.name)}</th>'
            f'<td class="text">{_e(group)}</td>{figures}'
            f'<td class="text about">{_e(about)}</td></tr>'
        )
    return "".join(out) + "</tbody></table></div>"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><th scope="row">{_e(n)}</th><td>{_e(v)}</td></tr>' for n, v in pairs)
    return f'<table class="pairs"><tbody>{body}</tbody></table>'


def _legend(attribution: Attribution) -> str:
    """Colour, name and share of every group; also the strip, where no share of note is negative."""
    groups = sorted(attribution.groups.values(), key=lambda g: (-abs(g.share), g.name))
    items = "".join(
        f"<li>{_dot(g.name)}{_e(g.name)} <b>{_minus(text.percent(g.share))}</b></li>"
        for g in groups
    )
    strip = ""
    if groups and all(math.isfinite(g.share) and g.share > -0.005 for g in groups):
        bars = "".join(
            f'<i style="flex:{g.share:.5f};background:var({group_variable(g.name)})"></i>'
            for g in groups
            if g.share >= 0.002
        )
        strip = f'<div class="strip" aria-hidden="true">{bars}</div>'
    return f'{strip}<ul class="legend">{items}</ul>'


def _stats(attribution: Attribution) -> str:
    stats = text.Statistics.of(attribution.error)
    exact = text.rms(attribution.exact)
    noun = text.noun(attribution)
    whose = "the second’s" if text.is_difference(attribution) else "the exact"
    ratio = (
        f"{_figures(stats.rms / exact)} of {whose} rms" if exact and math.isfinite(exact) else ""
    )
    sigmas = f"± {_figures(stats.stderr)} standard error"
    shape = " × ".join(str(n) for n in attribution.error.shape)
    radius = float(attribution.oracle_radius)
    boxes = (
        (f"rms {noun}", _figures(stats.rms), ratio),
        (f"largest {noun}", _figures(stats.max), f"of {shape} values"),
        (f"mean {noun} (bias)", _figures(stats.mean), sigmas),
        ("radius of the exact values", _figures(radius), "what the oracle leaves open"),
    )
    cells = "".join(f"<div><dt>{n}</dt><dd>{v}<small>{s}</small></dd></div>" for n, v, s in boxes)
    return f'<dl class="stats">{cells}</dl>'


def _terms() -> str:
    said = "; ".join(f"<b>{name}</b>: {about}" for name, about in _TERMS)
    return f'<p class="intro terms">{said}.</p>'


def _key(attribution: Attribution, *more: str) -> str:
    """The legend of lines: the whole, `more` and, without `more`, every group."""
    names = [n for n in more if n not in attribution.groups and n != "before the cast"]
    groups = sorted(attribution.groups.values(), key=lambda g: (-g.rms, g.name))
    names += [g.name for g in groups if g.rms > 0 and (not more or g.name in more)]
    items = [
        f'<li><span class="dot" style="background:var(--ink)"></span>{text.noun(attribution)}</li>'
    ]
    if "before the cast" in more:
        items.append(
            '<li><span class="dot" style="background:var(--soft)"></span>before the '
            "cast (dashed)</li>"
        )
    items += [f"<li>{_dot(name)}{_e(name)}</li>" for name in names]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _card(title: str, caption: str, picture: str, whole: bool = False) -> str:
    kind = "card whole" if whole else "card"
    body = f"<h3>{title}</h3><figcaption>{caption}</figcaption>{picture}"
    return f'<figure class="{kind}">{body}</figure>'


def _pictures(attribution: Attribution, sweep: Sequence[Mapping[str, Any]] | None) -> str:
    from emulation.report import pictures

    if attribution.error.ndim < 2 or not attribution.error.size:
        return ""
    if not np.all(np.isfinite(attribution.error)):
        return '<p class="soft">Not all of it is finite, so there is nothing to draw.</p>'
    noun = text.noun(attribution)
    cards = [
        _card(
            "Along the rows",
            f"Rms {noun} of each query row: the whole (thick) and each group in its colour. "
            "Groups that are exactly 0 have no line.",
            _key(attribution) + pictures.by_row(attribution),
        ),
        _card(
            f"Signed {noun}",
            f"Values by {noun} (the outermost 0.1 % lies outside). Below, the mean alone, "
            "magnified: bar ± one, band ± two standard errors, values taken as independent.",
            pictures.histogram(attribution),
        ),
    ]
    few = _key(attribution, "before the cast", *pictures.TILE_GROUPS)
    by_tiles = pictures.by_tiles(attribution)
    if by_tiles is not None:
        cards.append(
            _card(
                "Rows by number of tiles",
                f"Rms over all rows that visit as many tiles of keys: the {noun} (thick), the "
                f"{noun} before the cast (dashed), rescaling and summation order in their colours. "
                "Rows that see more keys also average more values.",
                few + by_tiles,
            )
        )
    by_size = pictures.by_tile_size(sweep, noun) if sweep else None
    if by_size is not None:
        cards.append(
            _card(
                "The same rows in other tiles",
                "The last rows again, with other tile sizes and nothing else changed: the "
                f"{noun} (thick), before the cast (dashed), rescaling and summation order.",
                few + by_size,
            )
        )
    # An odd picture out takes the whole width.
    alone = len(cards) % 2 == 0
    cards.append(
        _card(
            "Where in the output",
            f"Rms {noun} of blocks of rows and columns, over all heads.",
            pictures.heat_map(attribution, whole=alone),
            whole=alone,
        )
    )
    return f'<div class="grid">{"".join(cards)}</div>'


def _other_outputs(attribution: Attribution) -> str:
    from emulation.report import pictures

    out = []
    for i, (name, part) in enumerate(text.parts_of(attribution).items()):
        if part is attribution:
            continue
        stats = text.Statistics.of(part.error)
        picture = pictures.shares(part, key=f"p{i}") if part.error.size else ""
        notes = _notes(part.notes)
        out.append(
            f'<details class="card"><summary>{_e(name)}<span>rms {_minus(text.number(stats.rms))}. '
            f"{_minus(_e(text.headline(part)))}</span></summary>{_table(part)}"
            f'<div class="wide-figure">{picture}</div>{notes}</details>'
        )
    return "<h2>Other outputs</h2>" + "".join(out) if out else ""


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{_e(n)}</li>" for n in notes)}</ul>' if notes else ""


def to_html(
    attribution: Attribution,
    *,
    title: str | None = None,
    source: str | None = None,
    command: str | None = None,
    options: Mapping[str, Any] | None = None,
    sweep: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """One self-contained page: verdict, table, pictures, options, plan, and how to make it again.

    source: one line on where the input came from. command: the shell line that makes this report.
    sweep: the same rows with other tile sizes, each `dict(tiles=int, tile_n=int, error=float,
    groups={name: rms})`, with `error_before_cast=float` where known. The same arguments give the
    same bytes. Raises ImportError with the command that installs matplotlib.
    """
    from emulation.report import pictures

    heading = title or text.title(attribution)
    shape = " × ".join(str(n) for n in attribution.error.shape)
    facts = [attribution.output, text.dtype_of(attribution), shape, *([source] if source else [])]
    plan = text.flatten(text.plan_of(attribution))
    cards = []
    if options:
        cards.append(f'<div class="card"><h3>Options</h3>{_pairs(text.flatten(options))}</div>')
    if plan:
        cards.append(f'<div class="card"><h3>Plan</h3>{_pairs(plan)}</div>')
    cards.append(f'<div class="card"><h3>Versions</h3>{_pairs(text.flatten(versions()))}</div>')
    told = text.sides(attribution)
    sides = f'<p class="sides">{_e(told)}</p>\n' if told else ""
    noun = text.noun(attribution)
    made = (
        ""
        if command is None
        else (
            '<h2>Make it again</h2><p class="soft">The same input gives the same bytes.</p>'
            f"<pre><code>{_e(command)}</code></pre>"
        )
    )
    main = f"""<header>
<p class="eyebrow">{" · ".join(_e(f) for f in facts)}</p>
<h1>{_e(heading)}</h1>
<p class="lead">{_minus(_e(text.headline(attribution)))}</p>
{sides}{_notes(attribution.notes)}
{_legend(attribution)}
{_stats(attribution)}
</header>
<h2>Every place that rounds</h2>
<p class="intro">{_SHARES.format(noun=noun)}</p>
{_table(attribution)}
{_terms()}
<figure class="card wide-figure">{pictures.shares(attribution)}</figure>
<h2>Where it sits</h2>
{_pictures(attribution, sweep)}
{_other_outputs(attribution)}
<h2>What was computed</h2>
<div class="grid">{"".join(cards)}</div>
{made}
<footer>Made by cuflash. Contributions keep their signs and close by secants, not derivatives; what
the oracle still sees is the residual.
Verdict: {_e(attribution.verdict())}.</footer>"""
    return document(heading, main)
