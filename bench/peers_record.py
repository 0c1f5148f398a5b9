"""Outputs and gradients of public kernels, recorded on a GPU to be studied without one.

    python -m bench.peers_record FOLDER
    python -m bench.peers_record --compare FILE.npz ... [--only TEXT] [--workers 2]

On a GPU it writes FOLDER/peers_KERNEL.npz: one head that is run 48 times side by side (so that
FlashAttention-2 splits no keys), N = 384, of every head dimension, format and mask with its
gradients, and of head dimensions whose c depends on how it is rounded without; of the unfused path,
whose products are cuBLAS's, also one head alone. What a kernel refuses is listed.

--compare prints the equal shares of O and LSE under the kernel's Plan, and of dQ, dK and dV, formed
from the recorded O and LSE, under its backward; and of the best under another `Plan.c`, or under a
`BackwardPlan` that differs in one choice: "best" if that gives more, "also" (how many) if as many,
else "next".
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from bench.common import gpu
from bench.explain_gpu import differing, gradients_under, orders
from bench.gpu_kernels import Task, called, fa3_with_gradients, gradients
from emulation import Problem, plan_of
from emulation.explain.whose import emulated
from emulation.plan import C
from emulation.problem import Array
from emulation.samples import sample

KERNELS = ("fa2", "cudnn", "efficient", "math", "fa3")
N, COPIES = 384, 48
WIDTHS = (32, 64, 96, 128, 192, 256)
#: Here c is another one under another rule of `Plan.c`: an output tells which it was.
FORWARD_ONLY = (40, 72, 80, 160)
#: Of one head alone: widths and lengths.
ALONE = ((32, 64), (384, 512, 1024, 2048))
GRADIENTS = ("dq", "dk", "dv")
#: The first of `orders`.
OWN = "its plan"


@dataclass(frozen=True)
class Case:
    """One head: its width, format, mask and length, run so many times side by side; with gradients
    or the forward alone.
    """

    d: int
    dtype: str
    causal: bool
    gradients: bool = True
    n: int = N
    copies: int = COPIES

    @property
    def name(self) -> str:
        alone = f"_n{self.n}_alone" if self.copies == 1 else ""
        return f"d{self.d}_{self.dtype}_{'causal' if self.causal else 'full'}{alone}"

    def inputs(self) -> tuple[Array, Array, Array, Array]:
        """q, k, v and dout (1, N, D)."""
        size: dict[str, Any] = {"n": self.n, "d": self.d, "dtype": self.dtype}
        dout = sample("normal", seed=self.d + 1, **size)[0]
        return *sample("normal", seed=self.d, **size), dout


CASES = {
    case.name: case
    for case in (
        *itertools.starmap(Case, itertools.product(WIDTHS, ("bfloat16", "float16"), (False, True))),
        *(Case(d, t, False, False) for d in FORWARD_ONLY for t in ("bfloat16", "float16")),
        *(
            Case(d, "bfloat16", causal, False, n, 1)
            for d, n, causal in itertools.product(*ALONE, (False, True))
        ),
    )
}


def cases_of(kernel: str) -> dict[str, Case]:
    """What is recorded of a kernel."""
    return {name: case for name, case in CASES.items() if case.copies > 1 or kernel == "math"}


def digest(arrays: tuple[Array, ...]) -> str:
    """Of the inputs: a recording is of these and no others."""
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


# -- on a GPU --------------------------------------------------------------------------


def results(kernel: str, case: Case, task: Task, dout: Array) -> Iterator[Callable[[], Any]]:
    """Calls that give arrays (copies, N, ...) by name. FlashAttention-3's backward has a forward of
    its own, whose results it starts from.
    """
    yield lambda: dict(zip(("out", "lse"), called(kernel, task), strict=True))
    if not case.gradients:
        return
    if kernel == "fa3":
        found: dict[str, str] = {"out": "saved_out", "lse": "saved_lse"}
        yield lambda: {found.get(n, n): x for n, x in fa3_with_gradients(task, dout).items()}
    else:
        yield lambda: dict(zip(GRADIENTS, gradients(kernel, task, dout), strict=True))


def bits(x: Array) -> Array:
    """Half formats as uint16."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def record(kernel: str, cases: dict[str, Case]) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file by name, and what the kernel refused.

    CASE/ARRAY is the first copy's, CASE/ARRAY_same how many of the copies have its bits, and
    CASE/inputs the inputs' digest.
    """
    arrays: dict[str, Array] = {}
    refused: dict[str, str] = {}
    for name, case in cases.items():
        given = case.inputs()
        q, k, v, dout = (np.repeat(x, case.copies, axis=0) for x in given)
        task = Task("normal", q, k, v, case.causal)
        arrays[f"{name}/inputs"] = np.array(digest(given))
        for call in results(kernel, case, task, dout):
            try:
                found = call()
            except Exception as error:  # what a kernel does not take, it says in many ways
                why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                refused.setdefault(why, name)
                continue
            for array, x in found.items():
                if x is None:
                    continue
                same = sum(np.array_equal(bits(x[0]), bits(y)) for y in x)
                arrays[f"{name}/{array}"] = bits(x[0])
                arrays[f"{name}/{array}_same"] = np.array(same)
    return arrays, refused


def versions() -> dict[str, str]:
    """Of what ran."""
    import torch

    found = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    return found | {"cuda": str(torch.version.cuda), "gpu": gpu()["name"]}


def write_all(folder: Path) -> int:
    """A file for every kernel; 1 if PyTorch's kernels gave no gradient."""
    folder.mkdir(parents=True, exist_ok=True)
    start, missing, made_by = time.perf_counter(), [], json.dumps(versions())
    for kernel in KERNELS:
        arrays, refused = record(kernel, cases_of(kernel))
        path = folder / f"peers_{kernel}.npz"
        more = {"kernel": np.array(kernel), "versions": np.array(made_by)}
        np.savez_compressed(path, **arrays, **more)  # type: ignore[arg-type]
        given = [n for n in arrays if not n.endswith(("_same", "/inputs"))]
        unlike = {  # sums in no fixed order
            n.split("/")[1]
            for n in given
            if int(arrays[f"{n}_same"]) != CASES[n.split("/")[0]].copies
        }
        print(
            f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {len(given)} arrays, copies differ in "
            f"{sorted(unlike) or 'none'}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        for why, name in refused.items():
            print(f"    refused from {name} on: {why}")
        if kernel != "fa3" and not any(n.endswith("/dk") for n in given):
            missing.append(kernel)
    return int(bool(missing))


# -- without a GPU ---------------------------------------------------------------------


def share(got: Array, want: Array) -> float:
    """Of equal bits; two NaN are equal."""
    kind = np.uint32 if got.dtype == np.float32 else np.uint16
    return 1.0 - differing(got, want, kind) / got.size


def compare(kernel: str, case: Case, recorded: dict[str, Array]) -> dict[str, dict[str, float]]:
    """Equal shares of every array: under the kernel's Plan (of so many heads as ran) and, of O and
    LSE, other roundings of c; of gradients, every neighbour of its backward.

    Raises ValueError where the inputs are not those that were recorded.
    """
    given = case.inputs()
    if digest(given) != str(recorded["inputs"]):
        raise ValueError(f"{kernel}, {case.name}: recorded of inputs other than those drawn here")
    q, k, v, dout = given
    names = ("out", "lse", "saved_out", "saved_lse", *GRADIENTS)
    held = {n: recorded[n][None] for n in names if n in recorded}
    held = {n: x.view(dout.dtype) if x.dtype == np.uint16 else x for n, x in held.items()}
    problem = Problem.of(q, k, v, causal=case.causal)
    many = (np.broadcast_to(x, (case.copies, *x.shape[1:])) for x in (q, k, v))
    plan = plan_of(kernel, *many, causal=case.causal)
    others = {f"c {c}": dataclasses.replace(plan, c=c) for c in get_args(C) if c != plan.c}
    found: dict[str, dict[str, float]] = {}
    for word, other in {OWN: plan, **(others if plan.algorithm == "tiled" else {})}.items():
        both = emulated(problem, other, np.arange(case.n))
        expected = dict(zip(("out", "lse"), both, strict=True))
        for n in (n for n in held if n not in GRADIENTS):
            found.setdefault(n, {})[word] = share(held[n], expected[n.removeprefix("saved_")])
    out, lse = (held.get(f"saved_{n}", held.get(n)) for n in ("out", "lse"))
    if plan.algorithm != "tiled" or out is None or lse is None or "dk" not in held:
        return found
    for word, other in orders(plan):
        gradients = gradients_under(other, problem, dout, out, lse)
        for name, x in zip(GRADIENTS, gradients, strict=True):
            found.setdefault(name, {})[word] = share(held[name], x)
    return found


def said(found: dict[str, dict[str, float]]) -> str:
    """A line's numbers: under the Plan, and the best of the others: whether it is better, tells
    nothing, or how much worse it is.
    """
    words = []
    for name, shares in found.items():
        own = shares[OWN]
        others = {word: x for word, x in shares.items() if word != OWN}
        top = max(others.values(), default=-1.0)
        best = [word for word, x in others.items() if x == top]
        alike = f"also {len(best)}: {best[0]}" if best else ""
        more = f"{'best' if top > own else 'next'} {top:.6f}: {best[0]}" if best else ""
        text = alike if top == own else more
        words.append(f"{name} {own:.6f}" + (f" ({text})" if text else ""))
    return ", ".join(words)


def together(cases: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean shares over the cases that have an array. A choice that some case does not list is the
    Plan's own there.
    """
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(n for case in cases for n in case):
        held = [case[name] for case in cases if name in case]
        for word in dict.fromkeys(w for shares in held for w in shares):
            each = [shares.get(word, shares[OWN]) for shares in held]
            found.setdefault(name, {})[word] = sum(each) / len(each)
    return found


def compare_all(files: list[Path], only: str, workers: int) -> int:
    """A line for every case and one for all of a kernel's; 1 if a file is of other inputs."""
    jobs: list[tuple[str, str, Any]] = []
    failed = 0
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for path in files:
            with np.load(path) as z:
                kernel = str(z["kernel"])
                for name, case in CASES.items():
                    arrays = {n.split("/")[1]: z[n] for n in z.files if n.startswith(f"{name}/")}
                    line = f"{kernel}, {name}"
                    if arrays and only in line:
                        jobs.append((kernel, line, pool.submit(compare, kernel, case, arrays)))
        results: dict[str, list[dict[str, dict[str, float]]]] = {}
        for kernel, line, job in jobs:
            try:
                found = job.result()
            except ValueError as error:
                failed = 1
                print(error, flush=True)
                continue
            results.setdefault(kernel, []).append(found)
            print(f"{line}: {said(found)}", flush=True)
    for kernel, cases in results.items():
        print(f"{kernel}, {len(cases)} cases together: {said(together(cases))}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where the files go")
    parser.add_argument("--compare", type=Path, nargs="+", help="files that were recorded")
    parser.add_argument("--only", default="", help="part of the line, such as 'cudnn, d128'")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.compare:
        return compare_all(chosen.compare, chosen.only, chosen.workers)
    if chosen.folder is None:
        parser.error("folder: not given, must be one to record into, or use --compare")
    return write_all(chosen.folder)


if __name__ == "__main__":
    sys.exit(main())
