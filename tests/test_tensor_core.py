"""tensor_core: all recorded outputs of the hardware, the readable twin, the special cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emulation import rounding, rules, tensor_core
from emulation.formats import FORMATS, format_of
from emulation.rounding import Backend
from emulation.rules import RULES, Output
from emulation.tensor_core import NAN_BITS, dot_scalar, fma_chain, mma
from tests.foreign import Foreign, foreign_arrays

GOLDEN = Path(__file__).parent / "golden" / "tensor_core_h200.npz"
DTYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
KINDS = ["normal", "wide", "sub", "zeros", "prob"]
BACKENDS = ["numpy", "numba"]
QUICK = settings(max_examples=40, deadline=None)
Array = NDArray[Any]


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN) as data:
        return dict(data)


def recorded(golden: dict[str, Array], prefix: str, kind: str) -> tuple[Array, ...]:
    a, b, c, d = (golden[f"{prefix}_{kind}_{x}"] for x in "ABCD")
    return a.view(DTYPES[prefix]), b.view(DTYPES[prefix]), c, d


def wrong(got: Any, expected: Any) -> int:
    """Number of elements whose bits differ."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == np.float32
    return int((got.view(np.uint32) != expected.view(np.uint32)).sum())


def need(backend: Backend) -> None:
    if backend == "numba":
        pytest.importorskip("numba")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", DTYPES)
def test_hardware(golden: dict[str, Array], prefix: str, kind: str, backend: Backend) -> None:
    need(backend)
    a, b, c, d = recorded(golden, prefix, kind)
    assert wrong(mma(a, b, c, backend=backend), d) == 0
    x, y = (rounding.widen(v).astype(np.float32) for v in (a, b))
    assert wrong(mma(x, y, c, fmt=a.dtype.name, backend=backend), d) == 0


@pytest.mark.parametrize("prefix", DTYPES)
def test_hardware_by_the_readable_twin(golden: dict[str, Array], prefix: str) -> None:
    for kind in KINDS:
        a, b, c, d = (x[3, :4].astype(np.float32) for x in recorded(golden, prefix, kind))
        for i, j in np.ndindex(4, 4):
            got = dot_scalar(
                a[i].tolist(), b[j].tolist(), float(c[i, j]), fmt=format_of(DTYPES[prefix])
            )
            assert got == float(d[i, j])


@pytest.mark.parametrize("prefix", DTYPES)
def test_other_array_modules_get_the_same_bits(golden: dict[str, Array], prefix: str) -> None:
    for kind in KINDS:
        a, b, c, d = recorded(golden, prefix, kind)
        x, y = (Foreign.of(rounding.widen(v).astype(np.float32)) for v in (a, b))
        with foreign_arrays():
            got = mma(x, y, Foreign.of(c), fmt=a.dtype.name)
        assert isinstance(got, Foreign)
        assert wrong(got, d) == 0


def variants(rule: rules.Rule) -> dict[str, tuple[rules.Rule, int | None]]:
    def bits(n: int) -> rules.Rule:
        return replace(rule, fraction_bits=dict.fromkeys(rule.fraction_bits, n))

    return {"F=24": (bits(24), None), "F=26": (bits(26), None), "two steps of 8": (rule, 8)}


@pytest.mark.parametrize("variant", ["F=24", "F=26", "two steps of 8"])
@pytest.mark.parametrize("prefix", DTYPES)
def test_wrong_rules_do_not_reproduce_the_hardware(
    golden: dict[str, Array], prefix: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, step = variants(RULES["sm90"])[variant]
    monkeypatch.setitem(RULES, "sm90", rule)
    a, b, c, d = recorded(golden, prefix, "normal")
    assert wrong(mma(a, b, c, step=step), d) > 100


@pytest.mark.parametrize("prefix", DTYPES)
def test_wrong_roundings_do_not_reproduce_the_hardware(
    golden: dict[str, Array], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d = recorded(golden, prefix, "normal")
    of = rules.Step.of
    monkeypatch.setattr(rules.Step, "of", lambda *x, **k: replace(of(*x, **k), nearest=True))
    assert wrong(mma(a, b, c, backend="numpy"), d) > 1000  # nearest at the end
    monkeypatch.undo()
    monkeypatch.setattr(np, "trunc", np.rint)
    assert wrong(mma(a, b, c, backend="numpy"), d) > 1000  # nearest everywhere
    monkeypatch.undo()
    x, y = (v.astype(np.float32) for v in (a, b))
    assert wrong(fma_chain(x, y, c), d) > 1000
    assert wrong((c + np.matmul(x, y.swapaxes(1, 2))).astype(np.float32), d) > 1000


def test_zero_products_do_not_count_toward_the_largest_exponent(
    golden: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d = recorded(golden, "f16", "zeros")
    plain = tensor_core.powers
    monkeypatch.setattr(
        tensor_core, "powers", lambda x, fmt: np.maximum(plain(x, fmt), 2.0**fmt.emin)
    )
    assert wrong(mma(a, b, c, backend="numpy"), d) > 100


# --- random operands ------------------------------------------------------------------------------

HALF_EDGES = [0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00, 0x7F7F, 0x7F80, 0x7FC0]
halves = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from(HALF_EDGES + [x | 0x8000 for x in HALF_EDGES]),
    st.builds(lambda s, m: s | 0x3800 | m, st.sampled_from([0, 0x8000]), st.integers(0, 0xFFF)),
)
words = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001]),
    st.builds(
        lambda s, m: s | 0x3F000000 | m, st.sampled_from([0, 1 << 31]), st.integers(0, 2**24)
    ),
)


