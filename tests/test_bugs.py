"""Public bug reports as inputs: other libraries failed on them; the oracle and the bound say what
is right. The id of a case is the report: repository name and number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulation import oracle
from emulation.backward import flash_vjp
from emulation.bounds import forward_bound
from emulation.flash import flash
from emulation.plan import Numerics, Plan, default_plan
from emulation.problem import Problem
from emulation.samples import sample
from tests.bug_cases import BUGS, normal
from tests.cases import NUMERICS, assert_bounded, assert_within, shaped


@pytest.mark.parametrize("name", BUGS)
def test_reported_case(name: str) -> None:
    """Forward and backward, in small tiles, within the bound of the oracle."""
    case = BUGS[name]
    q, k, v = case.make()
    plan = default_plan(Problem.of(q, k, v), case.numerics, tile_n=32)
    rng = np.random.default_rng(1)
    dout = shaped(rng.standard_normal((*q.shape[:-1], v.shape[-1])), plan.format)
    found = (
        *flash(q, k, v, plan=plan, **case.masks),
        *flash_vjp(q, k, v, dout, plan=plan, **case.masks),
    )
    arrays = dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))
    assert_bounded(arrays, (q, k, v, dout), plan, case.masks, finite=case.finite)
    if case.holds is not None:
        case.holds(arrays)


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


@pytest.mark.parametrize("reference", NUMERICS["reference"])
@pytest.mark.parametrize("fields", [{}, {"p": "split"}, {"row_sum": "unrounded"}], ids=str)
def test_scores_of_minus_infinity(reference: str, fields: dict[str, str]) -> None:
    """A score of -inf weighs 0, also in a tile where all are; a row of nothing else is 0 / 0, and
    its LSE log 0, as in IEEE arithmetic and PyTorch.
    """
    q, k, v = sample("normal", n=6, n_k=70, d=16, dtype="bfloat16")
    q[..., 0], k[0, 20:, 0] = 1.0, -np.inf
    numerics = {"reference": reference, **fields}
    plan = default_plan(Problem.of(q, k, v), numerics, tile_n=16)
    for got, want in zip(
        flash(q, k, v, plan=plan), flash(q, k[:, :20], v[:, :20], plan=plan), strict=True
    ):
        assert got.tobytes() == want.tobytes()
    out, lse = flash(q, k[:, 20:], v[:, 20:], plan=plan)
    assert np.isnan(out.astype(np.float32)).all()
    assert (lse == -np.inf).all()


# -- windows (family 8)


@pytest.mark.parametrize("window", [(-1, -3), (-1, 0), (0, -1), (3, -2)])
def test_negative_windows_are_refused(window: tuple[int, int]) -> None:
    """flash-attention#1116: (-1, -3) was taken for no window at all."""
    x = np.ones((1, 5, 16), np.float16)
    with pytest.raises(ValueError, match=r"window: (left|right) is -"):
        flash(x, x, x, window=window)


# -- heads and widths


@pytest.mark.parametrize("d", [1, 7])
def test_head_dimensions_that_fill_no_step(d: int) -> None:
    """flashinfer#4299, flash-attention#2888: on the GPU they are multiples of 8."""
    q, k, v = normal(6, (6, 9, d), (2, 21, d), (2, 21, d), dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v), tile_n=32)
    masks: dict[str, Any] = {"causal": True}
    found = (*flash(q, k, v, plan=plan, **masks), *flash_vjp(q, k, v, q, plan=plan, **masks))
    arrays = dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))
    assert_bounded(arrays, (q, k, v, q), plan, masks)


def test_strides_of_k_and_v() -> None:
    """pytorch#119500, flash-attention test of transposed dO: layouts change no bit."""
    q, k, v = normal(8, (2, 33, 16), (2, 33, 16), (2, 33, 16))
    a, b, c = (np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v))
    assert all(not x.flags.c_contiguous for x in (a, b, c))
    for one, other in zip(flash(q, k, v), flash(a, b, c), strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(flash_vjp(q, k, v, q), flash_vjp(a, b, c, a), strict=True):
        assert one.tobytes() == other.tobytes()
