"""How a `Plot` is drawn: inline SVG for the page, or a file of its own in either scheme."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from emulation.claims.claim import Plot
from emulation.report.drawing import (
    INK,
    LINE,
    NARROW,
    SOFT,
    WIDE,
    canvas,
    colour,
    decades,
    frame,
    log_axis,
    picture,
)
from emulation.report.style import GROUP_COLOURS, palette

# After `drawing`, which says what to install where matplotlib is missing.
from matplotlib.lines import Line2D  # isort: skip
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator  # isort: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CYCLE = tuple(GROUP_COLOURS)
_STYLES: tuple[Any, ...] = ("-", "--", ":")


def inline(plot: Plot, key: str) -> str:
    """The plot for the page: wide and narrow, in the page's colours."""
    return picture(key, plot.title, lambda wide: _figure(plot, wide))


def standalone(plot: Plot, *, dark: bool) -> str:
    """The plot as an SVG file of its own; the same plot gives the same bytes."""
    svg = inline(plot, "p").split("</svg>")[0] + "</svg>"
    colours = palette(dark)
    svg = re.sub(r"var\((--[a-z0-9-]+)\)", lambda m: colours.get(m[1], "sans-serif"), svg)
    box = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg)
    assert box is not None
    size = f'xmlns="http://www.w3.org/2000/svg" width="{box[1]}" height="{box[2]}"'
    ground = f'<rect width="100%" height="100%" fill="{colours["--card"]}"/>'
    head, rest = svg.split(">", 1)
    return head.replace("<svg", f"<svg {size}", 1) + ">" + ground + rest + "\n"


def _looks(plot: Plot) -> dict[str, tuple[str, Any]]:
    """Colour and line style of every series; groups of sources keep their own colour."""
    looks: dict[str, tuple[str, Any]] = {}
    used = 0
    for name in plot.series:
        if name in GROUP_COLOURS:
            looks[name] = (colour(name), "-")
        else:
            looks[name] = (colour(_CYCLE[used % len(_CYCLE)]), _STYLES[used // len(_CYCLE) % 3])
            used += 1
    return looks


def _figure(plot: Plot, wide: bool) -> Figure:
    names, looks = list(plot.series), _looks(plot)
    legend = 20 * len(names) + 12
    if wide:
        figure = canvas(WIDE, max(300, legend + 60))
        axes = frame(figure, 74, 52, 300, 30)
    else:
        figure = canvas(NARROW, 260 + legend)
        axes = frame(figure, 62, 48 + legend, 14, 30)
    for name in names:
        points = plot.series[name]
        x, y = [p[0] for p in points], [p[1] for p in points]
        shade, style = looks[name]
        axes.plot(x, y, style, color=shade, marker="o", markersize=3.5)
    every = [p for points in plot.series.values() for p in points]
    if plot.log_y:
        log_axis(axes.yaxis, *decades([p[1] for p in every]), 7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({p[0] for p in every})
        step = -(-len(ticks) // (8 if wide else 4))
        axes.xaxis.set_major_locator(FixedLocator(ticks[::step]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_count))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8 if wide else 4, integer=True))
    axes.set_xlabel(plot.x)
    style_of: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(plot.y, (0, 1), xytext=(0, 10), fontsize=12, color=SOFT, **style_of)
    lines = [Line2D([], [], color=looks[n][0], linestyle=looks[n][1], marker="o") for n in names]
    place: dict[str, Any] = (
        {"loc": "upper left", "bbox_to_anchor": (1 - 292 / WIDE, 1)} if wide
        else {"loc": "lower left", "bbox_to_anchor": (0, 0)}
    )  # fmt: skip
    figure.legend(lines, names, frameon=False, labelcolor=INK, fontsize=11, **place)
    return figure


def _count(value: float, _position: int | None = None) -> str:
    """16384 as 16k.

    >>> _count(16384), _count(96)
    ('16k', '96')
    """
    whole = round(value)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else f"{value:g}"
