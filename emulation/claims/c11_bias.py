"""Claim 11: flash errs by noise without bias; sparse and low-rank attention err with structure.

Signed means with standard errors over independent draws; then the two known exceptions, each with
its remedy: the tensor core truncates, and tied maxima meet values of one sign.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emulation import Numerics, Plan, Problem, attribute, default_plan
from emulation.claims import c09_depth, gpu
from emulation.claims.approximations import APPROXIMATIONS, exact, structure
from emulation.claims.claim import Claim, Figures, Plot, Verdict, no_gpu, task
from emulation.claims.inputs import BUNDLED, make
from emulation.claims.settings import Settings
from emulation.claims.statistics import SIGMAS, mean_and_error, rms
from emulation.claims.tasks import Task
from emulation.flash import flash

#: The default, and what removes each exception: (state, numerics).
PLAIN = Numerics()
CASES: dict[str, dict[str, tuple[str, Numerics]]] = {
    "truncation": {
        "default": ("float32", PLAIN),
        "l by the tensor core": ("float32", dataclasses.replace(PLAIN, row_sum="rounded")),
        "promoted": ("float32", dataclasses.replace(PLAIN, accumulate="promoted")),
    },
    "tied maxima": {
        "O in bf16": ("bfloat16", PLAIN),
        "O in bf16, tie-safe": ("bfloat16", dataclasses.replace(PLAIN, reference="tie-safe")),
        "O in bf16, power-of-two": (
            "bfloat16", dataclasses.replace(PLAIN, reference="power-of-two")
        ),
        "O in fp32 (kernels)": ("float32", PLAIN),
    },
}  # fmt: skip
#: The case of each exception that nothing remedies.
BARE = {"truncation": "default", "tied maxima": "O in bf16"}
#: Where both exceptions arise: the sum of P V.
SOURCE = "PV accumulation"
#: Correlation of neighbouring rows' errors beyond which they are no noise.
STRUCTURED = 0.25


def sources(seed: int, *, n: int, rows: int) -> dict[str, Any]:
    """Mean of every source's contribution to one draw, in units of the whole error's rms."""
    x = make("normal", dtype="bfloat16", seed=seed, n=n, rows=rows)
    found = attribute(*x.qkv)
    size = rms(found.error)
    means = {name: s.mean / size for name, s in found.sources.items()}
    return {"n": n, "means": means | {"whole": float(found.error.mean()) / size}}


def approximate(seed: int, *, kind: str, n: int) -> dict[str, Any]:
    """Structure of the errors of approximations beside that of flash, on one head."""
    x = make(kind, dtype="bfloat16", seed=seed, n=n)
    causal = bool(x.masks.get("causal", False))
    q, k, v = (y[0].astype(np.float64) for y in x.qkv)
    truth = exact(q, k, v, causal)
    rounded = flash(*x.qkv, **x.masks)[0][0].astype(np.float64)
    found = {"flash": structure(rounded - truth, truth)}
    for name, approximation in APPROXIMATIONS.items():
        found[name] = structure(approximation(q, k, v, causal) - truth, truth)
    return {"kind": kind, "n": n, "methods": found}


def exception(seed: int, *, which: str, case: str, n: int, rows: int, draws: int) -> dict[str, Any]:
    """Mean of the error over |O|, and of the part that the sum of P V has in it, over draws.

    On values of one sign such a mean is a shrinking or growing of the whole output. Ties: two keys
    far above the rest, exponents unfused as an unfused half chain has them, so that P is exactly 1
    twice.
    """
    state, numerics = CASES[which][case]
    if which == "truncation":
        x = make("one-signed", dtype="bfloat16", seed=seed, n=n, rows=rows, heads=draws)
        options: dict[str, Any] = {}
        fields: dict[str, Any] = {}
    else:
        x = make("tied-max", dtype="bfloat16", seed=seed, n=n, rows=rows, heads=draws)
        options, fields = {"scale": 0.25}, {"score": "unfused", "tile_n": 64}
    problem = Problem.of(*x.qkv, **options)
    plan: Plan = default_plan(problem, numerics, state=state, **fields)
    found = attribute(*x.qkv, plan=plan, state=state, **options).before_cast
    assert found is not None

    def relative(error: Any) -> tuple[float, float]:
        return mean_and_error((error / np.abs(found.exact)).mean(axis=(1, 2)).tolist())

    (mean, error), (whole, whole_error) = (
        relative(found.sources[SOURCE].contribution), relative(found.error)
    )  # fmt: skip
    return {
        "which": which, "case": case, "n": n, "gpu": False, "mean": mean, "error": error,
        "whole": whole, "whole_error": whole_error,
    }  # fmt: skip


def on_gpu(seed: int, *, kernels: str, case: str, n: int, rows: int, draws: int) -> dict[str, Any]:
    """Truncation in the kernel itself: mean of the whole error over |O|, output in fp32."""
    cp, module = gpu.load(kernels)
    x = make("one-signed", dtype="bfloat16", seed=seed, n=n, rows=rows, heads=draws)
    numerics = dataclasses.replace(CASES["truncation"][case][1], out="float32")
    out = module.attention(*(cp.asarray(y) for y in x.qkv), numerics=numerics)
    truth = gpu.exact(cp, *x.qkv)
    means = cp.asnumpy(((out - truth) / cp.abs(truth)).mean(axis=(1, 2))).tolist()
    mean, error = mean_and_error(means)
    return {
        "which": "truncation", "case": case, "n": n, "gpu": True, "mean": mean, "error": error,
        "whole": mean, "whole_error": error,
    }  # fmt: skip


def _tasks(settings: Settings) -> list[Task]:
    draws = settings.pick(tiny=4, quick=12, full=32)
    n, rows = settings.pick(tiny=(64, 32), quick=(512, 64), full=(2048, 128))
    found = [task(11, f"sources {i}", sources, n=n, rows=rows) for i in range(draws)]
    for kind in ("normal", BUNDLED):
        found.append(task(11, f"structure {kind}", approximate, kind=kind,
                          n=settings.pick(tiny=128, quick=512, full=1024)))  # fmt: skip
    sizes = settings.pick(
        tiny=(256,), quick=(1024, 8192), full=(1024, 2048, 4096, 8192, 16384, 32768, 65536)
    )
    layers, length, width = settings.pick(tiny=(4, 32, 32), quick=(32, 64, 64), full=(32, 256, 256))
    found.append(task(11, "depth", c09_depth.measure, layers=layers, n=length, width=width,
                      heads=2, norm=True))  # fmt: skip
    draws = settings.pick(tiny=3, quick=4, full=6)
    for case in CASES["truncation"]:
        for length in sizes:
            given: dict[str, Any] = {"case": case, "n": length, "rows": 8, "draws": draws}
            name = f"truncation {case} {length}"
            cost = float(8 * draws * length)
            found.append(task(11, name, exception, cost=cost, which="truncation", **given))
            if settings.gpu:  # more of them, since nothing tells this error from the others there
                given |= {"rows": 64, "draws": 8, "kernels": settings.kernels}
                found.append(task(11, f"kernel {name}", on_gpu, gpu=True, **given))
    for case in CASES["tied maxima"]:
        found.append(
            task(11, f"tied maxima {case}", exception, which="tied maxima", case=case, n=64, rows=2,
                 draws=settings.pick(tiny=24, quick=40, full=200))
        )  # fmt: skip
    return found


def _gather(values: Mapping[str, Any]) -> Figures:
    drawn = [value["means"] for name, value in values.items() if name.startswith("sources ")]
    names = sorted({name for means in drawn for name in means})
    bias = {}
    for name in names:
        mean, error = mean_and_error([means.get(name, 0.0) for means in drawn])
        bias[name] = {"mean": mean, "error": error}
    exceptions = [v for v in values.values() if "which" in v]
    shapes = [v for name, v in values.items() if name.startswith("structure ")]
    depth = {
        name: {"first": d[0], "last": d[-1], "layers": len(d)}
        for name, d in values["depth"]["deviations"].items()
    }
    return {"bias": bias, "structure": shapes, "exceptions": exceptions, "depth": depth}


def _biased(entry: Mapping[str, float]) -> bool:
    return not abs(entry["mean"]) <= SIGMAS * entry["error"]


def _judge(figures: Figures) -> Verdict:
    whole = figures["bias"]["whole"]
    noise = not _biased(whole)
    flash_like = [s["methods"]["flash"] for s in figures["structure"]]
    others = [m for s in figures["structure"] for n, m in s["methods"].items() if n != "flash"]
    unstructured = all(abs(m["neighbours"]) < STRUCTURED for m in flash_like)
    structured = all(
        max(abs(m["neighbours"]), abs(m["shrink"]) / m["relative"]) >= STRUCTURED for m in others
    )
    depth = figures["depth"]
    layers = depth["flash"]["layers"]
    times = min(m["relative"] for m in others) / max(m["relative"] for m in flash_like)
    said = (
        f"flash's mean error is {whole['mean']:.1e} +- {whole['error']:.1e} of the error's rms on "
        f"normal inputs; approximations err at least {times:.2g} times more and with structure; "
        f"a window leaves {depth['window of N/8']['last']:.1e} after {layers} layers, "
        f"flash {depth['flash']['last']:.1e}"
    )
    if not (noise and unstructured and structured):
        return Verdict("does not hold", said + " (or without structure, or flash has it, too).")
    left = {
        which: [
            e for e in figures["exceptions"]
            if e["case"] == bare and not e["gpu"] and _biased(e)
        ]
        for which, bare in BARE.items()
    }  # fmt: skip
    if not any(left.values()):
        return Verdict("holds", said + ".")
    told = []
    for which, entries in left.items():
        if entries:
            worst = max(entries, key=lambda e: abs(e["mean"]))
            same = alike(figures["exceptions"], worst)
            parts = ", ".join(f"{_pm(e['mean'], e['error'])} ({e['case']})" for e in same)
            wholes = ", ".join(f"{_pm(e['whole'], e['whole_error'])} ({e['case']})" for e in same)
            told.append(
                f"{which} at N = {worst['n']}: mean error over |O| of the sum of P V alone "
                f"{parts}; of the whole O before the cast {wholes}"
            )
    return Verdict(
        "holds if",
        f"values have both signs: {said}. With one sign, {'. '.join(told)}.",
        "values have both signs",
    )


def alike(exceptions: Sequence[dict[str, Any]], entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every case of an exception that was measured as `entry` was, itself first."""
    same = [e for e in exceptions if all(e[f] == entry[f] for f in ("which", "n", "gpu"))]
    return sorted(same, key=lambda e: e["case"] != entry["case"])