def patterns(draw: Any, strategy: Any, shape: tuple[int, int], dtype: Any) -> Array:
    n = shape[0] * shape[1]
    bits = draw(st.lists(strategy, min_size=n, max_size=n))
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    out: Array = np.array(bits, unsigned).view(dtype).reshape(shape)
    return out


@st.composite
def products(draw: Any) -> tuple[Array, Array, Array, str, dict[str, Any]]:
    """Operands as float32 values of a format, an accumulator, and how to multiply them."""
    name = draw(st.sampled_from(["float16", "bfloat16", "tf32", "e4m3", "e5m2"]))
    arch = draw(st.sampled_from([k for k, r in RULES.items() if name in r.step]))
    out: Output = draw(st.sampled_from(["float32", "float32", "float16"]))
    m, n, k = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    dtype = DTYPES["bf16" if name == "bfloat16" else "f16"]
    source = (words, np.float32) if name == "tf32" else (halves, dtype)
    a, b = (
        rounding.cast(rounding.narrow(rounding.widen(patterns(draw, *args))), name)
        for args in ((source[0], (m, k), source[1]), (source[0], (n, k), source[1]))
    )
    c = rounding.cast(patterns(draw, words, (m, n), np.float32), out)
    how = {"arch": arch, "out": out, "step": draw(st.sampled_from([None, None, 8]))}
    return a, b, c, name, how


@QUICK
@given(case=products())
def test_scalar_numpy_and_numba_agree(case: Any) -> None:
    a, b, c, name, how = case
    got = mma(a, b, c, fmt=name, backend="numpy", **how)
    for i, j in np.ndindex(got.shape):
        twin = dot_scalar(a[i], b[j], float(c[i, j]), fmt=name, **how)
        expected = NAN_BITS if twin != twin else np.array([twin], np.float32).view(np.uint32)[0]
        assert got.view(np.uint32)[i, j] == expected
    with foreign_arrays():
        other = mma(*map(Foreign.of, (a, b, c)), fmt=name, **how)
    assert wrong(other, got) == 0
    pytest.importorskip("numba")
    assert wrong(mma(a, b, c, fmt=name, backend="numba", **how), got) == 0


@pytest.mark.parametrize("prefix", DTYPES)
def test_numba_is_numpy_on_large_products(prefix: str) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    shape = (2, 150, 50)
    bits = rng.integers(0, 2**16, shape, np.uint16)
    a = bits.view(DTYPES[prefix])
    b = rng.standard_normal((2, 300, 50)).astype(np.float32).astype(DTYPES[prefix])
    c = rng.integers(0, 2**32, (2, 150, 300), np.uint32).view(np.float32)
    assert wrong(mma(a, b, c, backend="numba"), mma(a, b, c, backend="numpy")) == 0
    tame = np.where(np.isfinite(a.astype(np.float32)), a, np.zeros((), a.dtype))
    assert wrong(mma(tame, b, backend="numba"), mma(tame, b, backend="numpy")) == 0


def test_result_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from emulation import fast

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((200, 64)).astype(np.float16) for _ in range(2))
    expected = mma(a, b, backend="numba")
    monkeypatch.setattr(fast, "GRAIN", 1000)
    for workers in (1, 3, 7):
        monkeypatch.setattr(fast, "WORKERS", workers)
        assert wrong(mma(a, b, backend="numba"), expected) == 0


# --- the rule's special cases ---------------------------------------------------------------------


