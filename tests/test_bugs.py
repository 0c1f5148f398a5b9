"""Public bug reports as inputs: other libraries failed on them; the oracle and the bound say what
is right. The id of a case is the report: repository name and number.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from emulation import oracle
from emulation.backward import flash_vjp
from emulation.bounds import backward_bound, forward_bound
from emulation.flash import flash
from emulation.plan import Numerics, Plan, default_plan
from emulation.problem import Array, Problem
from emulation.samples import sample
from tests.cases import NUMERICS, assert_within, shaped

FA = "flash-attention"


def normal(seed: int, *shapes: tuple[int, ...], dtype: str = "float16", by: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return [shaped(rng.standard_normal(shape) * by, dtype) for shape in shapes]


def check(q: Array, k: Array, v: Array, *, tile_n: int = 32, **options: Any) -> tuple[Array, ...]:
    """Forward and backward within a finite bound of the oracle; returns out, lse, dq, dk, dv."""
    problem = Problem.of(q, k, v, **options)
    numerics = options.pop("numerics", None)
    plan = default_plan(problem, numerics, tile_n=tile_n)
    rng = np.random.default_rng(1)
    dout = shaped(rng.standard_normal((*q.shape[:-1], v.shape[-1])), problem.dtype)
    out, lse = flash(q, k, v, plan=plan, **options)
    exact = oracle.attention(q, k, v, **options)
    bounds = [*forward_bound(problem, plan), *backward_bound(problem, plan, dout)]
    assert all(np.isfinite(b).all() for b in bounds)
    assert_within("out", out, exact, bounds[0].reshape(out.shape))
    assert_within("lse", lse, exact, bounds[1].reshape(lse.shape))
    gradients = flash_vjp(q, k, v, dout, plan=plan, **options)
    truth = oracle.attention_vjp(q, k, v, dout, **options)
    for name, g, bound in zip(("dq", "dk", "dv"), gradients, bounds[2:], strict=True):
        assert_within(name, g, truth, bound.reshape(g.shape))
    return out, lse, *gradients


# -- lengths (family 2)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_odd_lengths_with_large_inputs(n: int, causal: bool) -> None:
    """flash-attention#334 (NaN in dQ for [1, 1, 1, 16], inputs * 3), #1052 (causal)."""
    for d, n_k in ((16, n), (32, n), (16, 1), (16, 70)):
        q, k, v = normal(352, (1, n, d), (1, n_k, d), (1, n_k, d), by=3.0)
        check(q, k, v, causal=causal)


@pytest.mark.parametrize(
    ("n_q", "n_k"),
    [
        pytest.param(70, 35, id=f"{FA}#1778, {FA}#2199, flashinfer#4452"),
        pytest.param(5, 2, id="pytorch#108108, tall"),
        pytest.param(2, 5, id="pytorch#108108, wide"),
        pytest.param(76, 1, id=f"{FA}#443"),
    ],
)
@pytest.mark.parametrize("causal", ["bottom-right", "top-left"])
def test_causal_with_unequal_lengths(n_q: int, n_k: int, causal: Any) -> None:
    """Bottom-right, the first queries of a tall problem see nothing: out 0, LSE -inf (never some
    finite number), dQ 0.
    """
    q, k, v = normal(0, (2, n_q, 16), (2, n_k, 16), (2, n_k, 16), by=3.0)
    out, lse, dq, _, _ = check(q, k, v, causal=causal)
    blind = max(0, n_q - n_k) if causal == "bottom-right" else 0
    assert not out[:, :blind].any()
    assert np.all(lse[:, :blind] == -np.inf)
    assert not dq[:, :blind].any()
    assert np.isfinite(lse[:, blind:]).all()


# -- empty things (family 3)


