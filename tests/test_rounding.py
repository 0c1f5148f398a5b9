"""rounding: arrays against exact rational arithmetic, numba against NumPy, the known traps."""

from __future__ import annotations

import ctypes
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emulation import rounding
from emulation.formats import FORMATS
from emulation.rounding import Backend, Mode
from tests.foreign import Foreign, foreign_arrays

# Compiling the first numba kernel takes longer than any deadline.
QUICK = settings(max_examples=50, deadline=None)
Float32 = NDArray[np.float32]
NAMES = list(FORMATS)

#: Patterns where rules change: zeros, subnormals, 1, ties of narrow formats, overflow, Inf, NaN.
EDGES = [
    0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x33000000, 0x33000001, 0x387FE000,
    0x38800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000,
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x43E00000, 0x43E80000, 0x43E80001, 0x7F7F7FFF, 0x7F7F8000,
    0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
]  # fmt: skip
PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(EDGES + [x | 0x80000000 for x in EDGES]),
    # Few significant bits: sums and products that are ties.
    st.builds(
        lambda s, e, m: s << 31 | e << 23 | m << 11,
        st.integers(0, 1), st.integers(90, 160), st.integers(0, 0xFFF),
    ),
)  # fmt: skip


def values(patterns: list[int]) -> Float32:
    return np.array(patterns, np.uint32).view(np.float32)


def f32(*xs: float) -> Float32:
    return np.array(xs, np.float32)


def assert_same_bits(got: Any, expected: Any) -> None:
    """Equal patterns, where all NaNs count as one (payloads are not specified)."""
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    a, b = (np.where(np.isnan(x), 0x7FC00000, x.view(np.uint32)) for x in (got, expected))
    np.testing.assert_array_equal(a, b)


triples = st.lists(st.tuples(PATTERNS, PATTERNS, PATTERNS), min_size=1, max_size=8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", rounding.MODES)
@QUICK
@given(rows=triples)
def test_round_to_is_round_scalar(name: str, mode: Mode, rows: list[tuple[int, int, int]]) -> None:
    # Sums of two float32 values reach what float32 cannot hold: ties, and ties missed by 2^-40.
    with np.errstate(invalid="ignore"):
        pairs = values([x for row in rows for x in row[:2]]).astype(np.float64)
        x = np.concatenate([pairs, pairs[::2] + pairs[1::2], pairs * 2.0**100])
    expected = [rounding.round_scalar(float(v), name, mode) for v in x]
    assert_same_bits(rounding.round_to(x, name, mode), expected)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(patterns=st.lists(PATTERNS, min_size=1, max_size=40))
def test_cast_is_round_scalar(name: str, backend: Backend, patterns: list[int]) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    x = values(patterns)
    expected = [rounding.round_scalar(float(v), name) for v in x]
    assert_same_bits(rounding.cast(x, name, backend=backend), expected)


ARITY: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (rounding.add, 2),
    "sub": (rounding.sub, 2),
    "mul": (rounding.mul, 2),
    "div": (rounding.div, 2),
    "sqrt": (rounding.sqrt, 1),
    "fma": (rounding.fma, 3),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", ARITY)
@QUICK
@given(rows=triples)
def test_operations_are_the_exact_ones_rounded_once(
    op: str, name: str, rows: list[tuple[int, int, int]]
) -> None:
    function, arity = ARITY[op]
    args = [values(list(column)) for column in zip(*rows, strict=True)][:arity]
    expected = [rounding.scalar(op, *map(float, row), fmt=name) for row in zip(*args, strict=True)]
    assert_same_bits(function(*args, name), expected)


@QUICK
@given(rows=triples)
def test_fma_by_round_to_odd_is_the_machine_instruction(rows: list[tuple[int, int, int]]) -> None:
    pytest.importorskip("numba")
    a, b, c = (values(list(column)) for column in zip(*rows, strict=True))
    assert_same_bits(rounding.fma(a, b, c, backend="numpy"), rounding.fma(a, b, c, backend="numba"))


def test_fma_on_many_values_numba_is_numpy() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(0, 2**32, 400_000, np.uint32).view(np.float32) for _ in range(3))
    # c near -a * b: cancellation, and ties of every kind.
    with np.errstate(all="ignore"):
        near = -(a.astype(np.float64) * b).astype(np.float32)
        up, down = (np.ldexp(near, shift) for shift in (24, -25))
    for z in (c, near, up, down):
        assert_same_bits(
            rounding.fma(a, b, z, backend="numpy"), rounding.fma(a, b, z, backend="numba")
        )


def test_trap_float64_to_bfloat16_through_float32() -> None:
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40])
    assert rounding.round_to(x, "bfloat16").tolist() == [1 + 2.0**-7, 1 + 2.0**-7]
    naive = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert naive.tolist() == [1.0, 1 + 2.0**-6]


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_trap_float32_fma_through_float64(backend: Backend) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    x, c = f32(1 + 2.0**-12), f32(2.0**-60)
    # x^2 = 1 + 2^-11 + 2^-24 is a tie of float32; c breaks it upwards.
    assert float(rounding.fma(x, x, c, backend=backend)[0]) == 1 + 2.0**-11 + 2.0**-23
    assert float((x.astype(np.float64) * x + c).astype(np.float32)[0]) == 1 + 2.0**-11


