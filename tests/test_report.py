"""The report: its forms (strict, escaped, equal to each other, never varying) and its input."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import pytest

import emulation
from emulation import Attribution, report
from emulation.report import text
from emulation.report.inputs import InputError, to_format
from emulation.report.json_report import plain
from emulation.report.style import GROUP_COLOURS, group_variable
from emulation.report.work import prepare
from emulation.samples import sample
from emulation.sources import GROUPS

HOSTILE = '</td><script>alert("x")</script>\x1b[31m\n| `a` $\\frac{1}{2}$ \u202e& url(#p) #01fe00'
SWEEP = [
    {
        "tiles": 96 // t,
        "tile_n": t,
        "error": 1e-3,
        "error_before_cast": 1e-4,
        "groups": {"score": 1e-8},
    }
    for t in (16, 32, 48)
]


@pytest.fixture(scope="module")
def found() -> Attribution:
    """Two heads, causal, several tiles, gradients, and a reference that rescales."""
    q, k, v = sample("rising", n=96, d=16, heads=2, dtype="bfloat16")
    numerics = {"reference": "row-max", "row_sum": "unrounded"}
    plan = emulation.default_plan(emulation.Problem.of(q, k, v), numerics, tile_n=16)
    return emulation.attribute(q, k, v, dout=v[:, ::-1].copy(), causal=True, plan=plan)


@pytest.fixture(scope="module")
def page(found: Attribution) -> str:
    return report.to_html(found, source="a.npz", command="cuflash report", sweep=SWEEP)


def hostile(a: Attribution) -> Attribution:
    """The same attribution with hostile text in every place that holds text."""

    def rename(c: Any, name: str, group: str) -> Any:
        return dataclasses.replace(c, name=name, group=group, about=HOSTILE)

    sources = {}
    for i, c in enumerate(a.sources.values()):
        name = f"{HOSTILE}{i}" if i % 2 else c.name
        sources[name] = rename(c, name, c.group + HOSTILE)
    groups = {g.name + HOSTILE: rename(g, g.name + HOSTILE, g.name) for g in a.groups.values()}
    return dataclasses.replace(
        a, sources=sources, groups=groups, notes=(HOSTILE,), algorithm=HOSTILE, parts={}
    )


def strict(data: str) -> Any:
    def refuse(literal: str) -> NoReturn:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(data, parse_constant=refuse)


class Page(HTMLParser):
    """Checks nesting, collects tags, attributes and table cells."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_page_is_whole_and_loads_nothing(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    assert "http:" not in page
    assert "https:" not in page
    assert '"Content-Security-Policy" content="default-src \'none\'; style-src' in page
    assert not [n for n, _ in parsed.attributes if n.startswith("on")]
    for name, value in parsed.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value is not None
            assert value.startswith(("#", "data:image/png;base64,"))
    for target in re.findall(r"url\(([^)]*)\)", page):
        assert target.startswith("#")


def test_page_ids_are_unique_and_referenced(page: str) -> None:
    ids = [v for n, v in Page(page).attributes if n == "id"]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"url\(#([^)]*)\)", page)) | set(re.findall(r'href="#([^"]*)"', page))
    assert wanted <= set(ids)
    assert wanted


def test_page_follows_the_colour_scheme(page: str) -> None:
    assert "prefers-color-scheme:dark" in page
    assert "#01fe" not in page, "a sentinel colour was left"
    svg = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert not re.findall(r"(?:fill|stroke): #", svg), "a colour that does not follow the scheme"
    assert "DejaVu" not in svg


def test_page_holds_every_picture(page: str, found: Attribution) -> None:
    for label in (
        "Share and rms of every source",
        "Error against query row",
        "Histogram of the error",
        "Error by number of tiles",
        "Error by tile size",
        "Heat map of the error",
    ):
        assert page.count(f'aria-label="{label}"') == (
            2 * len(found.parts) if label.startswith("Share") else 2
        )
    assert "data:image/png;base64," in page
    assert len(page) < 1_000_000


