"""Derive the coefficients of `emulation.sfu.ex2_polynomial`: 2^f on [0, 1], degree 5, constant term 1, float32.

    python bench/derive_ex2_polynomial.py

Remez exchange on the relative error gives the real coefficients. Then one coefficient after the other, lowest power
first, is rounded to float32 and the others are fitted again around it; the neighbours of the result (in units in
the last place) are tried in real float32 FMA arithmetic, and the one with the smallest largest error wins among
those that give exactly 2 at f = 1.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from emulation import rounding

Real = NDArray[np.float64]
GRID: Real = 0.5 - 0.5 * np.cos(np.pi * np.arange(1, 20001) / 20000)  # (0, 1], denser at the ends
F32 = np.float32


def relative_error(c: Real, f: Real) -> Real:
    """(1 + sum c[k] f^(k+1)) / 2^f - 1."""
    return np.asarray((1 + np.polyval([*c[::-1], 0.0], f)) / np.exp2(f) - 1)


def remez(fixed: list[float], degree: int = 5) -> Real:
    """Minimax coefficients of f^1 .. f^degree, the first ones being `fixed`."""
    free = np.arange(len(fixed) + 1, degree + 1)
    nodes = np.linspace(0.02, 1.0, len(free) + 1)
    for _ in range(30):
        known = 1 + sum(c * nodes ** (k + 1) for k, c in enumerate(fixed))
        matrix = nodes[:, None] ** free / np.exp2(nodes)[:, None]
        signs = (-1.0) ** np.arange(len(nodes))
        solved = np.linalg.solve(np.column_stack([matrix, -signs]), 1 - known / np.exp2(nodes))
        c = np.concatenate([fixed, solved[:-1]])
        error = relative_error(c, GRID)
        # One extremum for every run of one sign, the largest of each; the longest alternation is kept.
        runs = np.split(np.arange(len(GRID)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        peaks = [int(run[np.argmax(np.abs(error[run]))]) for run in runs]
        while len(peaks) > len(nodes):
            peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
        if len(peaks) < len(nodes):
            break
        nodes = GRID[peaks]
    return c


def measured(c: tuple[float, ...], f: NDArray[np.float32]) -> float:
    """Largest relative error of Horner in float32 FMAs; infinite where f = 1 does not give 2."""
    one = horner(c, np.ones(1, F32))
    if one[0] != 2:
        return np.inf
    exact = np.exp2(f.astype(np.float64))
    return float(np.abs(horner(c, f) / exact - 1).max())


def horner(c: tuple[float, ...], f: NDArray[np.float32]) -> NDArray[np.float32]:
    p = np.full(f.shape, c[-1], F32)
    for coefficient in (*c[-2::-1], 1.0):
        p = rounding.fma(p, f, F32(coefficient))
    return p


def main() -> None:
    ideal = remez([])
    print(f"minimax in real arithmetic: 2^{np.log2(np.abs(relative_error(ideal, GRID)).max()):.2f}")
    fixed: list[float] = []
    while len(fixed) < 5:
        fixed.append(float(F32(remez(fixed)[len(fixed)])))
    start = np.array(fixed, F32).view(np.int32)
    sample = (np.arange(0, 1 << 23, 257) * 2.0**-23).astype(F32)
    moves = itertools.product(range(-3, 4), range(-3, 4), range(-2, 3), range(-1, 2), range(-1, 2))
    candidates = [tuple((start + np.array(m)).astype(np.int32).view(F32).tolist()) for m in moves]
    ranked = sorted((measured(c, sample), c) for c in candidates)[:12]
    everywhere = np.concatenate([(np.arange(1 << 23) * 2.0**-23).astype(F32), np.ones(1, F32)])
    error, best = min((measured(c, everywhere), c) for _, c in ranked)
    steps = np.diff(horner(best, everywhere))
    print(f"float32 FMAs, all 2^23 fractions: {error:.4g} = 2^{np.log2(error):.2f}; falls {int((steps < 0).sum())} times")
    print("POLYNOMIAL =", best[::-1])


if __name__ == "__main__":
    main()
