"""What must hold of flash and flash_vjp for every problem and Plan: contributions that close, and
equal bits where nothing that a row depends on has changed.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emulation import attribute, oracle, rounding, sfu, tensor_core
from emulation.backward import flash_vjp
from emulation.bounds import forward_bound
from emulation.contributions import Attribution
from emulation.flash import flash
from emulation.plan import Numerics, Plan
from emulation.problem import DTYPES, Array, Problem
from emulation.samples import KINDS, sample
from tests.cases import NUMERICS, Case, assert_within, cases, clean, plans, same_bits, shaped

TINY_ERROR = 1e-6  # of the error: what contributions may leave


# -- contributions


FLOAT64 = 2.0**-44  # some hundred float64 roundings of the exact companion and of the parts


def assert_closes(a: Attribution) -> None:
    """Groups sum to sources, sources to the error, but for the oracle's radius and float64."""
    for part in (a, *a.parts.values()):
        for each in filter(None, (part, part.before_cast)):
            error = each.error
            sources = sum((c.contribution for c in each.sources.values()), np.zeros(error.shape))
            groups = sum((c.contribution for c in each.groups.values()), np.zeros(error.shape))
            scale = max((c.max for c in each.sources.values()), default=0.0)
            assert np.max(np.abs(sources - groups), initial=0.0) <= 1e-13 * scale
            rest = float(np.linalg.norm(error - sources))
            room = TINY_ERROR * float(np.linalg.norm(error)) + each.oracle_radius * error.size
            terms = sum(float(np.linalg.norm(c.contribution)) for c in each.sources.values())
            room += FLOAT64 * (float(np.linalg.norm(each.exact)) + terms)
            assert rest <= room, (part.output, rest, room)


@st.composite
def attributed(draw: st.DrawFn, /) -> tuple[Case, str]:
    """Moderate scores (float64 resolves the errors) without empty sides."""
    case = draw(cases(longest=48))
    assume(case.problem.n_q and case.problem.n_k)
    kind = draw(st.sampled_from(sorted(set(KINDS) - {"huge", "tiny"})))
    h, n, d = case.q.shape
    q = sample(kind, n=n, n_k=max(2, case.k.shape[1]), d=max(2, d), heads=h, dtype="float32")[0]
    k = sample(kind, n=n, n_k=max(2, case.k.shape[1]), d=max(2, d), heads=len(case.k))[1]
    v = clean(case.v)
    q, k, v = (shaped(x, case.plan.format) for x in (q[..., :d], k[:, : case.k.shape[1], :d], v))
    algorithm = draw(st.sampled_from(("flash", "flash", "standard")))
    return replace(case, q=q, k=k, v=v), algorithm


@settings(max_examples=40)
@given(attributed())
def test_contributions_close(drawn: tuple[Case, str]) -> None:
    case, algorithm = drawn
    options = {**case.options, "dout": case.dout, "dlse": case.dlse}
    plan = case.plan if algorithm == "flash" else None
    a = attribute(case.q, case.k, case.v, algorithm=algorithm, plan=plan, **options)
    assert_closes(a)
    assert_closes(a - attribute(case.q, case.k, case.v, algorithm="standard", **options))


