"""float32 inputs on the emulator: three bfloat16 terms an operand are as good as fp32 FMAs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import emulation
from emulation import Numerics, Plan, wide
from emulation.backward import flash_vjp
from emulation.bounds import backward_bound, forward_bound
from emulation.contributions import EXPECTED_RESIDUAL
from emulation.flash import flash
from emulation.plan import default_plan
from emulation.problem import Array, Problem
from emulation.samples import sample


def floats(count: int, low: int, high: int, seed: int = 0) -> Array:
    """Random significands with exponents in [low, high], both signs."""
    rng = np.random.default_rng(seed)
    fraction = rng.integers(0, 1 << 23, count)
    field = rng.integers(low + 127, high + 128, count)
    sign = rng.integers(0, 2, count) << 31
    return (fraction | field << 23 | sign).astype(np.uint32).view(np.float32)


def total(x: Array) -> Array:
    return np.asarray(sum(t.astype(np.float64) for t in wide.terms(x)))


def test_terms_hold_all_bits() -> None:
    top = float(np.finfo(np.float32).max)
    edges = np.array([0.0, -0.0, 1.0, top, -top], np.float32)
    x = np.concatenate([floats(200_000, -110, 127), edges])
    assert (total(x) == x.astype(np.float64)).all()
    for t, scale in zip(wide.terms(x), (1.0, 2.0**-8, 2.0**-16), strict=True):
        assert (t.view(np.uint32) & 0xFFFF == 0).all()
        assert (
            abs(t.astype(np.float64)) <= abs(x.astype(np.float64)) * scale * (1 + 2.0**-8)
        ).all()


def test_terms_of_tiny_numbers() -> None:
    x = np.concatenate([floats(200_000, -126, -110), floats(1000, -127, -127)])
    assert np.abs(total(x) - x.astype(np.float64)).max() <= 2.0**-134


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_stay_special(special: float) -> None:
    a, b = np.ones((3, 20), np.float32), np.ones((2, 20), np.float32)
    a[1, 7] = special
    d = wide.dot(a, b)
    assert np.isnan(d[1]).all()
    assert (d[[0, 2]] == 20).all()


@pytest.mark.parametrize("scale", [1.0, 1e18, 1e-16])
def test_product_error(scale: float) -> None:
    """Of one product over 128 terms: below 2^-22 of the sum of magnitudes."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((64, 128)).astype(np.float32) * np.float32(scale) for _ in "ab")
    exact, size = (f(a.astype(np.float64)) @ f(b.astype(np.float64)).T for f in (np.positive, abs))
    for arch in ("sm80", "sm90"):
        assert (np.abs(wide.dot(a, b, arch=arch) - exact) / size).max() < 2.0**-22


def results(arrays: tuple[Array, ...], plan: Plan, **options: Any) -> tuple[Array, ...]:
    q, k, v, dout = arrays
    out, _ = flash(q, k, v, plan=plan, **options)
    return (out, *flash_vjp(q, k, v, dout, plan=plan, **options))


def errors(got: tuple[Array, ...], want: tuple[Any, ...]) -> Array:
    """(4, 2): rms and 99.9th percentile of out, dq, dk, dv."""
    gaps = [np.abs(g.astype(np.float64) - w) for g, w in zip(got, want, strict=True)]
    return np.array([[np.sqrt(np.mean(x**2)), np.quantile(x, 0.999)] for x in gaps])


def inputs(kind: str, n: int, d: int) -> tuple[Array, ...]:
    heads = 2 if n <= 256 else 1
    q, k, v = sample(kind, n=n, d=d, heads=heads, dtype="float32")
    of_dout = kind if kind == "one-signed" else "normal"
    return q, k, v, sample(of_dout, n=n, d=d, heads=heads, dtype="float32", seed=9)[2]


def exact(arrays: tuple[Array, ...]) -> tuple[Any, ...]:
    q, k, v, dout = arrays
    gradients = emulation.oracle.attention_vjp(q, k, v, dout)
    return (emulation.oracle.attention(q, k, v).out, gradients.dq, gradients.dk, gradients.dv)


