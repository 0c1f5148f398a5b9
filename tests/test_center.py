"""Centred dQ: which keys a mean is of, bits where they can be said in advance, less error, dK and
dV as they were; and kernels that do not do it refuse it. Bits of those that do: with the others of
the kernels (tests/test_sm90_backward.py, tests/test_sm80_backward.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import planner, sm80_backward, sm80_float32, sm90_backward
from cuflash.compiler import source_dir
from cuflash.sm80_forward import FIXED
from emulation import attribute, oracle
from emulation.backward import flash_vjp
from emulation.center import SAMPLES, SHARE, THRESHOLD, has_large_mean, sampled_keys
from emulation.plan import BackwardPlan, Numerics, Plan, default_plan
from emulation.problem import Array, Problem, numpy_dtype
from emulation.samples import capture, sample
from tests.cases import same_bits
from tests.on_gpu import uneven_means
from tests.test_attribution import assert_closes

HALF = ["float16", "bfloat16"]


def plans_of(center: int, **fields: Any) -> tuple[Plan, Plan]:
    """The same Plan with and without centring."""
    plan = Plan(**fields)
    return plan, replace(plan, backward=replace(plan.backward, center=center))


def constant(path: str, name: str) -> float:
    """A constant of the kernels, without what divides it."""
    text = (source_dir() / path).read_text(encoding="utf-8")
    match = re.search(rf"constexpr \w+ {name} = ([\d.]+)f?(?: / \w+)?;", text)
    assert match, f"{name} in {path}"
    return float(match[1])


def test_kernels_have_the_same_rule() -> None:
    assert constant("tile/center.cuh", "kSamples") == SAMPLES
    assert constant("tile/center.cuh", "kOfSamples") == SHARE
    assert constant("tile/center.cuh", "kThreshold") == THRESHOLD
    assert constant("sm80/chosen_rows.cuh", "kRuleRows") == sm80_backward.RULE_ROWS


@pytest.mark.parametrize("center", [16, 48, 64])
def test_samples_are_seen_and_spread(center: int) -> None:
    rng = np.random.default_rng(0)
    lo = rng.integers(0, 300, 200)
    hi = np.maximum(lo, rng.integers(0, 400, 200))
    keys, kind, has = sampled_keys(lo, hi, center)
    assert keys.shape[1] == SAMPLES
    for row in range(200):
        groups = [g for g in range(30) if lo[row] <= g * center and (g + 1) * center <= hi[row]]
        assert has[row] == bool(groups)
        if not groups:
            continue
        first, length = groups[0] * center, len(groups) * center
        want = [first + (2 * t + 1) * length // 32 for t in range(16)]
        assert keys[kind[row]].tolist() == want
        assert first <= want[0]
        assert want[-1] < first + length


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("p", ["input", "split"])
def test_keys_that_are_all_alike(dtype: str, p: Any) -> None:
    """Of a key of powers of two all sums are multiples, also when cut: plain dQ is R k, and centred
    half of it. Rows that see no whole group of keys are plain.
    """
    q, _, v = sample("normal", n=80, d=16, dtype=dtype)
    k = np.full(q.shape, 2.0, q.dtype)
    dout = sample("normal", n=80, d=16, dtype=dtype, seed=1)[0]
    numerics, tiles = Numerics(p=p, out="float32"), BackwardPlan(tile_n=32)
    plain, centered = (
        flash_vjp(q, k, v, dout, plan=plan, causal=True)
        for plan in plans_of(32, numerics=numerics, format=dtype, backward=tiles)
    )
    assert plain[0][:, 31:].any()
    assert same_bits(plain[0][:, :31], centered[0][:, :31])
    assert same_bits(plain[0][:, 31:] * np.float32(1 - SHARE), centered[0][:, 31:])
    assert all(map(same_bits, plain[1:], centered[1:]))


@pytest.mark.parametrize("dtype", HALF)
def test_rows_sum_to_the_gradient_of_lse(dtype: str) -> None:
    """With dlse rows of dS sum to it: R, what plain dQ of equal keys shows of them, less dlse."""
    q, _, v = sample("normal", n=64, d=16, dtype=dtype)
    k = np.full(q.shape, 2.0, q.dtype)
    dout = sample("normal", n=64, d=16, dtype=dtype, seed=1)[0]
    dlse = np.random.default_rng(2).standard_normal(q.shape[:-1]).astype(np.float32)
    plain, centered = (
        flash_vjp(q, k, v, dout, dlse=dlse, plan=plan)[0]
        for plan in plans_of(16, numerics=Numerics(out="float32"), format=dtype)
    )
    sums = plain[..., 0] * np.float32(2.0)  # over scale k = 1 / 2
    rest = (sums - dlse).astype(np.float64)
    want = 0.25 * (2.0 * sums.astype(np.float64) - rest * 2.0 * SHARE)
    assert rest.any()
    assert same_bits(centered, np.repeat(want.astype(np.float32)[..., None], 16, axis=-1))


def test_a_softcap_keeps_dq_plain() -> None:
    q, k, v = sample("normal", n=48, d=16, dtype="bfloat16")
    results = [flash_vjp(q, k, v, q, plan=plan, softcap=5.0) for plan in plans_of(16)]
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("dtype", HALF)
def test_real_activations_err_less(dtype: str) -> None:
    q, k, v, options = capture(dtype)
    dout = sample("normal", n=1024, d=64, dtype=dtype, seed=1)[0]
    exact: Any = oracle.attention_vjp(q, k, v, dout, **options)
    floor = exact.dq.astype(np.float32).astype(numpy_dtype(dtype)).astype(np.float64) - exact.dq
    centered = default_plan(Problem.of(q, k, v, **options))
    plain = replace(centered, backward=replace(centered.backward, center=0))
    results = [flash_vjp(q, k, v, dout, plan=p, **options) for p in (plain, centered)]

    def above_floor(dq: Array) -> float:
        error = dq.astype(np.float64) - exact.dq
        return float(np.sqrt(np.mean(error**2) / np.mean(floor**2)))

    of_plain, of_centered = (above_floor(r[0]) for r in results)
    assert 1.0 < of_centered < of_plain
    assert all(map(same_bits, results[0][1:], results[1][1:]))


def test_contributions_close_and_say_where_error_went() -> None:
    """Keys with a large mean. What centring itself rounds is of float32, dS of halves."""
    q, k, v = sample("normal", n=200, d=32, dtype="bfloat16")
    k = (k.astype(np.float32) + np.float32(4)).astype(k.dtype)
    dout = sample("normal", n=200, d=32, dtype="bfloat16", seed=1)[0]
    found = []
    for plan in plans_of(32):
        a = attribute(q, k, v, dout=dout, plan=plan, causal=True)
        assert_closes(a)
        found.append(a.parts["dq"].sources)
    plain, centered = found
    assert "dQ centering" not in plain
    for name in ("dS rounding", "O in delta"):
        assert centered[name].rms < plain[name].rms
    assert 0.0 < centered["dQ centering"].rms < centered["dS rounding"].rms


def test_float32_kernels_refuse_it() -> None:
    """They round no dS."""
    x = np.zeros((32, 64), np.float32)
    problem = Problem.of(x, x, x)
    plan = default_plan(problem)
    plan = replace(plan, backward=replace(plan.backward, center=64))
    assert not planner.runs_hopper_backward(problem, plan)
    rule = r"plan\.backward\.center: got 64, must be 0 on the float32 kernels"
    with pytest.raises(ValueError, match=rule):
        sm80_float32._prepared_backward(problem, plan, 232_448)


def test_workspaces_hold_a_sum_for_each_row() -> None:
    """Where dQ is centred, and else none."""
    x = np.zeros((3, 150, 64), numpy_dtype("bfloat16"))
    for center, softcap, sums in ((0, None, False), (32, None, True), (32, 5.0, False)):
        plan = Plan(format="bfloat16", backward=BackwardPlan(64, 128, center=center), **FIXED)
        problem = Problem.of(x, x, x, softcap=softcap)
        assert planner.runs_hopper_backward(problem, plan)
        hopper = sm90_backward._prepared(problem, plan, None, 132)
        portable = sm80_backward._prepared(problem, plan, sm80_backward.Limits())
        for found in (hopper, portable):
            assert (found.row_sums >= 3 * 150) == sums
            assert found.row_sums <= 3 * 256
            name = found.launches[-1].instantiation.name_expression
            assert name.endswith(",true>") == sums


def test_the_rule_at_its_edge() -> None:
    """Of 16 keys, 2 n - 16 of one sign more than of the other: (2 n - 16)^2 against 8 * 16."""
    samples = np.ones((3, SAMPLES, 40))
    samples[0, :3] = -1.0  # 10^2 < 128
    samples[1, :2] = -1.0  # 12^2 > 128
    samples[2] = 0.0
    assert has_large_mean(samples).tolist() == [False, True, False]
    for value in (np.nan, np.inf):
        samples[1, 5, 33] = value
        assert not has_large_mean(samples)[1]


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("n", [300, 333])
def test_heads_that_gpu_tests_centre_in_part(n: int, d: int) -> None:
    """All rows that see a whole group of keys, none, late ones, early ones; and blocks of 64 rows
    that have both kinds.
    """
    k = uneven_means(sample("normal", n=n, d=d, heads=4, dtype="bfloat16", seed=1)[1])
    keys, kind, has = sampled_keys(np.zeros(n, int), np.arange(1, n + 1), 32)
    rows = [has & has_large_mean(x[keys])[kind] for x in k]
    assert rows[0].tolist() == has.tolist() == [i >= 31 for i in range(n)]
    assert not rows[1].any()
    assert not rows[2][: n * 2 // 5].any()
    assert rows[2][-40:].all()
    assert rows[3][31 : n // 2].all()
    assert not rows[3][-40:].any()
    for h in (2, 3):
        assert any(0 < rows[h][i : i + 64].sum() < 64 for i in range(0, n - 64, 64))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("value", [None, np.nan, np.inf])
def test_rows_without_a_large_mean_are_plain(dtype: str, value: float | None) -> None:
    """Bit for bit, beside rows of the same head that are centred: keys with a mean come first, then
    keys that take it back, or one that is not finite.
    """
    q, k, v = sample("normal", n=128, d=16, dtype=dtype)
    k = k.astype(np.float32)
    k[:, :64] += 3.0
    k[:, 64:] -= 3.0
    keys = np.array([0, 127])
    if value is not None:
        last = sampled_keys(np.zeros(1, int), np.array([96]), 32)[0][0, -1]
        k[:, last] = value
        keys = np.array([0, last])
    k = k.astype(q.dtype)
    dout = sample("normal", n=128, d=16, dtype=dtype, seed=1)[0]
    plain, centered = (
        flash_vjp(q, k, v, dout, plan=plan, causal=True) for plan in plans_of(32, format=dtype)
    )
    assert not same_bits(plain[0][:, 31 : keys[1]], centered[0][:, 31 : keys[1]])
    assert same_bits(plain[0][:, :31], centered[0][:, :31])
    assert same_bits(plain[0][:, 127:], centered[0][:, 127:])
    assert all(map(same_bits, plain[1:], centered[1:]))
