"""Colours and stylesheet of the HTML report. Each group has one colour everywhere.

Pictures are drawn with sentinel colours that stand for CSS variables, so that they follow the
page's scheme, light or dark.
"""

from __future__ import annotations

import hashlib

#: Group -> (CSS variable, light, dark).
GROUP_COLOURS: dict[str, tuple[str, str, str]] = {
    "rescale": ("--g-rescale", "#cf3d4f", "#ff7a85"),
    "summation order": ("--g-sum", "#d98512", "#f5b14c"),
    "exponential": ("--g-exp", "#7b53c9", "#b497ff"),
    "P rounding": ("--g-p", "#2f75d6", "#6caeff"),
    "score": ("--g-score", "#14938a", "#4fd0c3"),
    "normalisation": ("--g-norm", "#b04c84", "#ee8fc4"),
    "output cast": ("--g-cast", "#68758c", "#9dabc2"),
    "LSE": ("--g-lse", "#8a6a32", "#d3b06f"),
    "P from forward": ("--g-pf", "#4a5bb0", "#93a4ff"),
    "dP": ("--g-dp", "#0f8fb3", "#5cc9ec"),
    "delta": ("--g-delta", "#4d8a2e", "#93cf6d"),
    "dS": ("--g-ds", "#a3701f", "#dfa659"),
    "dS rounding": ("--g-dsr", "#2a9d63", "#67d69d"),
    "residual": ("--g-rest", "#a4a9b3", "#6f7785"),
}

_SPARE: tuple[tuple[str, str, str], ...] = (
    ("--g-x0", "#5f8d8a", "#93c5c1"),
    ("--g-x1", "#9a6f9e", "#d0a5d4"),
    ("--g-x2", "#8f8a4a", "#c9c47f"),
    ("--g-x3", "#a8664f", "#dd9b84"),
)

_INK: dict[str, tuple[str, str]] = {
    "--ink": ("#1b2230", "#e6e9ef"),
    "--soft": ("#5c6675", "#a3adbb"),
    "--line": ("#dfe3e9", "#2c3441"),
    "--card": ("#ffffff", "#171c25"),
    "--page": ("#f5f6f8", "#0f131a"),
    "--tint": ("#eef1f5", "#1e2530"),
}

_PALETTE: dict[str, tuple[str, str]] = _INK | {
    name: (light, dark) for name, light, dark in (*GROUP_COLOURS.values(), *_SPARE)
}

#: CSS variable -> the colour that stands for it while a picture is drawn.
SENTINELS: dict[str, str] = {name: f"#01fe{i:02x}" for i, name in enumerate(_PALETTE)}


def group_variable(group: str) -> str:
    """The CSS variable of a group's colour; an unknown group gets a spare one, always the same."""
    if group in GROUP_COLOURS:
        return GROUP_COLOURS[group][0]
    return _SPARE[hashlib.sha256(group.encode()).digest()[0] % len(_SPARE)][0]


def palette(dark: bool) -> dict[str, str]:
    """CSS variable -> colour of one scheme, for pictures outside a page.

    >>> palette(dark=False)["--page"]
    '#f5f6f8'
    """
    return {name: pair[dark] for name, pair in _PALETTE.items()}


def _variables(scheme: int) -> str:
    return "".join(f"{name}:{pair[scheme]};" for name, pair in _PALETTE.items())


