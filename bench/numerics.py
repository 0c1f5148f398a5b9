"""The rms error of each choice of Numerics beside FlashAttention-3's arithmetic: why the default is
the default.

    python -m bench.numerics [--data FOLDER_OF_CAPTURES]

For every input: rms of (out - exact) / rms of (out of FA3's arithmetic - exact), after the output
cast. A choice may be the default when no ratio is above 1.03. Of the default also LSE's largest
error over max(1, |LSE|). Beside the standard inputs and the captures: logits of 10^4 and more, that
grow along the walk, and that all lie far below 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import captures, standard_inputs, write
from emulation import Numerics, Problem, default_plan, flash, plan_of
from emulation.oracle import float64_attention
from emulation.problem import Array
from emulation.samples import sample

DEFAULT = "row-max, unrounded (default)"
CHOICES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "row-max, rounded": {"numerics": Numerics(row_sum="rounded")},
    "row-max, rounded by lanes": {
        "numerics": Numerics(row_sum="rounded"),
        "rounded_sum": "lanes",
    },
    "stale, rounded": {"numerics": Numerics(reference="stale", row_sum="rounded")},
    "stale, unrounded": {"numerics": Numerics(reference="stale")},
    "power-of-two, rounded": {"numerics": Numerics(reference="power-of-two", row_sum="rounded")},
    "power-of-two, unrounded": {"numerics": Numerics(reference="power-of-two")},
    "lazy, rounded": {"numerics": Numerics(reference="lazy", row_sum="rounded")},
    "tie-safe, rounded": {"numerics": Numerics(reference="tie-safe", row_sum="rounded")},
    "stale, rounded, left-to-right": {
        "numerics": Numerics(reference="stale", row_sum="rounded"),
        "direction": "left-to-right",
    },
    "row-max, split, rounded": {"numerics": Numerics(row_sum="rounded", p="split")},
}


def _inputs(folder: Path | None, dtype: str) -> Iterator[tuple[str, Array, Array, Array, bool]]:
    for kind, q, k, v in standard_inputs(dtype):
        yield kind, q, k, v, False
        yield f"{kind}, causal", q, k, v, True
    for kind in ("huge", "rising"):
        yield kind, *sample(kind, n=1024, d=64, dtype=dtype), False
    q, k, v = sample("normal", n=1024, d=64, dtype=dtype)
    yield "far below 0", abs(q) * q.dtype.type(8), -abs(k) * q.dtype.type(8), v, False
    for file, _, q, k, v, causal in captures(folder, dtype):
        yield file, q, k, v, causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    folder = parser.parse_args().data
    squares: dict[str, dict[str, list[float]]] = {}
    lse_errors: dict[str, list[float]] = {}
    for dtype in ("bfloat16", "float16"):
        for name, q, k, v, causal in _inputs(folder, dtype):
            problem = Problem.of(q, k, v, causal=causal)
            exact, exact_lse = float64_attention(problem)

            row = squares.setdefault(f"{name}, {dtype}", {})
            plans = {"FA3": plan_of("fa3", q, k, v, causal=causal)}
            plans |= {c: default_plan(problem, **fields) for c, fields in CHOICES.items()}
            for choice, plan in plans.items():
                out, lse = flash(q, k, v, plan=plan, causal=causal)
                error = out.astype(np.float64) - exact
                row.setdefault(choice, []).append(float(np.mean(error**2)))
                if choice == DEFAULT:
                    of_lse = abs(lse.astype(np.float64) - exact_lse) / np.maximum(1, abs(exact_lse))
                    lse_errors.setdefault(f"{name}, {dtype}", []).append(float(of_lse.max()))
    ratios = {
        name: {c: float(np.sqrt(np.mean(row[c]) / np.mean(row["FA3"]))) for c in CHOICES}
        for name, row in squares.items()
    }
    names = list(ratios)
    for choice in CHOICES:
        at = int(np.argmax([ratios[name][choice] for name in names]))  # of NaN if there is one
        worst = names[at]
        print(f"{choice:32} worst {ratios[worst][choice]:.3f} on {worst}")
    largest = {name: float(np.max(errors)) for name, errors in lse_errors.items()}
    worst = names[int(np.argmax([largest[name] for name in names]))]
    print(f"LSE of the default: error over max(1, |LSE|) at most {largest[worst]:.2e}, on {worst}")
    print(write("numerics", ratios | {"LSE of the default": largest}))


if __name__ == "__main__":
    main()
