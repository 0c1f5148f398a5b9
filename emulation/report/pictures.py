"""The pictures of the HTML report, one function each: what is drawn, `drawing` says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emulation.report import text
from emulation.report.drawing import (
    HALF,
    INK,
    LINE,
    NARROW,
    SOFT,
    TINT,
    WIDE,
    Floats,
    canvas,
    colour,
    decades,
    frame,
    heading,
    log_axis,
    picture,
    power,
)

# After `drawing`, which says what to install where matplotlib is missing.
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator  # isort: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emulation.contributions import Attribution


def shares(attribution: Attribution, key: str = "a") -> str:
    """Share of every source before and after the output cast, and its rms on a log axis."""
    rows = [r for r in text.rows(attribution) if r.kind in ("source", "residual")]
    return picture(key, "Share and rms of every source", lambda wide: _draw_shares(rows, wide))


def _draw_shares(rows: Sequence[text.Row], wide: bool) -> Figure:
    labels, under, over = 158 if wide else 128, 26, 28
    block = 25 * len(rows) + under + over
    if wide:
        figure = canvas(WIDE, block)
        split = labels + int(0.58 * (WIDE - labels))
        left = frame(figure, labels, under, WIDE - split + 40, over)
        right = frame(figure, split + 30, under, 70, over)
    else:
        figure = canvas(NARROW, 2 * block + 22)
        left = frame(figure, labels, under + block + 22, 14, over)
        right = frame(figure, labels, under, 56, over + block + 22)
    _draw_share_bars(left, rows, wide)
    _draw_rms_dots(right, rows, wide)
    for axes, named in ((left, True), (right, not wide)):
        axes.set_ylim(len(rows) - 0.4, -0.6)
        names = [_short(r.name) if named else "" for r in rows]
        axes.set_yticks(np.arange(len(rows)), names, color=INK)
        axes.spines["left"].set_visible(False)
    return figure


#: Shares below this have one label: their two bars cannot be told apart.
_SMALL = 0.01


def _draw_share_bars(axes: Axes, rows: Sequence[text.Row], wide: bool) -> None:
    cast = any(r.before is not None for r in rows)
    after = np.nan_to_num([100 * (r.share or 0.0) for r in rows])
    before = np.nan_to_num([100 * (r.before or 0.0) for r in rows])
    colours = [colour(r.group or r.name) for r in rows]
    y, shift, height = np.arange(len(rows)), (0.18 if cast else 0.0), (0.32 if cast else 0.56)
    axes.barh(y - shift, after, height, color=colours, linewidth=0)
    if cast:
        axes.barh(y + shift, before, height, color=colours, linewidth=0, alpha=0.38)
    low, high = float(min(0, *after, *before)), float(max(1e-9, *after, *before))
    room = (high - low) * (0.2 if wide else 0.36)
    # Room on the left only where a label stands there.
    axes.set_xlim(low - (room if low <= -100 * _SMALL else 0.0), high + room)
    for i, row in enumerate(rows):
        pair = ((row.share, after[i], -shift, INK), (row.before, before[i], shift, SOFT))
        if max(abs(after[i]), abs(before[i])) < 100 * _SMALL:
            _label(axes, text.percent(row.share), 0.0, i, SOFT)
            continue
        for share, value, offset, tone in pair if cast else pair[:1]:
            if share is not None:
                _label(axes, text.percent(share), float(value), i + offset, tone)
    axes.axvline(0, color=SOFT, linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
    axes.xaxis.grid(color=LINE, linewidth=0.8)
    if wide:
        heading(axes, "share" + (" after the output cast, pale: before it" if cast else ""))
    else:
        heading(axes, "share" + (", pale: before the cast" if cast else ""))


def _draw_rms_dots(axes: Axes, rows: Sequence[text.Row], wide: bool) -> None:
    low, high = decades([r.rms for r in rows])
    log_axis(axes.xaxis, low, high, 8 if wide else 5)
    for i, row in enumerate(rows):
        tone = colour(row.group or row.name)
        if row.rms > 0 and np.isfinite(row.rms):
            axes.plot([low, row.rms], [i, i], color=tone, linewidth=2, alpha=0.38)
            axes.plot([row.rms], [i], "o", color=tone, markersize=7)
        at = min(max(row.rms, low), high) if np.isfinite(row.rms) else high
        _label(axes, text.number(row.rms), at, i, INK, gap=9)
    heading(axes, "rms, logarithmic")


def _label(axes: Axes, label: str, x: float, y: float, tone: str, gap: int = 6) -> None:
    """A small figure beside the end of a bar, on the side away from zero."""
    style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 10}
    side = "right" if x < 0 else "left"
    shift = (-gap if x < 0 else gap, 0)
    axes.annotate(label.replace("-", "−"), (x, y), xytext=shift, ha=side, color=tone, **style)


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


def _row_rms(x: Floats) -> Floats:
    """rms of every query row over heads and columns: (..., N, D) -> (N,)."""
    axes = tuple(i for i in range(x.ndim) if i != x.ndim - 2)
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt(np.mean(np.square(x), axis=axes)))


def _binned(values: Floats, bins: int) -> tuple[Floats, Floats]:
    """Centres and root mean squares of at most `bins` equal runs of rows."""
    edges = np.unique(np.linspace(0, len(values), min(bins, len(values)) + 1).astype(int))
    count = np.diff(edges)
    sums = np.add.reduceat(np.square(values), edges[:-1])
    return (edges[:-1] + edges[1:] - 1) / 2, np.sqrt(sums / count)


def by_row(attribution: Attribution) -> str:
    """rms error of each query row: in all, and of each group."""
    noun = text.noun(attribution)
    lines = [(noun, INK, _row_rms(attribution.error))]
    lines += [(g.name, colour(g.name), _row_rms(g.contribution)) for g in _ranked(attribution)]
    return picture(
        "b", f"{noun.capitalize()} against query row", lambda wide: _draw_rows(lines, wide)
    )


def _ranked(attribution: Attribution) -> list[Any]:
    return sorted(attribution.groups.values(), key=lambda g: (-g.rms, g.name))


def _draw_rows(lines: Sequence[tuple[str, str, Floats]], wide: bool) -> Figure:
    figure = canvas(HALF if wide else NARROW, 330 if wide else 290)
    axes = frame(figure, 48, 46, 12, 14)
    curves = [(*_binned(values, 128 if wide else 64), tone) for _, tone, values in lines]
    lo, hi = decades([float(v) for _, y, _ in curves for v in y])
    for x, y, tone in reversed(curves):
        width = 2.2 if tone == INK else 1.4
        axes.plot(x, np.where(y > 0, y, np.nan), color=tone, linewidth=width)
    log_axis(axes.yaxis, lo, hi, 8)
    axes.set_xlim(0, max(1, len(lines[0][2]) - 1))
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 4, integer=True))
    axes.set_xlabel("query row")
    return figure


TILE_GROUPS = ("rescale", "summation order")


def by_tiles(attribution: Attribution) -> str | None:
    """Error and rescale group by the tiles that a row visits; None where all rows visit as many."""
    tiles = attribution.tiles
    if tiles is None or attribution.error.ndim < 2 or len(np.unique(tiles[tiles > 0])) < 2:
        return None
    if len(tiles) != attribution.error.shape[-2]:
        return None
    counts = np.unique(tiles[tiles > 0])
    x = counts.astype(np.float64)

    def grouped(values: Floats) -> Floats:
        per_row = _row_rms(values)
        return np.array([np.sqrt(np.mean(np.square(per_row[tiles == t]))) for t in counts])

    noun = text.noun(attribution)
    series = [(noun, INK, "-", grouped(attribution.error))]
    if attribution.before_cast is not None:
        series.append(("before the cast", SOFT, "--", grouped(attribution.before_cast.error)))
    series += [
        (name, colour(name), "-", grouped(_contribution(attribution, name))) for name in TILE_GROUPS
    ]
    label = "tiles that a row visits"
    title = f"{noun.capitalize()} by number of tiles"
    return picture("c", title, lambda wide: _draw_tiles(x, series, label, wide, []))


def _contribution(attribution: Attribution, group: str) -> Floats:
    """Zeros for a group without any rounding."""
    if group in attribution.groups:
        return attribution.groups[group].contribution
    return np.zeros_like(attribution.error)


def by_tile_size(sweep: Sequence[Mapping[str, Any]], noun: str = "error") -> str | None:
    """The caller's sweep: the same rows with other tile sizes; None with fewer than two sizes."""
    points = sorted(sweep, key=lambda p: (int(p["tiles"]), -int(p["tile_n"])))
    if len(points) < 2:
        return None
    x = np.array([float(p["tiles"]) for p in points])
    series = [(noun, INK, "-", np.array([float(p["error"]) for p in points]))]
    if all("error_before_cast" in p for p in points):
        values = np.array([float(p["error_before_cast"]) for p in points])
        series.append(("before the cast", SOFT, "--", values))
    for name in TILE_GROUPS:
        values = np.array([float(p["groups"].get(name, 0.0)) for p in points])
        series.append((name, colour(name), "-", values))
    sizes = [str(int(p["tile_n"])) for p in points]
    label = "tiles that a row visits (size of a tile)"
    title = f"{noun.capitalize()} by tile size"
    return picture("s", title, lambda wide: _draw_tiles(x, series, label, wide, sizes))


