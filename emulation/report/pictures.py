"""The pictures of the HTML report: inline SVG drawn by matplotlib, text kept as text, no id or date that varies.

Each picture is drawn twice, `wide` for a desktop and narrow for a phone, so that its text is never scaled small.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emulation.report import text
from emulation.report.style import SENTINELS, group_variable

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError(
        "the HTML report draws with matplotlib, which is not installed: pip install cuflash[report]"
    ) from error

if TYPE_CHECKING:
    from emulation.attribution import Attribution

Floats = NDArray[np.float64]

INK, SOFT, LINE = SENTINELS["--ink"], SENTINELS["--soft"], SENTINELS["--line"]
CARD, TINT = SENTINELS["--card"], SENTINELS["--tint"]
WIDE, HALF, NARROW = 1030, 500, 330
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 12.0,
    "axes.unicode_minus": True,
    "axes.linewidth": 1.0,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.size": 4.0,
    "ytick.major.size": 0.0,
    "text.parse_math": False,
    "text.color": INK,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def colour(group: str) -> str:
    """The drawing colour that stands for the group's CSS variable."""
    return SENTINELS[group_variable(group)]


@contextmanager
def _drawing() -> Iterator[None]:
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        # Only the measure of a name in a foreign script is lost: the page's own font shows it.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font", category=UserWarning)
        yield


def _figure(width: int, height: int) -> Figure:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    return figure


