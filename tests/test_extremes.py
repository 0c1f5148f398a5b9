"""Where attention's numbers reach the ends of their formats: scale, softcap, infinities, and sums
that overflow. Results are within their bounds, or what the docstrings say of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
from emulation import Problem, attribute, flash, flash_vjp, oracle, standard, standard_vjp
from emulation.bound_terms import TANH
from emulation.bounds import backward_bound, forward_bound, standard_bound
from emulation.machine import Machine
from emulation.plan import Plan, default_plan
from emulation.problem import DTYPES, LEAST, MOST_SCALE, MOST_SOFTCAP
from emulation.samples import sample
from tests.cases import assert_within, same_bits

# -- scale and softcap


def run_all(dtype: str, options: dict[str, Any], seed: int) -> list[Any]:
    """Every call on small N(0, 1) inputs, checked against its bound; the bounds of both outs."""
    q, k, v = sample("normal", n=12, n_k=21, d=8, dtype=dtype, seed=seed)
    problem = Problem.of(q, k, v, **options)
    plan = default_plan(problem, tile_n=16)
    exact = oracle.attention(q, k, v, **options)
    tiled, whole = forward_bound(problem, plan), standard_bound(problem)
    for got, bounds in (
        (flash(q, k, v, plan=plan, **options), tiled),
        (standard(q, k, v, **options), whole),
    ):
        for name, x, bound in zip(("out", "lse"), got, bounds, strict=True):
            assert_within(name, x, exact, bound)
    slopes = backward_bound(problem, plan, q)
    gradients = oracle.attention_vjp(q, k, v, q, **options)
    got_slopes = flash_vjp(q, k, v, q, plan=plan, **options)
    for name, x, bound in zip(("dq", "dk", "dv"), got_slopes, slopes, strict=True):
        assert_within(name, x, gradients, bound)
    standard_vjp(q, k, v, q, **options)
    for algorithm in ("flash", "standard"):
        try:
            attribute(q, k, v, dout=q, algorithm=algorithm, **options)
        except OverflowError as error:
            assert "left the range of its formats" in str(error)  # noqa: PT017  # may not raise
    return [*tiled, *whole]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.floats(LEAST, MOST_SCALE),
    st.none() | st.floats(LEAST, MOST_SOFTCAP),
    st.integers(0, 9),
)
def test_every_scale_and_softcap_is_within_its_bound(
    dtype: str, scale: float, softcap: float | None, seed: int
) -> None:
    """Over their whole ranges; warnings are errors here, so none leaves the library."""
    options: dict[str, Any] = {"scale": 2.0**scale}
    if softcap is not None:
        options["softcap"] = 2.0**softcap
        factor = math.log2(2 * math.log2(math.e)) + scale - softcap
        assume(LEAST + 1e-9 < factor < MOST_SCALE - 1e-9)
    run_all(dtype, options, seed)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DTYPES), st.floats(-20, MOST_SOFTCAP), st.integers(0, 9))
def test_every_softcap_of_ordinary_scores_has_a_finite_bound(
    dtype: str, softcap: float, seed: int
) -> None:
    for bound in run_all(dtype, {"softcap": 2.0**softcap}, seed):
        assert np.isfinite(bound).all()


def test_tanh_is_within_its_constant() -> None:
    """Over the arguments where it is not flat, and tiny ones; and its error is that of softcap."""
    rng = np.random.default_rng(0)
    tiny = np.ldexp(1 + rng.random(2**16), rng.integers(-126, 4, 2**16))
    x = np.concatenate([np.linspace(-31, 31, 2**20), tiny, -tiny]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64) * (0.5 * math.log(2)))
    off = np.abs(Machine().tanh("softcap", x).astype(np.float64) - exact)
    assert TANH / 4 < off.max() < TANH


@pytest.mark.parametrize("softcap", [50.0, 1e3, 2.0**MOST_SOFTCAP])
def test_attribute_says_what_a_softcap_costs(softcap: float) -> None:
    q, k, v = sample("normal", n=40, d=64, dtype="float32")
    found = attribute(q, k, v, softcap=softcap)
    assert found.residual_share < 1e-6
    (note,) = found.notes
    assert note.startswith("out: softcap is the largest source")
    assert f"a softcap of {softcap:g} moves scores by up to {softcap * TANH:.1e}" in note
    # A score off by `moved` moves every weight by a factor of at most exp(moved), and so does l.
    moved = 2 * softcap * TANH
    most = math.expm1(moved) * 2 * float(np.abs(v).max())
    assert found.sources["softcap"].max <= most
    assert not attribute(q, k, v).notes


# -- infinities


@settings(max_examples=60, deadline=None)
@given(st.sampled_from("qkv"), st.integers(0, 9), st.integers(0, 7), st.sampled_from((1.0, -1.0)))
def test_in_float32_an_infinity_is_a_nan(name: str, row: int, column: int, sign: float) -> None:
    """Split into bfloat16 terms it holds Inf - Inf: out and lse are those of a NaN in its place,
    which reaches the rows that see it, in v only its column.
    """
    given_: dict[str, Any] = dict(
        zip("qkv", sample("normal", n=10, d=8, dtype="float32"), strict=True)
    )
    found = []
    for value in (sign * np.inf, np.nan):
        x = given_[name].copy()
        x[0, row, column] = value
        found.append(cuflash.attention(**given_ | {name: x}, causal=True, return_lse=True))
    (out, lse), (nan_out, nan_lse) = found
    expected = np.zeros(out.shape, bool)
    rows: Any = row if name == "q" else slice(row, None)
    expected[0, rows, column if name == "v" else slice(None)] = True
    assert np.array_equal(np.isnan(out), expected)
    assert np.array_equal(np.isnan(lse), expected.all(axis=2))
    assert same_bits(np.nan_to_num(out), np.nan_to_num(nan_out))
    assert same_bits(np.nan_to_num(lse), np.nan_to_num(nan_lse))


def test_half_formats_and_fma_chains_keep_infinities() -> None:
    """What the float32 rule is an exception from."""
    for dtype in DTYPES:
        q, k, v = sample("normal", n=4, d=8, dtype=dtype)
        v[0, 2, 1] = np.inf
        plan = Plan(format=dtype, wide="fma", tile_n=16)  # type: ignore[arg-type]
        out, _ = flash(q, k, v, plan=plan)
        assert np.isposinf(out[0, :, 1].astype(np.float32)).all()


# -- sums that overflow


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_o_overflow_before_they_are_divided(dtype: str) -> None:
    """Equal keys: exact O is v. The sum of N v fits up to 2^128, as the docstring says."""
    n = 16
    for exponent, fits in ((123, True), (125, False)):
        x = np.zeros((n, 8), np.float32).astype(sample("normal", n=1, dtype=dtype)[0].dtype)
        v = np.full_like(x, 2.0**exponent)
        out = cuflash.attention(x, x, v).astype(np.float32)
        assert np.array_equal(out, np.full(out.shape, 2.0**exponent if fits else np.inf))


def test_the_guard_is_the_forwards_only() -> None:
    """Scores of 1e12: out is that of the largest score, gradients may be NaN."""
    q, k, v = sample("normal", n=8, d=8, dtype="float32")
    out, _ = flash(q, k, v, scale=1e12)
    assert np.array_equal(out, v[:, np.argmax(q[0] @ k[0].T, axis=1)])
    assert np.isnan(flash_vjp(q, k, v, q, scale=1e12)[0]).any()
