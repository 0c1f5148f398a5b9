"""The judge: correct kernels are rounding on every input, mistakes are found and named."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.bugs import Setting, bugs
from bench.explain import inputs, kernel, planted
from bench.planted import Mistakes, forward
from emulation import Problem, explain, flash, oracle, plan_of, standard, testing, tolerance
from emulation.explain.case import Case
from emulation.explain.exact import NOTHING, run, run_backward
from emulation.explain.judge import verdict
from emulation.explain.suspects import SUSPECTS, suspects
from emulation.explain.whose import Bits, rows_for, search
from emulation.problem import numpy_dtype
from emulation.samples import KINDS, sample

MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"causal": "top-left"}, {"window": (9, 4)}, {"softcap": 5.0},
    {"causal": True, "window": (20, None), "scale": 0.3},
)  # fmt: skip
BUGS = {f"{b.suspect}: {b.strength}": b for b in bugs()}


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    masks=st.sampled_from(MASKS),
    name=st.sampled_from(["fa3", "fa2", "fa2-split", "cudnn", "efficient", "cuflash"]),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 90), st.sampled_from([8, 32, 80])),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_correct_kernels_are_rounding(
    kind: str, dtype: str, masks: dict[str, Any], name: str, shape: tuple[int, int, int],
    heads: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    """Whatever the input, the mask and the order of operations."""
    n_q, n_k, d = shape
    q = sample(kind, n=n_q, n_k=2, d=d, heads=heads[0], dtype=dtype, seed=seed)[0]
    _, k, v = sample(kind, n=1, n_k=n_k, d=d, heads=heads[1], dtype=dtype, seed=seed + 1)
    scale = masks.get("scale")
    plan = None
    if name != "cuflash":
        plan = plan_of(name, q, k, v, causal=masks.get("causal", False), scale=scale)
    out, lse = flash(q, k, v, plan=plan, **masks)
    found = explain(q, k, v, out, lse=lse, arithmetic=False, sources=False, **masks)
    assert found.is_rounding, str(found)


@functools.cache
def case_of(setting: Setting) -> tuple[Case, Any]:
    """One problem of a setting: its bugs share what is known of it."""
    arrays = inputs("normal", "bfloat16", setting)
    return Case(Problem.of(*arrays[:3], **dict(setting.masks))), arrays


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found_and_named(name: str) -> None:
    """A kernel that shares no code with the suspects, its mistake, and what it is called."""
    bug = BUGS[name]
    masks = dict(bug.setting.masks)
    case, arrays = case_of(bug.setting)
    found = verdict(case, arithmetic=False, sources=False, **planted(bug, arrays, masks))
    assert found.kind == "another computation"
    names = {found.named, *(s.split(" (")[0] for s in found.same)}
    assert bug.suspect in names, str(found)


def test_every_suspect_is_planted_or_a_variant() -> None:
    """No suspect without a bug that must be called by its name."""
    planted_names = {b.suspect for b in bugs()}
    assert {s.name for s in SUSPECTS} <= planted_names


def test_exact_values_are_the_oracles() -> None:
    """Without a change `run` and `run_backward` are exact attention and its gradients."""
    for masks in MASKS:
        q, k, v = sample("normal", n=33, d=16, heads=4, dtype="bfloat16")
        k, v = k[:2], v[:2]
        problem = Problem.of(q, k, v, **masks)
        truth = oracle.attention(q, k, v, **masks)
        got = run(problem, NOTHING, np.arange(33))
        assert np.abs(got.out - truth.out).max() < 1e-13
        seen = np.isfinite(truth.lse)
        assert np.abs(got.lse[seen] - truth.lse[seen]).max() < 1e-13
        grads = oracle.attention_vjp(q, k, v, q, **masks)
        mine = run_backward(problem, NOTHING, q.astype(np.float64)).value
        for name in ("dq", "dk", "dv"):
            want = getattr(grads, name)
            assert np.abs(mine[name] - want).max() < 1e-12 * (1 + np.abs(want).max())


def test_glance_is_exact() -> None:
    """The quick look that large inputs get."""
    for masks in MASKS:
        q, k, v = sample("outlier", n=40, n_k=55, d=16, heads=2, dtype="float16")
        case = Case(Problem.of(q, k, v, **masks))
        truth = oracle.attention(q, k, v, **masks)
        assert np.abs(case.whole.out - truth.out).max() < 1e-13
        seen = np.isfinite(truth.lse)
        assert np.abs(case.whole.lse[seen] - truth.lse[seen]).max() < 1e-13


def test_assertion_fails_where_allclose_passes() -> None:
    """One padded key is counted among 512: no element moves by 1e-2."""
    q, k, v = sample("normal", n=512, d=64, dtype="bfloat16")
    right, _ = forward(Mistakes(), q, k, v)
    wrong, _ = forward(Mistakes(pad=1), q, k, v)
    assert np.allclose(wrong.astype(float), right.astype(float), atol=1e-2)
    testing.assert_attention_close(right, q, k, v)
    with pytest.raises(AssertionError, match="padded keys counted \\(1 keys\\)"):
        testing.assert_attention_close(wrong, q, k, v)


def test_assertion_rounds_masters_to_the_kernels_format() -> None:
    """float32 masters, a kernel that took them in bfloat16."""
    q, k, v = (x.astype(np.float32) for x in sample("normal", n=64, d=32, dtype="float16"))
    half = [x.astype(numpy_dtype("bfloat16")) for x in (q, k, v)]
    out, lse = flash(*half, causal=True)
    testing.assert_attention_close(out, q, k, v, lse=lse, dtype="bfloat16", causal=True)
    with pytest.raises(AssertionError):
        testing.assert_attention_close(out, q, k, v, lse=lse, causal=True)


def test_tf32_scores_of_float32_inputs() -> None:
    """What a library does that lets float32 products run on the tensor core's TF32."""
    q, k, v = sample("normal", n=90, d=32, heads=2, dtype="float32")
    right, lse = standard(q, k, v, causal=True)
    assert explain(q, k, v, right, lse=lse, causal=True, sources=False).is_rounding
    q_cut, k_cut = (((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32) for x in (q, k))
    wrong, _ = standard(q_cut, k_cut, v, causal=True)
    found = explain(q, k, v, wrong, causal=True)
    assert found.named == "inputs rounded to another format"
    assert found.suspect is not None
    assert found.suspect.variant == "q, k to tf32"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_fails(bad: float) -> None:
    q, k, v = sample("normal", n=20, d=16)
    out, _ = flash(q, k, v)
    out[0, 3, 2] = bad
    found = explain(q, k, v, out)
    assert found.kind == "another computation"
    assert "(0, 3, 2)" in str(found)


def test_single_wrong_element_is_located() -> None:
    q, k, v = sample("normal", n=90, d=32, dtype="bfloat16")
    out, _ = flash(q, k, v)
    out[0, 71, 5] += np.float32(0.25)
    found = explain(q, k, v, out)
    judged = found.judgements["out"]
    assert (found.kind, judged.outside, judged.where) == ("another computation", 1, (0, 71, 5))
    assert found.named is None


def test_bias_is_told_with_its_source() -> None:
    """Scores tie at the max, values of one sign: the cast errs one way (arXiv 2510.04212)."""
    rng = np.random.default_rng(0)
    n, d = 192, 64
    way = rng.choice([-1.0, 1.0], d)
    q, k = 0.25 * rng.standard_normal((n, d)) + 2 * way, 0.25 * rng.standard_normal((n, d))
    k[[5, 77]] = way
    arrays = [q, k, -np.abs(rng.standard_normal((n, d)))]
    q, k, v = (x.astype(np.float32).astype(numpy_dtype("bfloat16")) for x in arrays)
    out, lse = flash(q, k, v, plan=plan_of("fa3", q, k, v))
    found = explain(q, k, v, out, lse=lse)
    assert found.kind == "rounding, but biased"
    assert found.bias_source == "output cast"
    assert found.kernels[0].name == "fa3"
    assert found.kernels[0].all_bits


def test_gradients_are_judged() -> None:
    setting = Setting(n_q=64, n_k=64)
    arrays = inputs("normal", "bfloat16", setting)
    masks = dict(setting.masks)
    q, k, v, dout = arrays
    out, lse = kernel("fa3", q, k, v, masks)
    from bench.explain import gradients

    grads = gradients("fa3", arrays, masks)
    options: dict[str, Any] = {"lse": lse, "dout": dout, "arithmetic": False, "sources": False}
    assert explain(q, k, v, out, grads=grads, **options, **masks).kind == "rounding"
    dq, dk, dv = (x.copy() for x in grads)
    dk[0, 3, 3] = np.float32(9.0)
    found = explain(q, k, v, out, grads=(dq, dk, dv), **options, **masks)
    assert found.judgements["dk"].where == (0, 3, 3)
    assert not found.is_rounding


@pytest.mark.parametrize("plan", [None, "fa3"])
def test_tolerance_holds(plan: str | None) -> None:
    q, k, v = sample("rising", n=60, d=32, heads=2, dtype="float16")
    arithmetic = None if plan is None else plan_of(plan, q, k, v, causal=True)
    t = tolerance(q, k, v, dout=q, plan=arithmetic, causal=True)
    out, lse = flash(q, k, v, plan=plan_of("fa3", q, k, v, causal=True), causal=True)
    truth = oracle.attention(q, k, v, causal=True)
    assert (np.abs(out.astype(float) - truth.out) <= t.out).all()
    assert (np.abs(lse - truth.lse) <= t.lse).all()
    assert t.dq is not None
    assert t.dq.shape == q.shape
    assert np.isfinite(t.dq).all()


@pytest.mark.parametrize(("d", "c"), [(64, "once"), (40, "floats")])
def test_search_finds_an_unknown_kernel(d: int, c: Any) -> None:
    """All bits of an arithmetic that the search is not told."""
    q, k, v = sample("normal", n=300, d=d, dtype="bfloat16")
    plan = dataclasses.replace(plan_of("cudnn", q, k, v), c=c)
    out, lse = flash(q, k, v, plan=plan)
    problem = Problem.of(q, k, v)
    rows = rows_for(problem, 1 << 14)
    found = search(Bits(problem, rows, out[:, rows], lse[:, rows]))
    assert found.all_bits
    assert found.plan is not None
    assert (found.plan.tile_n, found.plan.direction) == (plan.tile_n, plan.direction)
    assert found.plan.c == c


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": np.zeros((3, 3))}, r"out: shape \(3, 3\), must be \(1, 8, 16\)"),
        ({"out": None}, "out: got NoneType, must be an array"),
        ({"lse": np.zeros(3)}, r"lse: shape \(3,\)"),
        ({"grads": (1, 2, 3)}, "grads: given without dout"),
        ({"rows": 0}, "rows: got 0"),
        ({"rows": True}, "rows: got True"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v = sample("normal", n=8, d=16)
    given_: dict[str, Any] = {"out": flash(q, k, v)[0]} | change
    out = given_.pop("out")
    with pytest.raises((TypeError, ValueError), match=message):
        explain(q, k, v, out, **given_)


def test_suspects_of_nothing_to_get_wrong() -> None:
    """One query, one key: masks, groups and tiles change nothing and are not suspected."""
    x = np.ones((1, 1, 16), np.float16)
    names = {name for name, _, _ in suspects(Problem.of(x, x, x))}
    assert not names & {"mask dropped", "causal alignment", "GQA heads interleaved", "keys skipped"}
