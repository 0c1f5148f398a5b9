"""The bug reports of `bug_cases` on the kernels, all memory poisoned: bits of the emulator, within
the bound of the oracle. And reports that only a GPU can show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emulation.problem import Array
from emulation.samples import KINDS, capture, sample
from tests.bug_cases import BUGS, normal
from tests.cases import NUMERICS, assert_bounded
from tests.on_gpu import assert_same, check, dout_of, forward, results

pytestmark = pytest.mark.gpu


def bounded(
    q: Array, k: Array, v: Array, *, dlse: Array | None = None, finite: bool = True, **given: Any
) -> dict[str, Array]:
    """Equal bits and within the derived bound."""
    dout = dout_of(q, v)
    found = check(q, k, v, dout, dlse, **given)
    masks = {name: x for name, x in given.items() if name != "numerics"}
    assert_bounded(found.arrays, (q, k, v, dout), found.plan, masks, dlse, finite)
    return found.arrays


@pytest.mark.parametrize("name", BUGS)
def test_reported_case(name: str) -> None:
    case = BUGS[name]
    q, k, v = case.make()
    found = bounded(q, k, v, finite=case.finite, numerics=case.numerics or None, **case.masks)
    if case.holds is not None:
        case.holds(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_random_and_adversarial_inputs(kind: str, dtype: str, causal: bool) -> None:
    q, k, v = sample(kind, n=150, n_k=200, d=64, heads=2, dtype=dtype, seed=21)
    slope = np.random.default_rng(4).standard_normal(q.shape[:2]).astype(np.float32)
    bounded(q, k, v, causal=causal, dlse=slope if causal else None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_captured_activations(dtype: str) -> None:
    q, k, v, options = capture(dtype)
    bounded(q[:, :400], k[:, :400], v[:, :400], **options)


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dimension(d: int) -> None:
    """flashinfer#4299: 96 read out of bounds, 72 was silently wrong."""
    dtype = ("float16", "bfloat16")[d // 8 % 2]
    q, k, v = normal(d, (4, 40, d), (2, 70, d), (2, 70, d), dtype=dtype)
    check(q, k, v, causal=True)


@pytest.mark.parametrize("first", range(0, 131, 10))
@pytest.mark.parametrize("causal", [False, True])
def test_every_length(first: int, causal: bool) -> None:
    """Every length from 0 to 130 on both sides (families 1 and 2 of the reports)."""
    for n in range(first, min(first + 10, 131)):
        for n_q, n_k in ((n, n), (n, 70), (70, n)):
            q, k, v = normal(n, (1, n_q, 32), (1, n_k, 32), (1, n_k, 32), by=2.0)
            check(q, k, v, causal=causal)


@pytest.mark.parametrize("n", [241, 255, 256, 257, 259])
def test_lengths_about_two_tiles(n: int) -> None:
    q, k, v = normal(n, (2, n, 64), (2, n, 64), (2, n, 64), dtype="bfloat16")
    check(q, k, v, causal=True)
    check(q, k, v)


@pytest.mark.parametrize("reference", NUMERICS["reference"])
@pytest.mark.parametrize("exp2", NUMERICS["exp2"])
def test_scores_of_minus_infinity(reference: str, exp2: str) -> None:
    """A score of -inf weighs 0, also in a tile where all are; a row of nothing else has O NaN."""
    q, k, v = sample("normal", n=70, n_k=300, d=64, dtype="bfloat16")
    q[..., 0], k[0, 90:, 0] = 1.0, -np.inf
    numerics = {"reference": reference, "exp2": exp2}
    dout = dout_of(q, v)
    found = check(q, k, v, dout, numerics=numerics).arrays
    short = results(q, k[:, :90], v[:, :90], dout, numerics=numerics).arrays
    assert_same("out", found["out"], short["out"])
    assert_same("lse", found["lse"], short["lse"])
    found = check(q, k[:, 90:], v[:, 90:], dout, numerics=numerics).arrays
    assert np.isnan(found["out"].astype(np.float32)).all()
    assert (found["lse"] == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_run_on_nan_leaves_nothing_behind(dtype: str) -> None:
    """flash-attention#1395: shared memory keeps what the run before left there."""
    q, k, v = sample("normal", n=33, n_k=45, d=64, heads=200, dtype=dtype)
    wanted = results(q, k, v, q).arrays
    nothing = [np.full_like(x, np.nan) for x in (q, k, v)]
    results(nothing[0], nothing[1], nothing[2], nothing[0])
    again = results(q, k, v, q).arrays
    for name, x in again.items():
        assert np.isfinite(x.astype(np.float32)).all(), name
        assert_same(name, x, wanted[name])


def test_unequal_long_sides() -> None:
    """flash-attention#1254: 1023 queries on 2045 keys hung."""
    q, k, v = normal(0, (1, 1023, 128), (1, 2045, 128), (1, 2045, 128), dtype="bfloat16")
    check(q, k, v)


def test_window_of_all_keys_is_causal() -> None:
    """flash-attention#1133: (N - 1, 0) was not equal to causal."""
    cupy = pytest.importorskip("cupy")
    n = 16384
    shape = (4, n, 128)
    q, k, v = (
        cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(3)
    )
    causal, window = everything(q, k, v, causal=True), everything(q, k, v, window=(n - 1, 0))
    for x, y in zip(causal, window, strict=True):
        assert same_words(x, y)


def same_words(x: Any, y: Any) -> bool:
    """Equal bits, on the device."""
    bits = f"u{x.itemsize}"
    return bool((x.view(bits) == y.view(bits)).all())


def test_every_array_in_a_layout_of_its_own() -> None:
    """pytorch#119500 (dV by the strides of K), flash-attention's test of a transposed dO."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    shape = (2, 4, 97, 64)
    q, k, v, dout = normal(9, shape, shape, shape, shape)
    plain = [cupy.asarray(x) for x in (q, k, v, dout)]
    want = dict(zip(("out", "dq", "dk", "dv"), gradients(cuflash, *plain), strict=True))
    turned = [
        cupy.asarray(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (q, dout)
    ]
    by_head = cupy.asarray(np.ascontiguousarray(k.swapaxes(0, 1))).swapaxes(0, 1)
    wide = cupy.asarray(np.concatenate([v, v], axis=-1))[..., 64:]
    flipped = cupy.asarray(np.ascontiguousarray(dout.swapaxes(2, 3))).swapaxes(2, 3)
    for given in ((turned[0], by_head, wide, turned[1]), (plain[0], plain[1], wide, flipped)):
        for name, x in zip(want, gradients(cuflash, *given), strict=True):
            assert_same(name, cupy.asnumpy(x), cupy.asnumpy(want[name]))


def gradients(cuflash: Any, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    """out, dq, dk, dv."""
    out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    return (out, *vjp(dout))


def everything(q: Any, k: Any, v: Any, **masks: Any) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv on the device; dout is q."""
    import cuflash

    (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **masks)
    return (out, lse, *vjp(q))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_keys_than_16_bits_count(dtype: str) -> None:
    """xformers#719: NaN beyond 32,768 keys. Values that count: every weight is 1 / N."""
    n = 66_000
    q = np.zeros((1, 3, 64), np.float32).astype(sample("normal", n=1, dtype=dtype)[0].dtype)
    k = np.zeros((1, n, 64), np.float32).astype(q.dtype)
    v = (np.arange(n) % 2)[None, :, None].repeat(64, 2).astype(q.dtype)
    out, lse = forward(q, k, v)
    # One reciprocal and one product are rounded; LSE has 4e-6 of its size.
    assert np.abs(out.astype(np.float32) - 0.5).max() <= 2.0**-24
    assert np.abs(lse - np.log(n)).max() <= 4e-6 * np.log(n)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(65_600, 1), (1, 65_600), (33_000, 2)], ids=str)
def test_more_batches_or_heads_than_a_grid_axis(shape: tuple[int, int], dtype: str) -> None:
    """pytorch#142228, pytorch#146704, xformers#845: [65536, 8, 4, 64]."""
    cupy = pytest.importorskip("cupy")

    q, k, v = (x[0] for x in normal(2, (1, 4, 64), (1, 4, 64), (1, 4, 64), dtype=dtype))
    host = everything(*(cupy.asarray(x[None, None]) for x in (q, k, v)))
    arrays = [cupy.broadcast_to(cupy.asarray(x), (*shape, 4, 64)) for x in (q, k, v)]
    arrays[0] = cupy.ascontiguousarray(arrays[0])
    for x, y in zip(everything(*arrays), host, strict=True):
        assert x.shape[:2] == shape
        assert same_words(x, y)
