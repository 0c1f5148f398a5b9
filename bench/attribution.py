"""How well attribution closes: residual as a share of the error, on random inputs and real
activations.

    python -m bench.attribution [--data FOLDER_OF_CAPTURES]

Forward and backward, before and after the output cast, cuflash's and the article's arithmetic and
standard attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import captures, standard_inputs, write
from emulation import Attribution, Numerics, attribute
from emulation.problem import Array
from emulation.samples import sample

ALGORITHMS: dict[str, dict[str, Any]] = {
    "flash": {},
    "flash, article": {
        "numerics": Numerics(reference="row-max", row_sum="unrounded", delta="rounded")
    },
    "standard": {"algorithm": "standard"},
}


def residuals(a: Attribution) -> dict[str, float]:
    """Residual share of every part, before the cast ("o", ...) and after."""
    shares = {}
    for name, part in a.parts.items():
        shares[name] = part.residual_share
        if part.before_cast is not None:
            shares[f"{name} before cast"] = part.before_cast.residual_share
    return shares


def _inputs(folder: Path | None, dtype: str) -> Iterator[tuple[str, Array, Array, Array, bool]]:
    for kind, q, k, v in standard_inputs(dtype):
        yield kind, q, k, v, False
    for file, head, q, k, v, causal in captures(folder, dtype):
        if head % 4 == 0:  # every fourth head: a run of minutes, not of hours
            yield f"{file} head {head}", q, k, v, causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    folder = parser.parse_args().data
    figures: dict[str, dict[str, float]] = {}
    for dtype in ("float16", "bfloat16"):
        for name, q, k, v, causal in _inputs(folder, dtype):
            dout = sample("normal", n=q.shape[1], d=v.shape[2], dtype=dtype, seed=1)[0]
            for algorithm, options in ALGORITHMS.items():
                a = attribute(q, k, v, dout=dout, causal=causal, **options)
                shares = residuals(a)
                figures[f"{name}, {dtype}, {algorithm}"] = shares
                print(f"{name:36} {dtype:9} {algorithm:15} worst {max(shares.values()):.1e}")
    print(f"worst of all: {max(max(s.values()) for s in figures.values()):.1e}")
    print(write("attribution", figures))


if __name__ == "__main__":
    main()
