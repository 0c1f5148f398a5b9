"""The rms error of each choice of Numerics beside FlashAttention-3's arithmetic: why the default is
the default.

    python -m bench.numerics [--data FOLDER_OF_CAPTURES]

For every input: rms of (out - exact) / rms of (out of FA3's arithmetic - exact), after the output
cast. A choice may be the default when no ratio is above 1.03.
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

CHOICES: dict[str, dict[str, Any]] = {
    "row-max, unrounded (default)": {},
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
    for file, _, q, k, v, causal in captures(folder, dtype):
        yield file, q, k, v, causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    folder = parser.parse_args().data
    squares: dict[str, dict[str, list[float]]] = {}
    for dtype in ("bfloat16", "float16"):
        for name, q, k, v, causal in _inputs(folder, dtype):
            problem = Problem.of(q, k, v, causal=causal)
            exact = float64_attention(problem)[0]

            def mean_square(plan: Any, q=q, k=k, v=v, causal=causal, exact=exact) -> float:  # type: ignore[no-untyped-def]
                out = flash(q, k, v, plan=plan, causal=causal)[0].astype(np.float64)
                return float(np.mean((out - exact) ** 2))

            row = squares.setdefault(f"{name}, {dtype}", {})
            row.setdefault("FA3", []).append(mean_square(plan_of("fa3", q, k, v, causal=causal)))
            for choice, fields in CHOICES.items():
                plan = default_plan(problem, **fields)
                row.setdefault(choice, []).append(mean_square(plan))
    ratios = {
        name: {c: float(np.sqrt(np.mean(row[c]) / np.mean(row["FA3"]))) for c in CHOICES}
        for name, row in squares.items()
    }
    for choice in CHOICES:
        worst = max(ratios, key=lambda name, c=choice: ratios[name][c])  # type: ignore[misc]
        print(f"{choice:32} worst {ratios[worst][choice]:.3f} on {worst}")
    print(write("numerics", ratios))


if __name__ == "__main__":
    main()
