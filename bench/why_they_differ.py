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
from emulation.claims.claim import ClaimResult
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


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


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
    supported(r.verdict.kind == "does not hold", "rescaling is never the largest source")
    supported(f["power_of_two_rescale"]["float32"] == 0, "powers of two rescale without rounding")
    wide, half = _forward(f, "float32"), _forward(f, "bfloat16")
    least = min(c["top_rms"] / c["rescale_rms"] for c in wide if c["rescale_rms"])
    order = max(c["order_rms"] / c["top_rms"] for c in wide)
    half_least = min(c["top_rms"] / c["rescale_rms"] for c in half if c["rescale_rms"])
    half_share = max(abs(c["rescale_share"]) for c in half)
    small, large = min(c["n"] for c in wide), max(c["n"] for c in wide)
    cells = len(f["cells"])
    kernels = f["kernels"]
    told = ""
    if kernels:
        bits = sum(k["differing_bits"] for k in kernels)
        supported(bits == 0, "kernel and emulator agree bit for bit")
        k = kernels[-1]
        told = (
            f" The kernel itself, on a GPU: 0 bits differ from the emulator at every N; at N = "
            f"{k['n']} its rms error is {number(k['errors']['row-max'])} with a running maximum, "
            f"{number(k['errors']['power-of-two'])} with powers of two and "
            f"{number(k['errors']['final'])} with the maximum known beforehand, where nothing is "
            "rescaled at all."
        )
    return (
        "Neither. In the arithmetic of kernels (state in fp32) the difference is the rounding "
        "of P "
        f"before the product with V and the rounding of the output. Over N from {small} to "
        f"{large}, "
        f"random and real inputs, rescaling is at least {least:.2g} times smaller than the largest "
        f"source, and the order of summation contributes at most {percent(order)} of it. If the "
        "state were kept in bf16, as the article's arithmetic supposes, it would be "
        f"{_tops(half)}; rescaling would still be {half_least:.2g} times smaller or more, and "
        "at most "
        f"{percent(half_share)} of the difference. Rescaling is not the largest source in any of "
        f"{cells} cases, forward or backward. And it can be switched off: with the reference "
        "rounded "
        f"up to a power of two every factor is exact, and its contribution is exactly 0.{told}"
    )


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
    return (
        f"At N = {top}, {percent(flash)} of the output values of flash and standard attention are "
        f"equal; {percent(standard)} of two standard runs whose keys come in another order; "
        f"{percent(order)} of two flash runs in which only sums are cut differently; all of "
        "them when "
        "the order is the same. So non-associativity is real and small: most differing bits come "
        "from P, which one algorithm rounds before the division and the other after it."
    )


def _backward(r7: ClaimResult, r12: ClaimResult) -> str:
    shares = [o["recomputed_share"] for c in r7.figures["cells"] for o in c["outputs"].values()]
    supported(max(shares) < 0.5, "recomputing is not why gradients differ")
    real = [c for c in r12.figures["cells"] if c["kind"] != "normal"]
    random = [c for c in r12.figures["cells"] if c["kind"] == "normal"]
    low, high = (f(c["dq rounded"]["delta"] for c in real) for f in (min, max))
    hidden = max(c["dq rounded"]["delta"] for c in random)
    supported(high > 1 > hidden, "delta dominates on real inputs and not on random ones")
    gain = max(c["dq rounded"]["error"] / c["dq full"]["error"] for c in real)
    return (
        f"Recomputing P explains at most {100 * max(shares):.2g} % of the difference of gradients; "
        "what parts them is the rounding of P and of dS. The largest error of dQ is one that "
        "both the "
        "article and random tests miss: delta = rowsum(dO O) taken from the rounded O. In units of "
        f"the error of merely rounding dQ it is {low:.2g} to {high:.2g} on real activations and "
        f"{hidden:.2g} on normal inputs. cuflash keeps what O lost, which makes dQ's error up to "
        f"{gain:.2g} times smaller."
    )