def test_every_group_has_its_own_colour() -> None:
    named = (*GROUPS, text.RESIDUAL)
    assert len({GROUP_COLOURS[g] for g in named}) == len(named)
    assert group_variable("someone's group") == group_variable("someone's group")


@pytest.mark.parametrize("title", [None, HOSTILE])
def test_hostile_text_stays_text(found: Attribution, title: str | None) -> None:
    page = report.to_html(
        hostile(found), title=title, source=HOSTILE, command=HOSTILE, options={HOSTILE: HOSTILE}
    )
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page


def test_hostile_text_does_not_break_the_table(found: Attribution) -> None:
    plain_text = report.to_markdown(hostile(found), source=HOSTILE, options={"a": HOSTILE})
    assert "\x1b" not in plain_text
    assert not re.search(r"(?<!\\)<", plain_text)
    table = [x for x in plain_text.splitlines() if x.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {8}


def test_json_is_strict_and_complete(found: Attribution) -> None:
    data = strict(report.to_json(found, command="cuflash report", options={"a": (1, None)}))
    assert list(data["outputs"]) == ["out", "lse", "dq", "dk", "dv"]
    for name, part in found.parts.items():
        told = data["outputs"][name]
        assert set(told["sources"]) == set(part.sources)
        for group, c in part.groups.items():
            for field in ("rms", "max", "mean", "share"):
                assert told["groups"][group][field] == getattr(c, field)
        total = sum(s["share"] for s in told["sources"].values()) + told["residual"]["share"]
        assert total == pytest.approx(1.0, abs=1e-9)
    assert data["plan"]["numerics"]["reference"] == "row-max"
    assert data["outputs"]["out"]["tiles"] == {"min": 1, "max": 6}
    assert data["outputs"]["out"]["before_cast"]["error"]["rms"] > 0
    assert max(len(v) for v in _lists(data)) < 10, "a tensor got in"


def _lists(data: Any) -> list[list[Any]]:
    if isinstance(data, dict):
        return [x for v in data.values() for x in _lists(v)]
    return [data, *(x for v in data for x in _lists(v))] if isinstance(data, list) else [[]]


def test_json_has_null_for_what_is_not_finite(found: Attribution) -> None:
    error = found.error.copy()
    error[0, 0, 0] = np.inf
    c = dataclasses.replace(next(iter(found.sources.values())), share=np.nan, rms=np.inf)
    broken = dataclasses.replace(found, error=error, sources={c.name: c}, parts={})
    told = strict(report.to_json(broken))["outputs"]["out"]
    assert told["error"]["max"] is None
    assert told["sources"][c.name]["share"] is None
    assert "not finite" in report.to_html(broken)
    assert "not finite" in report.to_markdown(broken)
    assert plain(np.float32("nan")) is None


def test_tables_agree_with_json(found: Attribution, page: str) -> None:
    told = strict(report.to_json(found))["outputs"]["out"]
    markdown = [
        [cell.strip().replace("\\", "").strip("*") for cell in line.strip("| ").split(" | ")]
        for line in report.to_markdown(found).split("## lse")[0].splitlines()
        if line.startswith("| ")
    ]
    html = [[c.replace("−", "-").replace("\xa0", " ").strip() for c in r] for r in Page(page).rows]
    known = {**told["groups"], **told["sources"]}
    seen = set()
    for table in (markdown[2:], html[1 : len(markdown) - 1]):
        for row in table:
            if row[0] not in known:
                continue
            seen.add(row[0])
            c = known[row[0]]
            want = [text.number(c["rms"]), text.number(c["max"]), text.number(c["mean"])]
            assert row[2:5] == want
            before = told["before_cast"]
            old = {**before["groups"], **before["sources"]}.get(row[0])
            assert row[5] == text.percent(old["share"] if old else None)
            assert row[6] == text.percent(c["share"])
    assert seen >= set(told["sources"])


def test_same_input_same_bytes(found: Attribution, page: str) -> None:
    again = report.to_html(found, source="a.npz", command="cuflash report", sweep=SWEEP)
    assert again == page
    assert report.to_json(found) == report.to_json(found)
    assert not re.search(r"\b20\d\d-\d\d-\d\d", page), "a date got in"


def test_same_bytes_whatever_the_settings_of_matplotlib(found: Attribution, page: str) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        again = report.to_html(found, source="a.npz", command="cuflash report", sweep=SWEEP)
        assert mpl.rcParams["font.size"] == 30
    assert again == page


def test_methods_call_the_report(found: Attribution) -> None:
    assert found.to_markdown() == report.to_markdown(found)
    assert found.to_json() == report.to_json(found)
    assert found.to_html(title="A title") == report.to_html(found, title="A title")


def test_algorithm_without_plan_or_cast() -> None:
    q, k, v = sample("normal", n=8, d=8, dtype="float32")
    a = emulation.attribute(q[0], k[0], v[0], algorithm="standard")
    assert "– |" in report.to_markdown(dataclasses.replace(a, before_cast=None))
    assert strict(report.to_json(a))["plan"] is None
    Page(report.to_html(dataclasses.replace(a, before_cast=None)))


@pytest.mark.parametrize("kind", ["normal", "peaked", "one-signed", "sink"])
def test_headline_gives_the_rest_in_its_own_precision(kind: str) -> None:
    """A rest of single digits in 1e-5 % says nothing beside groups in whole per cent."""
    a = emulation.attribute(*sample(kind, n=64, d=64, dtype="bfloat16"))
    shares = {n: g.share for n, g in a.groups.items()}
    rest = 1.0 - sum(s for n, s in shares.items() if abs(s) >= 0.05 or n == "rescale")
    said = re.search("everything else together (.*)[.]$", text.headline(a))
    assert said is not None
    assert said[1] == (text.percent(rest) if abs(rest) >= 5e-4 else "below 0.05 %")


def test_difference_is_called_one() -> None:
    q, k, v = sample("normal", n=16, d=8)
    a = emulation.attribute(q, k, v, against="standard")
    assert report.to_markdown(a).startswith("# Why flash and standard attention differ")
    assert "of the difference comes from" in text.headline(a)
    sweep = [{**p, "groups": {}} for p in SWEEP]
    page = report.to_html(a, sweep=sweep)
    assert "flash (the first) minus standard (the second)" in page.split("</header>")[0]
    visible = re.sub(r"<style>.*?</style>|<footer>.*", "", page, flags=re.S)
    assert "difference" in visible
    visible = visible.replace("all error of the LSE", "")  # the name of a source
    assert not re.findall(r"(?<!standard )\berrors?\b", visible)
    told = report.to_markdown(a)
    assert "rms difference" in told
    assert "error" not in told


def test_lse_is_float32(found: Attribution) -> None:
    assert "values in float32; rms" in report.to_markdown(found).split("## lse")[1].split("##")[0]
    assert "values in bfloat16; rms" in report.to_markdown(found).split("## lse")[0]
    q, k, v = sample("normal", n=16, d=8)
    wide = emulation.attribute(q, k, v, numerics={"out": "float32"})
    assert "16 × 8 values in float32" in report.to_markdown(wide)


def test_notes_stand_at_the_top(found: Attribution) -> None:
    noted = dataclasses.replace(found, notes=("Mind this.",))
    assert "Mind this." in report.to_html(noted).split("</header>")[0]
    assert "- Mind this." in report.to_markdown(noted).split("## out")[0]


def test_page_explains_its_letters_and_lines(page: str, found: Attribution) -> None:
    for term in ("P", "V", "l", "alpha", "LSE", "reference"):
        assert f"<b>{term}</b>: " in page
    card = page[page.index("Along the rows") :].split("<svg")[0]
    assert all(f"</span>{g.name}</li>" in card for g in found.groups.values() if g.rms > 0)
    # The rules of a table with a fixed column vanish under it unless each cell owns its own.
    assert "border-collapse:separate" in page


def test_no_error_at_all(found: Attribution) -> None:
    zero = np.zeros_like(found.error)
    a = dataclasses.replace(
        found, error=zero, residual=zero, sources={}, groups={}, parts={}, before_cast=None
    )
    assert "There is no error" in report.to_markdown(a)
    Page(report.to_html(a))
    assert strict(report.to_json(a))["outputs"]["out"]["residual"]["share"] is None


def test_printable_and_percent_edges() -> None:
    assert text.printable("x" * 500) == "x" * 400 + "…"
    assert text.percent(float("nan")) == "–"
    assert text.percent(-0.00001) == "-0.0010 %"
    assert text.number(float("-inf")) == "-inf"


def test_rms_of_tiny_and_huge() -> None:
    assert text.rms(np.full(3, 1e-200)) == pytest.approx(1e-200)
    assert text.rms(np.full(3, 1e200)) == pytest.approx(1e200)
    assert text.rms(np.empty(0)) == 0.0


def test_report_needs_nothing_until_it_draws() -> None:
    blocked = "matplotlib", "rich", "numba", "flint", "cupy"
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import cuflash.cli
import emulation
from emulation.report.work import prepare
from emulation.samples import sample
a = emulation.attribute(*sample("normal", n=8, d=8))
a.to_markdown(); a.to_json()
try:
    a.to_html()
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "python -m pip install '.[report]'" in run.stdout


# -- what a report is about ----------------------------------------------------------------

NO_MASKS = {"scale": None, "causal": None, "window": None, "softcap": None}


def arrays(n: int = 40, d: int = 8, heads: int | None = None, dtype: Any = np.float16) -> Any:
    shape = (n, d) if heads is None else (heads, n, d)
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(dtype) for name in ("q", "k", "v")}


