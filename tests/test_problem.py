"""Problem: the mask against its definition, and every refusal: argument, value, rule."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from emulation import oracle
from emulation.flash import flash
from emulation.plan import Plan
from emulation.problem import Problem

X = np.zeros((2, 3, 8), np.float16)
SIZES = (0, 1, 2, 3, 5)
SIDES = (None, 0, 1, 2, 7)


def visible(i: int, j: int, n_q: int, n_k: int, causal: Any, window: Any) -> bool:
    """The definition: key j stands at j, query i at i (top-left) or at i + n_k - n_q; a causal
    query sees what is not after it, a window what is at most `left` before and `right` after it.
    """
    at = i if causal == "top-left" else i + n_k - n_q
    left, right = window or (None, None)
    return (
        (not causal or j <= at)
        and (left is None or at - j <= left)
        and (right is None or j - at <= right)
    )


@pytest.mark.parametrize("causal", [False, True, "bottom-right", "top-left"])
def test_band_is_the_definition(causal: Any) -> None:
    windows = [None, *itertools.product(SIDES, SIDES)]
    for n_q, n_k, window in itertools.product(SIZES, SIZES, windows):
        q, k = np.zeros((n_q, 4), np.float16), np.zeros((n_k, 4), np.float16)
        lo, hi = Problem.of(q, k, k, causal=causal, window=window).band()
        for i in range(n_q):
            seen = [j for j in range(n_k) if visible(i, j, n_q, n_k, causal, window)]
            assert list(range(lo[i], hi[i])) == seen, (n_q, n_k, i, window)
            assert hi[i] > lo[i] or lo[i] == hi[i] == 0


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("n_q", [2, 5])
@pytest.mark.parametrize("n_k", [2, 5, 20])
def test_results_obey_the_dense_mask(causal: Any, n_q: int, n_k: int) -> None:
    """flash and the oracle against softmax under the dense mask, in float64."""
    rng = np.random.default_rng(n_q + 10 * n_k)
    q, k, v = (rng.standard_normal((n, 8)).astype(np.float32) for n in (n_q, n_k, n_k))
    s = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(8)
    plan = Plan(format="float32", tile_n=16)
    for window in (None, *itertools.product((None, 0, 1, 7), (None, 0, 3))):
        mask = np.array(
            [[visible(i, j, n_q, n_k, causal, window) for j in range(n_k)] for i in range(n_q)]
        )
        p = np.where(mask, np.exp(s), 0.0)
        total = p.sum(axis=1, keepdims=True)
        expected = (p / np.where(total > 0, total, 1.0)) @ v
        exact = oracle.attention(q, k, v, causal=causal, window=window)
        assert np.allclose(exact.out, expected, rtol=0, atol=1e-14)
        assert np.array_equal(np.isneginf(exact.lse), ~mask.any(axis=1))
        out, lse = flash(q, k, v, plan=plan, causal=causal, window=window)
        assert np.allclose(out, expected, rtol=0, atol=1e-5)
        assert np.array_equal(np.isneginf(lse), ~mask.any(axis=1))


def test_shapes_are_flattened_and_kept() -> None:
    q, k = np.zeros((2, 6, 5, 8), np.float16), np.zeros((2, 3, 7, 8), np.float16)
    v = np.zeros((2, 3, 7, 4), np.float16)
    p = Problem.of(q, k, v)
    assert (p.heads, p.n_q, p.n_k, p.d, p.d_v, p.group) == (12, 5, 7, 8, 4, 2)
    assert (p.lead, p.kv_lead, p.dtype) == ((2, 6), (2, 3), "float16")
    assert [p.kv_head(h) for h in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


#: id -> (arrays, options, error, message): what is refused, and how.
REFUSED: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = {
    "list": (([[1.0]], X, X), {}, TypeError, "q: got list, must be an array"),
    "float64": ((X, X.astype(float), X), {}, TypeError, "k: dtype float64, must be one of"),
    "axes": ((X, X, X[0, 0]), {}, ValueError, "v: shape (8,), must have 2 to 4 axes"),
    "mixed axes": ((X, X[0], X[0]), {}, ValueError, "k, v: 2 and 2 axes, must be 3 like q"),
    "mixed dtypes": (
        (X, X, X.astype(np.float32)), {}, TypeError, "v: dtype float32, must be float16 like q",
    ),
    "head dimension of k": (
        (X, X[..., :4], X), {}, ValueError, "k: head dimension 4, must be 8 like q",
    ),
    "no head dimension": (
        (X[..., :0], X[..., :0], X), {}, ValueError, "q: head dimension 0, must be 1 to 256",
    ),
    "wide v": (
        (X, X, np.zeros((2, 3, 257), np.float16)), {}, ValueError,
        "v: head dimension 257, must be 1 to 256",
    ),
    "keys without values": (
        (X, X, X[:, :2]), {}, ValueError,
        "v: shape (2, 2, 8), must be like k (2, 3, 8) but for the last axis",
    ),
    "batch": (
        (X[None], np.stack([X, X]), np.stack([X, X])), {}, ValueError,
        "k: batch 2, must be 1 like q",
    ),
    "heads": (
        (np.concatenate([X, X])[:3], X, X), {}, ValueError,
        "k: 2 heads, must divide the 3 heads of q",
    ),
    "no key heads": (
        (X, X[:0], X[:0]), {}, ValueError, "k: 0 heads, must divide the 2 heads of q",
    ),
    "scale 0": ((X, X, X), {"scale": 0.0}, ValueError, "scale: got 0.0, must be a positive finite"),
    "scale nan": ((X, X, X), {"scale": math.nan}, ValueError, "scale: got nan, must be a positive"),
    "scale text": ((X, X, X), {"scale": "1"}, TypeError, "scale: got '1', must be a positive"),
    "scale bool": ((X, X, X), {"scale": True}, TypeError, "scale: got True, must be a positive"),
    "softcap": ((X, X, X), {"softcap": -5}, ValueError, "softcap: got -5, must be a positive"),
    "softcap inf": ((X, X, X), {"softcap": math.inf}, ValueError, "softcap: got inf, must be a"),
    "causal": (
        (X, X, X), {"causal": "left"}, ValueError,
        "causal: got 'left', must be False, True, \"bottom-right\" or \"top-left\"",
    ),
    "causal None": ((X, X, X), {"causal": None}, TypeError, "causal: got None, must be a bool"),
    "window number": ((X, X, X), {"window": 3}, TypeError, "window: got 3, must be None or a pair"),
    "window text": ((X, X, X), {"window": "ab"}, TypeError, "window: got 'ab', must be None or"),
    "window triple": ((X, X, X), {"window": (1, 2, 3)}, TypeError, "window: got (1, 2, 3), must"),
    "window float": (
        (X, X, X), {"window": (1.0, 2)}, TypeError,
        "window: left is 1.0, must be None (unbounded) or an integer >= 0",
    ),
    "window negative": (
        (X, X, X), {"window": (None, -3)}, ValueError,
        "window: right is -3, must be >= 0 (None is unbounded)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_argument_value_and_rule(name: str) -> None:
    (q, k, v), options, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        Problem.of(q, k, v, **options)


def test_values_are_not_looked_at_until_asked() -> None:
    q, k, v = (np.ones((1, 3, 4), np.float32) for _ in range(3))
    v[0, 2, 1] = np.nan
    assert Problem.of(q[:, :2], k, v, causal="top-left").nonfinite() is None
    found = Problem.of(q, k, v).nonfinite()
    assert found == "v: nan at (head, row, column) (0, 2, 1), must be finite"
    q[0, 0, 3] = -np.inf
    assert Problem.of(q, k, v, causal="top-left", window=(0, 0)).nonfinite() == (
        "q: -inf at (head, row, column) (0, 0, 3), must be finite"
    )
