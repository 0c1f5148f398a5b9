"""A verdict as Markdown, strict JSON and one HTML file that loads nothing.

All three print the same rows. Text that came from a user or a file passes `printable`, and in HTML
`escape`, before it reaches a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from emulation.explain.fit import Match
from emulation.explain.verdict import Verdict, explained
from emulation.report.document import document
from emulation.report.json_report import plain, versions
from emulation.report.text import flatten, number, percent, printable

SCHEMA = "cuflash.explain/1"
_TITLES = {
    "rounding": "This is rounding",
    "rounding, but biased": "This is rounding, but biased",
    "another computation": "This is another computation",
}
Table = tuple[tuple[str, ...], list[list[str]]]


def judgements(verdict: Verdict) -> Table:
    """One line an output."""
    head = (
        "output", "elements", "held against a bound", "outside", "largest error / bound",
        "at", "rms error", "expected",
    )  # fmt: skip
    rows = [
        [
            j.output, str(j.size), str(j.checked), str(j.outside + j.nonfinite),
            number(j.worst), ", ".join(map(str, j.where)), number(j.rms), number(j.expected),
        ]
        for j in verdict.judgements.values()
    ]  # fmt: skip
    return head, rows


def candidates(verdict: Verdict) -> Table:
    """Computations that were compared, the best first; of rounding there is none to find."""
    head = ("computation", "which", "explains", "remaining, of the expected error", "of the bound")
    rows = [
        [m.name, m.variant, explained(m.explained), number(m.remaining), number(m.of_bound)]
        for m in _compared(verdict)
    ]
    return head, rows


def _compared(verdict: Verdict) -> list[Match]:
    found = () if verdict.is_rounding else (verdict.suspect, *verdict.others)
    return [m for m in found if m is not None]


def arithmetic(verdict: Verdict) -> Table:
    """Known kernels, by the bits that they reproduce."""
    head = ("arithmetic", "equal elements of O", "of LSE")
    return head, [[k.name, percent(k.out), percent(k.lse)] for k in verdict.kernels]


def sources(verdict: Verdict) -> Table:
    """Groups of roundings, by their share of the error."""
    ranked = sorted(verdict.shares.items(), key=lambda x: -abs(x[1]))
    return ("source", "share of the error"), [[name, percent(share)] for name, share in ranked]


_SECTIONS = (
    ("Outputs", judgements),
    ("What computation it is", candidates),
    ("Whose arithmetic it is", arithmetic),
    ("Where the rounding happens", sources),
)


def _pipe(table: Table) -> list[str]:
    head, rows = table
    safe = [[printable(c).replace("|", "\\|") for c in row] for row in [list(head), *rows]]
    widths = [max(len(row[i]) for row in safe) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in safe
    ]
    return [lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:], ""]


def to_markdown(
    verdict: Verdict,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Headline, sentences, tables. more: further lines, such as on another output."""
    out = [f"# {_TITLES[verdict.kind]}", ""]
    out += [*(f"- {printable(line, 600)}" for line in verdict.sentences()[1:]), ""]
    out += [*(f"- {printable(line, 600)}" for line in more), ""] if more else []
    out += [f"Input: {printable(source)}", ""] if source else []
    if options:
        out += ["Options: " + ", ".join(f"{n} {v}" for n, v in flatten(options)), ""]
    for title, make in _SECTIONS:
        table = make(verdict)
        if table[1]:
            out += [f"## {title}", "", *_pipe(table)]
    return "\n".join(out)


def to_json(
    verdict: Verdict,
    *,
    source: str | None = None,
    command: str | None = None,
    options: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Strict JSON (RFC 8259), indented; the same arguments give the same bytes."""
    data = {
        "schema": SCHEMA,
        "kind": verdict.kind,
        "named": verdict.named,
        "variant": None if verdict.suspect is None else verdict.suspect.variant,
        "same as": list(verdict.same),
        "seen in": verdict.where_seen,
        "sentences": [*verdict.sentences(), *more],
        "outputs": {
            name: {n: x for n, x in vars(j).items() if n != "blocks"}
            for name, j in verdict.judgements.items()
        },
        "candidates": [vars(m) for m in _compared(verdict)],
        "fault": verdict.local,
        "noise": None if verdict.noise is None else vars(verdict.noise),
        "bias": None if verdict.bias is None else vars(verdict.bias),
        "source": verdict.source,
        "bias source": verdict.bias_source,
        "shares": verdict.shares,
        "arithmetic": [
            {
                "name": k.name, "out": k.out, "lse": k.lse, "elements": k.elements,
                "plan": None if k.plan is None else k.plan.to_json(),
            }
            for k in verdict.kernels
        ],
        "facts": verdict.facts,
        "input": source,
        "command": command,
        "options": dict(options or {}),
        "versions": versions(),
    }  # fmt: skip
    return json.dumps(plain(data), indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def _e(value: object, limit: int = 600) -> str:
    return escape(printable(value, limit), quote=True)


def _table(table: Table) -> str:
    head, rows = table
    top = "".join(f'<th scope="col">{_e(c)}</th>' for c in head)
    body = "".join(
        f'<tr><th scope="row">{_e(row[0])}</th>' + "".join(f"<td>{_e(c)}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    )  # fmt: skip
    return (
        '<div class="scroll card" tabindex="0" role="region"><table><thead><tr>'
        f"{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _maps(verdict: Verdict) -> str:
    """Where errors are large in units of the bound."""
    from emulation.report import pictures

    cards = []
    for i, j in enumerate(verdict.judgements.values()):
        if j.output == "lse" or not j.blocks.size:
            continue
        n, d = j.blocks.shape
        title = f"{j.output}: largest error in units of the bound, rows held against it"
        picture = pictures.block_map(f"w{i}", title, j.blocks, n, d, "largest |error| / bound")
        cards.append(
            f'<figure class="card whole"><h3>{_e(title)}</h3><figcaption>Blocks of rows and '
            "columns, the largest over heads. Above 1 no rounding reaches.</figcaption>"
            f"{picture}</figure>"
        )
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def to_html(
    verdict: Verdict,
    *,
    source: str | None = None,
    command: str | None = None,
    options: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> str:
    """One self-contained page; the same arguments give the same bytes. Raises ImportError with the
    command that installs matplotlib.
    """
    title = _TITLES[verdict.kind]
    notes = "".join(f"<li>{_e(line)}</li>" for line in (*verdict.sentences()[1:], *more))
    sections = "".join(
        f"<h2>{_e(name)}</h2>{_table(table)}"
        for name, table in ((name, make(verdict)) for name, make in _SECTIONS)
        if table[1]
    )
    pairs = "".join(
        f'<tr><th scope="row">{_e(n)}</th><td>{_e(v)}</td></tr>'
        for n, v in flatten({**dict(options or {}), **versions()})
    )
    lead = verdict.named or (f"mostly {verdict.source}" if verdict.source else verdict.kind)
    again = (
        "" if command is None else f"<h2>Make it again</h2><pre><code>{_e(command)}</code></pre>"
    )
    main = f"""<header>
<p class="eyebrow">{_e(source or "attention output")}</p>
<h1>{_e(title)}</h1>
<p class="lead">{_e(lead[0].upper() + lead[1:])}.</p>
<ul class="notes">{notes}</ul>
</header>
{sections}
<h2>Where it sits</h2>
{_maps(verdict)}
<h2>What was asked</h2>
<div class="card"><table class="pairs"><tbody>{pairs}</tbody></table></div>
{again}
<footer>Made by cuflash. Bounds are derived, not chosen; a suspect is named by the error itself.
</footer>"""
    return document(title, main)
