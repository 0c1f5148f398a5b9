"""How a picture becomes inline SVG: matplotlib figures, text kept as text, nothing that varies.

Each picture is drawn twice, wide for a desktop and narrow for a phone, so that its text is never
scaled small.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation.report.style import SENTINELS, group_variable
from emulation.report.text import install

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError as error:
    raise ImportError(
        f"the HTML report draws with matplotlib, which is not installed: {install('report')}"
    ) from error

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
        mpl.rcParams.update(_RC)  # type: ignore[arg-type]  # its stub wants Literal keys
        # Only the measure of a name in a foreign script is lost: the page's own font shows it.
        warnings.filterwarnings(
            "ignore", message=r"Glyph .* missing from font", category=UserWarning
        )
        yield


def canvas(width: int, height: int) -> Figure:
    """An empty figure of so many pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    return figure


def frame(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes whose edges keep the given distances (pixels) from the figure's."""
    width, height = (72 * float(s) for s in figure.get_size_inches())
    inner = (width - left - right) / width, (height - top - bottom) / height
    axes = figure.add_axes((left / width, bottom / height, *inner))
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    return axes


def power(value: float, _position: int | None = None) -> str:
    """A power of ten in plain text, which needs no mathematics fonts.

    >>> power(1e-5)
    '10⁻⁵'
    """
    exponent = round(np.log10(value)) if value > 0 else 0
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def log_axis(axis: Any, low: float, high: float, ticks: int) -> None:
    """A logarithmic axis, at most `ticks` decades labelled."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(numticks=ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(power))
    axis.grid(color=LINE, linewidth=0.8)


def heading(axes: Axes, title: str) -> None:
    """A quiet title at the left edge of the axes."""
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(title, (0, 1), xytext=(0, 12), fontsize=12, color=SOFT, **style)


def _inline(figure: Figure, key: str, label: str, kind: str) -> str:
    """The figure as an <svg> element: ids begin with `key`, sentinels become CSS variables."""
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


def picture(key: str, label: str, draw: Callable[[bool], Figure]) -> str:
    """Wide and narrow drawing of one picture; CSS shows one of them."""
    with _drawing():
        wide = _inline(draw(True), f"{key}w", label, "wide")
        narrow = _inline(draw(False), f"{key}n", label, "narrow")
    return wide + narrow


def decades(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around the positive values, at most twelve."""
    good = [float(v) for v in values if np.isfinite(v) and v > 0] or [1.0]
    high = 10.0 ** np.ceil(np.log10(max(good)) + 0.05)
    low = 10.0 ** np.floor(np.log10(min(good)) - 0.05)
    return max(low, high * 1e-12), high
