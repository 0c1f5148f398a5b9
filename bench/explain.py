"""Planted bugs and correct kernels before the judge: what is found, named, and wrongly accused.

    python -m bench.explain [--data FOLDER] [--workers 2]     the table (bench/results/explain.json)
    python -m bench.explain --gpu [--elements 2e8]            bits of public kernels on a GPU

Every bug of `bench.bugs` on six inputs (bfloat16 and float16 by turns, one of them real
activations), on which the judge was tuned; and, counted apart, those of `bench.held_out`; correct
outputs of emulated FlashAttention-3 and -2, cuDNN, the memory-efficient kernel, PyTorch's "math",
Triton's tutorial, unfused fp32 and cuflash, forward and gradients, on every kind of input and on
the captures. Beside it what allclose finds by PyTorch's default rule, by atol = 1e-2, and by
FlashAttention's.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench import bugs as in_sample
from bench import held_out
from bench.bugs import CAPPED, CAUSAL, FULL, NARROW, WIDE, WINDOW, Bug, Setting
from bench.common import captures, write
from bench.planted import Mistakes, backward, forward
from emulation import Problem, default_plan, flash, flash_vjp, plan_of, standard
from emulation.backward import standard_vjp
from emulation.explain.case import Case
from emulation.explain.exact import NOTHING, run
from emulation.explain.judge import verdict
from emulation.problem import Array
from emulation.samples import KINDS, capture, sample

INPUTS = (
    ("normal", "bfloat16"), ("outlier", "float16"), ("sink", "bfloat16"),
    ("one-signed", "float16"), ("rising", "bfloat16"), ("capture", "float16"),
)  # fmt: skip
KERNELS = ("fa3", "fa2", "cudnn", "efficient", "math", "triton", "cuflash", "unfused fp32")
CORRECT = (CAUSAL, FULL, NARROW, WIDE, WINDOW, CAPPED)


def inputs(kind: str, dtype: str, s: Setting, seed: int = 5) -> tuple[Array, Array, Array, Array]:
    """q, k, v and dout of a setting. "capture": stretches of the bundled head, a head each."""
    dout = sample("normal", n=s.n_q, n_k=2, d=s.d, heads=s.heads, dtype=dtype, seed=seed + 2)[0]
    if kind == "capture":
        q, k, v, _ = capture(dtype)
        wide = [np.concatenate([x[0], x[0]], axis=1)[:, : s.d] for x in (q, k, v)]
        step = (len(wide[0]) - max(s.n_q, s.n_k)) // s.heads
        starts = [step * h for h in range(s.heads)]
        q = np.stack([wide[0][i : i + s.n_q] for i in starts])
        k, v = (np.stack([x[i : i + s.n_k] for i in starts[: s.kv_heads]]) for x in wide[1:])
        return q, k, v, dout
    q = sample(kind, n=s.n_q, n_k=s.n_k, d=s.d, heads=s.heads, dtype=dtype, seed=seed)[0]
    _, k, v = sample(kind, n=s.n_q, n_k=s.n_k, d=s.d, heads=s.kv_heads, dtype=dtype, seed=seed)
    return q, k, v, dout


def kernel(name: str, q: Array, k: Array, v: Array, masks: dict[str, Any]) -> tuple[Array, Array]:
    """Out and lse of a correct kernel, emulated."""
    if name == "unfused fp32":
        out, lse = standard(*(x.astype(np.float32) for x in (q, k, v)), **masks)
        return out.astype(q.dtype), lse
    if name == "planted":
        return forward(Mistakes(), q, k, v, **masks)
    return flash(q, k, v, plan=_plan(name, q, k, v, masks), **masks)


def _plan(name: str, q: Array, k: Array, v: Array, masks: dict[str, Any]) -> Any:
    if name == "cuflash":
        return default_plan(Problem.of(q, k, v, **masks))
    return plan_of(name, q, k, v, causal=masks.get("causal", False))


def gradients(name: str, arrays: Any, masks: dict[str, Any]) -> tuple[Array, Array, Array]:
    q, k, v, dout = arrays
    if name == "unfused fp32":
        found = standard_vjp(*(x.astype(np.float32) for x in arrays), **masks)
        return tuple(x.astype(q.dtype) for x in found)  # type: ignore[return-value]
    return flash_vjp(q, k, v, dout, plan=_plan(name, q, k, v, masks), **masks)


# -- the usual rules -------------------------------------------------------------------


def rules(out: Array, exact: Array, half: Array) -> dict[str, bool]:
    """Whether each rule passes an output. exact: float64; half: the unfused result of the format's
    own precision, which FlashAttention's tests measure by.
    """
    ref = exact.astype(np.float32).astype(out.dtype).astype(np.float64)
    theirs = out.astype(np.float64)
    error = np.abs(theirs - ref)
    rtol = {"float16": 1e-3, "bfloat16": 1.6e-2}[str(out.dtype)]
    ref32 = exact.astype(np.float32)
    shifted = (ref32.astype(out.dtype) + out.dtype.type(0.3) - out.dtype.type(0.3)).astype(float)
    atol = 2 * np.abs(shifted - ref).max()
    return {
        "torch.testing default": bool((error <= 1e-5 + rtol * np.abs(ref)).all()),
        "atol=1e-2": bool((error <= 1e-2).all()),
        "FlashAttention": bool(
            np.abs(theirs - exact).max() <= 2 * np.abs(half.astype(float) - exact).max() + atol
        ),
    }


# -- tasks -----------------------------------------------------------------------------


def planted(bug: Bug, arrays: Any, masks: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a bug, as arguments of `verdict`."""
    q, k, v, dout = arrays
    if bug.special:
        if bug.special == "standard":
            out, lse = standard(q, k, v, state=str(q.dtype), **masks)
        else:
            out, lse = flash(q, k, v, plan=default_plan(
                Problem.of(q, k, v, **masks), {"row_sum": "unrounded"}, state=str(q.dtype)), **masks
            )  # fmt: skip
        return {"out": out, "lse": lse}
    if bug.of == "backward":
        out, lse = kernel("fa2", q, k, v, masks)
        return {"out": out, "grads": backward(bug.mistakes, q, k, v, dout, **masks), "dout": dout}
    out, lse = forward(bug.mistakes, q, k, v, **masks)
    return {"out": out, "lse": lse}


