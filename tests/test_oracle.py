"""The oracle: tiers agree within their radii, gradients with differences, and lies are caught."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import flint
import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulation import oracle
from emulation.oracle import certified, large, readable
from emulation.problem import DTYPES, Problem, numpy_dtype
from emulation.samples import KINDS, sample

Arrays = tuple[Any, Any, Any]
TIERS: tuple[oracle.Tier, ...] = ("mpmath", "arb", "float64")
OUTPUTS = ("out", "lse")
GRADIENTS = ("dq", "dk", "dv")


def assert_agree(a: Any, b: Any, names: tuple[str, ...]) -> None:
    """Two results agree within the sum of their radii (and what two float64 cannot hold)."""
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype == np.float64
        assert x.shape == y.shape
        finite = np.isfinite(x)
        assert np.array_equal(x[~finite], y[~finite])  # -inf of rows that see nothing
        low = getattr(a, f"{name}_low")[finite] - getattr(b, f"{name}_low")[finite]
        difference = np.abs((x[finite] - y[finite]) + low)
        radius = getattr(a, f"{name}_radius") + getattr(b, f"{name}_radius")
        assert np.all(difference <= radius + 2.0**-100 * np.abs(x[finite])), (name, radius)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Arrays, dict[str, Any], int]:
    """Small problems of every kind, and a seed."""
    n_q, n_k = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    d, d_v = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 4, 8]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seed, dtype = draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(sorted(KINDS)))
    heads = kv_heads * group
    q, k, v = sample(kind, n=n_q, n_k=n_k, d=8, heads=heads, dtype=dtype, seed=seed)
    side = st.none() | st.integers(0, 4)
    options = {
        "scale": draw(st.none() | st.sampled_from([1.0, 0.3, 7.7])),
        "causal": draw(st.sampled_from([False, True, "top-left"])),
        "window": draw(st.none() | st.tuples(side, side)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 30.0])),
    }
    return (q[:, :, :d], k[:kv_heads, :, :d], v[:kv_heads, :, :d_v]), options, seed


def cotangents(q: Any, v: Any, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]))
    return dout, rng.standard_normal(q.shape[:-1])


@settings(deadline=None, max_examples=60)
@given(problems())
def test_tiers_agree(problem: tuple[Arrays, dict[str, Any], int]) -> None:
    (q, k, v), options, seed = problem
    dout, dlse = cotangents(q, v, seed)
    results = {t: oracle.attention(q, k, v, tier=t, **options) for t in TIERS}
    vjp = {t: oracle.attention_vjp(q, k, v, dout, dlse=dlse, tier=t, **options) for t in TIERS}
    assert results["arb"].radius <= 1e-30
    assert results["mpmath"].radius <= 1e-30
    assert vjp["arb"].radius <= 1e-30
    for tier in TIERS[::2]:
        assert_agree(results[tier], results["arb"], OUTPUTS)
        assert_agree(vjp[tier], vjp["arb"], GRADIENTS)
    auto = oracle.attention(q, k, v, **options)
    assert auto.tier == "arb"
    assert auto.certified
    assert np.array_equal(auto.out, results["arb"].out)


# ---- an independent statement of the definition: N x N mask, nothing subtracted, no gradients ----


def visible(i: int, j: int, n_q: int, n_k: int, causal: Any, window: Any) -> bool:
    diagonal = i + (0 if causal == "top-left" else n_k - n_q)
    left, right = window or (None, None)
    return (
        not (causal and j > diagonal)
        and not (left is not None and j < diagonal - left)
        and not (right is not None and j > diagonal + right)
    )


def plain(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Out and lse of one head of mpf arrays, from the definition."""
    outs, lses = [], []
    for i in range(len(q)):
        scores = {}
        for j in range(len(k)):
            if visible(i, j, len(q), len(k), options["causal"], options["window"]):
                s = options["scale"] * sum(q[i] * k[j])
                cap = options["softcap"]
                scores[j] = s if cap is None else cap * mpmath.tanh(s / cap)
        total = sum(mpmath.exp(s) for s in scores.values())
        outs.append(
            sum(mpmath.exp(s) * v[j] for j, s in scores.items()) / total if scores else None
        )
        lses.append(mpmath.log(total) if scores else None)
    return outs, lses


