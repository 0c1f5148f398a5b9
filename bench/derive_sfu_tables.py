"""Derive the tables of `emulation.sfu` from recorded outputs over all 2^23 mantissas.

    python -m bench.derive_sfu_tables [GOLDEN_DIR]        (default: tests/golden)

Every output bounds (A << s) +- B r +- C sq(r) + const on both sides, so the three integers of a
slice are a small integer fit: for given B and C, A must lie in an interval. C and B are searched
around their least-squares values on the few points that bind, and those are found by adding the
worst violated points until none is left. Nothing is written unless all recorded values are
reproduced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation import sfu

Int = NDArray[np.int64]
OUTPUT = Path(__file__).parent.parent / "emulation" / "data" / "sfu.npz"
MANTISSAS = np.arange(1 << 23, dtype=np.int64)
FRACTIONS = 1.0 + MANTISSAS * 2.0**-23


def add_ulps(reference: NDArray[np.floating[Any]], ulps: NDArray[np.int8]) -> NDArray[np.float32]:
    """float32(reference) moved by recorded differences in units in the last place."""
    bits = reference.astype(np.float32).view(np.int32) + ulps
    return np.asarray(bits, np.int32).view(np.float32)


def recorded(directory: Path) -> dict[str, NDArray[np.float32]]:
    """The outputs in the order of the mantissa m.

    ex2 over [1, 2) and over -(0.5 + m 2^-24), rcp over [1, 2), lg2 over [2^e, 2^(e + 1)), e = -1,
    0, 1.
    """
    out = {}
    with np.load(directory / "ex2_h200.npz") as data:
        out["ex2"] = add_ulps(np.exp2(FRACTIONS), data["pos_1_2"])
        out["ex2_negative"] = add_ulps(np.exp2(-(0.5 + MANTISSAS * 2.0**-24)), data["neg_1_half"])
    with np.load(directory / "rcp_lg2_h200.npz") as data:
        out["rcp"] = add_ulps(1.0 / FRACTIONS, data["rcp"])
        for e in (-1, 0, 1):
            values = add_ulps(np.log2(FRACTIONS * 2.0**e), data[f"lg2_{e}"])
            values[data[f"lg2_{e}_bigi"]] = data[f"lg2_{e}_bigv"]
            out[f"lg2_{e}"] = values
    return out


def bounds(name: str, data: dict[str, NDArray[np.float32]]) -> tuple[Int, Int]:
    """Smallest and largest integer the recipe may give, per mantissa."""
    if name == "ex2":
        low = (data["ex2"].astype(np.float64) * 2.0**22).astype(np.int64)
        return low, low
    if name == "rcp":
        low = (data["rcp"].astype(np.float64) * 2.0**24).astype(np.int64)
        return low, low
    low, high = np.full(1 << 23, -(1 << 62)), np.full(1 << 23, 1 << 62)
    for e in (0, 1, -1):
        y = data[f"lg2_{e}"].astype(np.float64)
        step = np.maximum(np.spacing(np.abs(y).astype(np.float32)).astype(np.float64) * 2.0**36, 1)
        magnitude = np.abs(y) * 2.0**36
        first = np.ceil(magnitude).astype(np.int64)
        last = np.ceil(magnitude + step).astype(np.int64) - 1
        first, last = (first, last) if e >= 0 else (~last, ~first)
        low, high = np.maximum(low, first - (e << 36)), np.minimum(high, last - (e << 36))
    low[0], high[0] = -(1 << 62), 1 << 62  # log2(1) = 0 is a special case of the hardware
    return low, high


def fit_slice(r: Int, low: Int, high: Int, u: sfu.Unit) -> tuple[int, int, int]:
    """The A, B, C with low <= recipe <= high at all r: the first in the order of C, then B."""
    square = sfu.squares()[r << u.up]
    lo = (low << u.drop) - u.const  # of (A << shift) + b_sign B r + c_factor C square
    hi = (high + 1 << u.drop) - 1 - u.const
    known = np.flatnonzero(np.abs(low) < 1 << 61)
    columns = np.stack(
        [np.full(len(r), 1 << u.shift), u.b_sign * r, u.c_factor * square], 1
    ).astype(np.float64)
    middle = (lo[known] + hi[known]) / 2
    guess = np.rint(np.linalg.lstsq(columns[known], middle, rcond=None)[0]).astype(np.int64)
    chosen = known[np.linspace(0, len(known) - 1, 200).astype(np.int64)]
    b, c = (
        g.ravel() for g in np.meshgrid(guess[1] + np.arange(-60, 61), guess[2] + np.arange(-12, 13))
    )
    order = np.lexsort((b, c))
    b, c = b[order], c[order]
    while True:
        rest = u.b_sign * b[:, None] * r[chosen] + u.c_factor * c[:, None] * square[chosen]
        first = -(-(lo[chosen] - rest).max(1) >> u.shift)  # ceil
        last = (hi[chosen] - rest).min(1) >> u.shift
        fits = np.flatnonzero(first <= last)
        if not len(fits):
            raise ValueError(f"{u.name}: no integers fit this slice")
        b, c, first = b[fits], c[fits], first[fits]
        value = (first[0] << u.shift) + u.b_sign * b[0] * r + u.c_factor * c[0] * square
        excess = np.maximum(lo - value, value - hi)
        if excess[known].max() <= 0:
            return int(first[0]), int(b[0]), int(c[0])
        worst = known[np.argsort(excess[known])[-50:]]
        chosen = np.concatenate([chosen, worst[excess[worst] > 0]])


def derive(name: str, data: dict[str, NDArray[np.float32]]) -> Int:
    """The table of one function, int64 (slices, 3)."""
    u = sfu.UNITS[name]
    low, high = bounds(name, data)
    r = np.arange(1 << u.bits, dtype=np.int64)
    rows = []
    for start in range(0, 1 << 23, 1 << u.bits):
        part = slice(start, start + (1 << u.bits))
        rows.append(fit_slice(r, low[part], high[part], u))
    return np.array(rows, np.int64)


def mismatches(data: dict[str, NDArray[np.float32]]) -> dict[str, int]:
    """How many recorded values `emulation.sfu` does not reproduce."""
    x = FRACTIONS
    made = {
        "ex2": sfu.ex2(x.astype(np.float32), backend="numpy"),
        "ex2_negative": sfu.ex2(
            (-(0.5 + MANTISSAS * 2.0**-24)).astype(np.float32), backend="numpy"
        ),
        "rcp": sfu.rcp(x.astype(np.float32), backend="numpy"),
        **{
            f"lg2_{e}": sfu.lg2((x * 2.0**e).astype(np.float32), backend="numpy")
            for e in (-1, 0, 1)
        },
    }
    return {k: int((made[k].view(np.uint32) != v.view(np.uint32)).sum()) for k, v in data.items()}


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("tests/golden")
    data = recorded(directory)
    tables = {name: derive(name, data) for name in sfu.UNITS}
    sfu.table = tables.__getitem__  # type: ignore[assignment]
    wrong = mismatches(data)
    for name, count in wrong.items():
        print(f"{name}: {count} of {1 << 23} values differ")
    for name, t in tables.items():
        print(f"{name}: {len(t)} slices, A, B, C up to {t.max(0).tolist()}")
    if any(wrong.values()):
        raise SystemExit("nothing written")
    np.savez_compressed(OUTPUT, **{name: t.astype(np.int32) for name, t in tables.items()})  # type: ignore[arg-type]
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