def of_setting(task: tuple[Setting, str, str, bool, Path | None]) -> dict[str, Any]:
    """All bugs of a setting, and the correct kernels, on one input, in-sample or held out."""
    setting, kind, dtype, held, folder = task
    masks = dict(setting.masks)
    if held:
        arrays, planted_here = held_out.inputs(kind, dtype, setting, folder), held_out.bugs()
    else:
        arrays, planted_here = inputs(kind, dtype, setting), in_sample.bugs()
    settings = held_out.CORRECT if held else CORRECT
    q, k, v, dout = arrays
    case = Case(Problem.of(q, k, v, **masks))
    half = standard(q, k, v, state=dtype, **masks)[0]
    exact = run(case.problem, NOTHING, np.arange(case.problem.n_q)).out
    right = kernel("planted", q, k, v, masks)[0]
    found, correct = [], []
    for bug in (b for b in planted_here if b.setting == setting):
        start = time.perf_counter()
        given = planted(bug, arrays, masks)
        with np.errstate(all="ignore"):
            v_ = verdict(case, arithmetic=False, sources=False, **given)
        names = {v_.named, *(s.split(" (")[0] for s in v_.same)}
        same = float(np.mean(given["out"].astype(np.float32) == right.astype(np.float32)))
        found.append({
            "of": bug.of, "suspect": bug.suspect, "strength": bug.strength,
            "input": kind, "dtype": dtype,
            "found": not v_.is_rounding, "named": bug.suspect in names, "as": v_.named,
            "equal bits": same if bug.of == "forward" else None,
            "beyond the bound": max((j.outside for j in v_.judgements.values()), default=0),
            "rules": rules(given["out"], exact, half) if bug.of == "forward" else None,
            "seconds": round(time.perf_counter() - start, 2),
        })  # fmt: skip
    right_ones = [n for n in (*KERNELS, "planted") if n != "math" or "softcap" not in masks]
    for name in right_ones if setting in settings else ():
        out, lse = kernel(name, q, k, v, masks)
        given = {"out": out, "lse": lse}
        if name in ("fa3", "cuflash", "unfused fp32"):
            given |= {"grads": gradients(name, arrays, masks), "dout": dout}
        correct.append(_correct(case, name, f"{kind}, {masks}, D {setting.d}", dtype, given, half))
    return {"bugs": found, "correct": correct, "held": held}


