"""The derived bounds hold for every problem and every Plan, and are not loose; and the constants
that they take from the hardware's functions are measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from emulation import oracle, sfu
from emulation.backward import flash_vjp
from emulation.bound_terms import EX2, LG2, RCP
from emulation.bounds import backward_bound, forward_bound, standard_bound
from emulation.flash import flash, flash_forward
from emulation.plan import BackwardPlan, Numerics, Plan, default_plan
from emulation.problem import DTYPES, Problem
from emulation.samples import KINDS, sample
from emulation.standard import standard
from tests.cases import FIELDS, NUMERICS, Case, assert_within, cases, consistent


def check_forward(case: Case) -> None:
    q, k, v = case.q, case.k, case.v
    exact = oracle.attention(q, k, v, **case.options)
    out, lse = flash(q, k, v, plan=case.plan, **case.options)
    bounds = forward_bound(case.problem, case.plan)
    assert_within("out", out, exact, bounds[0].reshape(out.shape))
    assert_within("lse", lse, exact, bounds[1].reshape(lse.shape))
    wide, _ = forward_bound(case.problem, case.plan, before_cast=True)
    assert_within("out", flash_forward(case.problem, case.plan).o, exact, wide)


def check_backward(case: Case) -> None:
    q, k, v, dout, dlse = case.q, case.k, case.v, case.dout, case.dlse
    exact = oracle.attention_vjp(q, k, v, dout, dlse=dlse, **case.options)
    got = flash_vjp(q, k, v, dout, dlse=dlse, plan=case.plan, **case.options)
    bounds = backward_bound(case.problem, case.plan, dout, dlse)
    for name, gradient, bound in zip(("dq", "dk", "dv"), got, bounds, strict=True):
        assert_within(name, gradient, exact, bound.reshape(gradient.shape))


@settings(max_examples=1000)
@given(cases())
def test_error_is_within_the_bound(case: Case) -> None:
    check_forward(case)
    check_backward(case)


@settings(max_examples=100)
@given(cases())
def test_standard_error_is_within_its_bound(case: Case) -> None:
    exact = oracle.attention(case.q, case.k, case.v, **case.options)
    out, lse = standard(case.q, case.k, case.v, **case.options)
    bounds = standard_bound(case.problem)
    assert_within("out", out, exact, bounds[0].reshape(out.shape))
    assert_within("lse", lse, exact, bounds[1].reshape(lse.shape))


def settings_of_one_field() -> list[Any]:
    """Every value of every field, one at a time, and with every reference those that depend on
    it.
    """
    found = []
    for name, values in (NUMERICS | FIELDS).items():
        for value in values:
            found.append(pytest.param({name: value}, id=f"{name}={value}"))
    for reference in NUMERICS["reference"]:
        for name in ("row_sum", "accumulate", "exp2", "alpha", "direction", "score"):
            for value in (NUMERICS | FIELDS)[name]:
                fields = {"reference": reference, name: value}
                found.append(pytest.param(fields, id=f"{reference},{name}={value}"))
    return found


@pytest.mark.parametrize("fields", settings_of_one_field())
def test_every_field_of_a_plan(fields: dict[str, Any]) -> None:
    """Scores rise in both directions of the keys, so that references move; the bound is finite."""
    fmt = DTYPES[len(str(fields)) % 2]
    q, k, v = sample("rising", n=45, n_k=70, d=24, heads=2, dtype=fmt, seed=3)
    k[1] = k[1, ::-1]
    dout = sample("normal", n=45, d=24, heads=2, dtype=fmt, seed=4)[0]
    numerics = {n: x for n, x in fields.items() if n in NUMERICS}
    rest = {n: x for n, x in fields.items() if n not in NUMERICS}
    chosen = Numerics(**{"out": "float32", **numerics})
    defaults: dict[str, Any] = {"alpha": "references", "lse": "sum", "tile_n": 16, "stale_limit": 8}
    plan = Plan(
        numerics=chosen,
        format=fmt,  # type: ignore[arg-type]
        backward=BackwardPlan(tile_m=16, tile_n=32),
        **consistent(defaults | rest, chosen.reference),
    )
    case = Case(q, k, v, dout, None, {"causal": True}, plan)
    check_forward(case)
    check_backward(case)
    problem, plan = case.problem, case.plan
    for bound in (*forward_bound(problem, plan), *backward_bound(problem, plan, dout)):
        assert np.isfinite(bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reference", ["row-max", "stale"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_input_has_a_finite_bound(kind: str, reference: str, dtype: str) -> None:
    q, k, v = sample(kind, n=64, d=32, dtype=dtype)
    dout = sample("normal", n=64, d=32, dtype=dtype, seed=9)[0]
    plan = default_plan(Problem.of(q, k, v), {"reference": reference}, tile_n=16)
    case = Case(q, k, v, dout, None, {}, plan)
    check_forward(case)
    check_backward(case)
    for bound in (*forward_bound(case.problem, plan), *backward_bound(case.problem, plan, dout)):
        assert np.isfinite(bound).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bounds_are_not_loose(dtype: str) -> None:
    """Largest bound over largest error of N(0, 1) inputs: a bound that grew would hide bugs."""
    q, k, v = sample("normal", n=128, d=64, dtype=dtype)
    dout = sample("normal", n=128, d=64, dtype=dtype, seed=9)[0]
    problem = Problem.of(q, k, v, causal=True)
    plan = default_plan(problem)
    exact = oracle.attention(q, k, v, causal=True)
    out, lse = flash(q, k, v, plan=plan, causal=True)
    bounds = [*forward_bound(problem, plan), *backward_bound(problem, plan, dout)]
    gradients = oracle.attention_vjp(q, k, v, dout, causal=True)
    got = flash_vjp(q, k, v, dout, plan=plan, causal=True)
    pairs = [(out, exact.out), (lse, exact.lse)]
    pairs += [(g, getattr(gradients, n)) for g, n in zip(got, ("dq", "dk", "dv"), strict=True)]
    for (value, truth), bound, most in zip(pairs, bounds, (4, 40, 15, 40, 8), strict=True):
        error = np.abs(np.asarray(value, np.float32).astype(np.float64) - truth)
        assert bound.max() <= most * error.max()


def test_a_wrong_result_exceeds_the_bound() -> None:
    """A dropped rescale, a shifted mask and one wrong half ulp of bf16 are all seen."""
    q, k, v = sample("rising", n=70, d=32, dtype="bfloat16")
    plan = Plan(tile_n=16, direction="left-to-right", numerics=Numerics(reference="row-max"))
    problem = Problem.of(q, k, v, causal=True)
    exact = oracle.attention(q, k, v, causal=True)
    bound, _ = forward_bound(problem, plan)
    out, _ = flash(q, k, v, plan=plan, causal=True)
    assert_within("out", out, exact, bound)
    lost = out.copy()
    lost[0, 40] = lost[0, 40] * np.float32(1.02)
    shifted, _ = flash(q, k, v, plan=plan, window=(None, 1))
    for wrong in (lost, shifted, np.full_like(out, np.nan)):
        with pytest.raises(AssertionError, match="out"):
            assert_within("out", wrong, exact, bound)


def test_what_has_no_bound_is_refused_or_infinite() -> None:
    x = sample("rising", n=64, d=16)[0]
    problem = Problem.of(x, x, x)
    stale = Numerics(reference="stale")
    plan = Plan(format="float16", tile_n=16, stale_limit=8, numerics=stale)
    with pytest.raises(ValueError, match=r"plan\.state"):
        forward_bound(problem, replace(plan, state="float16"))
    with pytest.raises(ValueError, match="plan: format bfloat16"):
        forward_bound(problem, replace(plan, format="bfloat16"))
    with pytest.raises(ValueError, match="stale_limit"):
        forward_bound(problem, replace(plan, stale_limit=1))
    with pytest.raises(ValueError, match="v: nan"):
        forward_bound(Problem.of(x, x, np.full_like(x, np.nan)), plan)


def test_empty_problems_are_exact() -> None:
    for n_q, n_k in ((0, 5), (5, 0), (0, 0)):
        q, k = np.ones((2, n_q, 8), np.float16), np.ones((1, n_k, 8), np.float16)
        problem = Problem.of(q, k, k)
        plan = Plan(format="float16", stale_limit=14)
        bounds = [*forward_bound(problem, plan), *backward_bound(problem, plan, q)]
        assert all(not b.any() for b in (*bounds, *standard_bound(problem)))


# -- the constants


def relative(got: Any, exact: Any) -> float:
    return float(np.max(np.abs(got.astype(np.float64) / exact - 1)))


def test_exp2_is_within_its_constant() -> None:
    """Over all 2^23 fractions. The unit cuts |x| to 23 fraction bits, so a result stands for a
    whole interval: both of its ends count. Results for other integers follow by scaling.
    """
    fraction = np.arange(2**23) * 2.0**-23
    y = sfu.ex2((1 + fraction).astype(np.float32))
    assert relative(y, np.exp2(1 + fraction)) < EX2
    assert relative(y, np.exp2(1 + fraction + 2.0**-23)) < EX2
    y = sfu.ex2(-(1 + fraction).astype(np.float32))
    assert relative(y, np.exp2(-1 - fraction)) < EX2
    assert relative(y, np.exp2(-1 - fraction - 2.0**-23)) < EX2
    for x in (fraction, -fraction / 4, -fraction * 2.0**-20, -1 - fraction):
        x32 = x.astype(np.float32)
        assert relative(sfu.ex2_polynomial(x32), np.exp2(x32.astype(np.float64))) < EX2


def test_rcp_and_lg2_are_within_their_constants() -> None:
    mantissa = (1 + np.arange(2**23) * 2.0**-23).astype(np.float32)
    assert relative(sfu.rcp(mantissa), 1 / mantissa.astype(np.float64)) < RCP
    for exponent in (-20, -3, -2, -1, 0, 1, 2, 30):
        x = np.ldexp(mantissa, exponent)
        exact = np.log2(x.astype(np.float64))
        off = np.abs(sfu.lg2(x).astype(np.float64) - exact)
        assert np.max(off / np.maximum(1.0, np.abs(exact))) < LG2
