"""Derive the float32 coefficients of `emulation.sfu.ex2_polynomial`: 2^f on [0, 1], degree 5.

    python -m bench.derive_ex2_polynomial

Remez exchange on the relative error with the constant term 1 gives the real coefficients; it is
weighted, because the rounding of the last FMA takes more of the budget near f = 0. The two lowest
coefficients are tried at several neighbouring float32 numbers, the others fitted again around each
choice and rounded one by one. The set with the smallest largest error in real float32 FMA
arithmetic wins, among those that give exactly 2 at f = 1.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from emulation import rounding

Real = NDArray[np.float64]
GRID: Real = 0.5 - 0.5 * np.cos(np.pi * np.arange(1, 4001) / 4000)  # (0, 1], denser at the ends
F32 = np.float32


def relative_error(c: Real, f: Real) -> Real:
    """(1 + sum c[k] f^(k+1)) / 2^f - 1."""
    return np.asarray((1 + np.polyval([*c[::-1], 0.0], f)) / np.exp2(f) - 1)


def weight(f: Real) -> Real:
    """What the approximation may spend at f of a total of 2^-22.75, next to the roundings."""
    return np.asarray(2.0**-22.75 - 2.0**-24 * (1 + 0.35 * f) / np.exp2(f))


def remez(fixed: list[float], degree: int = 5) -> Real:
    """Weighted minimax coefficients of f^1 .. f^degree, the first ones being `fixed`."""
    free = np.arange(len(fixed) + 1, degree + 1)
    nodes = np.linspace(0.02, 1.0, len(free) + 1)
    for _ in range(30):
        known = 1 + sum(c * nodes ** (k + 1) for k, c in enumerate(fixed))
        matrix = nodes[:, None] ** free / np.exp2(nodes)[:, None]
        signs = (-1.0) ** np.arange(len(nodes))
        solved = np.linalg.solve(
            np.column_stack([matrix, -signs * weight(nodes)]), 1 - known / np.exp2(nodes)
        )
        c = np.concatenate([fixed, solved[:-1]])
        error = relative_error(c, GRID) / weight(GRID)
        # One extremum for every run of one sign, the largest of each; the longest alternation is
        # kept.
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


def neighbour(x: float, steps: int) -> float:
    """The float32 number `steps` units in the last place from the one nearest to x."""
    bits = np.array([x], F32).view(np.int32) + np.int32(steps)
    return float(bits.view(F32)[0])


def main() -> None:
    ideal = remez([])
    print(f"minimax in real arithmetic: 2^{np.log2(np.abs(relative_error(ideal, GRID)).max()):.2f}")
    sample = (np.arange(0, 1 << 23, 257) * 2.0**-23).astype(F32)
    found = []
    for first, second in itertools.product(range(-4, 5), range(-12, 13)):
        fixed = [neighbour(ideal[0], first)]
        fixed.append(neighbour(remez(fixed)[1], second))
        while len(fixed) < 5:
            fixed.append(neighbour(remez(fixed)[len(fixed)], 0))
        found.append((measured(tuple(fixed), sample), tuple(fixed)))
    ranked = sorted(found)[:5]
    for _, c in list(ranked):
        for moves in itertools.product(range(-3, 4), repeat=3):
            near = (*c[:2], *(neighbour(x, m) for x, m in zip(c[2:], moves, strict=True)))
            ranked.append((measured(near, sample), near))
    ranked = sorted(ranked)[:10]
    everywhere = np.concatenate([(np.arange(1 << 23) * 2.0**-23).astype(F32), np.ones(1, F32)])
    error, best = min((measured(c, everywhere), c) for _, c in ranked)
    steps = np.diff(horner(best, everywhere))
    print(
        f"float32 FMAs, all 2^23 fractions: {error:.4g} = 2^{np.log2(error):.2f}; "
        f"falls {int((steps < 0).sum())} times"
    )
    print("POLYNOMIAL =", best[::-1])


if __name__ == "__main__":
    main()