OPTIONS = [
    {"scale": 0.75, "causal": False, "window": None, "softcap": None},
    {"scale": 0.75, "causal": True, "window": (1, None), "softcap": 2.0},
    {"scale": 0.75, "causal": "top-left", "window": None, "softcap": None},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_central_differences(options: dict[str, Any]) -> None:
    n_q, n_k = 4, 3
    q, k, v = sample("normal", n=n_q, n_k=n_k, d=2, seed=5)
    dout, dlse = cotangents(q, v, 1)
    exact = oracle.attention(q, k, v, tier="mpmath", **options)
    gradients = oracle.attention_vjp(q, k, v, dout, dlse=dlse, tier="mpmath", **options)
    to_mpf = np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])
    with mpmath.workdps(90):
        arrays = [to_mpf(x[0]) for x in (q, k, v)]
        grad, grad_lse = to_mpf(dout[0]), to_mpf(dlse[0])

        def loss() -> Any:
            outs, lses = plain(arrays[0], arrays[1], arrays[2], options)
            return sum(
                sum(grad[i] * outs[i]) + grad_lse[i] * lses[i]
                for i in range(n_q)
                if outs[i] is not None
            )

        outs, lses = plain(arrays[0], arrays[1], arrays[2], options)
        for i in range(n_q):
            if outs[i] is None:
                assert exact.lse[0, i] == -np.inf
                assert not exact.out[0, i].any()
                continue
            error = abs(lses[i] - exact.lse[0, i] - exact.lse_low[0, i])
            assert error <= exact.lse_radius + 1e-30
            errors = abs(outs[i] - exact.out[0, i] - exact.out_low[0, i])
            assert max(errors) <= exact.out_radius + 1e-30

        step = mpmath.mpf(10) ** -25
        for x, name in zip(arrays, GRADIENTS, strict=True):
            for at in np.ndindex(x.shape):
                kept = x[at]
                x[at] = kept + step
                above = loss()
                x[at] = kept - step
                difference = (above - loss()) / (2 * step)
                x[at] = kept
                got = getattr(gradients, name)[0][at], getattr(gradients, f"{name}_low")[0][at]
                assert abs(difference - got[0] - got[1]) <= 1e-30


def test_arb_radius_and_time() -> None:
    q, k, v = sample("normal", n=1024)
    start = time.perf_counter()
    exact = oracle.attention(q, k, v, tier="arb")
    print(f"N = 1024, D = 64: {time.perf_counter() - start:.2f} s, radius {exact.radius:.1e}")
    assert exact.certified
    assert exact.radius <= 1e-30
    approximate = oracle.attention(q, k, v, tier="float64")
    assert_agree(approximate, exact, OUTPUTS)
    assert not approximate.certified
    assert len(approximate.checked_rows) == 4
    assert 0 < approximate.checked_difference <= approximate.radius <= 1e-12


def test_float64_gradients_within_their_radius() -> None:
    q, k, v = sample("peaked", n=200, n_k=300, d=32, heads=2, dtype="bfloat16")
    dout, dlse = cotangents(q, v, 0)
    options: dict[str, Any] = {"causal": True, "window": (150, None)}
    arb = oracle.attention_vjp(q, k[:1], v[:1], dout, dlse=dlse, tier="arb", **options)
    fast = oracle.attention_vjp(q, k[:1], v[:1], dout, dlse=dlse, tier="float64", **options)
    assert_agree(fast, arb, GRADIENTS)
    assert arb.radius <= 1e-30
    assert fast.radius <= 1e-8
    assert len(fast.checked_rows) == 4
    dq, dk, dv = oracle.float64_gradients(Problem.of(q, k[:1], v[:1], **options), dout, dlse)
    assert np.array_equal(dq, fast.dq)
    assert np.array_equal(dk, fast.dk)
    assert np.array_equal(dv, fast.dv)