def one(a: list[float], b: list[float], c: float = 0.0, dtype: Any = np.float16, **how: Any) -> int:
    """Bits of a single output element, the same from both code paths."""
    x, y = (np.array([v], np.float32).astype(dtype) for v in (a, b))
    z = np.array([[c]], np.float32)
    got = int(mma(x, y, z, backend="numpy", **how).view(np.uint32)[0, 0])
    assert got == int(mma(x, y, z, **how).view(np.uint32)[0, 0])
    return got


INF, NAN = float("inf"), float("nan")


def bits(x: float) -> int:
    return int(np.array([x], np.float32).view(np.uint32)[0])


def test_nan_and_infinity() -> None:
    assert one([NAN, 1], [1, 1]) == one([INF, 1], [0, 1]) == one([1], [1], NAN) == NAN_BITS
    assert one([INF, INF], [1, -1]) == one([INF], [-1], INF) == NAN_BITS
    assert one([INF, -1], [2, 5]) == one([1], [1], INF) == bits(INF)
    assert one([INF], [-2]) == one([1], [1], -INF) == bits(-INF)
    # The NaN of one step survives the next ones; another row does not see it.
    a = np.ones((2, 64), np.float16)
    a[0, 3] = np.nan
    got = mma(a, a[1:])
    assert got.view(np.uint32)[0, 0] == NAN_BITS
    assert got[1, 0] == 64.0


def test_overflow_gives_infinity_although_rounding_is_toward_zero() -> None:
    big = 2.0**127
    assert one([big, big], [1, 1], dtype=DTYPES["bf16"]) == bits(INF)
    assert one([-big, -big], [1, 1], dtype=DTYPES["bf16"]) == bits(-INF)
    # Inside a step a product may exceed the range of float32 ...
    assert one([big, -big, 1], [2, 2, 1], dtype=DTYPES["bf16"]) == 0
    # ... but an accumulator that has overflowed stays infinite.
    a = [big] * 16 + [-big] * 16
    assert one(a, [1.0] * 32, dtype=DTYPES["bf16"]) == bits(INF)
    assert one([256.0] * 2, [256.0] * 2, out="float16") == bits(INF)
    assert one([240.0], [273.0], out="float16") == bits(INF)  # 65520, a tie past the largest


def test_zeros_are_positive() -> None:
    assert one([0.0], [-1.0], -0.0) == one([1, -1], [1, 1]) == one([-0.0], [1.0], -0.0) == 0
    tiny = 2.0**-133
    assert one([-tiny], [tiny], dtype=DTYPES["bf16"]) == 0  # underflow


def test_subnormals_are_kept() -> None:
    assert one([2.0**-24], [2.0**-24]) == bits(2.0**-48)
    assert one([2.0**-100], [2.0**-40], dtype=DTYPES["bf16"]) == bits(2.0**-140)
    assert one([2.0**-133], [1.0], dtype=DTYPES["bf16"]) == bits(2.0**-133)


def test_truncation_differs_between_architectures() -> None:
    small = [1.0] + [2.0**-12] * 4  # products of 2^-24
    got = {arch: one(small, small, arch=arch) for arch in ("sm70", "sm80", "sm90", "sm100")}
    assert got["sm70"] == one(small, small, step=1) == bits(1.0)
    assert got["sm80"] == got["sm90"] == got["sm100"] == bits(1 + 2.0**-22)
    a, b = [1.0] + [2.0**-12] * 7, [1.0] + [2.0**-13] * 7  # products of 2^-25
    assert one(a, b, arch="sm80") == bits(1.0)
    assert one(a, b, arch="sm90") == bits(1 + 2.0**-23)


def test_a_half_output_is_rounded_to_nearest() -> None:
    assert one([1.0, 2.0**-6], [1.0, 3 * 2.0**-6], out="float16") == bits(1 + 2.0**-10)
    assert one([1.0, 2.0**-6], [1.0, 2.0**-5], out="float16") == bits(1.0)  # tie to even


def test_tf32_operands_are_truncated() -> None:
    x = [1 + 2.0**-10 + 2.0**-11]
    assert one(x, [1.0], dtype=np.float32, fmt="tf32") == bits(1 + 2.0**-10)


def test_fp8_keeps_fourteen_bits_on_hopper() -> None:
    a = np.array([[1.0, 2.0**-6]], np.float32)
    b = np.array([[1.0, 2.0**-8]], np.float32)
    assert mma(a, b, fmt="e5m2")[0, 0] == 1.0
    assert mma(a, b, fmt="e5m2", arch="sm100")[0, 0] == 1 + 2.0**-14


