"""Attribution: contributions close, say what is known to be true, and agree with an independent
split.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from emulation import (
    Attribution,
    Numerics,
    Problem,
    attribute,
    default_plan,
    flash,
    oracle,
    plan_of,
    shapley,
)
from emulation.contributions import EXPECTED_RESIDUAL
from emulation.problem import Array, numpy_dtype
from emulation.samples import KINDS, capture, sample
from emulation.sources import GROUPS, SOURCES

ARTICLE = Numerics(reference="row-max", row_sum="unrounded", delta="rounded")


def inputs(kind: str, dtype: str, n: int = 160) -> tuple[tuple[Array, Array, Array], Array]:
    dout = sample("normal", n=n, d=64, dtype=dtype, seed=7)[0]
    return sample(kind, n=n, d=64, dtype=dtype), dout


def assert_closes(a: Attribution) -> None:
    """Every part, before and after its cast: sources, groups and residual add up, and the residual
    is small.
    """
    for part in a.parts.values():
        for p in (part, part.before_cast):
            if p is None:
                continue
            norm = float(np.linalg.norm(p.error))
            for pieces in (p.sources, p.groups):
                total = sum((c.contribution for c in pieces.values()), start=p.residual)
                assert np.linalg.norm(total - p.error) <= 1e-12 * norm
            shares = sum(s.share for s in p.sources.values())
            residual = float(np.vdot(p.residual, p.error)) / norm**2
            assert abs(shares + residual - 1) <= 1e-9
            assert p.residual_share <= EXPECTED_RESIDUAL, (p.output, p.residual_share, p.notes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", [None, ARTICLE], ids=["default", "article"])
def test_flash_closes(kind: str, dtype: str, numerics: Numerics | None) -> None:
    qkv, dout = inputs(kind, dtype)
    assert_closes(attribute(*qkv, dout=dout, numerics=numerics, causal=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["normal", "outlier", "tied-max", "one-signed"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
def test_standard_and_half_state_close(kind: str, dtype: str, state: str) -> None:
    """Also with half-precision state: secants leave no second-order remainder."""
    qkv, dout = inputs(kind, dtype)
    assert_closes(attribute(*qkv, dout=dout, algorithm="standard", state=state))
    assert_closes(attribute(*qkv, dout=dout, state=state))


def test_real_activations_close() -> None:
    q, k, v, options = capture("bfloat16")
    dout = sample("normal", n=1024, d=64, dtype="bfloat16", seed=1)[0]
    a = attribute(q, k, v, dout=dout, numerics=ARTICLE, **options)
    assert_closes(a)
    # What random inputs hide: on real activations delta from the rounded O is dQ's largest source.
    assert max(a.parts["dq"].groups.values(), key=lambda g: g.share).name == "delta"


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window": (20, 0)},
        {"causal": "top-left", "window": (None, 3)},
        {"scale": 0.7},
    ],
    ids=str,
)
def test_options_close(options: dict[str, Any]) -> None:
    q = sample("normal", n=70, d=40, heads=4, dtype="float16")[0].reshape(2, 2, 70, 40)
    _, k, v = (x.reshape(2, 1, 90, 40) for x in sample("normal", n=90, d=40, heads=2, seed=2))
    v = v[..., :24]
    dout = sample("normal", n=70, d=24, heads=4, seed=3)[0].reshape(2, 2, 70, 24)
    dlse = np.linspace(-1, 1, 280, dtype=np.float32).reshape(2, 2, 70)
    a = attribute(q, k, v, dout=dout, dlse=dlse, **options)
    assert a.parts["dk"].error.shape == k.shape
    assert_closes(a)
    assert_closes(attribute(q, k, v, dout=dout, dlse=dlse, algorithm="standard", **options))


@pytest.mark.parametrize("numerics", [
    {"reference": "power-of-two"}, {"reference": "final"}, {"reference": "lazy"},
    {"reference": "tie-safe"}, {"p": "split"}, {"exp2": "polynomial"}, {"exp2": "mixed"},
    {"accumulate": "promoted"}, {"out": "float32"}, {"row_sum": "unrounded"},
], ids=str)  # fmt: skip
def test_every_numerics_value_closes(numerics: dict[str, str]) -> None:
    (q, k, v), dout = inputs("rising", "bfloat16", n=300)
    plan = default_plan(Problem.of(q, k, v), numerics, tile_n=48)
    assert_closes(attribute(q, k, v, dout=dout, plan=plan))


@pytest.mark.parametrize("reference", ["power-of-two", "final", "stale"])
def test_exact_rescale_contributes_nothing(reference: str) -> None:
    """An article's question: with rescaling by powers of two the rescale group is exactly zero."""
    q, k, v = sample("rising", n=300, d=64, dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v), {"reference": reference}, tile_n=16)
    a = attribute(q, k, v, plan=plan)
    assert a.before_cast is not None
    assert "rescale" not in a.before_cast.groups
    rows = dataclasses.replace(plan, numerics=Numerics(reference="row-max"))
    b = attribute(q, k, v, plan=rows)
    assert b.before_cast is not None
    assert b.before_cast.groups["rescale"].rms > 0


