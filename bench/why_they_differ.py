"""Writes docs/why-they-differ.md and its pictures from bench/results/claims.json.

    python -m bench.why_they_differ [--check]

Every number of the document is looked up in the JSON. What the prose says is stated as a condition
first: figures that no longer support a sentence stop the script instead of leaving it false.
`--check` writes nothing and fails where the document is not what the JSON gives.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from emulation.claims import page
from emulation.claims.c10_training import CONTROL, OTHER_BATCHES, OTHER_WEIGHTS, forked
from emulation.claims.c11_bias import BARE
from emulation.claims.c12_delta import SOURCE as DELTA
from emulation.claims.c12_delta import worse_keys
from emulation.claims.claim import ClaimResult
from emulation.claims.inputs import heads
from emulation.report.text import number

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "bench/results/claims.json"
TEMPLATE = ROOT / "bench/why_they_differ.template.md"
DOCUMENT = ROOT / "docs/why-they-differ.md"
PICTURES = ROOT / "docs/why-they-differ"
#: Pictures of the document: file name -> (claim, which of its plots).
PLOTS = {
    "sources-fp32": (4, 0), "sources-bf16": (4, 1), "depth": (9, 0), "training": (10, 0),
    "truncation": (11, 0),
}  # fmt: skip
SHORT = {"float16": "fp16", "bfloat16": "bf16"}


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def figure(x: float) -> str:
    """Three digits; without an exponent where that is as short.

    >>> figure(1.42), figure(35400.0), figure(-0.00076)
    ('1.42', '3.54e4', '-7.60e-4')
    """
    return f"{x:.3g}" if x == 0 or 0.01 <= abs(x) < 1000 else number(x)


def supported(condition: bool, sentence: str) -> None:
    """Stop unless the figures support what the document says."""
    if not condition:
        raise SystemExit(f"{SOURCE.name} no longer supports: {sentence}")


def _picture(name: str, alt: str) -> str:
    folder = PICTURES.name
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">'
    light = f'<img alt="{alt}" src="{folder}/{name}-light.svg">'
    return f"<picture>\n  {dark}\n  {light}\n</picture>"


def _forward(f: Any, state: str) -> list[Any]:
    return [c for c in f["cells"] if c["state"] == state and c["output"] == "out"]


def _tops(cells: list[Any]) -> str:
    """Which sources lead, the commonest first."""
    names = [c["top"] for c in cells]
    return " or ".join(sorted(set(names), key=lambda n: (-names.count(n), n)))


def _rescale(r: ClaimResult) -> str:
    f = r.figures
    power = f["power_of_two_rescale"]
    supported(r.verdict.kind == "does not hold", "rescaling is never the largest source")
    supported(power["float32"] == power["bfloat16"] == 0, "powers of two rescale without rounding")
    wide, half = _forward(f, "float32"), _forward(f, "bfloat16")
    least = min(c["top_rms"] / c["rescale_rms"] for c in wide if c["rescale_rms"])
    order = max(c["order_rms"] / c["top_rms"] for c in wide)
    half_least = min(c["top_rms"] / c["rescale_rms"] for c in half if c["rescale_rms"])
    half_share = max(abs(c["rescale_share"]) for c in half)
    small, large = min(c["n"] for c in wide), max(c["n"] for c in wide)
    # Exact but for results below fp16's smallest normal number, 2^-14: nothing else can round.
    small_half = (
        f"In fp16 state it still contributes up to {figure(power['float16'])}: there a rescaled "
        "value can fall below 2⁻¹⁴ and lose bits as a subnormal."
        if power["float16"]
        else "In fp16 state, too, as far as no value became a subnormal."
    )
    told = ""
    if f["kernels"]:
        bits = sum(k["differing_bits"] for k in f["kernels"])
        supported(bits == 0, "kernel and emulator agree bit for bit")
        k = f["kernels"][-1]
        told = (
            f" The kernel itself, on a GPU: no value differs from the emulator's at any N; at N = "
            f"{k['n']} its rms error is {figure(k['errors']['row-max'])} with a running maximum, "
            f"{figure(k['errors']['power-of-two'])} with powers of two and "
            f"{figure(k['errors']['final'])} with the maximum known beforehand, where nothing is "
            "rescaled at all (one draw)."
        )
    return (
        "Neither, in the arithmetic of kernels (state in fp32): there the two differ by the "
        "rounding of P before the product with V, and by the rounding of the output. For N from "
        f"{small} to {large}, on random inputs and {_heads(f['cells'])}, one draw each, the "
        f"rms of what rescaling contributes is at least {figure(least)} times smaller than that of "
        f"the largest source, and that of the order of summation is at most {percent(order)} of "
        "it. With the state in bf16, as the article's arithmetic supposes, the largest source is "
        f"{_tops(half)}; rescaling is then still at least {figure(half_least)} times smaller than "
        f"it, and at most {percent(half_share)} of the whole difference. Rescaling is the largest "
        f"source in none of {len(f['cells'])} cases, forward or backward.\n\n"
        "It can be switched off. With the reference rounded up to a power of two every factor is "
        "exact, and rescaling contributes exactly 0 in fp32 and bf16 state. "
        f"{small_half}{told}"
    )


def _heads(cells: list[Any]) -> str:
    """How many heads of real models the cells are about."""
    return f"real activations ({heads(c['kind'] for c in cells)})"


def _bits(r: ClaimResult) -> str:
    cells = r.figures["cells"]
    top = max(c["n"] for c in cells)
    pairs: dict[str, list[float]] = {}
    for c in (c for c in cells if c["n"] == top):
        for name, share in c["pairs"].items():
            pairs.setdefault(name, []).append(share["out"])
    mean = {name: sum(x) / len(x) for name, x in pairs.items()}
    flash, standard, order, same = mean.values()
    supported(same == 1 and flash < standard, "flash and standard differ by more than order")
    draws = len(next(iter(pairs.values())))
    return (
        f"At N = {top} (mean of {draws} cases: each input and format, one draw), "
        f"{percent(flash)} of the output values of flash and standard attention are equal; "
        f"{percent(standard)} of two standard runs whose keys come in another order; "
        f"{percent(order)} of two flash runs in which only sums are cut differently; all of them "
        "when the order is the same. So non-associativity is real and small: most differing bits "
        "come from P, which one algorithm rounds before the division and the other after it."
    )


def _backward(r7: ClaimResult, r12: ClaimResult) -> str:
    shares = [o["recomputed_share"] for c in r7.figures["cells"] for o in c["outputs"].values()]
    supported(max(shares) < 0.5, "recomputing is not why gradients differ")
    cells = r12.figures["cells"]
    real = [c for c in cells if c["kind"] != "normal"]
    random = [c for c in cells if c["kind"] == "normal"]
    low, high = (f(c["dq rounded"]["delta"] for c in real) for f in (min, max))
    hidden = max(c["dq rounded"]["delta"] for c in random)
    supported(high > 1 > hidden, "delta dominates on real inputs and not on random ones")
    first = sum(c["dq rounded"]["top"] == DELTA for c in real)
    supported(first > 0, "delta is the largest source on some real inputs")
    gain = max(c["dq rounded"]["error"] / c["dq full"]["error"] for c in real)
    worse = worse_keys(cells)
    told = ""
    if worse:
        most = max(c["dk full"]["error"] / c["dk rounded"]["error"] for c in worse)
        formats = " and ".join(sorted({SHORT[c["dtype"]] for c in worse}))
        told = (
            f" Not everything gains: in {len(worse)} of these {len(real)} cases ({formats}) dK's "
            f"error grows, by up to {most:.3g} times, because delta's error cancelled part of "
            "another."
        )
    return (
        f"Recomputing P explains at most {100 * max(shares):.2g} % of the difference of any "
        "gradient before its cast; what parts them is the rounding of P and of dS. One error is "
        "missed by the article and by random tests: delta = rowsum(dO O) taken from the rounded O. "
        f"On {_heads(real)}, in bf16 and fp16 and one draw of dO each, it is the largest error of "
        f"dQ in {first} of {len(real)} cases: {low:.2g} to {high:.2g} times the error of merely "
        f"rounding dQ to its format, and {hidden:.2g} times on normal inputs. cuflash keeps what O "
        f"lost, which makes dQ's error before the cast up to {gain:.2g} times smaller.{told}"
    )


def _depth(r: ClaimResult) -> str:
    parts = []
    for run in r.figures["runs"]:
        d = run["deviations"]["flash"]
        kind = "pre-norm" if run["norm"] else "without norm"
        where = ", the kernel" if run["gpu"] else ""
        parts.append(
            f"{run['model']}, {kind}{where}: {figure(d[0])} after one layer, {figure(d[-1])} "
            f"after {len(d)}"
        )
    normed = next(run for run in r.figures["runs"] if run["norm"])["deviations"]
    window = normed["window of N/8"]
    supported(window[-1] > normed["flash"][-1], "a window deviates more than rounding")
    return (
        "Only attention rounds here, everything else is float64. Deviation of the residual stream "
        "from the run with exact attention, over the norm of that run's stream (one draw of "
        f"weights and inputs): {'; '.join(parts)}. A window of an eighth of the keys gives "
        f"{figure(window[0])} after one layer and {figure(window[-1])} after {len(window)}."
    )


def _training(r: ClaimResult) -> str:
    f = r.figures
    if r.verdict.kind == "not measured":
        return f"Not measured in this run. {r.verdict.text}"
    supported(f["repeat_distance"] == 0, "training is deterministic")
    v = f["variants"]
    flash, standard, other = v["cuflash"], v["standard"], v[OTHER_BATCHES]
    test = flash["against_exact"]
    supported(not v[CONTROL]["against_exact"]["equivalent"], "the test tells a window apart")
    ratio = flash["distance"][-1] / other["distance"][-1]
    fork = (
        "So training has forked: each rounded run is at least half as far from the exact one as "
        "other batches put it."
        if forked(f)
        else "So training has not forked yet at this length, though distances grow."
    )

    def tested(name: str) -> str:
        t = v[name]["against_exact"]
        inside = "within" if t["equivalent"] else "not within"
        return f"{figure(t['mean'])} ({figure(t['low'])} to {figure(t['high'])}, {inside})"

    return (
        f"A model of {f['parameters']} weights on real text, {f['steps'][-1]} steps, {f['seeds']} "
        "seeds, the same first weights and batches. The same attention twice gives the same "
        "weights. Distance from the exact run's weights, over their norm, mean of the seeds: "
        f"cuflash {figure(flash['distance'][0])} after one step and "
        f"{figure(flash['distance'][-1])} at the end, standard attention "
        f"{figure(standard['distance'][0])} and {figure(standard['distance'][-1])}; other batches "
        f"{figure(other['distance'][-1])}, other first weights "
        f"{figure(v[OTHER_WEIGHTS]['distance'][-1])}. cuflash ends at {ratio:.2g} of the distance "
        f"of other batches. {fork}\n\n"
        f"Held-out loss minus that of the exact run, mean and 90 % interval over seeds, against a "
        f"margin of {figure(test['margin'])} (what other batches change, rms): cuflash "
        f"{tested('cuflash')}, standard {tested('standard')}, other batches "
        f"{tested(OTHER_BATCHES)}, other first weights {tested(OTHER_WEIGHTS)}. A window of an "
        f"eighth of the keys, which the test must tell apart, gives {tested(CONTROL)}."
    )


def _bias(r: ClaimResult) -> str:
    f = r.figures
    whole = f["bias"]["whole"]
    supported(r.verdict.kind == "holds if", "flash is unbiased but for known exceptions")
    trunc = [e for e in f["exceptions"] if e["which"] == "truncation" and not e["gpu"]]
    top = max(e["n"] for e in trunc)
    cases = {e["case"]: e for e in trunc if e["n"] == top}
    bare, cured = cases[BARE["truncation"]], cases["promoted"]
    supported(abs(cured["mean"]) < abs(bare["mean"]), "promoted sums truncate less")
    tied = {e["case"]: e for e in f["exceptions"] if e["which"] == "tied maxima"}
    half, wide = tied["O in bf16"], tied["O in fp32 (kernels)"]
    supported(abs(wide["whole"]) < abs(half["whole"]) / 100, "fp32 accumulators avoid tied maxima")
    names = {"default": "the default"}

    def told(field: str) -> str:
        return ", ".join(
            f"{_pm(e[field], e['error' if field == 'mean' else f'{field}_error'])} with "
            f"{names.get(case, case)}"
            for case, e in cases.items()
        )

    return (
        f"On normal inputs the mean of flash's error is {_pm(whole['mean'], whole['error'])} of "
        "the error's rms: noise. (± is the standard error over independent draws, everywhere "
        "here.) With values of one sign the tensor core shows: it truncates, so O shrinks. At "
        f"N = {top} the mean of error over |O| that comes from the sum of P V alone is "
        f'{told("mean")} (`accumulate="promoted"` adds tiles in fp32). Of the whole O before its '
        f"cast it is {told('whole')}; P's rounding makes that one uncertain. Two keys tied at the "
        f"maximum bias the whole O by {_pm(half['whole'], half['whole_error'])} of |O| where it is "
        f"kept in bf16, which kernels do not: in fp32 it is "
        f"{_pm(wide['whole'], wide['whole_error'])}."
    )


def _pm(mean: float, error: float) -> str:
    return f"{figure(mean)} ± {figure(error)}"


def _short(results: dict[int, ClaimResult]) -> str:
    """What can be said in a few sentences, each for the state that it holds for."""
    f = results[4].figures
    wide, half = (set(_tops(_forward(f, s)).split(" or ")) for s in ("float32", "bfloat16"))
    supported("P rounding" in wide, "in fp32 state P's rounding parts the two")
    supported(not wide & {"rescale", "summation order"}, "order is not the reason in fp32 state")
    supported("rescale" not in half, "rescaling is not the reason in bf16 state")
    trials = results[2].figures["rational"]["trials"]
    supported(results[2].verdict.kind == "holds", "the algorithm is exact")
    other = (
        "the order of sums would come first, and rescaling still not"
        if "summation order" in half
        else "rescaling would not be the reason either"
    )
    return (
        f"The algorithm is exact: in rational arithmetic {trials} random tilings give equal "
        "fractions. In the arithmetic that kernels have (state in fp32), what differs is where P "
        "is rounded, and that the output is rounded at all; both algorithms do both, and neither "
        "rescaling nor the order of sums is the reason. Were the state kept in bf16, "
        f"{other}. What is worth changing is elsewhere: delta from the rounded O in the backward, "
        "and the tensor core's truncation where values have one sign."
    )


def _verdict(r: ClaimResult) -> str:
    """The verdict with its condition in a few words.

    The whole sentence is in the JSON and on the page of `cuflash claims`.
    """
    if r.verdict.kind == "holds if":
        supported(bool(r.verdict.condition), f"claim {r.number} names its condition")
    rest = {"holds if": " ", "not measured": ": "}.get(r.verdict.kind)
    return f"**{r.verdict.kind}**" + (rest + r.verdict.condition if rest else "")


def _machine(rest: dict[str, Any]) -> str:
    machine = dict(rest["machine"])
    packages = machine.pop("packages", {})
    said = ", ".join(f"{name} {value}" for name, value in (machine | rest["versions"]).items())
    optional = ", ".join(f"{name} {version}" for name, version in packages.items())
    return f"{said}. Optional packages: {optional}" if optional else said


def _missing(results: dict[int, ClaimResult]) -> str:
    """What was not measured, with the claims that miss it."""
    by_part: dict[str, list[str]] = {}
    for r in results.values():
        for part in r.missing:
            by_part.setdefault(part, []).append(str(r.number))
    if not by_part:
        return ""
    told = "; ".join(f"{part}, in {', '.join(numbers)}" for part, numbers in by_part.items())
    return f"\n\nNot measured in this run: {told}."


def document(results: dict[int, ClaimResult], rest: dict[str, Any]) -> str:
    """The Markdown: the template with its gaps filled."""
    rows = "\n".join(
        f"| {r.number} | {r.says} | {_verdict(r)} | "
        f"`{page.reproduce(r.number, '--full' in rest['command'])}` |"
        for r in results.values()
    )
    pictures = {
        name.replace("-", "_"): _picture(name, results[claim].plots[which].title)
        if results[claim].plots
        else ""
        for name, (claim, which) in PLOTS.items()
    }
    return TEMPLATE.read_text(encoding="utf-8").format(
        command=rest["command"],
        machine=_machine(rest),
        missing=_missing(results),
        rows=rows,
        rescale=_rescale(results[4]),
        bits=_bits(results[6]),
        backward=_backward(results[7], results[12]),
        depth_text=_depth(results[9]),
        training_text=_training(results[10]),
        bias=_bias(results[11]),
        short=_short(results),
        **pictures,
    )


def main(check: bool) -> int:
    """Write the document, or compare it with what is there."""
    results, rest = page.from_json(SOURCE.read_text(encoding="utf-8"))
    text = document({r.number: r for r in results}, rest)
    if check:
        return int(DOCUMENT.read_text(encoding="utf-8") != text)
    from emulation.claims.plots import standalone

    DOCUMENT.write_text(text, encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    by_number = {r.number: r for r in results}
    for name, (claim, which) in PLOTS.items():
        if not by_number[claim].plots:
            continue
        for dark in (False, True):
            svg = standalone(by_number[claim].plots[which], dark=dark)
            (PICTURES / f"{name}-{'dark' if dark else 'light'}.svg").write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
