"""Claim 10: training forks into two sets of weights, no different from another seed.

One small language model on real text, trained from the same weights on the same batches with exact,
standard and flash attention, beside runs with other batches, other initial weights, and a window:
distance of weights, loss curves, held-out loss, and an equivalence test. Its margin is what other
batches change; the window, which is another function, shows that the test can fail.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from emulation.claims.claim import Claim, Figures, Plot, Verdict, task
from emulation.claims.settings import Settings
from emulation.claims.statistics import equivalent, mean_and_error, rms, student
from emulation.claims.tasks import Task
from emulation.report.text import install

EXACT, AGAIN = "exact", "exact again"
OTHER_BATCHES, OTHER_WEIGHTS = "exact, other batches", "exact, other weights"
#: Attention that is not exact, so that the test must tell it apart.
CONTROL = "window of N/8"
#: Attention by cuflash under these Numerics.
FLASH: dict[str, dict[str, str]] = {
    "cuflash": {},
    "cuflash, power-of-two": {"reference": "power-of-two"},
    "cuflash, split P, fp32 out": {"p": "split", "out": "float32"},
}
#: Weights have forked once they are this much further apart than at the first record.
FORKED = 10.0


def train(
    seed: int, *, number: int, shape: list[int], steps: int, records: int, rate: float,
    evaluated: int, kernels: str, device: str,
) -> dict[str, Any]:  # fmt: skip
    """All variants of one seed (`number`), side by side; AdamW, linear warm-up over a tenth of the
    steps. Distances are from the exact run, relative to the norm of its weights.
    """
    from emulation.claims import character_model as m

    torch = m.torch
    sizes = m.Shape(*shape)
    sdpa = importlib.import_module(f"{kernels}.torch").scaled_dot_product_attention
    attention = dict.fromkeys((EXACT, AGAIN, OTHER_BATCHES, OTHER_WEIGHTS), m.exact)
    attention["standard"], attention[CONTROL] = m.standard, m.windowed
    for name, numerics in FLASH.items():
        attention[name] = functools.partial(sdpa, is_causal=True, numerics=numerics)
    if number:  # whether the same twice is the same is asked once
        del attention[AGAIN]
    models, optimisers, batches = {}, {}, {}
    for name in attention:
        other_weights, other_batches = name == OTHER_WEIGHTS, name in (OTHER_BATCHES, OTHER_WEIGHTS)
        models[name] = m.Model(sizes, 1000 + number + 500 * other_weights, device)
        optimisers[name] = torch.optim.AdamW(models[name].weights, rate)
        batches[name] = m.Batches(sizes, 2000 + number + 500 * other_batches, device)
    recorded = sorted({int(s) for s in np.geomspace(1, steps, records)})
    curves: dict[str, Any] = {n: {"distance": [], "loss": []} for n in attention}
    losses: dict[str, list[Any]] = {n: [] for n in attention}
    for step in range(1, steps + 1):
        for name, attend in attention.items():
            optimisers[name].param_groups[0]["lr"] = rate * min(1.0, 10 * step / steps)
            optimisers[name].zero_grad(set_to_none=True)
            loss = models[name].loss(batches[name].draw(), attend)
            loss.backward()
            optimisers[name].step()
            losses[name].append(loss.detach())
        if step in recorded:
            size = torch.linalg.vector_norm(models[EXACT].flat())
            for name in attention:
                apart = torch.linalg.vector_norm(models[name].flat() - models[EXACT].flat())
                curves[name]["distance"].append(float(apart / size))
                recent = torch.stack(losses[name][-max(1, steps // 20) :])
                curves[name]["loss"].append(float(recent.double().mean()))
    sequences = m.held_out(sizes, evaluated, device)
    with torch.no_grad():  # weights are compared, so one attention evaluates all
        final = {
            n: float(
                np.mean([float(models[n].loss(part, m.exact)) for part in sequences.split(32)])
            )
            for n in attention
        }
    return {"number": number, "steps": recorded, "curves": curves, "held_out": final,
            "parameters": int(models[EXACT].flat().numel()), "device": device}  # fmt: skip


def _tasks(settings: Settings) -> list[Task]:
    on_gpu = settings.gpu and settings.size == "full"
    if importlib.util.find_spec("torch") is None or settings.kernels is None:
        return []
    if on_gpu:  # layers, width, heads, N, batch
        given: dict[str, Any] = {"shape": [2, 128, 2, 128, 16], "steps": 1500, "device": "cuda"}
        given |= {"rate": 1e-3, "evaluated": 256}
    else:
        shape = settings.pick(
            tiny=[1, 16, 1, 16, 2], quick=[1, 32, 1, 32, 4], full=[2, 32, 2, 32, 4]
        )
        steps = settings.pick(tiny=6, quick=120, full=400)
        given = {"shape": shape, "steps": steps, "device": "cpu", "rate": 3e-3, "evaluated": 64}
    seeds = settings.pick(tiny=2, quick=4, full=6)
    given |= {"records": 24, "kernels": settings.kernels}
    return [task(10, f"seed {i}", train, gpu=on_gpu, number=i, **given) for i in range(seeds)]


def _gather(values: Mapping[str, Any]) -> Figures:
    runs = list(values.values())
    if not runs:
        return {"measured": False}
    names = list(runs[-1]["held_out"])
    # Seeds of the same kind: the same first weights, the same attention, other batches.
    margin = rms([r["held_out"][OTHER_BATCHES] - r["held_out"][EXACT] for r in runs])
    variants: dict[str, Any] = {}
    for name in names:
        losses = [r["held_out"][name] for r in runs]
        mean, error = mean_and_error(losses)
        half = student(0.975, len(losses) - 1) * error if len(losses) > 1 else None
        distance = np.mean([r["curves"][name]["distance"] for r in runs], axis=0).tolist()
        loss = np.mean([r["curves"][name]["loss"] for r in runs], axis=0).tolist()
        differences = [r["held_out"][name] - r["held_out"][EXACT] for r in runs]
        variants[name] = {
            "held_out": mean, "interval": half, "distance": distance, "loss": loss,
            "against_exact": equivalent(differences, margin),
        }  # fmt: skip
    again = [d for r in runs if AGAIN in r["curves"] for d in r["curves"][AGAIN]["distance"]]
    return {
        "measured": True, "seeds": len(runs), "steps": runs[0]["steps"], "variants": variants,
        "parameters": runs[0]["parameters"], "device": runs[0]["device"], "margin": margin,
        "repeat_distance": max(again),
    }  # fmt: skip


def _judge(figures: Figures) -> Verdict:
    if not figures["measured"]:
        needs = f"needs PyTorch: {install('torch')}"
        return Verdict("not measured", f"It {needs}.", "needs PyTorch")
    if figures["repeat_distance"] != 0:
        return Verdict(
            "does not hold",
            "nothing can be said: training twice with the same attention gives other weights "
            f"(distance {figures['repeat_distance']:.1e}).",
        )
    variants = figures["variants"]
    rounded = ("standard", *FLASH)
    seed = variants[OTHER_BATCHES]["distance"][-1]
    first = {n: variants[n]["distance"][0] for n in rounded}
    last = {n: variants[n]["distance"][-1] for n in rounded}
    parted = [n for n in rounded if not variants[n]["against_exact"]["equivalent"]]
    ends = ", ".join(f"{n} {first[n]:.1e} to {last[n]:.2g}" for n in rounded)
    tested = variants["cuflash"]["against_exact"]
    said = (
        f"From step 1 to {figures['steps'][-1]} the distance to the exact run's weights, "
        "relative to "
        f"their norm, went: {ends}; other batches give {seed:.2g}. Held-out loss of cuflash "
        "minus exact: "
        f"{_interval(tested)}, margin {tested['margin']:.1e} (what other batches change, rms over "
        f"{figures['seeds']} seeds); by the same test "
        + ", ".join(
            f"{name} {_interval(variants[name]['against_exact'])} "
            f"({'' if variants[name]['against_exact']['equivalent'] else 'not '}within)"
            for name in (OTHER_BATCHES, OTHER_WEIGHTS, CONTROL)
        )
    )
    if variants[CONTROL]["against_exact"]["equivalent"]:
        return Verdict(
            "not measured",
            f"The test tells nothing apart here: even {CONTROL} passes it. {said}.",
            "the test needs longer training",
        )
    if parted:
        return Verdict("does not hold", f"Not equivalent to exact: {', '.join(parted)}. {said}.")
    if forked(figures):
        return Verdict("holds", f"Training has forked. {said}. Every rounded attention is within.")
    return Verdict(
        "holds if",
        f"training goes on for longer than this, where it has not forked: the weights of cuflash "
        f"are {last['cuflash'] / seed:.2g} of another seed's distance apart. {said}. "
        "Every rounded attention is within.",
        f"training is longer than {figures['steps'][-1]} steps: no fork yet",
    )


def forked(figures: Figures) -> bool:
    """Whether every rounded run parted: tenfold since the first record, to half of what other
    batches give.
    """
    curves = [figures["variants"][n]["distance"] for n in ("standard", *FLASH)]
    seed = figures["variants"][OTHER_BATCHES]["distance"][-1]
    return all(d[-1] > FORKED * d[0] and d[-1] >= 0.5 * seed for d in curves)


def _interval(tested: Mapping[str, Any]) -> str:
    if tested["low"] is None:
        return f"{tested['mean']:+.1e}"
    return f"{tested['mean']:+.1e} [{tested['low']:+.1e}, {tested['high']:+.1e}]"


def _tabulate(figures: Figures) -> list[dict[str, Any]]:
    if not figures["measured"]:
        return []
    return [
        {
            "attention": name, "distance at step 1": v["distance"][0],
            "at the last": v["distance"][-1], "held-out loss": v["held_out"],
            "95 % +-": v["interval"], "minus exact": v["against_exact"]["mean"],
            "90 % from": v["against_exact"]["low"], "to": v["against_exact"]["high"],
            "margin": v["against_exact"]["margin"],
            "equivalent": "yes" if v["against_exact"]["equivalent"] else "no",
        }
        for name, v in figures["variants"].items()
    ]  # fmt: skip


def _draw(figures: Figures) -> list[Plot]:
    if not figures["measured"]:
        return []
    steps, plots = figures["steps"], []
    for what, title, y in (
        ("distance", "Distance of the weights from the exact run", "relative"),
        ("loss", "Training loss (mean of the last 5 % of steps)", "nats"),
    ):
        series = {
            name: [[s, d] for s, d in zip(steps, v[what], strict=True) if d]
            for name, v in figures["variants"].items()
        }
        series = {name: points for name, points in series.items() if points}
        plots.append(Plot(title, "step", y, series, True, what == "distance"))
    return plots


def _missing(settings: Settings) -> list[str]:
    return [] if _tasks(settings) else [f"all of it (needs PyTorch: {install('torch')})"]


def _setting(settings: Settings) -> str:
    tasks = _tasks(settings)
    if not tasks:
        return "not measured: needs PyTorch"
    a = tasks[0].arguments
    sizes = dict(zip(("layers", "width", "heads", "N", "batch"), a["shape"], strict=True))
    said = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return (
        f"characters of pydoc_data.topics; {said}; {a['steps']} steps of AdamW, {len(tasks)} "
        "seeds, "
        f"{a['device']}; fp32 but for attention on bf16"
    )


CLAIM = Claim(
    number=10,
    title="Training forks",
    says="Training trajectories fork: 1e-3 grows over thousands of steps into two sets of weights, "
    "no different from another seed.",
    rule="The same attention twice must give the same weights. Not measured unless the test tells "
    "a window of an eighth of the keys from exact attention. Does not hold if the "
    "held-out loss of some attention is not equivalent to exact attention's (two one-sided t tests "
    "at 5 % over seeds; margin: the rms change that other batches make at the same first weights). "
    "Holds if, besides, every distance grew more than tenfold and reached half of what other "
    "batches give; holds if, when it has not yet.",
    setting=_setting,
    tasks=_tasks,
    gather=_gather,
    judge=_judge,
    tabulate=_tabulate,
    draw=_draw,
    missing=_missing,
)
run = CLAIM.run