def _correct(
    case: Case, name: str, where: str, dtype: str, given: dict[str, Any], half: Array | None
) -> dict[str, Any]:
    v = verdict(case, arithmetic=False, sources=False, **given)
    exact = case.whole.out
    out = given["out"].reshape(exact.shape) if len(case.rows) == case.problem.n_q else None
    return {
        "kernel": name, "input": where, "dtype": dtype, "kind": v.kind,
        "named": v.named, "elements": sum(j.checked for j in v.judgements.values()),
        "chi": {n: j.chi for n, j in v.judgements.items()},
        "worst": {n: j.worst for n, j in v.judgements.items()},
        "rules": None if out is None or half is None else rules(out, exact, half),
    }  # fmt: skip


def of_kind(task: tuple[str, str, bool]) -> dict[str, list[dict[str, Any]]]:
    """Correct kernels on one kind of input."""
    kind, dtype, causal = task
    setting = Setting(n_q=256, n_k=256, heads=2, kv_heads=1, masks=(("causal", causal),))
    arrays = inputs(kind, dtype, setting, seed=17)
    q, k, v, dout = arrays
    masks: dict[str, Any] = {"causal": causal}
    case = Case(Problem.of(q, k, v, **masks))
    correct = []
    for name in KERNELS:
        out, lse = kernel(name, q, k, v, masks)
        given: dict[str, Any] = {"out": out, "lse": lse}
        # With "huge" P would be formed anew from an LSE that fp32 holds to whole units.
        if kind != "huge" and name != "math":
            given |= {"grads": gradients(name, arrays, masks), "dout": dout}
        correct.append(_correct(case, name, f"{kind}, {masks}", dtype, given, None))
    return {"bugs": [], "correct": correct}


def of_capture(task: tuple[str, str, Array, Array, Array, bool]) -> dict[str, Any]:
    """Correct kernels on one head of a capture."""
    name, dtype, q, k, v, causal = task
    case = Case(Problem.of(q, k, v, causal=causal))
    correct = []
    for kernel_name in KERNELS:
        out, lse = kernel(kernel_name, q, k, v, {"causal": causal})
        given = {"out": out, "lse": lse}
        correct.append(_correct(case, kernel_name, f"capture {name}", dtype, given, None))
    return {"bugs": [], "correct": correct}


def work(folder: Path | None) -> list[tuple[Any, Any]]:
    """(function, argument) of every task, the long ones first."""
    tasks: list[tuple[Any, Any]] = []
    both = ((False, in_sample.bugs(), INPUTS), (True, held_out.bugs(), held_out.INPUTS))
    for held, every, kinds in both:
        settings = list(dict.fromkeys(b.setting for b in every))
        for setting, (kind, dtype) in itertools.product(settings, kinds):
            tasks.append((of_setting, (setting, kind, dtype, held, folder)))
    for kind, dtype, causal in itertools.product(sorted(KINDS), ("float16", "bfloat16"), (0, 1)):
        tasks.append((of_kind, (kind, dtype, bool(causal))))
    for dtype in ("float16", "bfloat16"):
        for name, h, q, k, v, causal in captures(folder, dtype):
            if h % 9 == 4 or folder is None:
                tasks.append((of_capture, (f"{name} head {h}", dtype, q, k, v, causal)))
    return tasks


