"""What is no usual suspect: faults of a place, free numbers, biases, what looks like dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.planted import Mistakes, backward, forward
from emulation import Problem, explain, flash, testing
from emulation.explain import fit, local
from emulation.explain.case import Case
from emulation.explain.fit import Observed
from emulation.explain.fitted import modelled
from emulation.explain.verdict import Verdict
from emulation.problem import Array
from emulation.samples import sample

QUICK: dict[str, Any] = {"arithmetic": False, "sources": False}
NAN = float("nan")


@functools.cache
def arrays(
    n_q: int = 96, n_k: int = 96, d: int = 64, heads: int = 4, dtype: str = "bfloat16",
    kind: str = "normal",
) -> tuple[Array, Array, Array]:  # fmt: skip
    q = sample(kind, n=n_q, n_k=2, d=d, heads=heads, dtype=dtype, seed=1)[0]
    _, k, v = sample(kind, n=n_q, n_k=n_k, d=d, heads=heads // 2, dtype=dtype, seed=1)
    return q, k, v


def judged(out: Array, q: Array, k: Array, v: Array, **masks: Any) -> Verdict:
    return explain(q, k, v, out, **QUICK, **masks)


def _set(out: Array, at: Any, value: float) -> Array:
    found = out.copy()
    found[at] = np.float32(value)
    return found


PLACES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "element": (lambda o: _set(o, (3, 42, 21), 0.6), "1 element (3, 42, 21) is wrong in out"),
    "NaN row": (lambda o: _set(o, (1, 40), NAN), "Row 40 of head 1 is NaN in out"),
    "NaN element": (lambda o: _set(o, (1, 40, 7), NAN), "1 element (1, 40, 7) is NaN in out"),
    "infinity": (lambda o: _set(o, (0, 5, 7), np.inf), "1 element (0, 5, 7) is infinite in out"),
    "last row": (
        lambda o: _set(o, (slice(None), -1), 0), "Row 95 of every head is zero (never written)",
    ),
    "head": (lambda o: _set(o, 2, 0), "Head 2 is zero (never written) in out"),
    "all": (lambda o: 0 * o, "All of out is zero (never written)."),
    "all NaN": (lambda o: NAN * o, "All of out is NaN."),
    "row repeated": (
        lambda o: np.concatenate([o[:, :-1], o[:, -2:-1]], axis=1),
        "Row 95 of every head is wrong in out; the rest is rounding.",
    ),
    "column": (
        lambda o: np.concatenate([o[..., :-1], o[..., :1]], axis=2),
        "Column 63 of every head is wrong in out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fault", PLACES)
def test_fault_of_a_place_is_told_and_no_suspect_named(fault: str, causal: bool) -> None:
    q, k, v = arrays()
    right, _ = forward(Mistakes(), q, k, v, causal=causal)
    change, text = PLACES[fault]
    with np.errstate(all="ignore"):
        found = judged(change(right), q, k, v, causal=causal)
    assert found.kind == "another computation"
    assert found.named is None, str(found)
    assert text in str(found)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        ((2, 17), 9.0, "1 element (2, 17) is wrong in lse"),
        ((2, 17), NAN, "1 element (2, 17) is NaN in lse"),
        ((1,), 0.0, "Head 1 is zero (never written) in lse"),
        ((), 0.0, "All of lse is zero (never written)."),
    ],
)
def test_fault_of_a_place_in_the_lse(at: tuple[int, ...], value: float, text: str) -> None:
    q, k, v = arrays()
    out, lse = forward(Mistakes(), q, k, v, causal=True)
    found = explain(q, k, v, out, lse=_set(lse, at, value), causal=True, **QUICK)
    assert found.kind == "another computation"
    assert found.named is None, str(found)
    assert text in str(found)


def test_rows_that_see_no_key() -> None:
    """NaN, or a number, where 0 is right."""
    q, k, v = arrays(n_q=80, n_k=20)
    right, _ = forward(Mistakes(), q, k, v, causal=True)
    assert judged(right, q, k, v, causal=True).is_rounding
    found = judged(_set(right, (slice(None), slice(60)), NAN), q, k, v, causal=True)
    assert found.named is None
    assert "Rows 0 to 59 of every head are NaN, where no key is seen and 0 is right" in str(found)
    found = judged(_set(right, (slice(None), slice(60)), 0.5), q, k, v, causal=True)
    assert "Rows 0 to 59 of every head are not zero, where no key is seen" in str(found)


LIKE_DROPOUT: dict[str, tuple[Callable[[Array, Array], Array], str]] = {
    "heads": (lambda o, m: np.stack([o[0]] * 4), "Head 1 is not its own but what head 0 must be"),
    "reversed": (lambda o, m: o[..., ::-1], "columns of out are reversed"),
    "rolled": (lambda o, m: np.roll(o, 1, axis=2), "columns of out are rolled by +1"),
    "rows scaled": (
        lambda o, m: (o.astype(np.float32) * m).astype(o.dtype),
        "Each row is the right one times a number of its own",
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fault", LIKE_DROPOUT)
def test_what_looks_random_is_not_dropout(fault: str, dtype: str) -> None:
    q, k, v = arrays(dtype=dtype)
    right, lse = forward(Mistakes(), q, k, v)
    change, text = LIKE_DROPOUT[fault]
    found = judged(change(right, np.exp(lse - lse.max())[..., None]), q, k, v)
    assert found.named is None, str(found)
    assert text in str(found)


@pytest.mark.parametrize(
    ("n_k", "lost", "text"),
    [
        (96, slice(37, 50), "Keys 37 to 49 do not count"),
        (300, slice(100, 150), "Keys 100 to 149 do not count"),
        (300, slice(217, 218), "Key 217 does not count"),
    ],
)
def test_keys_left_out_are_found(n_k: int, lost: slice, text: str) -> None:
    """Ranges that no tile has; and dropout beside them is dropout."""
    q, k, v = arrays(n_k=n_k, dtype="float16")
    there = np.ones(n_k, bool)
    there[lost] = False
    wrong, _ = forward(Mistakes(see=lambda i, j, m: m & there), q, k, v)
    found = judged(wrong, q, k, v)
    assert found.named is None, str(found)
    assert text in str(found)
    dropped, _ = forward(Mistakes(drop=0.2), q, k, v)
    assert judged(dropped, q, k, v).named == "dropout left on"


@pytest.mark.parametrize("factor", [1.001, 1.01, 0.9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale_is_fitted(factor: float, dtype: str) -> None:
    q, k, v = arrays(n_q=160, n_k=160, dtype=dtype)
    wrong, _ = forward(Mistakes(scale=lambda s, d: factor * s), q, k, v, causal=True)
    found = judged(wrong, q, k, v, causal=True)
    assert found.named == "scale wrong by a factor", str(found)
    assert found.suspect is not None
    assert abs(float(found.suspect.variant.removeprefix("x ")) - factor) < 0.05 * abs(1 - factor)


def test_softcap_and_gain_are_fitted_and_fail_the_assertion() -> None:
    q, k, v = arrays(n_q=160, n_k=80, d=80)
    masks: dict[str, Any] = {"softcap": 5.0}
    wrong, _ = forward(Mistakes(cap=lambda c, s: (1.1 * c, s)), q, k, v, **masks)
    with pytest.raises(AssertionError, match=r"another softcap \(5\.\d* for 5\)"):
        testing.assert_attention_close(wrong, q, k, v, **masks)
    wrong, _ = forward(Mistakes(gain=1 + 2**-8), q, k, v)
    with pytest.raises(AssertionError, match=r"output times a constant \(x 1\.00"):
        testing.assert_attention_close(wrong, q, k, v)


def test_bias_beyond_every_modelled_source() -> None:
    """The output truncated in place of rounded, in a way that no factor fits: half a unit off."""
    q, k, v = arrays(n_q=160, n_k=160)
    with np.errstate(all="ignore"):
        exact = Case(Problem.of(q, k, v)).whole.out
    bits = exact.astype(np.float32).view(np.uint32) & 0xFFFF0000
    wrong = bits.view(np.float32).astype(q.dtype)
    found = judged(wrong, q, k, v)
    assert found.kind == "another computation", str(found)
    right = judged(exact.astype(np.float32).astype(q.dtype), q, k, v)
    assert right.kind == "rounding"


@pytest.mark.parametrize("kind", ["normal", "big mean"])
@pytest.mark.parametrize("shape", [(1, 5, 8, 2), (2, 5, 8, 2), (1, 64, 64, 1), (1, 300, 64, 4)])
def test_few_rows_are_no_evidence_of_a_bias(shape: tuple[int, int, int, int], kind: str) -> None:
    n, m, d, heads = shape
    for seed in range(6):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal((heads, x, d)) for x in (n, m, m))
        v = v + (10 if kind == "big mean" else 0)
        half = [x.astype(np.float16) for x in (q, k, v)]
        right, _ = forward(Mistakes(), *half)
        assert judged(right, *half).kind == "rounding"


def test_bias_needs_rows_that_differ() -> None:
    """One row 100 times is one row; 100 rows that lean are a bias, of a bounded figure in words."""
    rng = np.random.default_rng(0)
    exact = 1 + rng.random((1, 100, 16))
    sigma = np.full(exact.shape, 0.01)
    same = Observed(exact + 0.01, exact, sigma, 9 * sigma)
    assert fit.bias(same) is None
    other = Observed(exact + 0.01 + 1e-5 * rng.random((1, 100, 16)), exact, sigma, 9 * sigma)
    found = fit.bias(other)
    assert found is not None
    assert fit.beyond(found, other, [exact])
    assert not fit.beyond(found, other, [exact + 0.01])
    few = Observed(*(x[:, : fit.LEAST - 1] for x in (other.out, exact, sigma, other.bound)))
    assert fit.bias(few) is None


def test_models_round() -> None:
    """The modelled kernels err as rounding does, and not all alike."""
    q, k, v = arrays()
    case = Case(Problem.of(q, k, v, causal=True))
    close = np.arange(96)
    near = case.near(close)
    models = modelled(case, close)
    assert len(models) == 4
    for m in models:
        assert 0.05 < fit.chi_square(m - near.out, near.sigma) < 2
    assert len({m.tobytes() for m in models}) == 4


@pytest.mark.parametrize(
    ("given", "name"),
    [((33, 0), "window off by some"), ((31, 0), "window off by some"), (None, "mask dropped")],
)
def test_window_where_many_keys_are_seen_by_nobody(given: Any, name: str) -> None:
    """What a suspect sees there is what the caller passed."""
    q, k, v = arrays(n_q=64, n_k=300, d=128, heads=2, dtype="float16")
    wrong, _ = flash(q, k, v, causal=True, window=given)
    found = judged(wrong, q, k, v, causal=True, window=(32, 0))
    assert found.named == name
    assert found.suspect is not None
    assert found.suspect.fits


def test_keys_seen_by_nobody_may_be_nan() -> None:
    q, k, v = arrays(n_q=16, n_k=96, d=32, heads=2)
    k, v = _set(k, (0, 3), NAN), _set(v, (0, 4), np.inf)
    right, _ = flash(q, k, v, causal=True, window=(8, 0))
    assert judged(right, q, k, v, causal=True, window=(8, 0)).is_rounding


def _graded(change: Callable[[list[Array]], None], dtype: str = "bfloat16") -> Verdict:
    q, k, v = arrays(n_q=64, n_k=64, heads=2, dtype=dtype)
    out, _ = forward(Mistakes(), q, k, v)
    dout = sample("normal", n=64, n_k=2, d=64, heads=2, dtype=dtype, seed=9)[0]
    grads = list(backward(Mistakes(), q, k, v, dout))
    change(grads)
    return explain(q, k, v, out, grads=tuple(grads), dout=dout, **QUICK)


def _times(at: int, factor: float) -> Callable[[list[Array]], None]:
    def change(g: list[Array]) -> None:
        g[at] = (g[at].astype(np.float32) * factor).astype(g[at].dtype)

    return change


def _put(at: int, where: Any, value: float) -> Callable[[list[Array]], None]:
    def change(g: list[Array]) -> None:
        g[at] = _set(g[at], where, value)

    return change


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (lambda g: None, None, "Rounding."),
        (_times(1, -1.0), "backward: wrong sign", "(dk)"),
        (_times(0, 8.0), "backward: one gradient's scale", "(dq not scaled)"),
        (_times(2, 1.3), "backward: a gradient times a constant", "(dv x 1."),
        (lambda g: g.insert(1, g.pop()), "backward: dK and dV swapped", ""),
        (_put(2, (0, -1), 0), None, "Row 63 of head 0 is zero (never written) in dv"),
        (_put(0, (0, 3, 3), NAN), None, "1 element (0, 3, 3) is NaN in dq"),
        (_put(0, (0, 3, 3), 2.0), None, "1 element (0, 3, 3) is wrong in dq"),
        (lambda g: [_times(i, 0.0)(g) for i in range(3)], None, "All of dv is zero"),
    ],
)
def test_gradients(change: Any, name: str | None, text: str) -> None:
    found = _graded(change)
    assert found.named == name, str(found)
    assert text in str(found)


def test_place_in_words() -> None:
    bad = np.zeros((3, 40, 20), bool)
    bad[:2, 5:8] = True
    words = local.place(bad, np.arange(40), bad.shape)
    assert words == "rows 5 to 7 of heads 0 to 1 are"
    bad[:] = False
    bad[1, :, [3, 9]] = True
    assert local.place(bad, np.arange(40), bad.shape) == "columns 3 and 9 of head 1 are"