def save(path: Path, members: dict[str, Any]) -> str:
    np.savez(path, **members)
    return str(path)


def test_formats_are_rounded_once(tmp_path: Path) -> None:
    x = np.full((4, 8), 1 + 2.0**-8 + 2.0**-40)
    path = save(tmp_path / "input.npz", {"q": x, "k": x, "v": x})
    work = prepare(path, fmt="bfloat16", masks=NO_MASKS)
    assert work.q.dtype == ml_dtypes.bfloat16
    assert float(work.q[0, 0]) == 1 + 2.0**-7
    assert prepare(path, masks=NO_MASKS).q.dtype == np.float32
    assert "rounded here to float32" in prepare(path, masks=NO_MASKS).notes[0]
    path = save(tmp_path / "mixed.npz", {"q": x, "k": x.astype(np.float32), "v": x})
    with pytest.raises(InputError, match="k: dtype float32: must be float64 like q"):
        prepare(path, masks=NO_MASKS)
    work = prepare(path, fmt="float32", masks=NO_MASKS)
    assert work.notes == ("q and v of the file are float64, rounded here to float32.",)


def test_bfloat16_and_byte_orders_are_recognised(tmp_path: Path) -> None:
    told = arrays(dtype=np.float32)
    half = {n: x.astype(ml_dtypes.bfloat16) for n, x in told.items()}
    work = prepare(save(tmp_path / "a.npz", half), masks=NO_MASKS)
    assert work.q.dtype == ml_dtypes.bfloat16
    assert work.notes == ()
    np.testing.assert_array_equal(work.q, half["q"])
    big = {n: np.asfortranarray(x.astype(">f4")) for n, x in told.items()}
    work = prepare(save(tmp_path / "b.npz", big), fmt="float16", masks=NO_MASKS)
    np.testing.assert_array_equal(work.q, told["q"].astype(np.float16))


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float32"])
def test_every_stored_format_arrives_correctly_rounded(fmt: str) -> None:
    from emulation.rounding import round_scalar

    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 8)) * 2.0 ** rng.integers(-20, 12, (8, 8))
    for stored in (np.float64, np.float32, np.float16):
        y = x.astype(stored)
        want = [round_scalar(float(v), fmt) for v in y.ravel()]
        assert to_format("q", y, fmt).astype(np.float64).ravel().tolist() == want