def test_trap_float16_fma_through_float32() -> None:
    x, c = f32(1 + 2.0**-5), f32(2.0**-6 + 2.0**-11 + 2.0**-24 - 2.0**-10)
    exact = Fraction(float(x[0])) ** 2 + Fraction(float(c[0]))
    right = rounding.round_scalar(exact, "float16")
    assert float(rounding.fma(x, x, c, "float16")[0]) == right
    twice = rounding.round_scalar(rounding.round_scalar(exact), "float16")
    assert twice != right


def test_sum_to_bfloat16_is_rounded_once() -> None:
    a, b = f32(1 + 2.0**-8), f32(2.0**-100)
    assert float(rounding.add(a, b, "bfloat16")[0]) == 1 + 2.0**-7
    assert float(rounding.cast(rounding.add(a, b), "bfloat16")[0]) == 1.0


def test_signed_zeros_and_specials() -> None:
    zero, one = f32(0.0), f32(1.0)
    assert math.copysign(1, float(rounding.add(one, -one, "float16")[0])) == 1
    assert math.copysign(1, float(rounding.add(-zero, -zero, "bfloat16")[0])) == -1
    assert math.copysign(1, rounding.round_scalar(Fraction(-1, 2**200))) == -1
    assert np.isnan(rounding.mul(zero, np.inf, "bfloat16")[0])
    assert rounding.div(-one, zero, "float16")[0] == -np.inf
    assert rounding.sqrt(-zero).view(np.uint32)[0] == 0x80000000
    assert math.isnan(rounding.round_scalar(math.inf, "e4m3"))
    assert rounding.round_to(np.array([464.0, 465.0]), "e4m3")[0] == 448.0


def test_scalars_broadcast_and_shapes_are_kept() -> None:
    x = np.ones((2, 1, 3), np.float32)
    y = np.ones((4, 1), np.float32)
    assert rounding.fma(x, y, 0.5).shape == (2, 4, 3)
    assert rounding.add(x, 1.0).dtype == rounding.mul(2.0, x, "bfloat16").dtype == np.float32
    assert rounding.fma(x[:, :, :0], 1.0, 1.0).shape == (2, 1, 0)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="mode"):
        rounding.round_to(np.zeros(1), "float16", "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode"):
        rounding.round_scalar(1.0, "float16", "up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend"):
        rounding.fma(np.zeros(1), 0.0, 0.0, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op"):
        rounding.scalar("pow", 2.0, 3.0)


@QUICK
@given(patterns=st.lists(PATTERNS, min_size=1, max_size=40))
def test_widen_and_narrow_through_integers_are_exact(patterns: list[int]) -> None:
    x = values(patterns)
    with foreign_arrays():
        wide = rounding.widen(Foreign.of(x))
        assert_same_bits(rounding.narrow(wide), x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.asarray(wide), x.astype(np.float64))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", ARITY)
@QUICK
@given(rows=triples)
def test_other_array_modules_get_the_same_bits(
    op: str, name: str, rows: list[tuple[int, int, int]]
) -> None:
    function, arity = ARITY[op]
    args = [values(list(column)) for column in zip(*rows, strict=True)][:arity]
    with foreign_arrays():
        got = function(*map(Foreign.of, args), name)
        moved = rounding.cast(Foreign.of(args[0]), name)
    assert isinstance(got, Foreign)
    assert_same_bits(got, function(*args, name))
    assert_same_bits(moved, rounding.cast(args[0], name))


FLUSH = """
import ctypes
libm = ctypes.CDLL("libm.so.6")
environment = (ctypes.c_uint32 * 8)()
libm.fegetenv(environment)
environment[7] |= 0x8040  # FTZ and DAZ in MXCSR
libm.fesetenv(environment)
import emulation.rounding
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux" or not hasattr(ctypes, "CDLL"),
    reason="sets the MXCSR register of x86 through glibc",
)
def test_import_refuses_a_cpu_that_flushes_subnormals() -> None:
    done = subprocess.run([sys.executable, "-c", FLUSH], capture_output=True, text=True)
    assert done.returncode != 0
    assert "RuntimeError: the CPU flushes float32 subnormals to zero" in done.stderr


@pytest.mark.gpu
def test_cupy_gives_the_same_bits() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    random = rng.integers(0, 2**32, (3, 100_000), np.uint32)
    edges = np.array(EDGES + [x | 0x80000000 for x in EDGES], np.uint32)
    grid = np.stack([g.ravel() for g in np.meshgrid(edges, edges[::3], edges[::5])])
    a, b, c = np.concatenate([random, grid], 1).view(np.float32)
    for name in NAMES:
        for function, arity in ARITY.values():
            args = (a, b, c)[:arity]
            on_device = function(*map(cupy.asarray, args), name)
            assert_same_bits(cupy.asnumpy(on_device), function(*args, name))
        assert_same_bits(cupy.asnumpy(rounding.cast(cupy.asarray(a), name)), rounding.cast(a, name))