def _draw_tiles(
    x: Floats,
    series: Sequence[tuple[str, str, str, Floats]],
    label: str,
    wide: bool,
    sizes: Sequence[str],
) -> Figure:
    figure = canvas(HALF if wide else NARROW, 330 if wide else 300)
    axes = frame(figure, 48, 62 if sizes else 46, 20, 34)
    lo, hi = decades([float(v) for *_, values in series for v in values])
    none = [name for name, _, _, values in series if not np.any(values)]
    for name, tone, dash, values in series:
        if name in none:
            continue
        y = np.where(values > 0, values, np.nan)
        axes.plot(x, y, dash, color=tone, marker="o", markersize=5 if len(x) <= 16 else 0)
    if sizes:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(FixedLocator(x.tolist()))
        names = {float(v): f"{v:g}\n({s})" for v, s in zip(x, sizes, strict=True)}
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: names.get(float(v), f"{v:g}")))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8 if wide else 5, integer=True))
    log_axis(axes.yaxis, lo, hi, 8)
    axes.set_xlabel(label)
    if none:
        heading(axes, ", ".join(none) + ": exactly 0")
    return figure


def histogram(attribution: Attribution) -> str:
    """The signed error with its mean, and that mean magnified beside its standard error."""
    error = attribution.error.ravel()
    stats = text.Statistics.of(error)
    noun = text.noun(attribution)
    title = f"Histogram of the {noun}"
    return picture("d", title, lambda wide: _draw_histogram(error, stats, noun, wide))


