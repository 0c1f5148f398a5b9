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
    lse_error: dict[str, float] = {}
    for dtype in ("bfloat16", "float16"):
        for name, q, k, v, causal in _inputs(folder, dtype):
            problem = Problem.of(q, k, v, causal=causal)
            exact, exact_lse = float64_attention(problem)

            def mean_square(plan: Any, q=q, k=k, v=v, causal=causal, exact=exact) -> float:  # type: ignore[no-untyped-def]
                out = flash(q, k, v, plan=plan, causal=causal)[0].astype(np.float64)
                return float(np.mean((out - exact) ** 2))

            lse = flash(q, k, v, causal=causal)[1].astype(np.float64)
            error = float(np.max(abs(lse - exact_lse) / np.maximum(1, abs(exact_lse))))
            seen = lse_error.get(f"{name}, {dtype}", 0.0)
            lse_error[f"{name}, {dtype}"] = error if np.isnan(error) else max(error, seen)
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
    worst = max(lse_error, key=lse_error.__getitem__)
    print(
        f"LSE of the default: error over max(1, |LSE|) at most {lse_error[worst]:.2e}, on {worst}"
    )
    print(write("numerics", ratios | {"LSE of the default": lse_error}))


if __name__ == "__main__":
    main()