@pytest.mark.parametrize(
    ("n_q", "n_k"),
    [
        pytest.param(0, 100, id=f"{FA}#1713, {FA}#2421"),
        pytest.param(7, 0, id=f"{FA}#2470, flashinfer#4484, {FA}#978"),
        pytest.param(0, 0, id="both"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sides(n_q: int, n_k: int, causal: bool) -> None:
    q, k, v = normal(0, (2, n_q, 16), (2, n_k, 16), (2, n_k, 16))
    out, lse, dq, dk, dv = check(q, k, v, causal=causal)
    assert not out.any()
    assert np.all(lse == -np.inf)
    assert not any(g.any() for g in (dq, dk, dv))


def test_a_masked_key_reaches_nothing() -> None:
    """pytorch#101967, flash-attention#1745: NaN in a masked key or value."""
    q, k, v = normal(0, (1, 2, 4), (1, 40, 4), (1, 40, 4))
    k[:, 2:], v[:, 2:] = np.inf, np.nan
    masks: list[dict[str, Any]] = [
        {"causal": "top-left"},
        {"causal": "top-left", "window": (1, 3)},
        {"window": (None, -0), "causal": "top-left"},
    ]
    for mask in masks:
        for x in check(q, k, v, **mask):
            assert np.isfinite(x.astype(np.float32)).all()


# -- score range (family 4)


@pytest.mark.parametrize("offset", [-1e2, -1e3, -6e4, 1e2, 1e3, 6e4, -8e5, 8e5])
@pytest.mark.parametrize("reference", NUMERICS["reference"])
def test_constant_offset_of_all_scores(offset: float, reference: str) -> None:
    """PASA (arXiv 2503.01873) and flash-attention#442: a large bias on the scores."""
    q, k, v = normal(0, (1, 20, 16), (1, 70, 16), (1, 70, 16), dtype="bfloat16")
    q[..., 0], k[..., 0] = 1.0, offset
    held = float(k[0, 0, 0])
    plan = Plan(tile_n=16, numerics=Numerics(reference=reference))  # type: ignore[arg-type]
    out, lse = flash(q, k, v, plan=plan, scale=1.0)
    exact = oracle.attention(q, k, v, scale=1.0)
    bounds = forward_bound(Problem.of(q, k, v, scale=1.0), plan)
    assert_within("out", out, exact, bounds[0])
    assert_within("lse", lse, exact, bounds[1])
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.all(np.abs(lse - held) < 20)


@pytest.mark.parametrize("score", ["guarded", "fused", "unfused"])
@pytest.mark.parametrize("reference", NUMERICS["reference"])
def test_one_key_with_scores_of_1e12(reference: str, score: Any) -> None:
    """pytorch#121558: bf16, q = k = v = 133120, [1, 64]. One fma for s c - r against a rounded m c
    leaves up to half an ulp of 10^11: 2^x overflows. Two roundings give 0; "guarded" takes them;
    where a Plan cannot, its bound says so.
    """
    x = shaped(np.full((1, 1, 64), 133120.0), "bfloat16")
    plan = Plan(score=score, numerics=Numerics(reference=reference))  # type: ignore[arg-type]
    out, lse = flash(x, x, x, plan=plan)
    bound, _ = forward_bound(Problem.of(x, x, x), plan)
    exact = oracle.attention(x, x, x)
    assert_within("out", out, exact, bound)
    if score != "fused" and reference != "tie-safe":
        assert out.tobytes() == x.tobytes()
        assert abs(float(lse[0, 0]) / exact.lse[0, 0] - 1) < 2.0**-22
    else:
        assert np.isfinite(out.astype(np.float32)).all() or np.isinf(bound).all()


def test_softcap_beyond_the_range_of_exp() -> None:
    """vllm#56579: cap 50 and scores of +-1e4: tanh made of exp must not overflow, and its slope is
    exactly 0 where it is flat. flash-attention#1065, #2402: other caps, causal, gradients.
    """
    q = shaped(np.ones((1, 4, 16)), "float16")
    k = shaped(np.stack([np.full(16, s) for s in (625.0, -625.0, 625.0)])[None], "float16")
    v = normal(0, (1, 3, 16))[0]
    out, lse, dq, dk, _ = check(q, k, v, scale=1.0, softcap=50.0)
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.all(np.abs(lse - (50 + np.log(2))) < 1e-4)
    assert not dq.any()
    assert not dk.any()
    for cap, causal in itertools.product((5.0, 15.0, 50.0), (False, True)):
        q, k, v = normal(3, (1, 33, 24), (1, 33, 24), (1, 33, 24), by=3.0)
        check(q, k, v, softcap=cap, causal=causal)


def test_lse_is_a_natural_logarithm() -> None:
    """pytorch#181645: LSE off by the factor ln 2."""
    x = np.zeros((1, 8, 16), np.float16)
    assert np.all(np.abs(check(x, x, x)[1] - np.log(8)) < 1e-6)


# -- ties (family 5)


@pytest.mark.parametrize("reference", NUMERICS["reference"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_ties_at_the_max_with_one_signed_values(reference: str, sign: float) -> None:
    """arXiv 2510.04212, flash-attention#2151: P exactly 1 several times and V of one sign. Within
    the bound always; and where no P is exactly 1, the mean error stays near 0.
    """
    q, k, v = sample("tied-max", n=70, d=32, dtype="bfloat16")
    v = (v.astype(np.float32) * sign).astype(v.dtype)
    fields = {"reference": reference}
    plan = default_plan(Problem.of(q, k, v), fields, tile_n=16)
    out, lse = flash(q, k, v, plan=plan)
    exact = oracle.attention(q, k, v)
    bounds = forward_bound(Problem.of(q, k, v), plan)
    assert_within("out", out, exact, bounds[0])
    assert_within("lse", lse, exact, bounds[1])


# -- windows (family 8)


@pytest.mark.parametrize("window", [(-1, -3), (-1, 0), (0, -1), (3, -2)])
def test_negative_windows_are_refused(window: tuple[int, int]) -> None:
    """flash-attention#1116: (-1, -3) was taken for no window at all."""
    x = np.ones((1, 5, 16), np.float16)
    with pytest.raises(ValueError, match=r"window: (left|right) is -"):
        flash(x, x, x, window=window)


@pytest.mark.parametrize("window", [(32, 64), (0, 0), (63, 0), (0, 63), (16, 15), (None, 3)])
def test_windows_count_keys(window: Any) -> None:
    """flash-attention#1133, #2199, TransformerEngine#1197: off by one at the window's edge."""
    for n_q, n_k in ((70, 64), (64, 70), (64, 64)):
        q, k, v = normal(5, (1, n_q, 16), (1, n_k, 16), (1, n_k, 16), dtype="bfloat16")
        check(q, k, v, window=window)
        check(q, k, v, window=window, causal=True)


# -- heads and widths


@pytest.mark.parametrize("d", [1, 7, 72, 96, 160, 256])
def test_head_dimensions(d: int) -> None:
    """flashinfer#4299 (72, 96), flash-attention#2888, #2552 (d_v != d with GQA)."""
    d_v = max(1, d - 5)
    q, k, v = normal(6, (6, 9, d), (2, 21, d), (2, 21, d_v), dtype="bfloat16")
    check(q, k, v, causal=True)


def test_keys_of_a_group_that_divides_no_tile() -> None:
    """flash-attention#2528: seven query heads a key head."""
    q, k, v = normal(7, (7, 33, 16), (1, 33, 16), (1, 33, 16))
    check(q, k, v, causal=True)


def test_strides_of_k_and_v() -> None:
    """pytorch#119500, flash-attention test of transposed dO: layouts change no bit."""
    q, k, v = normal(8, (2, 33, 16), (2, 33, 16), (2, 33, 16))
    a, b, c = (np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v))
    assert all(not x.flags.c_contiguous for x in (a, b, c))
    for one, other in zip(flash(q, k, v), flash(a, b, c), strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(flash_vjp(q, k, v, q), flash_vjp(a, b, c, a), strict=True):
        assert one.tobytes() == other.tobytes()