@pytest.mark.parametrize("tier", TIERS)
def test_huge_equal_scores(tier: Any) -> None:
    x = np.full((1, 64), 133120, ml_dtypes.bfloat16)  # score 133120^2 * 8 = 1.4e11
    exact = oracle.attention(x, x, x, tier=tier)
    assert (exact.out == 133120).all()
    assert exact.lse[0] == 133120.0**2 * 8
    assert exact.lse_low[0] == 0
    assert exact.radius <= (1e-20 if tier != "float64" else 1e-6)
    gradients = oracle.attention_vjp(x, x, x, np.ones((1, 64)), tier=tier)
    assert abs(gradients.dq).max() <= gradients.dq_radius


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("power", [18, 30, 60])
def test_huge_scores(dtype: str, power: int) -> None:
    """Scores to 2^120 with near ties: the two largest differ in the last bits of the keys only."""
    q, k, v = (x.astype(np.float32) for x in sample("normal", n=6, n_k=8, d=8, heads=1))
    k[0, 1] = k[0, 0]
    q, k = np.ldexp(q, power), np.ldexp(k, power)
    q[0, :3] *= 1e-9  # rows whose numbers have very different exponents from the others
    q, k, v = (x.astype(numpy_dtype(dtype)) for x in (q, k, v))
    arb = oracle.attention(q, k, v, tier="arb")
    assert arb.radius <= 1e-30
    for tier in TIERS[::2]:
        assert_agree(oracle.attention(q, k, v, tier=tier), arb, OUTPUTS)
    dout, dlse = cotangents(q, v, 0)
    exact = oracle.attention_vjp(q, k, v, dout, dlse=dlse, tier="arb")
    for tier in TIERS[::2]:
        got = oracle.attention_vjp(q, k, v, dout, dlse=dlse, tier=tier)
        assert_agree(got, exact, GRADIENTS)


def test_scores_need_two_limbs() -> None:
    """A plain float64 product loses the last bits of these scores, the limbs do not."""
    rng = np.random.default_rng(0)
    q = (rng.integers(2**23, 2**24, (5, 64)) * rng.choice([1.0, 2.0**-9], (5, 64))).astype(
        np.float32
    )
    k = (rng.integers(-(2**24), 2**24, (7, 64)) * 2.0**-20).astype(np.float32)
    high, low, error = large.Keys(k.astype(np.float64)).scores(q.astype(np.float64), slice(0, 7))
    assert low is not None
    assert (error < 1e-12).all()
    wrong = 0
    for i in range(5):
        for j in range(7):
            with mpmath.workprec(500):
                score = mpmath.fdot(map(float, q[i]), map(float, k[j]))
                assert abs(score - float(high[i, j]) - float(low[i, j])) <= error[i]
                wrong += float(q[i].astype(float) @ k[j].astype(float)) != score
    assert wrong


@pytest.mark.parametrize("tier", TIERS)
def test_unseen_nan_reaches_nothing(tier: Any) -> None:
    arrays = sample("normal", n=4, n_k=7, d=8, dtype="bfloat16")
    options: dict[str, Any] = {"causal": "top-left", "tier": tier}
    dirty = [x.copy() for x in arrays]
    dirty[1][0, 4:], dirty[2][0, 4:] = np.nan, np.inf  # queries 0 to 3 see keys 0 to 3
    clean, got = (oracle.attention(*x, **options) for x in (arrays, dirty))
    assert np.array_equal(clean.out, got.out)
    assert np.array_equal(clean.lse, got.lse)
    dout = np.ones((1, 4, 8), np.float16)
    before, after = (oracle.attention_vjp(q, k, v, dout, **options) for q, k, v in (arrays, dirty))
    assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in GRADIENTS)
    assert not after.dk[0, 4:].any()
    dirty[1][0, 3, 2] = -np.inf
    with pytest.raises(ValueError, match=r"k: -inf at \(head, row, column\) \(0, 3, 2\)"):
        oracle.attention(*dirty, **options)
    with pytest.raises(ValueError, match=r"k: -inf"):
        oracle.attention_vjp(dirty[0], dirty[1], dirty[2], dout, **options)


@pytest.mark.parametrize("tier", TIERS)
def test_rows_that_see_nothing(tier: Any) -> None:
    q, k, v = sample("normal", n=5, n_k=3, d=4)
    q[0, :2] = np.nan  # bottom-right: queries 0 and 1 come before every key
    exact = oracle.attention(q, k, v, causal=True, tier=tier)
    assert (exact.lse[0, :2] == -np.inf).all()
    assert np.isfinite(exact.lse[0, 2:]).all()
    assert not exact.out[0, :2].any()
    dout = np.ones((1, 5, 4))
    dout[0, 0] = np.nan
    gradients = oracle.attention_vjp(q, k, v, dout, causal=True, tier=tier)
    assert not gradients.dq[0, :2].any()
    assert np.isfinite(gradients.dv).all()
    dout[0, 4, 1] = np.inf
    with pytest.raises(ValueError, match=r"dout: inf at \(head, row, column\) \(0, 4, 1\)"):
        oracle.attention_vjp(q, k, v, dout, causal=True, tier=tier)


