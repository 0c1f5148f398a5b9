"""sfu: all recorded outputs of ex2, rcp and lg2, all special inputs, the polynomial's error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emulation import sfu
from emulation.rounding import Backend
from tests.foreign import Foreign, foreign_arrays

GOLDEN = Path(__file__).parent / "golden"
BACKENDS = ["numpy", "numba"]
NAN_BITS = 0x7FFFFFFF
Float32 = NDArray[np.float32]
Case = tuple[Callable[..., Any], Float32, Float32]

MANTISSAS = np.arange(1 << 23)
FUNCTIONS = {f.__name__: f for f in (sfu.ex2, sfu.rcp, sfu.lg2, sfu.ex2_polynomial)}
FIRST = np.array([0, 1, 0x7FFFFF], np.uint32)
#: Every sign and exponent with the first and last mantissas: zeros, subnormals, Inf and NaN too.
CORNERS = ((np.arange(512, dtype=np.uint32) << 23)[:, None] + FIRST).ravel().view(np.float32)


def f32(*xs: float) -> Float32:
    return np.array(xs, np.float32)


def wrong(got: Any, expected: Any) -> int:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == np.float32
    return int((got.view(np.uint32) != expected.view(np.uint32)).sum())


def need(backend: Backend) -> None:
    if backend == "numba":
        pytest.importorskip("numba")


def moved(reference: Any, ulps: Any) -> Float32:
    bits = reference.astype(np.float32).view(np.int32) + ulps
    return np.asarray(bits, np.int32).view(np.float32)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """Function, inputs, recorded outputs, over 2^23 mantissas each."""
    up = 1 + MANTISSAS * 2.0**-23
    down = -(0.5 + MANTISSAS * 2.0**-24)
    out: dict[str, Case] = {}
    with np.load(GOLDEN / "ex2_h200.npz") as data:
        for name, x in (("pos_1_2", up), ("neg_1_half", down)):
            out[name] = sfu.ex2, x.astype(np.float32), moved(np.exp2(x), data[name])
    with np.load(GOLDEN / "rcp_lg2_h200.npz") as data:
        out["rcp"] = sfu.rcp, up.astype(np.float32), moved(1 / up, data["rcp"])
        for e in (-1, 0, 1):
            x = up * 2.0**e
            y = moved(np.log2(x), data[f"lg2_{e}"])
            y[data[f"lg2_{e}_bigi"]] = data[f"lg2_{e}_bigv"]
            out[f"lg2_{e}"] = sfu.lg2, x.astype(np.float32), y
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["pos_1_2", "neg_1_half", "rcp", "lg2_-1", "lg2_0", "lg2_1"])
def test_hardware_on_all_mantissas(cases: dict[str, Case], name: str, backend: Backend) -> None:
    need(backend)
    function, x, expected = cases[name]
    # In pieces: the NumPy path holds a dozen int64 arrays.
    pieces = zip(np.split(x, 32), np.split(expected, 32), strict=True)
    assert sum(wrong(function(a, backend=backend), b) for a, b in pieces) == 0


@pytest.mark.parametrize("name", ["pos_1_2", "rcp", "lg2_-1", "lg2_0"])
def test_hardware_by_other_array_modules(cases: dict[str, Case], name: str) -> None:
    function, x, expected = cases[name]
    with foreign_arrays():
        got = function(Foreign.of(x[::64]))
    assert isinstance(got, Foreign)
    assert wrong(got, expected[::64]) == 0


@pytest.mark.parametrize(("name", "reference"), [("pos_1_2", np.exp2), ("rcp", np.reciprocal)])
def test_correct_rounding_does_not_reproduce_the_hardware(
    cases: dict[str, Case], name: str, reference: Callable[..., Any]
) -> None:
    _, x, expected = cases[name]
    assert wrong(reference(x.astype(np.float64)).astype(np.float32), expected) > 1_000_000


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("name", ["ex2", "rcp", "lg2"])
def test_every_integer_of_the_tables_matters(
    cases: dict[str, Case], name: str, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x, expected = cases[{"ex2": "pos_1_2", "rcp": "rcp", "lg2": "lg2_0"}[name]]
    changed = sfu.table(name).copy()
    changed[:, column] += 8
    monkeypatch.setattr(sfu, "table", lambda _: changed)
    slices = len(changed)
    x, expected = (v.reshape(slices, -1)[:, ::16] for v in (x, expected))
    differs = function(x).view(np.uint32) != expected.view(np.uint32)
    assert differs.any(axis=1).sum() >= slices - 1


def test_tables_fit_the_hardware_widths() -> None:
    for name, slices in (("ex2", 64), ("rcp", 128), ("lg2", 64)):
        t = sfu.table(name)
        assert t.shape == (slices, 3)
        assert (t >= 0).all()
        assert (t < [1 << 26, 1 << 16, 1 << 10]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_numba_and_other_array_modules_are_numpy(name: str, patterns: list[int]) -> None:
    function = FUNCTIONS[name]
    x = np.array(patterns, np.uint32).view(np.float32)
    expected = function(x, backend="numpy")
    with foreign_arrays():
        assert wrong(function(Foreign.of(x)), expected) == 0
    pytest.importorskip("numba")
    assert wrong(function(x, backend="numba"), expected) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numba_is_numpy_in_every_binade(name: str) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 300_000, np.uint32).view(np.float32)
    usual = rng.uniform(-150, 150, 300_000).astype(np.float32)
    x = np.concatenate([CORNERS, random, usual])
    function = FUNCTIONS[name]
    assert wrong(function(x, backend="numba"), function(x, backend="numpy")) == 0


# --- what PTX documents ---------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
TINY = 2.0**-149


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("ex2", [(0, 1), (-0.0, 1), (TINY, 1), (-TINY, 1), (-(2.0**-24), 1), (1e-30, 1), (3, 8)]),
        ("ex2", [(-126, 2.0**-126), (-126.5, 0), (-126.00001, 0), (-INF, 0), (-1e38, 0)]),
        ("ex2", [(127, 2.0**127), (128, INF), (1e38, INF), (INF, INF), (NAN, NAN)]),
        ("ex2_polynomial", [(0, 1), (-0.0, 1), (TINY, 1), (-TINY, 1), (-1e-30, 1), (3, 8)]),
        ("ex2_polynomial", [(-126, 2.0**-126), (-126.5, 0), (-126.00001, 0), (-INF, 0)]),
        ("ex2_polynomial", [(127, 2.0**127), (128, INF), (1e38, INF), (INF, INF), (NAN, NAN)]),
        ("rcp", [(1, 1), (-4, -0.25), (0, INF), (-0.0, -INF), (TINY, INF), (-TINY, -INF)]),
        ("rcp", [(INF, 0), (-INF, -0.0), (NAN, NAN), (2.0**126, 2.0**-126), (-(2.0**127), -0.0)]),
        ("lg2", [(1, 0), (2, 1), (8, 3), (0, -INF), (-0.0, -INF), (TINY, -INF), (-TINY, -INF)]),
        ("lg2", [(INF, INF), (-INF, NAN), (NAN, NAN), (-1, NAN), (-(2.0**-126), NAN)]),
    ],
)
def test_special_values(name: str, pairs: list[tuple[float, float]], backend: Backend) -> None:
    need(backend)
    x, y = (f32(*column) for column in zip(*pairs, strict=True))
    y = np.where(np.isnan(y), np.uint32(NAN_BITS), y.view(np.uint32)).view(np.float32)
    got = FUNCTIONS[name](x, backend=backend)
    np.testing.assert_array_equal(got.view(np.uint32), y.view(np.uint32))


def test_measured_facts() -> None:
    assert sfu.lg2(f32(2.0**-126))[0] > -126  # the complement
    assert sfu.ex2(f32(-0.5))[0] < np.float32(2**-0.5)  # the bias for x < 0


def test_scalars_and_empty_arrays_keep_their_shape() -> None:
    for function in FUNCTIONS.values():
        assert np.shape(function(np.array(1.5, np.float32))) == ()
        assert function(np.zeros((0, 3), np.float32)).shape == (0, 3)
        strided = np.linspace(1, 2, 24, dtype=np.float32).reshape(4, 6).T[::2]
        assert wrong(function(strided), function(strided.copy())) == 0


def test_ex2_is_monotone_over_a_binade(cases: dict[str, Case]) -> None:
    _, x, _ = cases["pos_1_2"]
    assert (np.diff(sfu.ex2(x)) >= 0).all()


def test_polynomial_error(cases: dict[str, Case]) -> None:
    _, x, _ = cases["pos_1_2"]
    y = sfu.ex2_polynomial(x).astype(np.float64)
    assert (np.abs(y / np.exp2(x.astype(np.float64)) - 1) < 2.0**-22.68).all()
    assert (np.diff(y) >= 0).all()


def test_polynomial_gives_exact_powers_at_integers() -> None:
    n = np.arange(-126, 128)
    assert (sfu.ex2_polynomial(n.astype(np.float32)) == np.ldexp(f32(1), n)).all()


@pytest.mark.gpu
def test_cupy_gives_the_hardware_bits(cases: dict[str, Case]) -> None:
    cupy = pytest.importorskip("cupy")
    for function, x, expected in cases.values():
        assert wrong(cupy.asnumpy(function(cupy.asarray(x))), expected) == 0
    for function in FUNCTIONS.values():
        assert wrong(cupy.asnumpy(function(cupy.asarray(CORNERS))), function(CORNERS)) == 0