# --- shapes, errors, the chain --------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes(backend: Backend) -> None:
    need(backend)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float16)

    a, b, c = draw(2, 3, 5, 20), draw(3, 7, 20), draw(5, 7).astype(np.float32)
    got = mma(a, b, c, backend=backend)
    assert got.shape == (2, 3, 5, 7)
    for i, j in np.ndindex(2, 3):
        assert wrong(got[i, j], mma(a[i, j], b[j], c, backend=backend)) == 0
    assert wrong(got[:, 1], mma(a[:, 1], b[1], c, backend=backend)) == 0
    assert mma(draw(0, 4), draw(3, 4), backend=backend).shape == (0, 3)
    assert mma(draw(2, 4), draw(0, 4), backend=backend).shape == (2, 0)
    assert mma(draw(0, 2, 4), draw(0, 3, 4), backend=backend).shape == (0, 2, 3)
    assert mma(draw(2, 0), draw(3, 0), backend=backend).tolist() == [[0.0] * 3] * 2
    assert mma(draw(5, 0), draw(7, 0), c, backend=backend).tolist() == c.tolist()
    assert c.flags.writeable
    strided = draw(40, 6).T[:, ::2]
    assert wrong(mma(strided, strided, backend=backend), mma(strided.copy(), strided.copy())) == 0


def test_padding_and_inputs_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 19)).astype(np.float16) for _ in range(2))
    c = rng.standard_normal((4, 4)).astype(np.float32)
    before = c.copy()
    x, y = (np.pad(v, ((0, 0), (0, 13))) for v in (a, b))
    assert wrong(mma(a, b, c), mma(x, y, c)) == 0
    assert wrong(c, before) == 0


def test_errors_name_the_argument() -> None:
    x, y = np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float16)
    with pytest.raises(TypeError, match="a: float32 array without fmt"):
        mma(x, x)
    with pytest.raises(TypeError, match="b: float16, must be bfloat16 like a"):
        mma(x, y, fmt="bfloat16")
    with pytest.raises(TypeError, match="fmt"):
        mma(y, y, fmt="bfloat16")
    with pytest.raises(ValueError, match="arch"):
        mma(y, y, arch="sm91")
    with pytest.raises(ValueError, match="bfloat16 on sm70"):
        mma(x, x, fmt="bfloat16", arch="sm70")
    with pytest.raises(ValueError, match="out"):
        mma(y, y, out="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step"):
        mma(y, y, step=0)
    with pytest.raises(ValueError, match="b: 3 columns"):
        mma(y, y[:, :3])
    with pytest.raises(ValueError, match="c: shape"):
        mma(y, y, np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="a: shape"):
        mma(y[0], y)


@QUICK
@given(data=st.data())
def test_fma_chain_is_the_scalar_chain(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 4)) for _ in range(3))
    a, b = (patterns(data.draw, words, (size, k), np.float32) for size in (m, n))
    c = patterns(data.draw, words, (m, n), np.float32)
    chains = [fma_chain(a, b, c, backend="numpy"), fma_chain(a, b, c)]
    for i, j in np.ndindex(m, n):
        d = float(c[i, j])
        for x, y in zip(a[i], b[j], strict=True):
            d = rounding.scalar("fma", float(x), float(y), d)
        for got in chains:
            assert bits(d) == bits(got[i, j]) or (d != d and got[i, j] != got[i, j])


def test_fma_chain_shapes() -> None:
    a, b = np.ones((2, 3, 4), np.float32), np.ones((5, 4), np.float32)
    assert (fma_chain(a, b) == np.full((2, 3, 5), 4.0)).all()
    assert fma_chain(a[..., :0], b[:, :0]).shape == (2, 3, 5)
    assert fma_chain(a[:, :0], b).shape == (2, 0, 5)


def test_rules_cover_the_formats_of_their_tables() -> None:
    assert set(RULES["sm90"].step) <= set(FORMATS)
    assert RULES["sm90"].step["float16"] == 16
    assert RULES["sm90"].fraction_bits["bfloat16"] == 25
    assert RULES["sm90"].zero_exponent == {"float32": -133, "float16": -21}


@pytest.mark.gpu
def test_cupy_gives_the_hardware_bits(golden: dict[str, Array]) -> None:
    cupy = pytest.importorskip("cupy")
    for prefix in DTYPES:
        for kind in KINDS:
            a, b, c, d = recorded(golden, prefix, kind)
            x, y = (cupy.asarray(rounding.widen(v).astype(np.float32)) for v in (a, b))
            got = mma(x, y, cupy.asarray(c), fmt=a.dtype.name)
            assert wrong(cupy.asnumpy(got), d) == 0
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**16, (40, 50), np.uint16).view(np.float16) for _ in range(2))
    got = mma(cupy.asarray(a), cupy.asarray(b))
    assert wrong(cupy.asnumpy(got), mma(a, b)) == 0