@pytest.mark.parametrize("tier", TIERS)
def test_offset_of_the_scores_moves_lse_by_it(tier: Any) -> None:
    """One more column, 1 in q and c in k: scores grow by scale * c and nothing else changes."""
    q, k, v = sample("normal", n=6, d=7, heads=1)
    q8 = np.concatenate([q, np.ones((1, 6, 1), q.dtype)], axis=2)
    k0, k8 = (np.concatenate([k, np.full((1, 6, 1), c, q.dtype)], axis=2) for c in (0, 4096))
    before, after = (oracle.attention(q8, x, v, scale=0.25, tier=tier) for x in (k0, k8))
    for i in range(6):
        parts = after.lse[0, i], after.lse_low[0, i], -before.lse[0, i], -before.lse_low[0, i]
        shift = float(sum(map(Fraction, parts)) - 1024)
        assert abs(shift) <= before.lse_radius + after.lse_radius + 2.0**-90
    moved = replace(after, lse=before.lse, lse_low=before.lse_low)
    assert_agree(before, moved, OUTPUTS)


def test_rows() -> None:
    q, k, v = sample("normal", n=40, d=8, heads=2)
    options: dict[str, Any] = {"causal": True, "window": (5, 0)}
    for tier in TIERS:
        full = oracle.attention(q, k, v, tier=tier, **options)
        part = oracle.attention(q, k, v, tier=tier, rows=[3, -1, 3, 20], **options)
        picked = replace(
            full,
            **{
                name: getattr(full, name)[:, [3, 39, 3, 20]]
                for name in ("out", "lse", "out_low", "lse_low")
            },
        )
        assert_agree(part, picked, OUTPUTS)
        assert oracle.attention(q, k, v, tier=tier, rows=[]).out.shape == (2, 0, 8)
    for bad, error in (([40], ValueError), ([[1]], ValueError), ([1.5], TypeError), (3, TypeError)):
        with pytest.raises(error, match=r"^rows: "):
            oracle.attention(q, k, v, rows=bad)


def test_lead_shapes() -> None:
    q, k, v = sample("normal", n=5, n_k=6, d=4, heads=8)
    q4, k4, v4 = q.reshape(2, 4, 5, 4), k[:4].reshape(2, 2, 6, 4), v[:4, :, :3].reshape(2, 2, 6, 3)
    exact = oracle.attention(q4, k4, v4, tier="arb")
    assert exact.out.shape == exact.out_low.shape == (2, 4, 5, 3)
    assert exact.lse.shape == (2, 4, 5)
    one = oracle.attention(q4[1, 3], k4[1, 1], v4[1, 1], tier="arb")
    assert np.array_equal(one.out, exact.out[1, 3])
    gradients = oracle.attention_vjp(q4, k4, v4, np.ones((2, 4, 5, 3)))
    assert (gradients.dq.shape, gradients.dk.shape, gradients.dv.shape) == (
        q4.shape,
        k4.shape,
        v4.shape,
    )
    assert gradients.dv_low.shape == v4.shape


def test_a_wrong_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = sample("normal", n=64, d=16)
    honest = large.forward
    checked = oracle.attention(q, k, v, tier="float64").checked_rows

    for name, wrong in (("out", 1e-11), ("lse", 1e-11), ("out", np.nan)):

        def lie(problem: Problem, rows: Any, name: str = name, wrong: float = wrong) -> Any:
            result = honest(problem, rows)
            getattr(result, name)[checked[2]] += wrong
            return result

        monkeypatch.setattr(large, "forward", lie)
        with pytest.raises(oracle.OracleError, match=rf"{name}, head 0, query {checked[2][1]}"):
            oracle.attention(q, k, v, tier="float64")
        assert not oracle.attention(q, k, v, tier="float64", certified_rows=0).checked_rows

    back = large.backward

    def lie_back(problem: Problem, dout: Any, dlse: Any) -> Any:
        result = back(problem, dout, dlse)
        result.dq[checked[0]] *= 1 + 1e-7
        return result

    monkeypatch.setattr(large, "backward", lie_back)
    with pytest.raises(oracle.OracleError, match=f"dq, head 0, query {checked[0][1]}"):
        oracle.attention_vjp(q, k, v, np.ones((1, 64, 16)), tier="float64")