@pytest.mark.parametrize("reference", ["row-max", "power-of-two"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_agrees_with_shapley(reference: str, state: str) -> None:
    """Switching groups of roundings on and off, in all orders, gives the same split up to second
    order.
    """
    q, k, v = sample("normal", n=40, d=16, dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v), {"reference": reference}, tile_n=16, state=state)
    a = attribute(q, k, v, plan=plan).before_cast
    assert a is not None
    parts = shapley(q, k, v, plan=plan)
    total = sum(parts.values(), start=np.zeros(a.error.shape))
    assert np.linalg.norm(total - a.error) <= 1e-9 * np.linalg.norm(a.error)
    assert set(parts) == set(a.groups)
    # Shapley and secants differ where errors multiply errors: at most (largest relative error)^2 of
    # the output.
    u = 2.0**-8
    second_order = (40 * u) ** 2 * float(np.abs(np.asarray(v, np.float32)).max())
    for name, group in a.groups.items():
        assert np.max(np.abs(group.contribution - parts[name])) <= second_order


def test_difference_of_two_algorithms() -> None:
    (q, k, v), dout = inputs("normal", "bfloat16")
    both = attribute(q, k, v, dout=dout, against="standard", causal=True)
    a = attribute(q, k, v, dout=dout, causal=True)
    b = attribute(q, k, v, dout=dout, causal=True, algorithm="standard")
    assert both.algorithm == "flash - standard"
    np.testing.assert_array_equal(both.error, a.observed - b.observed)
    assert_closes(both)
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal((a - b).parts[name].error, both.parts[name].error)
    with pytest.raises(ValueError, match="other: lse"):
        _ = a - b.parts["lse"]


def test_observed_output_of_somebody_else() -> None:
    q, k, v = sample("normal", n=64, d=64, dtype="bfloat16")
    plan = plan_of("cudnn", q, k, v)
    out, _ = flash(q, k, v, plan=plan)
    same = attribute(q, k, v, plan=plan, observed=out)
    assert same.residual_share <= EXPECTED_RESIDUAL
    assert not same.notes
    broken = out.copy()
    broken[0, 3, 5] += numpy_dtype("bfloat16").type(0.5)
    other = attribute(q, k, v, plan=plan, observed=broken)
    assert np.flatnonzero(np.abs(other.residual) > 0.1).tolist() == [3 * 64 + 5]
    assert "differs from the emulated one in 1 of 4096 elements" in other.notes[0]
    with pytest.raises(ValueError, match=r"observed: shape \(64, 64\), must be \(1, 64, 64\)"):
        attribute(q, k, v, observed=out[0])


def test_error_is_observed_minus_oracle() -> None:
    q, k, v = sample("peaked", n=50, d=32, dtype="float16")
    a = attribute(q, k, v)
    np.testing.assert_array_equal(a.exact, oracle.attention(q, k, v).out)
    np.testing.assert_array_equal(a.observed, flash(q, k, v)[0].astype(np.float64))
    np.testing.assert_array_equal(a.error, a.observed - a.exact)


def test_rows_that_see_nothing_have_no_error() -> None:
    q, k, v = sample("normal", n=20, n_k=8, d=16, dtype="float16")
    a = attribute(q, k, v, causal=True, dout=q)
    assert not a.error[0, :12].any()
    assert not a.parts["lse"].error[0, :12].any()
    assert not a.parts["dq"].error[0, :12].any()
    assert_closes(a)


def test_overflow_is_named() -> None:
    q, k, v = sample("huge", n=32, d=64, dtype="float16")
    with pytest.raises(
        OverflowError, match=r"standard\[float16\]: left the range .* QK accumulation"
    ):
        attribute(q, k, v, algorithm="standard", state="float16")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": "linear"}, ValueError, "algorithm: got 'linear'"),
        ({"against": "linear"}, ValueError, "against: got 'linear'"),
        ({"state": "float64"}, ValueError, "state: got 'float64'"),
        ({"dlse": np.zeros(4, np.float32)}, ValueError, "dlse: given without dout"),
        ({"numerics": {"x": "y"}}, ValueError, "numerics: unknown field 'x'"),
        ({"window": (-1, 0)}, ValueError, "window: left is -1"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = np.ones((4, 8), np.float16)
    with pytest.raises(error, match=message):
        attribute(x, x, x, **options)


def test_bad_observations() -> None:
    x = np.ones((4, 8), np.float16)
    with pytest.raises(ValueError, match=r"observed: nan at \(1, 2\), must be finite"):
        attribute(x, x, x, observed=np.where(np.arange(32).reshape(4, 8) == 10, np.nan, 1.0))
    with pytest.raises(TypeError, match="observed: dtype <U3, must be an array of"):
        attribute(x, x, x, observed=np.full((4, 8), "one"))


def test_verdict_says_what_is_unaccounted_for() -> None:
    q, k, v = sample("normal", n=300, d=64, dtype="bfloat16")
    assert "unaccounted" not in attribute(q, k, v).verdict()
    foreign = flash(q, k, v, plan=plan_of("cudnn", q, k, v))[0]
    assert "unaccounted for" in attribute(q, k, v, observed=foreign).verdict()


def test_differences_are_of_one_problem() -> None:
    q, k, v = sample("normal", n=32, d=16)
    with pytest.raises(ValueError, match="other: explains other inputs"):
        _ = attribute(q, k, v) - attribute(q * 2, k, v)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": "flsh"}, "algorithm: got 'flsh'"),
        ({"v": np.full((4, 8), np.nan, np.float16)}, "v: nan at"),
        ({"q": np.ones((0, 8), np.float16)}, "must not be empty"),
    ],
    ids=str,
)
def test_shapley_refuses_what_attribute_refuses(changed: dict[str, Any], message: str) -> None:
    x = np.ones((4, 8), np.float16)
    with pytest.raises(ValueError, match=message):
        shapley(**({"q": x, "k": x, "v": x} | changed))


def test_bad_values() -> None:
    x = np.ones((4, 8), np.float16)
    bad = x.copy()
    bad[2, 3] = np.nan
    with pytest.raises(
        ValueError, match=r"v: nan at \(head, row, column\) \(0, 2, 3\), must be finite"
    ):
        attribute(x, x, bad)
    with pytest.raises(ValueError, match="must not be empty"):
        attribute(x[:0], x, x)


def test_every_source_has_a_group() -> None:
    assert {s.group for s in SOURCES.values()} == set(GROUPS)
    assert all(s.about for s in SOURCES.values())
