"""The forms of the measured claims: JSON for machines, Markdown for a terminal, one HTML file.

All three come from the same `ClaimResult`s, and the JSON holds enough to make the other two again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from emulation.claims.claim import ClaimResult, Plot, Verdict
from emulation.report import text
from emulation.report.document import document
from emulation.report.json_report import plain, versions

SCHEMA = "cuflash.claims/1"
"""Changes when a reader of the old form would misread the new one."""

_SIGNS = {
    "holds": "--g-dsr",
    "holds if": "--g-sum",
    "does not hold": "--g-rescale",
    "not measured": "--soft",
}
_TITLE = "Why flash and standard attention differ"
_LONG = 40
"""Rows of a table that the page shows open; longer ones fold."""


def to_json(results: Sequence[ClaimResult], *, machine: Mapping[str, Any], command: str) -> str:
    """Strict JSON of everything: figures, verdicts, rules, tables, plots, seeds, times."""
    data = {
        "schema": SCHEMA,
        "command": command,
        "machine": dict(machine),
        "versions": versions(),
        "claims": [plain(dataclasses.asdict(r)) for r in results],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def from_json(data: str) -> tuple[list[ClaimResult], dict[str, Any]]:
    """The results of `to_json`, and the rest of it. ValueError for another schema."""
    found = json.loads(data)
    if found.get("schema") != SCHEMA:
        raise ValueError(f"schema: got {found.get('schema')!r}, must be {SCHEMA!r}")
    results = []
    for claim in found.pop("claims"):
        verdict = Verdict(**claim.pop("verdict"))
        plots = [Plot(**p) for p in claim.pop("plots")]
        results.append(ClaimResult(verdict=verdict, plots=plots, **claim))
    return results, found


def shown(value: Any) -> str:
    """A cell: figures short, 0 only where it is exactly 0.

    >>> shown(0.000303), shown(12), shown(0.0), shown(2.5), shown(None)
    ('3.03e-4', '12', '0', '2.5', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        if value == 0 or 0.01 <= abs(value) < 1e5:
            return f"{value:.4g}"
        return text.number(value)
    return str(value)


def columns(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """All names of a table's columns, in the order of their first use."""
    return list(dict.fromkeys(name for row in table for name in row))


def reproduce(number: int, full: bool) -> str:
    """The command that measures one claim again."""
    return f"cuflash claims --only {number}" + (" --full" if full else "")


# -- Markdown --------------------------------------------------------------------------


def to_markdown(results: Sequence[ClaimResult], *, full: bool = False) -> str:
    """One table of verdicts with the command of each row, then each claim's setting and rule."""
    lines = [f"# {_TITLE}", "", "| # | claim | verdict | command |", "| --- | --- | --- | --- |"]
    for r in results:
        said = _cell(f"**{r.verdict.kind}**: {r.verdict.text}")
        command = reproduce(r.number, full)
        lines.append(f"| {r.number} | {_cell(r.says)} | {said} | `{command}` |")
    for r in results:
        seconds = f"{r.seconds:.1f} s, {r.cpu_seconds:.1f} s of CPU"
        lines += ["", f"## {r.number}. {r.title}", "", f"- setting: {r.setting}"]
        lines += [f"- rule: {r.rule}", f"- tasks: {len(r.seeds)}, {seconds}"]
        lines += [f"- not measured: {'; '.join(r.missing)}"] * bool(r.missing)
    return "\n".join(lines) + "\n"


def _cell(value: str) -> str:
    return text.printable(value, 2000).replace("|", "\\|")


# -- HTML ------------------------------------------------------------------------------


def _e(value: object) -> str:
    return escape(text.printable(value, 4000), quote=True)


def _badge(kind: str) -> str:
    return f'<span class="dot" style="background:var({_SIGNS[kind]})"></span><b>{_e(kind)}</b>'


def _overview(results: Sequence[ClaimResult], full: bool) -> str:
    rows = "".join(
        f'<tr><th scope="row"><a href="#c{r.number}">{r.number}</a></th>'
        f'<td class="text about">{_e(r.says)}</td><td class="text">{_badge(r.verdict.kind)}</td>'
        f'<td class="text about measured">{_e(r.verdict.text)}</td>'
        f'<td class="text"><code>{_e(reproduce(r.number, full))}</code></td></tr>'
        for r in results
    )
    head = "".join(
        f'<th scope="col" class="text">{name}</th>'
        for name in ("", "the article says", "verdict", "what is measured", "again")
    )
    return (
        '<div class="scroll card" tabindex="0" role="region" aria-label="Verdicts"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _table(table: Sequence[Mapping[str, Any]]) -> str:
    names = columns(table)
    if not names:
        return ""
    wordy = {n for n in names if any(isinstance(row.get(n), str) for row in table)}
    cls = {n: ' class="text"' if n in wordy else "" for n in names}
    head = "".join(f'<th scope="col"{cls[n]}>{_e(n)}</th>' for n in names)
    body = "".join(
        "<tr>" + "".join(f"<td{cls[n]}>{_e(shown(row.get(n, '')))}</td>" for n in names) + "</tr>"
        for row in table
    )
    found = (
        '<div class="scroll card" tabindex="0" role="region" aria-label="Figures"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    state = " open" if len(table) <= _LONG else ""
    return (
        f"<details{state}><summary>Figures<span>{len(table)} rows</span></summary>{found}</details>"
    )


def _section(r: ClaimResult) -> str:
    from emulation.claims.plots import inline

    pictures = "".join(
        f'<figure class="card wide-figure"><figcaption>{_e(p.title)}</figcaption>'
        f"{inline(p, f'c{r.number}p{i}')}</figure>"
        for i, p in enumerate(r.plots)
        if any(p.series.values())
    )
    missing = f" Not measured: {_e('; '.join(r.missing))}." if r.missing else ""
    return (
        f'<h2 id="c{r.number}">{r.number}. {_e(r.title)}</h2>'
        f'<p class="intro">“{_e(r.says)}”</p>'
        f"<p>{_badge(r.verdict.kind)}: {_e(r.verdict.text)}</p>"
        f'<p class="soft">Setting: {_e(r.setting)}. Rule: {_e(r.rule)} '
        f"{len(r.seeds)} tasks, {r.seconds:.1f} s ({r.cpu_seconds:.1f} s of CPU).{missing}</p>"
        f"{pictures}{_table(r.table)}"
    )


def to_html(
    results: Sequence[ClaimResult], *, machine: Mapping[str, Any], command: str, full: bool = False
) -> str:
    """One page that loads nothing: the table of verdicts, then every claim with its pictures.

    Raises ImportError with the command that installs matplotlib.
    """
    facts = text.flatten({**machine, **versions()})
    pairs = "".join(f'<tr><th scope="row">{_e(n)}</th><td>{_e(v)}</td></tr>' for n, v in facts)
    main = f"""<header>
<h1>{_TITLE}</h1>
<p class="lead">An article’s claims about FlashAttention, measured. No verdict is written by hand:
each follows from the figures by the rule beside it.</p>
</header>
{_overview(results, full)}
{"".join(_section(r) for r in results)}
<h2>What was computed</h2>
<div class="card"><table class="pairs"><tbody>{pairs}</tbody></table></div>
<h2>Make it again</h2><pre><code>{_e(command)}</code></pre>
<footer>Made by cuflash.</footer>"""
    return document(_TITLE, main, "a{color:inherit}.measured{min-width:340px}")