def test_precision_is_left_alone() -> None:
    q, k, v = sample("normal", n=4, d=4)
    before = flint.ctx.prec, mpmath.mp.prec
    for tier in TIERS:
        oracle.attention_vjp(q, k, v, np.ones((1, 4, 4)), tier=tier)
    with pytest.raises(ZeroDivisionError):
        certified.adapt(lambda: 1 / 0, lambda _: 0.0)
    assert (flint.ctx.prec, mpmath.mp.prec) == before


def test_without_flint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flint", None)
    monkeypatch.delitem(sys.modules, "emulation.oracle.certified")
    monkeypatch.delattr(oracle, "certified")
    q, k, v = sample("normal", n=4, d=4)
    exact = oracle.attention(q, k, v)
    assert exact.tier == "float64"
    assert exact.checked_rows == ()
    with pytest.raises(ImportError, match=r"pip install cuflash\[oracle\]"):
        oracle.attention(q, k, v, tier="arb")


def test_refusals() -> None:
    q, k, v = sample("normal", n=4, d=4)
    long = np.zeros((1, 1025, 4), np.float16)
    with pytest.raises(ValueError, match=f'"mpmath" takes N <= {readable.LARGEST}, got 1025'):
        oracle.attention(long, long, long, tier="mpmath")
    with pytest.raises(ValueError, match='"arb" takes N <= 1024, got 1025; give rows='):
        oracle.attention(long, long, long, tier="arb")
    assert oracle.attention(long, long, long, tier="arb", rows=[7]).certified
    with pytest.raises(ValueError, match="tier: got 'exact', must be"):
        oracle.attention(q, k, v, tier="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dout: shape \(1, 4, 3\), must be \(1, 4, 4\)"):
        oracle.attention_vjp(q, k, v, np.zeros((1, 4, 3)))
    with pytest.raises(ValueError, match=r"dlse: shape \(4,\), must be \(1, 4\)"):
        oracle.attention_vjp(q, k, v, np.zeros((1, 4, 4)), dlse=np.zeros(4))
    with pytest.raises(TypeError, match="dout: dtype int64, must be one of"):
        oracle.attention_vjp(q, k, v, np.zeros((1, 4, 4), np.int64))
    with pytest.raises(ValueError, match=r"scale: got 1e\+300, must be 2\*\*-126 to 2\*\*127"):
        oracle.attention(q, k, v, scale=1e300)
    with pytest.raises(ValueError, match="dout, dlse: must keep gradients below"):
        oracle.attention_vjp(q, k, v, np.full((1, 4, 4), 1e300))
    with pytest.raises(ValueError, match="certified_rows: got -1, must be an integer >= 0"):
        oracle.attention(q, k, v, certified_rows=-1)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("tier", ["mpmath", "arb", "float64", "auto"])
def test_nothing_and_one(shape: tuple[int, int], tier: Any) -> None:
    q, k, v = sample("normal", n=shape[0], n_k=shape[1], d=4)
    exact = oracle.attention(q, k, v, tier=tier)
    assert exact.out.shape == q.shape
    gradients = oracle.attention_vjp(q, k, v, np.ones(q.shape), tier=tier)
    assert gradients.dk.shape == k.shape
    if shape == (1, 1):
        assert np.array_equal(exact.out, v.astype(np.float64))
    elif not all(shape):
        assert (exact.lse == -np.inf).all()
        assert not exact.out.any()


@pytest.mark.parametrize("softcap", [2.0**-126, 1e-3, 1e3, 2.0**16])
def test_extreme_softcap(softcap: float) -> None:
    q, k, v = sample("huge", n=5, d=4)
    dout = np.ones(q.shape)
    options: dict[str, Any] = {"softcap": softcap}
    arb, fast = (oracle.attention(q, k, v, tier=t, **options) for t in TIERS[1:])
    assert_agree(fast, arb, OUTPUTS)
    assert arb.radius <= 1e-30
    pair = [oracle.attention_vjp(q, k, v, dout, tier=t, **options) for t in TIERS[1:]]
    assert_agree(pair[0], pair[1], GRADIENTS)