SHORT = [
    (kind, 256, d, arch)
    for kind in ("normal", "outlier", "one-signed", "peaked")
    for d in (64, 128)
    for arch in ("sm80", "sm90")
]
LONG = [("one-signed", 1024, 64, "sm90"), ("normal", 1024, 128, "sm90")]


@pytest.mark.parametrize(("kind", "n", "d", "arch"), SHORT + LONG)
def test_as_accurate_as_fp32(kind: str, n: int, d: int, arch: str) -> None:
    """Errors of out, dq, dk, dv: at most twice those of correctly rounded FMAs, in the mean and for
    999 elements of 1000; every element within its bound.
    """
    arrays = inputs(kind, n, d)
    plan = default_plan(Problem.of(*arrays[:3]), arch=arch)
    assert plan.wide == "split"
    want = exact(arrays)
    got = results(arrays, plan)
    fma = errors(results(arrays, dataclasses.replace(plan, wide="fma")), want)
    assert (errors(got, want) <= 2 * fma).all(), errors(got, want) / fma
    problem = Problem.of(*arrays[:3])
    bounds = (forward_bound(problem, plan)[0], *backward_bound(problem, plan, arrays[3]))
    for x, y, bound in zip(got, want, bounds, strict=True):
        assert (np.abs(x.astype(np.float64) - y) <= bound).all()


def test_why_sums_are_promoted() -> None:
    """The tensor core truncates: over 1024 keys of one sign its own sums lose ten times more."""
    q, k, v, _ = inputs("one-signed", 1024, 64)
    want = emulation.oracle.attention(q, k, v).out
    rms = [
        np.sqrt(np.mean((flash(q, k, v, numerics=numerics)[0] - want) ** 2))
        for numerics in (None, Numerics())
    ]
    assert rms[1] > 10 * rms[0]


@pytest.mark.parametrize(("of_q", "of_k", "of_v"), [
    (1e30, 1e-30, 1e30), (1e-30, 1e30, 1e-30), (1e19, 1e-19, 1e36), (1.0, 1.0, 1e-33),
])  # fmt: skip
def test_range_of_fp32(of_q: float, of_k: float, of_v: float) -> None:
    q, k, v = sample("normal", n=64, d=32, dtype="float32")
    q, k, v = (x * np.float32(s) for x, s in ((q, of_q), (k, of_k), (v, of_v)))
    out, want = flash(q, k, v)[0].astype(np.float64), emulation.oracle.attention(q, k, v).out
    assert np.abs(out - want).max() < 1e-6 * of_v


def test_largest_numbers() -> None:
    """Numbers that bfloat16 rounds to infinity."""
    top = np.finfo(np.float32).max
    x = np.zeros((4, 32), np.float32)
    v = np.where(np.arange(32) % 2, np.float32(0.999) * top, -top)[None].astype(np.float32)
    assert (flash(x, x[:1], v)[0] == v).all()


def test_default_plan() -> None:
    x = np.zeros((16, 128), np.float32)
    problem = Problem.of(x, x, x)
    assert default_plan(problem).numerics == Numerics(accumulate="promoted")
    assert default_plan(problem, Numerics()).numerics == Numerics()
    assert default_plan(problem).rounded_sum == "lanes"
    assert default_plan(problem, wide="fma").wide == "fma"


@pytest.mark.parametrize("numerics", [{"p": "split"}, {"row_sum": "unrounded"}], ids=str)
def test_nothing_is_rounded(numerics: dict[str, str]) -> None:
    """P is no half: how a half would be carried, and which P is summed, changes no bit."""
    arrays = inputs("normal", 100, 32)
    common = {"accumulate": "promoted"}
    problem = Problem.of(*arrays[:3])
    plans = (default_plan(problem, common), default_plan(problem, {**common, **numerics}))
    for one, other in zip(*(results(arrays, plan) for plan in plans), strict=True):
        assert (one == other).all()


def test_attribution_closes() -> None:
    q, k, v, dout = inputs("normal", 100, 32)
    report = emulation.attribute(q, k, v, dout=dout)
    for part in report.parts.values():
        assert part.residual_share <= EXPECTED_RESIDUAL, part.output
        assert "P rounding" not in part.sources or part.sources["P rounding"].rms == 0