def _draw_histogram(error: Floats, stats: text.Statistics, noun: str, wide: bool) -> Figure:
    height = 330 if wide else 310
    figure = canvas(HALF if wide else NARROW, height)
    axes = frame(figure, 48, 134, 16, 14)
    reach = float(np.quantile(np.abs(error), 0.999)) or stats.max or 1.0
    unit = 10.0 ** np.floor(np.log10(reach))
    limit = reach / unit
    counts, edges = np.histogram(error / unit, bins=60, range=(-limit, limit))
    axes.stairs(counts / error.size, edges, fill=True, color=SOFT, alpha=0.6, linewidth=0)
    axes.axvline(0, color=SOFT, linewidth=1, linestyle=":")
    axes.axvline(stats.mean / unit, color=INK, linewidth=1.6)
    axes.set_xlim(-limit, limit)
    axes.xaxis.set_major_locator(MaxNLocator(7 if wide else 5))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    axes.yaxis.grid(color=LINE, linewidth=0.8)
    axes.set_xlabel(f"signed {noun}, in units of {power(unit)}")
    _draw_mean(frame(figure, 48, 40, 16, height - 82), stats, wide)
    return figure


def _draw_mean(axes: Axes, stats: text.Statistics, wide: bool) -> None:
    """The mean with one and two standard errors, on an axis that just holds them and 0."""
    span = 1.25 * (abs(stats.mean) + 2 * stats.stderr) or 1.0
    unit = 10.0 ** np.floor(np.log10(span))
    mean, error = stats.mean / unit, stats.stderr / unit
    axes.axvspan(mean - 2 * error, mean + 2 * error, color=TINT, linewidth=0)
    axes.axvline(0, color=SOFT, linewidth=1, linestyle=":")
    axes.errorbar([mean], [0], xerr=[error], fmt="o", color=INK, markersize=6, capsize=3)
    axes.set_xlim(-span / unit, span / unit)
    axes.set_ylim(-1, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    away = f"{mean / error:.1f} standard errors from 0" if error else text.number(stats.mean)
    label = f"mean: {away}, in units of {power(unit)}" if wide else f"mean: {away}"
    axes.set_xlabel(label.replace("-", "−"))


def blocks(error: Floats, rows: int = 128, columns: int = 64) -> Floats:
    """rms over heads and over blocks, (..., N, D) -> at most (rows, columns).

    >>> blocks(np.ones((2, 300, 3))).shape
    (128, 3)
    """
    square = np.square(error).reshape(-1, *error.shape[-2:]).mean(axis=0)
    for axis, most in ((0, rows), (1, columns)):
        length = square.shape[axis]
        edges = np.unique(np.linspace(0, length, min(most, length) + 1).astype(int))
        sums = np.add.reduceat(square, edges[:-1], axis=axis)
        count = np.diff(edges).reshape((-1, 1) if axis == 0 else (1, -1))
        square = sums / count
    return np.asarray(np.sqrt(square))


def heat_map(attribution: Attribution, *, whole: bool = False) -> str:
    """rms error of blocks of rows and columns; `whole`: as wide as the page."""
    cells = blocks(attribution.error)
    n, d = attribution.error.shape[-2:]
    full = WIDE if whole else HALF
    noun = text.noun(attribution)
    return picture(
        "e",
        f"Heat map of the {noun}",
        lambda wide: _draw_heat(cells, n, d, noun, full if wide else NARROW),
    )


def block_map(key: str, title: str, cells: Floats, n: int, d: int, what: str) -> str:
    """Any value of blocks of rows and columns (of n and d), as wide as the page."""
    return picture(
        key, title, lambda wide: _draw_heat(cells, n, d, "", WIDE if wide else NARROW, what)
    )


#: A slate that warms while its opacity grows from the page's own colour: for light and dark alike.
_HEAT = np.array([(0.42, 0.50, 0.62), (0.85, 0.30, 0.36)])


def _shade(level: Floats) -> Floats:
    """Levels in [0, 1] as RGBA, one axis more."""
    rgb = _HEAT[0] + level[..., None] * (_HEAT[1] - _HEAT[0])
    return np.concatenate([rgb, level[..., None]], axis=-1)


def _draw_heat(
    cells: Floats, n: int, d: int, noun: str, width: int, what: str | None = None
) -> Figure:
    height = 310 if width == NARROW else 330
    figure = canvas(width, height)
    axes = frame(figure, 48, 104, 12, 14)
    # The top per mille is clipped so that one spike does not blank the rest.
    top = float(np.quantile(cells, 0.999)) or float(cells.max()) or 1.0
    level = np.clip(cells / top, 0, 1).T
    axes.imshow(_shade(level), aspect="auto", interpolation="none", extent=(0, n, d, 0))
    axes.xaxis.set_major_locator(MaxNLocator(4 if width == NARROW else 8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("query row")
    axes.set_ylabel("column", labelpad=4)
    bar = frame(figure, 48, 40, 12, height - 52)
    bar.imshow(
        _shade(np.linspace(0, 1, 64)[None, :]),
        aspect="auto",
        interpolation="none",
        extent=(0, 1, 0, 1),
    )
    bar.set_yticks([])
    bar.set_xticks([0, 0.5, 1], ["0", text.number(top / 2), text.number(top)])
    first, _, last = bar.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    bar.set_xlabel(what or f"rms {noun} of a block")
    return figure