def _pm(mean: float, error: float) -> str:
    return f"{mean:.2e} +- {error:.0e}"


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "what": f"mean of {name} / rms of the error",
            "mean": b["mean"],
            "standard error": b["error"],
        }
        for name, b in figures["bias"].items()
    ]
    for s in figures["structure"]:
        rows += [
            {
                "what": f"{name} on {s['kind']}", "N": s["n"], "relative error": m["relative"],
                "shrinks by": m["shrink"], "correlation with the next row": m["neighbours"],
            }
            for name, m in s["methods"].items()
        ]  # fmt: skip
    rows += [
        {
            "what": f"{name}, deviation over {d['layers']} layers",
            "layer 1": d["first"],
            "last": d["last"],
        }
        for name, d in figures["depth"].items()
    ]
    rows += [
        {
            "what": f"{e['which']}, {e['case']}{', kernel' if e['gpu'] else ''}", "N": e["n"],
            "mean": e["mean"], "standard error": e["error"], "mean of the whole": e["whole"],
            "its standard error": e["whole_error"],
        }
        for e in figures["exceptions"]
    ]  # fmt: skip
    return rows


def _draw(figures: Figures) -> list[Plot]:
    series: dict[str, list[list[float]]] = {}
    for e in figures["exceptions"]:
        if e["which"] == "truncation":
            name = e["case"] + (", kernel" if e["gpu"] else "")
            series.setdefault(name, []).append([e["n"], e["mean"]])
    # The kernel tells no source from another: its curves are of the whole.
    title = "V > 0: mean error over |O| by the sum of P V (kernel: by all)"
    return [Plot(title, "N", "mean", series, log_x=True)]


CLAIM = Claim(
    number=11,
    title="Noise without bias",
    says="Flash's error is rounding noise without bias; sparse and low-rank attention err with "
    "structure, biased.",
    rule="Flash is noise if its mean error is within 3 standard errors of 0 on normal inputs and "
    f"errors of neighbouring rows correlate by less than {STRUCTURED}; an approximation is "
    f"structured if they correlate by {STRUCTURED} or more, or that part of its error scales the "
    "output. Holds if so; holds if, when a known exception (truncation, tied maxima) has a mean "
    "of the sum of P V beyond 3 standard errors.",
    setting=lambda s: (
        "bf16, D = 64; means over independent draws; window, top-k and pooled keys of "
        "an eighth; N to "
        f"{s.pick(tiny=256, quick=8192, full=65536)} with V > 0; tied maxima with V < 0"
    ),
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
    missing=no_gpu,
)
run = CLAIM.run