@pytest.mark.parametrize("reference", ["power-of-two", "final"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_references_that_rescale_without_error(reference: str, dtype: str) -> None:
    q, k, v = sample("rising", n=40, n_k=70, d=24, dtype=dtype)
    fields: Any = {"reference": reference}
    plan = Plan(numerics=Numerics(**fields), format=dtype, tile_n=16, direction="left-to-right")  # type: ignore[arg-type]
    a = attribute(q, k, v, plan=plan)
    assert "rescale" not in a.groups or not a.groups["rescale"].contribution.any()
    moving = replace(plan, numerics=Numerics(reference="row-max"))
    assert attribute(q, k, v, plan=moving).groups["rescale"].contribution.any()


# -- equal bits


def run(case: Case, **changes: Any) -> tuple[Array, ...]:
    """out, lse, dq, dk, dv."""
    c = replace(case, **changes)
    forward = flash(c.q, c.k, c.v, plan=c.plan, **c.options)
    return (
        *forward,
        *flash_vjp(c.q, c.k, c.v, c.dout, dlse=c.dlse, plan=c.plan, **c.options),
    )


@settings(max_examples=100)
@given(cases(), st.data())
def test_a_row_depends_on_nothing_but_itself(case: Case, data: st.DataObject) -> None:
    """Other rows, N_q, heads, batch: out, LSE and dQ of the kept rows keep their bits."""
    n_q = case.problem.n_q
    assume(n_q)
    out, lse, dq, *_ = run(case)
    # From the first row on (top-left), or up to the last (otherwise), the diagonal stays in place.
    kept = data.draw(st.integers(1, n_q))
    options = dict(case.options)
    if options["causal"] == "top-left" or (not options["causal"] and options["window"] is None):
        rows = slice(0, kept)
    else:
        rows = slice(n_q - kept, n_q)
    head = data.draw(st.integers(0, len(case.q) - 1))
    group = len(case.q) // len(case.k)
    kv = slice(head // group, head // group + 1)
    one = replace(
        case, q=case.q[head : head + 1, rows], k=case.k[kv], v=case.v[kv],
        dout=case.dout[head : head + 1, rows],
        dlse=None if case.dlse is None else case.dlse[head : head + 1, rows],
    )  # fmt: skip
    again = run(one)
    for whole, part in zip((out, lse, dq), again[:3], strict=True):
        assert same_bits(np.ascontiguousarray(whole[head : head + 1, rows]), part)
    batched = {name: np.stack([getattr(case, name)] * 2) for name in ("q", "k", "v", "dout")} | {
        "dlse": None if case.dlse is None else np.stack([case.dlse] * 2)
    }
    both = run(case, **batched)
    for whole, twice in zip(run(case), both, strict=True):
        assert same_bits(np.stack([whole] * 2), twice)


@settings(max_examples=80)
@given(cases())
def test_heads_of_a_group_are_repeated_heads(case: Case) -> None:
    group = len(case.q) // len(case.k)
    k, v = (np.repeat(x, group, axis=0) for x in (case.k, case.v))
    for shared, repeated in zip(run(case)[:3], run(case, k=k, v=v)[:3], strict=True):
        assert same_bits(shared, repeated)


@settings(max_examples=80)
@given(cases(), st.data())
def test_causal_rows_are_problems_cut_short(case: Case, data: st.DataObject) -> None:
    """Row i of a causal problem is the last row of the problem that ends there; so a decode step
    gives the bits of the prefill.
    """
    n = min(case.problem.n_q, case.problem.n_k)
    assume(n)
    left = data.draw(st.none() | st.integers(0, 40))
    case = replace(
        case, q=case.q[:, :n], k=case.k[:, :n], v=case.v[:, :n], dout=case.dout[:, :n], dlse=None,
        options={**case.options, "causal": True, "window": (left, None)},
    )  # fmt: skip
    case = replace(case, k=clean(case.k), v=clean(case.v))
    out, lse = flash(case.q, case.k, case.v, plan=case.plan, **case.options)
    i = data.draw(st.integers(0, n - 1))
    for first in (0, i):  # cut short, and a single row
        short = flash(
            case.q[:, first : i + 1], case.k[:, : i + 1], case.v[:, : i + 1],
            plan=case.plan, **case.options,
        )  # fmt: skip
        assert same_bits(np.ascontiguousarray(out[:, i]), np.ascontiguousarray(short[0][:, -1]))
        assert same_bits(np.ascontiguousarray(lse[:, i]), np.ascontiguousarray(short[1][:, -1]))


@settings(max_examples=60)
@given(cases())
def test_full_left_window_is_causal(case: Case) -> None:
    n = min(case.problem.n_q, case.problem.n_k)
    dlse = None if case.dlse is None else case.dlse[:, :n]
    k, v = clean(case.k[:, :n]), clean(case.v[:, :n])
    cut = replace(case, q=case.q[:, :n], k=k, v=v, dout=case.dout[:, :n], dlse=dlse)
    causal = run(cut, options={**case.options, "causal": True, "window": None})
    window = run(cut, options={**case.options, "causal": False, "window": (max(n - 1, 0), 0)})
    assert all(map(same_bits, causal, window))


@settings(max_examples=100)
@given(cases(), st.sampled_from([np.nan, np.inf, -np.inf, 3e4, 0.0]))
def test_what_nobody_sees_changes_nothing(case: Case, value: float) -> None:
    """Forward and gradients keep their bits; dK and dV of unseen keys are 0."""
    problem = case.problem
    lo, hi = problem.band()
    columns = np.arange(problem.n_k)
    unseen = ~((columns >= lo[:, None]) & (columns < hi[:, None])).any(axis=0)
    k, v = case.k.copy(), case.v.copy()
    k[:, unseen], v[:, unseen] = 0.0, 0.0
    other_k, other_v = k.copy(), v.copy()
    other_k[:, unseen], other_v[:, unseen] = value, -value
    quiet, loud = run(case, k=k, v=v), run(case, k=other_k, v=other_v)
    assert all(map(same_bits, quiet, loud))
    assert not quiet[3][:, unseen].any()
    assert not quiet[4][:, unseen].any()


@settings(max_examples=80)
@given(cases())
def test_empty_rows(case: Case) -> None:
    """O = 0, LSE = -inf, dQ = 0, whatever their q, dO and dLSE; every other result is finite."""
    n_q = case.problem.n_q
    assume(n_q)
    k, v = clean(case.k)[:, : n_q // 2], clean(case.v)[:, : n_q // 2]
    case = replace(case, k=k, v=v, options={**case.options, "causal": True})
    lo, hi = case.problem.band()
    empty = hi == lo
    assert empty.any()
    q, dout = case.q.copy(), case.dout.copy()
    q[:, empty], dout[:, empty] = np.nan, np.inf
    out, lse, dq, dk, dv = run(case, q=q, dout=dout)
    assert not out[:, empty].any()
    assert np.all(lse[:, empty] == -np.inf)
    assert not dq[:, empty].any()
    assert all(map(same_bits, (out, lse, dq, dk, dv), run(case)))


def test_empty_sides() -> None:
    for n_q, n_k, heads in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)):
        q, k = np.ones((heads, n_q, 8), np.float16), np.ones((heads, n_k, 8), np.float16)
        out, lse = flash(q, k, k)
        assert out.shape == q.shape
        assert not out.any()
        assert np.all(lse == (-np.inf if not n_k else lse))
        for x, gradient in zip((q, k, k), flash_vjp(q, k, k, q), strict=True):
            assert gradient.shape == x.shape
            assert not gradient.any() or n_q


# -- mathematics


@settings(max_examples=80)
@given(cases(longest=40), st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter(case: Case, random: Any) -> None:
    """Keys and values permuted together: the exact result is the same, flash within its bound."""
    order = list(range(case.problem.n_k))
    random.shuffle(order)
    k, v = clean(case.k), clean(case.v)
    options = {**case.options, "causal": False, "window": None}
    exact = oracle.attention(case.q, k, v, **options)
    moved = oracle.attention(case.q, k[:, order], v[:, order], **options)
    gap = np.abs((exact.out - moved.out) + (exact.out_low - moved.out_low))
    radius = exact.radius + moved.radius
    assert np.all(gap <= radius + 2.0**-99 * np.abs(exact.out))
    out, lse = flash(case.q, k[:, order], v[:, order], plan=case.plan, **options)
    bounds = forward_bound(Problem.of(case.q, k[:, order], v[:, order], **options), case.plan)
    assert_within("out", out, exact, bounds[0])
    assert_within("lse", lse, exact, bounds[1])


@settings(max_examples=80)
@given(plans(), st.sampled_from([1e2, -1e2, -1e3, 2048.0]), st.integers(0, 99))
def test_a_constant_on_all_scores_moves_only_lse(plan: Plan, offset: float, seed: int) -> None:
    q, k, v = sample("normal", n=20, n_k=50, d=23, dtype=plan.format, seed=seed)
    ones = np.ones((*q.shape[:2], 1), q.dtype)
    q2 = np.concatenate([q, ones], axis=2)
    constant = shaped(np.full((*k.shape[:2], 1), offset), plan.format)
    k2 = np.concatenate([k, constant], axis=2)
    scale = 0.25
    plain, shifted = (oracle.attention(a, b, v, scale=scale) for a, b in ((q, k), (q2, k2)))
    by = scale * float(constant[0, 0, 0])
    assert np.all(np.abs(shifted.lse - plain.lse - by) <= 1e-12 * (1 + abs(by)))
    out, lse = flash(q2, k2, v, plan=plan, scale=scale)
    bounds = forward_bound(Problem.of(q2, k2, v, scale=scale), plan)
    assert_within("out", out, plain, bounds[0])
    assert_within("lse", lse, shifted, bounds[1])
    assert np.isfinite(bounds[0]).all()


@settings(max_examples=100)
@given(plans(), st.sampled_from([1, 2, 16, 32, 64]), st.integers(0, 99))
def test_equal_scores_give_the_exact_mean(plan: Plan, n_k: int, seed: int) -> None:
    """Scores 0, a power of two of keys, small integers in V: nothing rounds, however the keys are
    cut, ordered and permuted.
    """
    rng = np.random.default_rng(seed)
    q = shaped(np.zeros((1, 5, 8)), plan.format)
    k = shaped(rng.standard_normal((1, n_k, 8)), plan.format)
    v = rng.integers(0, 4, (1, n_k, 3))
    for order in (np.arange(n_k), rng.permutation(n_k)):
        out, lse = flash(q, k[:, order], shaped(v[:, order], plan.format), plan=plan)
        assert np.array_equal(out[0].astype(np.float64), np.tile(v[0].mean(axis=0), (5, 1)))
        assert np.all(np.abs(lse - np.log(n_k)) <= 2.0**-21 * max(1.0, np.log(n_k)))


@settings(max_examples=80)
@given(plans(), st.integers(0, 99))
def test_one_visible_key(plan: Plan, seed: int) -> None:
    """O is the value, LSE the score."""
    assume(plan.numerics.row_sum == "rounded" and plan.format != "float32")
    plan = replace(plan, numerics=replace(plan.numerics, out="input"))
    q, k, v = sample("normal", n=41, d=24, dtype=plan.format, seed=seed)
    out, lse = flash(q, k, v, plan=plan, window=(0, 0))
    assert same_bits(out, v)
    score = (q.astype(np.float64) * k.astype(np.float64)).sum(-1) / np.sqrt(24)
    bound = forward_bound(Problem.of(q, k, v, window=(0, 0)), plan)[1]
    assert np.all(np.abs(lse - score) <= bound + 1e-12)


@settings(max_examples=60)
@given(plans(), st.integers(0, 99), st.integers(1, 70))
def test_copies_of_one_key(plan: Plan, seed: int, n_k: int) -> None:
    """n equal keys and values: O is the value within the bound, LSE grows by log n."""
    q, k, v = sample("normal", n=7, d=24, dtype=plan.format, seed=seed)
    k, v = (np.repeat(x[:, :1], n_k, axis=1) for x in (k, v))
    out, lse = flash(q, k, v, plan=plan)
    bounds = forward_bound(Problem.of(q, k, v), plan)
    wide = out.astype(np.float32).astype(np.float64)
    assert np.all(np.abs(wide - v[:, :1].astype(np.float64)) <= bounds[0])
    exact = oracle.attention(q, k, v)
    assert_within("lse", lse, exact, bounds[1])


# -- one arithmetic, two implementations


@settings(max_examples=40)
@given(cases(longest=40))
def test_numpy_and_numba_give_the_same_bits(case: Case) -> None:
    pytest.importorskip("numba")

    def no_fast_path(xp: Any, backend: Any = None) -> ModuleType | None:
        return None

    fast = run(case)
    with pytest.MonkeyPatch.context() as patch:
        for module in (rounding, sfu, tensor_core):
            patch.setattr(module, "fast_path", no_fast_path)
        slow = run(case)
    assert all(map(same_bits, fast, slow))


def test_every_reference_agrees_where_none_is_needed() -> None:
    """Two keys with scores -1 and 0 in log2 units: P is 1/2 and 1 (or both halved), exactly."""
    for reference in NUMERICS["reference"]:
        fields: Any = {"reference": reference}
        plan = Plan(numerics=Numerics(**fields), format="float16", tile_n=16)
        q = np.zeros((1, 1, 16), np.float16)
        v = np.array([[[3.0] * 16, [1.0] * 16]], np.float16)
        out, _ = flash(q, np.zeros((1, 2, 16), np.float16), v, plan=plan)
        assert out.tolist() == [[[2.0] * 16]]
