"""PyTorch's "math" path and Triton's tutorial: their Plans against the steps by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from emulation import (
    Numerics,
    Plan,
    Problem,
    attribute,
    flash,
    flash_vjp,
    oracle,
    plan_of,
    rounding,
    sfu,
)  # fmt: skip
from emulation.bounds import backward_bound, forward_bound
from emulation.cuda_math import expf, log2f, logf
from emulation.plan import BackwardPlan
from emulation.problem import Array
from emulation.samples import sample
from emulation.tensor_core import mma
from tests.cases import assert_within

F = np.float32


def chain(a: Array, b: Array) -> np.float32:
    acc = F(0)
    for x, y in zip(a, b, strict=True):
        acc = rounding.fma(F(x), F(y), acc)
    return acc


def by_halves(x: list[Any]) -> Any:
    while len(x) > 1:
        half = len(x) // 2
        x = [F(x[i] + x[i + half]) for i in range(half)]
    return x[0]


def softmax_sum(p: Array) -> Any:
    """One row, thread by thread."""
    if len(p) <= 1024:
        lanes = [F(0)] * 32
        for j, x in enumerate(p):
            lanes[j % 32] = F(lanes[j % 32] + x)
        return by_halves(lanes)
    threads = [F(0)] * 1024
    for j, x in enumerate(p):
        t = j // 4 % 1024
        threads[t] = F(threads[t] + x)
    return by_halves([by_halves(threads[i : i + 32]) for i in range(0, 1024, 32)])


@pytest.mark.parametrize("n_k", [5, 40, 1500, 5000])
def test_math_by_hand(n_k: int) -> None:
    n_q = 3 if n_k < 1000 else 1
    q, k, v = sample("normal", n=n_q, n_k=n_k, d=4, dtype="bfloat16", seed=n_k)
    out, lse = flash(q, k, v, plan=plan_of("math", q, k, v, causal=True), causal=True)
    root = F(np.sqrt(4**-0.5))
    wide_q, wide_k, wide_v = (x[0].astype(F) for x in (q, k, v))
    keys = (wide_k * root).astype(F)
    for i in range(n_q):
        n = n_k - n_q + 1 + i
        s = np.array([chain((wide_q[i] * root).astype(F), key) for key in keys[:n]], F)
        p = np.zeros(n_k, F)
        p[:n] = expf((s - s.max()).astype(F))
        total = softmax_sum(p)
        assert lse[0, i] == F(s.max() + logf(total))
        p = (p / total).astype(F)
        o = np.array([chain(p[:n], wide_v[:n, d]) for d in range(4)], F)
        assert np.array_equal(out[0, i], o.astype(out.dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_triton_by_hand(causal: bool) -> None:
    """Tiles of 32 keys, blocks of 64 queries, whose own keys are masked and hence not fused."""
    q, k, v = sample("rising", n=160, d=32, dtype="float16")
    plan = dataclasses.replace(plan_of("triton", q, k, v, causal=causal), tile_n=32)
    plan = dataclasses.replace(plan, diagonal=64 if causal else 0)
    out, lse = flash(q, k, v, plan=plan, causal=causal)
    c = F(32**-0.5 * np.log2(np.e))
    wide_q, wide_k, wide_v = (x[0].astype(F) for x in (q, k, v))
    for i in (5, 70, 127, 128, 159):
        m, total, acc = F(-np.inf), F(1), np.zeros((1, 32), F)
        for start in range(0, 160, 32):
            columns = np.arange(start, start + 32)
            seen = columns <= i if causal else np.ones(32, bool)
            s = mma(wide_q[i : i + 1], wide_k[columns], None, arch="sm90", fmt="float16")[0]
            if causal and start >= i // 64 * 64:
                y = np.where(seen, rounding.mul(s, c), F(-1e6)).astype(F)
                new = max(m, y.max())
                x = (y - new).astype(F)
            else:
                new = max(m, F(s.max() * c))
                x = rounding.fma(s, c, -new)
            p = np.where(seen, sfu.ex2(x), F(0)).astype(F)
            with np.errstate(invalid="ignore"):
                alpha = sfu.ex2(np.array([m - new], F))[0]
            lanes = []
            for g in range(4):
                t = F(0)
                for j in range(4):
                    for e in (0, 1):
                        t = F(t + p[8 * j + 2 * g + e])
                lanes.append(t)
            row = F(F(lanes[0] + lanes[2]) + F(lanes[1] + lanes[3]))
            half = rounding.cast(p, "float16")[None]
            acc = mma(half, wide_v[columns].T, rounding.mul(acc, alpha), arch="sm90", fmt="float16")
            total, m = rounding.fma(total, alpha, row), new
        o = rounding.mul(acc[0], sfu.rcp(np.array([total], F)))
        assert np.array_equal(out[0, i], o.astype(out.dtype)), i
        assert lse[0, i] == F(F(m + log2f(np.array([total], F))[0]) * F(np.log(2)))


@pytest.mark.parametrize("kernel", ["math", "triton"])
@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"causal": "top-left"}], ids=str)
def test_is_attributed(kernel: str, masks: dict[str, Any]) -> None:
    q, k, v = sample("rising", n=150, n_k=200, d=64, dtype="bfloat16")
    plan = plan_of(kernel, q, k, v, **masks)
    out, lse = flash(q, k, v, plan=plan, **masks)
    exact = oracle.attention(q, k, v, **masks)
    found = attribute(q, k, v, plan=plan, **masks)
    assert found.residual_share < 1e-6
    assert np.array_equal(found.observed, out.astype(np.float64))
    if kernel == "math":  # only the cast rounds to the half format
        assert found.groups["output cast"].share > 0.999
        return
    bounds = forward_bound(Problem.of(q, k, v, **masks), plan)
    assert_within("out", out, exact, bounds[0])
    assert_within("lse", lse, exact, bounds[1])


def test_what_an_unfused_plan_cannot() -> None:
    q, k, v = sample("normal", n=20, d=16)
    plan = plan_of("math", q, k, v)
    with pytest.raises(ValueError, match=r"softcap: got 3.0, must be None with an unfused plan"):
        flash(q, k, v, plan=plan, softcap=3.0)
    with pytest.raises(ValueError, match=r"plan\.algorithm: got 'unfused', must be 'tiled' for"):
        flash_vjp(q, k, v, q, plan=plan)
    with pytest.raises(ValueError, match=r"plan\.algorithm: got 'unfused', must be 'tiled' to be"):
        forward_bound(Problem.of(q, k, v), plan)
    for field, value in (("splits", 2), ("state", "float16"), ("wide", "split")):
        with pytest.raises(ValueError, match=rf"plan\.{field}: got .* if unfused"):
            dataclasses.replace(plan, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan\.diagonal: got 64, must be 0, or positive with"):
        Plan(diagonal=64)
    with pytest.raises(ValueError, match=r"plan\.backward\.delta_threads: got 3, must be 0, 1"):
        BackwardPlan(delta_threads=3)


@pytest.mark.parametrize("d", [64, 96, 256])
@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
def test_backward_of_a_peer_is_bounded(kernel: str, d: int) -> None:
    """Other orders of delta, of queries and of the exponent stay within their own bounds."""
    q, k, v = sample("normal", n=150, d=d, dtype="bfloat16")
    plan = plan_of(kernel, q, k, v, causal=True)
    grads = flash_vjp(q, k, v, q, plan=plan, causal=True)
    exact = oracle.attention_vjp(q, k, v, q, causal=True)
    bounds = backward_bound(Problem.of(q, k, v, causal=True), plan, q)
    for name, got, bound in zip(("dq", "dk", "dv"), grads, bounds, strict=True):
        error = np.abs(got.astype(np.float64) - getattr(exact, name))
        assert (error <= bound).all(), name
    wide = dataclasses.replace(plan, numerics=Numerics(p="split", out="float32"))
    ours = dataclasses.replace(wide, backward=BackwardPlan())
    a, b = (flash_vjp(q, k, v, q, plan=p, causal=True) for p in (wide, ours))
    same = all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
    assert same == (kernel == "fa3" and d == 64)