def _axes(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes whose edges keep the given distances (pixels) from the figure's."""
    width, height = (72 * float(s) for s in figure.get_size_inches())
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    return axes


def _power(value: float, _position: int | None = None) -> str:
    exponent = round(np.log10(value)) if value > 0 else 0
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def _log(axis: Any, low: float, high: float, ticks: int) -> None:
    """A log axis of whole decades, at most `ticks` of them labelled, labels without mathtext."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(numticks=ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_power))
    axis.grid(color=LINE, linewidth=0.8)


def _inline(figure: Figure, key: str, label: str, kind: str) -> str:
    """The figure as an <svg> element: ids prefixed by `key`, sentinels turned into CSS variables."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    head = f'<svg class="{kind}" viewBox="{box[1]}" role="img" aria-label="{escape(label)}">'
    svg = head + svg[svg.index(">") + 1 :]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", svg)
    svg = svg.replace("url(#", f"url(#{key}-").replace('xlink:href="#', f'href="#{key}-')
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*", "font-family: var(--sans)", svg)
    svg = re.sub(r'font: ([^;"\']*)\'DejaVu Sans\'[^;"]*', r"font: \1var(--sans)", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    names = {sentinel: name for name, sentinel in SENTINELS.items()}
    svg = re.sub(r"(: )(#01fe[0-9a-f]{2})", lambda m: f"{m[1]}var({names[m[2]]})", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _both(key: str, label: str, draw: Callable[[bool], Figure]) -> str:
    """Wide and narrow drawing of one picture; CSS shows one of them."""
    with _drawing():
        wide = _inline(draw(True), f"{key}w", label, "wide")
        narrow = _inline(draw(False), f"{key}n", label, "narrow")
    return wide + narrow


def _positive(values: Sequence[float] | Floats) -> list[float]:
    return [float(v) for v in values if np.isfinite(v) and v > 0]


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around the positive values, at most twelve."""
    good = _positive(values) or [1.0]
    high = 10.0 ** np.ceil(np.log10(max(good)) + 0.05)
    low = 10.0 ** np.floor(np.log10(min(good)) - 0.05)
    return max(low, high * 1e-12), high


# (a) ---------------------------------------------------------------------------------------------------------


def shares(attribution: Attribution, key: str = "a") -> str:
    """Share of every source before and after the output cast, and its rms on a log axis."""
    rows = [r for r in text.rows(attribution) if r.kind in ("source", "residual")]
    return _both(key, "Share and rms of every source", lambda wide: _draw_shares(rows, wide))


def _draw_shares(rows: Sequence[text.Row], wide: bool) -> Figure:
    pitch, labels = 25, 158 if wide else 128
    block = pitch * len(rows)
    if wide:
        figure = _figure(WIDE, block + 68)
        split = labels + int(0.58 * (WIDE - labels))
        left = _axes(figure, labels, 40, WIDE - split + 40, 28)
        right = _axes(figure, split + 30, 40, 70, 28)
    else:
        figure = _figure(NARROW, 2 * (block + 68) + 16)
        left = _axes(figure, labels, 40 + block + 68 + 16, 14, 28)
        right = _axes(figure, labels, 40, 56, 28 + block + 68 + 16)
    y = np.arange(len(rows))
    after = [100 * (r.share or 0.0) for r in rows]
    before = [100 * (r.before or 0.0) for r in rows]
    colours = [colour(r.group or r.name) for r in rows]
    cast = any(r.before is not None for r in rows)
    height = 0.32 if cast else 0.56
    left.barh(y - (0.18 if cast else 0), after, height, color=colours, linewidth=0)
    if cast:
        left.barh(y + 0.18, before, height, color=colours, linewidth=0, alpha=0.38)
    reach = [v for v in (*after, *before) if np.isfinite(v)] or [0.0]
    low, high = min(0.0, *reach), max(1e-9, *reach)
    room = (high - low) * (0.2 if wide else 0.36)
    left.set_xlim(low - (room if low < 0 else 0.0), high + room)
    for i, row in enumerate(rows):
        for value, offset, tone in ((row.share, -0.18, INK), (row.before, 0.18, SOFT)):
            if value is None or (offset > 0 and not cast):
                continue
            at = (100 * value, i + (offset if cast else 0.0))
            side = -1 if value < 0 else 1
            left.annotate(
                text.percent(value),
                at,
                xytext=(6 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                fontsize=10,
                color=tone,
            )
    left.axvline(0, color=SOFT, linewidth=1)
    left.xaxis.set_major_locator(MaxNLocator(6 if wide else 3))
    left.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
    left.xaxis.grid(color=LINE, linewidth=0.8)
    title = "share of the error" + (": after the cast (full), before it (pale)" if cast else "")
    _title(left, title if wide else "share: after the cast, before (pale)" if cast else "share")

    values = [r.rms for r in rows]
    lo, hi = _decades(values)
    _log(right.xaxis, lo, hi, 8 if wide else 5)
    for i, row in enumerate(rows):
        if row.rms > 0 and np.isfinite(row.rms):
            right.plot([lo, row.rms], [i, i], color=colours[i], linewidth=2, alpha=0.38)
            right.plot([row.rms], [i], "o", color=colours[i], markersize=7)
        right.annotate(
            text.number(row.rms),
            (max(row.rms, lo) if np.isfinite(row.rms) else hi, i),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color=INK,
        )
    _title(right, "rms, logarithmic")
    for axes, named in ((left, True), (right, not wide)):
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(y, [_short(r.name) if named else "" for r in rows], color=INK)
        axes.spines["left"].set_visible(False)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


def _title(axes: Axes, title: str) -> None:
    axes.annotate(
        title,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 12),
        textcoords="offset points",
        fontsize=12,
        color=SOFT,
    )


# (b) ---------------------------------------------------------------------------------------------------------


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
    lines = [("error", INK, _row_rms(attribution.error))]
    lines += [(g.name, colour(g.name), _row_rms(g.contribution)) for g in _ranked(attribution)]
    return _both("b", "Error against query row", lambda wide: _draw_rows(lines, wide))


def _ranked(attribution: Attribution) -> list[Any]:
    return sorted(attribution.groups.values(), key=lambda g: (-g.rms, g.name))


def _draw_rows(lines: Sequence[tuple[str, str, Floats]], wide: bool) -> Figure:
    figure = _figure(HALF if wide else NARROW, 330 if wide else 290)
    axes = _axes(figure, 48, 46, 12, 14)
    curves = [(*_binned(values, 128 if wide else 64), tone) for _, tone, values in lines]
    lo, hi = _decades([float(v) for _, y, _ in curves for v in y])
    for x, y, tone in reversed(curves):
        width = 2.2 if tone == INK else 1.4
        axes.plot(x, np.where(y > 0, y, np.nan), color=tone, linewidth=width)
    _log(axes.yaxis, lo, hi, 8)
    axes.set_xlim(0, max(1, len(lines[0][2]) - 1))
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 4, integer=True))
    axes.set_xlabel("query row")
    return figure


# (c) ---------------------------------------------------------------------------------------------------------

_TILE_GROUPS = ("rescale", "summation order")


def by_tiles(attribution: Attribution) -> str | None:
    """Error and rescale group of rows that visit the same number of tiles; None where all rows visit as many."""
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

    series = [("error", INK, "-", grouped(attribution.error))]
    if attribution.before_cast is not None:
        series.append(("before the cast", SOFT, "--", grouped(attribution.before_cast.error)))
    series += [
        (name, colour(name), "-", grouped(attribution.groups[name].contribution))
        for name in _TILE_GROUPS
        if name in attribution.groups
    ]
    label = "tiles that a row visits"
    return _both("c", "Error by number of tiles", lambda wide: _draw_tiles(x, series, label, wide, []))


def by_tile_size(sweep: Sequence[Mapping[str, Any]]) -> str | None:
    """The caller's sweep: the same rows with other tile sizes; None with fewer than two sizes."""
    points = sorted(sweep, key=lambda p: (int(p["tiles"]), -int(p["tile_n"])))
    if len(points) < 2:
        return None
    x = np.array([float(p["tiles"]) for p in points])
    series = [("error", INK, "-", np.array([float(p["error"]) for p in points]))]
    if all("error_before_cast" in p for p in points):
        values = np.array([float(p["error_before_cast"]) for p in points])
        series.append(("before the cast", SOFT, "--", values))
    for name in _TILE_GROUPS:
        if all(name in p["groups"] for p in points):
            values = np.array([float(p["groups"][name]) for p in points])
            series.append((name, colour(name), "-", values))
    sizes = [str(int(p["tile_n"])) for p in points]
    label = "tiles that a row visits (size of a tile)"
    return _both("s", "Error by tile size", lambda wide: _draw_tiles(x, series, label, wide, sizes))


def _draw_tiles(
    x: Floats,
    series: Sequence[tuple[str, str, str, Floats]],
    label: str,
    wide: bool,
    sizes: Sequence[str],
) -> Figure:
    figure = _figure(HALF if wide else NARROW, 330 if wide else 300)
    axes = _axes(figure, 48, 62 if sizes else 46, 20, 34)
    lo, hi = _decades([float(v) for *_, values in series for v in values])
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
    _log(axes.yaxis, lo, hi, 8)
    axes.set_xlabel(label)
    if none:
        _title(axes, ", ".join(none) + ": exactly 0")
    return figure


# (d) ---------------------------------------------------------------------------------------------------------


def histogram(attribution: Attribution) -> str:
    """The signed error with its mean, and that mean magnified beside its standard error."""
    error = attribution.error.ravel()
    stats = text.Statistics.of(error)
    return _both("d", "Histogram of the error", lambda wide: _draw_histogram(error, stats, wide))


def _draw_histogram(error: Floats, stats: text.Statistics, wide: bool) -> Figure:
    figure = _figure(HALF if wide else NARROW, 330 if wide else 310)
    top = _axes(figure, 48, 134, 16, 14)
    reach = float(np.quantile(np.abs(error), 0.999)) or stats.max or 1.0
    unit = 10.0 ** np.floor(np.log10(reach))
    counts, edges = np.histogram(error / unit, bins=60, range=(-reach / unit, reach / unit))
    top.stairs(counts / error.size, edges, fill=True, color=colour("output cast"), alpha=0.75, linewidth=0)
    top.axvline(0, color=SOFT, linewidth=1)
    top.axvline(stats.mean / unit, color=colour("rescale"), linewidth=1.6)
    top.set_xlim(-reach / unit, reach / unit)
    top.xaxis.set_major_locator(MaxNLocator(7 if wide else 5))
    top.yaxis.set_major_locator(MaxNLocator(4))
    top.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    top.yaxis.grid(color=LINE, linewidth=0.8)
    top.set_xlabel(f"observed − exact, in units of {_power(unit)}")

    strip = _axes(figure, 48, 40, 16, (330 if wide else 310) - 82)
    se, mean = stats.stderr, stats.mean
    span = 1.25 * max(abs(mean) + 2 * se, 1e-300)
    scale = 10.0 ** np.floor(np.log10(span))
    strip.axvspan((mean - 2 * se) / scale, (mean + 2 * se) / scale, color=TINT, linewidth=0)
    strip.axvline(0, color=SOFT, linewidth=1)
    strip.errorbar(
        [mean / scale], [0], xerr=[se / scale], fmt="o", color=colour("rescale"), markersize=6, capsize=3
    )
    strip.set_xlim(-span / scale, span / scale)
    strip.set_ylim(-1, 1)
    strip.set_yticks([])
    strip.spines["left"].set_visible(False)
    strip.xaxis.set_major_locator(MaxNLocator(5))
    ratio = f" ({mean / se:+.1f} standard errors)" if se else ""
    name = "mean" if not wide else "mean, magnified"
    strip.set_xlabel(f"{name}: {text.number(mean)}{ratio}, in {_power(scale)}" if wide else
                     f"mean{ratio}, in {_power(scale)}")
    return figure


# (e) ---------------------------------------------------------------------------------------------------------


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


def heat_map(attribution: Attribution) -> str:
    """rms error of blocks of rows and columns."""
    cells = blocks(attribution.error)
    shape = attribution.error.shape
    return _both("e", "Heat map of the error", lambda wide: _draw_heat(cells, shape[-2], shape[-1], wide))


#: One hue that grows from the page's own colour: readable on light and on dark, no legend of two hues.
_HEAT = np.array([(0.42, 0.50, 0.62), (0.85, 0.30, 0.36)])


def _shade(level: Floats) -> Floats:
    """(…,) levels in [0, 1] as RGBA: a slate that warms, its opacity following the level."""
    rgb = _HEAT[0] + level[..., None] * (_HEAT[1] - _HEAT[0])
    return np.concatenate([rgb, level[..., None]], axis=-1)


def _draw_heat(cells: Floats, n: int, d: int, wide: bool) -> Figure:
    figure = _figure(HALF if wide else NARROW, 330 if wide else 310)
    height = 330 if wide else 310
    axes = _axes(figure, 48, 104, 12, 14)
    # The top per mille is clipped so that one spike does not blank the rest.
    top = float(np.quantile(cells, 0.999)) or float(cells.max()) or 1.0
    level = np.clip(cells / top, 0, 1).T
    axes.imshow(_shade(level), aspect="auto", interpolation="none", extent=(0, n, d, 0))
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("query row")
    axes.set_ylabel("column", labelpad=4)
    bar = _axes(figure, 48, 40, 12, height - 52)
    bar.imshow(_shade(np.linspace(0, 1, 64)[None, :]), aspect="auto", interpolation="none", extent=(0, 1, 0, 1))
    bar.set_yticks([])
    bar.set_xticks([0, 0.5, 1], ["0", text.number(top / 2), text.number(top)])
    for label, side in zip(bar.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)
    bar.set_xlabel("rms error of a block")
    return figure