def _depth(r: ClaimResult) -> str:
    parts = []
    for run in r.figures["runs"]:
        d = run["deviations"]["flash"]
        kind = "pre-norm" if run["norm"] else "without norm"
        where = ", the kernel" if run["gpu"] else ""
        parts.append(
            f"{run['model']} {kind}{where}: {number(d[0])} after one layer, {number(d[-1])} "
            f"after {len(d)}"
        )
    window = next(run for run in r.figures["runs"] if run["norm"])["deviations"]["window of N/8"]
    return (
        "Only attention rounds here, everything else is float64. Deviation from exact attention: "
        + "; ".join(parts)
        + f". A window of an eighth of the keys gives {number(window[0])} after one layer and "
        f"{number(window[-1])} after {len(window)}."
    )


def _training(r: ClaimResult) -> str:
    f = r.figures
    supported(f["measured"] and f["repeat_distance"] == 0, "training is deterministic")
    v = f["variants"]
    other = v["exact, other batches"]
    flash, standard = v["cuflash"], v["standard"]
    test = flash["against_exact"]
    ratio = flash["distance"][-1] / standard["distance"][-1]
    seeds = flash["distance"][-1] / other["distance"][-1]
    said = "equivalent within" if test["equivalent"] else "not shown to be within"
    return (
        f"A model of {f['parameters']} weights on real text, {f['steps'][-1]} steps, {f['seeds']} "
        "seeds, the same start and batches. The same attention twice gives the same weights. "
        "Distance from the run with exact attention, relative to the weights: cuflash "
        f"{number(flash['distance'][0])} after one step and {number(flash['distance'][-1])} at the "
        f"end, standard attention {number(standard['distance'][0])} and "
        f"{number(standard['distance'][-1])}, other batches {number(other['distance'][-1])}. "
        f"Training forks: flash {ratio:.2g} times as far as standard attention, {seeds:.2g} times "
        f"as far as other batches. Held-out loss: {flash['held_out']:.4f} against "
        f"{v['exact']['held_out']:.4f} with exact attention, a difference of "
        f"{number(test['mean'])}, {said} two standard deviations over seeds "
        f"({number(test['margin'])})."
    )


def _bias(r: ClaimResult) -> str:
    f = r.figures
    whole = f["bias"]["whole"]
    supported(r.verdict.kind == "holds if", "flash is unbiased but for known exceptions")
    trunc = [e for e in f["exceptions"] if e["which"] == "truncation" and not e["gpu"]]
    top = max(e["n"] for e in trunc)
    bare, _, cured = (e for e in trunc if e["n"] == top)
    tied = {e["case"]: e for e in f["exceptions"] if e["which"] == "tied maxima"}
    half, wide = tied["O in bf16"], tied["O in fp32 (kernels)"]
    supported(abs(wide["mean"]) < abs(half["mean"]) / 100, "fp32 accumulators avoid tied maxima")
    return (
        f"On inputs of both signs flash's mean error is {number(whole['mean'])} ± "
        f"{number(whole['error'])} of its rms: noise. With values of one sign the tensor core "
        "shows: "
        f"it truncates, so O shrinks by {number(-bare['mean'])} at N = {top}; adding tiles in fp32 "
        f'(`accumulate="promoted"`) leaves {number(-cured["mean"])}. Two keys tied at the maximum '
        f"bias O by {half['mean'] * 256:.2f} of 2⁻⁸ where O is kept in bf16, which kernels do "
        "not: with "
        f"fp32 it is {number(wide['mean'])}."
    )


def document(results: dict[int, ClaimResult], rest: dict[str, Any]) -> str:
    """The Markdown: the template with its gaps filled."""
    rows = "\n".join(
        f"| {r.number} | {r.says} | **{r.verdict.kind}** | "
        f"`{page.reproduce(r.number, '--full' in rest['command'])}` |"
        for r in results.values()
    )
    pictures = {
        name.replace("-", "_"): _picture(name, results[claim].plots[which].title)
        for name, (claim, which) in PLOTS.items()
    }
    return TEMPLATE.read_text(encoding="utf-8").format(
        command=rest["command"],
        machine=", ".join(f"{name} {value}" for name, value in rest["machine"].items()),
        rows=rows,
        rescale=_rescale(results[4]),
        bits=_bits(results[6]),
        backward=_backward(results[7], results[12]),
        depth_text=_depth(results[9]),
        training_text=_training(results[10]),
        bias=_bias(results[11]),
        trials=results[2].figures["rational"]["trials"],
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
        for dark in (False, True):
            svg = standalone(by_number[claim].plots[which], dark=dark)
            (PICTURES / f"{name}-{'dark' if dark else 'light'}.svg").write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