def test_file_says_and_arguments_overrule(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", {**arrays(), "scale": 0.5, "causal": "top-left"})
    assert prepare(path, masks=NO_MASKS).masks["causal"] == "top-left"
    assert prepare(path, masks=NO_MASKS).masks["scale"] == 0.5
    work = prepare(path, masks={**NO_MASKS, "causal": False, "scale": 2.0})
    assert work.masks["causal"] is False
    assert work.masks["scale"] == 2.0
    path = save(tmp_path / "b.npz", {**arrays(), "causal": np.array([1])})
    assert prepare(path, masks=NO_MASKS).masks["causal"] == "bottom-right"


def test_heads_and_rows_are_cut(tmp_path: Path) -> None:
    shared = arrays(n=24, heads=2)
    members = {**shared, "q": arrays(n=24, heads=4)["q"], "out": np.zeros((4, 24, 8))}
    path = save(tmp_path / "a.npz", members)
    work = prepare(path, heads=[3, 1], rows=5, masks=NO_MASKS, backward=True)
    np.testing.assert_array_equal(work.q, members["q"][[3, 1], -5:])
    np.testing.assert_array_equal(work.k, shared["k"][[1, 0]])
    assert work.dout is not None
    assert work.observed is not None
    assert work.dout.shape == work.observed.shape == (2, 5, 8)


def test_large_input_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.npz", arrays(n=300, heads=3))
    assert prepare(path, masks=NO_MASKS).q.shape == (3, 300, 8)
    monkeypatch.setattr("emulation.report.work.MAX_SCORES", 300 * 300)
    work = prepare(path, masks=NO_MASKS)
    assert work.q.shape == (1, 300, 8)
    assert work.notes[0].startswith("Only head 0 of 3: the input is 0.27 million scores")
    monkeypatch.setattr("emulation.report.work.MAX_SCORES", 100 * 300 + 1)
    work = prepare(path, masks=NO_MASKS, backward=True)
    assert work.q.shape == (1, 100, 8)
    assert work.k.shape == (1, 300, 8)
    assert work.notes[0].startswith("Only head 0 of 3 and the last 100 of 300 rows: ")
    assert "(--rows and --head choose otherwise)" in work.notes[0]
    assert "dK and dV are the part" in work.notes[1]
    # What is asked for is done, and no more is chosen than what was left open.
    assert prepare(path, masks=NO_MASKS, rows=300).q.shape == (1, 300, 8)
    assert prepare(path, masks=NO_MASKS, heads=[1, 2]).q.shape == (2, 50, 8)
    work = prepare(path, masks=NO_MASKS, heads=[0, 1, 2], rows=300)
    assert (work.q.shape, work.notes) == ((3, 300, 8), ())
    top_left = {**NO_MASKS, "causal": "top-left"}
    assert prepare(path, masks=top_left).q.shape == (1, 300, 8)


def test_too_large_a_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.npz", arrays(n=300, heads=3))
    monkeypatch.setattr("emulation.report.work.MAX_SCORES", 100)
    monkeypatch.setattr("emulation.report.work.HARD_SCORES", 80_000)
    with pytest.raises(InputError, match=r"--rows: 300: must be at most 0\.08 million scores, not"):
        prepare(path, masks=NO_MASKS, rows=300)
    with pytest.raises(InputError, match=r"q: shape \(3, 300, 8\): must be at most"):
        prepare(path, masks={**NO_MASKS, "causal": "top-left"})
    with pytest.raises(InputError, match=r"--head: 0,1: must be at most"):
        prepare(path, masks={**NO_MASKS, "causal": "top-left"}, heads=[0, 1])
    assert prepare(path, masks=NO_MASKS, rows=200).q.shape == (1, 200, 8)
    monkeypatch.setattr("emulation.report.work.HARD_KEYS", 299)
    with pytest.raises(InputError, match="k: 300 keys: must be at most 299"):
        prepare(path, masks=NO_MASKS)