STYLE = (
    f""":root{{color-scheme:light dark;{_variables(0)}
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
"Liberation Sans",Arial,sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace}}
@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}
"""
    + """*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.6 var(--sans);
overflow-wrap:anywhere}
main{max-width:1120px;margin:0 auto;padding:56px 32px 72px}
header{margin:0 0 40px}
.eyebrow{margin:0 0 12px;color:var(--soft);font-size:13.5px;letter-spacing:.02em}
h1{margin:0 0 18px;font-size:34px;line-height:1.2;font-weight:650;letter-spacing:-.018em;
text-wrap:balance}
h2{margin:56px 0 6px;font-size:21px;line-height:1.3;font-weight:650;letter-spacing:-.01em}
h3{margin:0 0 4px;font-size:15px;font-weight:650}
p{margin:0 0 12px}
.lead{margin:0;max-width:44em;font-size:20px;line-height:1.5}
.soft,figcaption,.about{color:var(--soft)}
.intro{max-width:46em;margin-bottom:18px;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px}
.stats{display:grid;grid-template-columns:repeat(4,1fr);gap:1px;margin:32px 0 0;padding:0;
background:var(--line);border:1px solid var(--line);border-radius:12px;overflow:hidden}
.stats div{background:var(--card);padding:16px 20px}
.stats dt{color:var(--soft);font-size:13px}
.stats dd{margin:2px 0 0;font-size:21px;line-height:1.35;font-variant-numeric:tabular-nums}
.stats dd sup{font-size:.66em;line-height:0}
.stats small{display:block;color:var(--soft);font-size:13px}
.strip{display:flex;gap:2px;height:14px;margin:28px 0 10px;border-radius:7px;overflow:hidden}
.strip i{display:block}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:0;padding:0;list-style:none;font-size:14px}
.legend b{font-weight:600;font-variant-numeric:tabular-nums}
.dot{display:inline-block;width:10px;height:10px;margin-right:8px;border-radius:3px}
figure .legend{margin:0 0 12px;gap:2px 14px;font-size:13px;color:var(--soft)}
.sides{margin:10px 0 0;color:var(--soft)}
.terms{max-width:none;margin:14px 0 0;font-size:14px}.terms b{color:var(--ink);font-weight:600}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:20px;margin-top:20px}
.grid>*,figure{min-width:0}
figure{margin:0}
figcaption{margin:0 0 12px;font-size:14px;line-height:1.5}
svg{display:block;width:100%;height:auto}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-variant-numeric:tabular-nums}
.narrow{display:none}
.wide-figure{margin-top:18px}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch;margin-top:18px}
.scroll.card{padding:6px 0}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:14px;line-height:1.45;
font-variant-numeric:tabular-nums}
th,td{padding:7px 9px;text-align:right;white-space:nowrap;font-weight:400}
thead th{color:var(--soft);font-size:13px;border-bottom:1px solid var(--line);vertical-align:bottom}
tbody th,thead th:first-child,.text{text-align:left}
tbody th{position:sticky;left:0;background:var(--card)}
.group th,.group td,.total th,.total td{font-weight:650}
.group th,.group td,.one th,.one td{border-top:1px solid var(--line)}
.source th:first-child{padding-left:38px}
.residual th,.residual td,.total th,.total td{border-top:1px solid var(--line)}
.about{white-space:normal;min-width:190px;line-height:1.4}
th:first-child{padding-left:20px}th:last-child,td:last-child{padding-right:20px}
.pairs{width:100%;table-layout:fixed}
.pairs th,.pairs td{text-align:left;white-space:normal;vertical-align:top;
border-top:1px solid var(--line);padding:7px 10px 7px 0;position:static}
.pairs th:first-child{color:var(--soft);width:50%;padding-left:0}
.pairs tr:first-child>*{border-top:0}
details{margin-top:14px}
summary{cursor:pointer;font-weight:600}
summary span{font-weight:400;color:var(--soft);margin-left:8px}
code,pre{font-family:var(--mono);font-size:13.5px}
pre{margin:12px 0 0;padding:14px 16px;background:var(--tint);border-radius:8px;
overflow-x:auto;white-space:pre-wrap}
ul.notes{margin:10px 0 0;padding-left:20px;max-width:52em}
footer{margin-top:56px;padding-top:18px;border-top:1px solid var(--line);color:var(--soft);
font-size:13px}
.whole{grid-column:1/-1}
@media (max-width:760px){
main{padding:32px 16px 48px}h1{font-size:26px}.lead{font-size:18px}
.stats{grid-template-columns:1fr 1fr}.stats div{padding:12px 14px}.stats dd{font-size:18px}
.grid{grid-template-columns:minmax(0,1fr)}.card{padding:16px 14px}h2{margin-top:44px}
.wide{display:none}.narrow{display:block}
}
@media print{body{background:none}.card,.stats{break-inside:avoid}}
"""
)