def summary(found: list[dict[str, Any]], correct: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and one line a bug."""
    # A bug that changes no bit of this input is none.
    idle = [r for r in found if r["equal bits"] == 1.0 and r["of"] != "lse"]
    found = [r for r in found if r not in idle]
    table: dict[str, Any] = {}
    for row in found:
        line = table.setdefault(f"{row['suspect']}: {row['strength']}", Counter())
        line["planted"] += 1
        line["found"] += row["found"]
        line["named"] += row["named"]
        for rule, passed in (row["rules"] or {}).items():
            line[rule] += not passed
    accused = [row for row in correct if row["kind"] == "another computation"]
    of_rules: Counter[str] = Counter()
    for row in correct:
        of_rules.update(rule for rule, passed in (row["rules"] or {}).items() if not passed)
    forward_bugs = [row for row in found if row["rules"] is not None]
    names = ("torch.testing default", "atol=1e-2", "FlashAttention")
    return {
        "bugs": len(table), "planted": len(found), "without effect": len(idle),
        "found": sum(r["found"] for r in found) / max(1, len(found)),
        "named": sum(r["named"] for r in found) / max(1, len(found)),
        "found by rules, of forward bugs": {
            rule: sum(not r["rules"][rule] for r in forward_bugs) / max(1, len(forward_bugs))
            for rule in names
        },
        "correct outputs": len(correct), "elements": sum(r["elements"] for r in correct),
        "false alarms": len(accused), "accused": accused,
        "biased": sum(r["kind"] == "rounding, but biased" for r in correct),
        "false alarms of rules": {
            rule: [of_rules[rule], sum(r["rules"] is not None for r in correct)] for rule in names
        },
        "largest mean square of z": {
            n: max((r["chi"][n] for r in correct if n in r["chi"]), default=0.0)
            for n in ("out", "lse", "dq", "dk", "dv")
        },
        "largest share of the bound": {
            n: max((r["worst"][n] for r in correct if n in r["worst"]), default=0.0)
            for n in ("out", "lse", "dq", "dk", "dv")
        },
        "table": {name: dict(line) for name, line in table.items()},
        "missed or misnamed": [r for r in found if not (r["found"] and r["named"])],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of captures with manifest.json")
    parser.add_argument("--workers", type=int, default=max(1, os.cpu_count() or 1))
    parser.add_argument("--gpu", action="store_true", help="bits of public kernels on this GPU")
    parser.add_argument("--elements", type=float, default=2e8, help="of O, with --gpu")
    parser.add_argument("--seconds", type=float, default=240, help="about so long, with --gpu")
    chosen = parser.parse_args()
    if chosen.gpu:
        from bench import explain_gpu

        return explain_gpu.main(chosen.data, chosen.workers, int(chosen.elements), chosen.seconds)
    start = time.perf_counter()
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    correct: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    # Many small products: one thread a process, which libraries read when they are loaded.
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "NUMBA")}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.workers, context) as pool:
        jobs = [pool.submit(f, x) for f, x in work(chosen.data)]
        for i, job in enumerate(jobs):
            if (error := job.exception()) is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise error
            part = job.result()
            found[part.get("held", False)] += part["bugs"]
            correct[part.get("held", False)] += part["correct"]
            print(f"{i + 1} of {len(jobs)}, {time.perf_counter() - start:.0f} s", flush=True)
    figures: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 1)}
    for name, held in (("in-sample", False), ("held-out", True)):
        part = figures[name] = summary(found[held], correct[held])
        for row in part["missed or misnamed"]:
            print(name, "missed" if not row["found"] else "misnamed", row)
        for row in part["accused"]:
            print(name, "accused", row)
        print(name, {n: x for n, x in part.items() if not isinstance(x, list | dict)})
    print(write("explain", figures))
    return int(any(figures[n]["false alarms"] for n in ("in-sample", "held-out")))


if __name__ == "__main__":
    sys.exit(main())
