"""The report as Markdown that also reads well as plain text in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emulation.report import text

if TYPE_CHECKING:
    from emulation.contributions import Attribution

_HEAD = ("source", "group", "rms", "max", "mean (bias)", "share before the cast", "share")
_SPECIAL = str.maketrans({c: "\\" + c for c in "\\|<>`*_[]"})


def _cell(value: str) -> str:
    return value.translate(_SPECIAL)


def _table(head: tuple[str, ...], lines: list[list[str]], left: int) -> list[str]:
    """Pipe table, padded; the first `left` columns flush left, figures flush right."""
    widths = [max(len(line[i]) for line in [list(head), *lines]) for i in range(len(head))]
    rule = [("-" * w if i < left else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    padded = [
        [
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(x, widths, strict=True))
        ]
        for x in [list(head), rule, *lines]
    ]
    return ["| " + " | ".join(line) + " |" for line in padded]


def _lines(rows: list[text.Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        name = _cell(row.name)
        name = name if row.kind == "source" else f"**{name}**"
        group = _cell(row.group) if row.kind == "source" else ""
        figures = [text.number(row.rms), text.number(row.max), text.number(row.mean)]
        lines.append([name, group, *figures, text.percent(row.before), text.percent(row.share)])
    return lines


def _notes(notes: Sequence[str]) -> list[str]:
    return [*(f"- {_cell(text.printable(note))}" for note in notes), ""] if notes else []


def to_markdown(
    attribution: Attribution,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    groups: bool = True,
) -> str:
    """Headline and notes, the table of sources, and the groups of the other outputs.

    Shares are of the whole error; those before the cast are of the error that the result had before
    it was rounded to the output format. groups=False leaves out the column of groups, for narrow
    terminals. Ends with a newline.
    """
    parts = text.parts_of(attribution)
    out: list[str] = [
        f"# {_cell(text.printable(text.title(attribution)))}",
        "",
        _cell(text.headline(attribution)),
        "",
    ]
    told = text.sides(attribution)
    out += [_cell(text.printable(told)), ""] if told else []
    out += _notes(attribution.notes)
    if source is not None:
        out += [f"Input: {_cell(text.printable(source))}", ""]
    if options:
        out += ["Options: " + ", ".join(f"{n} {_cell(v)}" for n, v in text.flatten(options)), ""]
    for name, part in parts.items():
        main = part is attribution
        stats = text.Statistics.of(part.error)
        shape = " × ".join(str(n) for n in part.error.shape)
        out += [
            f"## {_cell(text.printable(name))}",
            "",
            f"{shape} values in {text.dtype_of(part)}; "
            f"rms {text.noun(part)} {text.number(stats.rms)}, "
            f"largest {text.number(stats.max)}, "
            f"mean {text.number(stats.mean)} ± {text.number(stats.stderr)}; "
            f"oracle radius {text.number(float(part.oracle_radius))}",
            "",
        ]
        lines = _lines(text.rows(part, sources=main))
        if main and groups:
            out += [*_table(_HEAD, lines, 2), ""]
        else:
            head = ("source" if main else "group", *_HEAD[2:])
            out += [*_table(head, [[x[0], *x[2:]] for x in lines], 1), ""]
        out += [] if main else _notes(part.notes)
    return "\n".join(out)
