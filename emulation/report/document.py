"""The shell of every HTML page: one file that loads nothing, and whose policy forbids it."""

from __future__ import annotations

from html import escape

from emulation.report.style import STYLE
from emulation.report.text import printable

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, main: str, style: str = "") -> str:
    """A page around `main`, which is HTML; title is text, of which
    only what a page can show is kept, style is CSS behind the common one.

    >>> document("a < b", "<p>c</p>").splitlines()[7]
    '<title>a &lt; b</title>'
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(printable(title))}</title>
<style>
{STYLE}{style}</style>
</head>
<body>
<main>
{main}
</main>
</body>
</html>
"""
