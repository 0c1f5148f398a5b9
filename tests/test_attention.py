"""The public calls: NumPy on the emulator, and the way to the launcher over a fake of CuPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
import emulation
from cuflash import planner
from cuflash.problem import GpuProblem, element_strides, overlap, overlaps_itself, swapped
from emulation.rules import RULES
from tests import fake_cupy
from tests.fake_cupy import on_gpu

ROOT = Path(__file__).parent.parent
BF16 = np.dtype(ml_dtypes.bfloat16)
CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "top-left", "scale": 0.3},
    {"window": (7, 2), "softcap": 5.0},
    {"numerics": {"out": "float32", "p": "split"}},
    {"numerics": emulation.Numerics(reference="power-of-two", delta="rounded")},
]


def arrays(
    heads: int | None = 4,
    kv_heads: int = 2,
    n_q: int = 37,
    n_k: int = 70,
    d: int = 16,
    d_v: int = 24,
    batch: int | None = 2,
    dtype: Any = np.float16,
) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)
    lead = () if batch is None else (batch,)
    q_lead, kv_lead = (lead, lead) if heads is None else ((*lead, heads), (*lead, kv_heads))
    shapes = ((*q_lead, n_q, d), (*kv_lead, n_k, d), (*kv_lead, n_k, d_v))
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in shapes)
    return q, k, v


def bits(x: Any) -> Any:
    return np.asarray(x).view(np.uint8 if x.ndim == 0 else f"u{x.dtype.itemsize}")


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(bits(np.ascontiguousarray(found)), bits(expected))


# -- NumPy -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=str)
def test_same_bits_as_the_emulator(dtype: Any, options: dict[str, Any]) -> None:
    q, k, v = arrays(dtype=dtype, batch=None)
    out, lse = emulation.flash(q, k, v, **options)
    same(cuflash.attention(q, k, v, **options), out)
    (found, found_lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    same(found, out)
    same(found_lse, lse)
    rng = np.random.default_rng(4)
    dout = rng.standard_normal(out.shape).astype(dtype)
    dlse = rng.standard_normal(lse.shape).astype(np.float32)
    expected = emulation.flash_vjp(q, k, v, dout, dlse=dlse, **options)
    for gradient, wanted in zip(vjp(dout, dlse), expected, strict=True):
        same(gradient, wanted)
    masks = {name: x for name, x in options.items() if name != "numerics"}
    problem = emulation.Problem.of(q, k, v, **masks)
    plan = emulation.default_plan(problem, options.get("numerics"))
    assert cuflash.plan(q, k, v, return_lse=True, **options) == plan


@pytest.mark.parametrize("batch", [2, None])
def test_layout_moves_only_axes(batch: int | None) -> None:
    q, k, v = arrays(batch=batch)
    out, lse = emulation.flash(q, k, v, causal=True)
    turned = [np.ascontiguousarray(swapped(x, "bnhd")) for x in (q, k, v)]
    (found, found_lse), vjp = cuflash.attention_vjp(
        *turned, causal=True, layout="bnhd", return_lse=True
    )
    same(swapped(found, "bnhd"), out)
    same(found_lse, lse)
    expected = emulation.flash_vjp(q, k, v, out, causal=True)
    for gradient, x, wanted in zip(vjp(found), turned, expected, strict=True):
        assert gradient.shape == x.shape
        assert gradient.flags.c_contiguous
        same(swapped(gradient, "bnhd"), wanted)


def test_two_axes_have_no_layout() -> None:
    q, k, v = arrays(heads=None, batch=None)
    same(cuflash.attention(q, k, v, layout="bnhd"), cuflash.attention(q, k, v))


def test_out_is_written_and_returned() -> None:
    q, k, v = arrays()
    wide = np.zeros((2, 37, 4, 50), np.float16)
    out = wide[..., ::2][..., :24]
    expected = emulation.flash(q, k, v)[0]
    turned = [swapped(x, "bnhd") for x in (q, k, v)]
    found, lse = cuflash.attention(*turned, layout="bnhd", out=out, return_lse=True)
    assert found is out
    assert lse.shape == (2, 4, 37)
    same(swapped(out, "bnhd"), expected)
    assert not wide[..., 1::2].any()
    out[...] = 0
    found, vjp = cuflash.attention_vjp(*turned, layout="bnhd", out=out)
    assert found is out
    same(swapped(out, "bnhd"), expected)
    assert vjp(out)[0].shape == turned[0].shape


def test_out_between_the_inputs_of_one_buffer() -> None:
    buffer = np.random.default_rng(0).standard_normal((2, 30, 4, 16)).astype(np.float16)
    q, k, v, out = (buffer[:, :, i] for i in range(4))
    expected = cuflash.attention(q, k, v)
    same(cuflash.attention(q, k, v, out=out), expected)


@pytest.mark.parametrize(
    ("sizes", "out_shape"),
    [
        ({"n_k": 0}, (2, 4, 37, 24)),
        ({"n_q": 0}, (2, 4, 0, 24)),
        ({"heads": 0, "kv_heads": 0}, (2, 0, 37, 24)),
        ({"batch": 0}, (0, 4, 37, 24)),
    ],
)
def test_empty(sizes: dict[str, int], out_shape: tuple[int, ...]) -> None:
    q, k, v = arrays(**sizes)
    (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True)
    assert out.shape == out_shape
    assert lse.shape == out_shape[:-1]
    assert not out.any()
    assert (lse == -np.inf).all()
    for gradient, x in zip(vjp(np.ones_like(out)), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


def test_import_needs_no_cupy_and_no_cuda() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None; sys.modules['cuda'] = None\n"
        "import cuflash, numpy as np\n"
        "cuflash.attention(*[np.ones((4, 8), np.float16)] * 3)\n"
        "assert not any(m.startswith(('cupy.', 'cuda.')) for m in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- Errors: argument, value, rule; nothing written -------------------------------------

Q, K, V = arrays()
OUT = (2, 4, 37, 24)


def _read_only() -> Any:
    out = np.zeros(OUT, np.float16)
    out.flags.writeable = False
    return out


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, r"q: got list, must be a NumPy or CuPy array"),
    ({"k": None}, TypeError, r"k: got NoneType, must be numpy.ndarray like q"),
    ({"q": Q[0, 0, 0]}, ValueError, r"q: shape \(16,\), must have 2 to 4 axes"),
    ({"v": V.astype(np.float32)}, TypeError, r"v: dtype float32, must be float16 like q"),
    ({"k": K[:, :, :, :8]}, ValueError, r"k: head dimension 8, must be 16 like q"),
    ({"layout": "bhdn"}, ValueError, r"layout: got 'bhdn', must be one of 'bhnd', 'bnhd'"),
    ({"layout": np.zeros(3)}, ValueError, r"layout: got array.*, must be one of"),
    ({"scale": -1.0}, ValueError, r"scale: got -1.0, must be a positive finite number"),
    ({"causal": "left"}, ValueError, r"causal: got 'left', must be"),
    ({"window": (-1, 0)}, ValueError, r"window: left is -1, must be >= 0"),
    ({"softcap": 0.0}, ValueError, r"softcap: got 0.0, must be a positive"),
    ({"numerics": {"p": "half"}}, ValueError, r"numerics.p: got 'half', must be one of"),
    ({"numerics": "fast"}, TypeError, r"numerics: got str, must be"),
    ({"return_lse": 1}, TypeError, r"return_lse: got 1, must be True or False"),
    ({"out": [0.0]}, TypeError, r"out: got list, must be numpy.ndarray like q"),
    (
        {"out": np.zeros((2, 4, 37, 16), np.float16)},
        ValueError,
        r"out: shape .*, must be \(2, 4, 3",
    ),
    ({"out": np.zeros(OUT, np.float32)}, TypeError, r"out: dtype float32, must be float16"),
    ({"out": np.zeros(OUT, ">f2")}, TypeError, r"out: dtype >f2, must be float16"),
    ({"out": _read_only()}, ValueError, r"out: read-only, must be writable"),
    (
        {"out": np.lib.stride_tricks.as_strided(np.zeros(OUT, np.float16), OUT, (0, 2000, 48, 2))},
        ValueError,
        r"out: strides \(0, 2000, 48, 2\), must give every element an address of its own",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), ERRORS)
def test_errors_name_argument_value_and_rule(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    out = np.full(OUT, 3, np.float16)
    given = {"q": Q, "k": K, "v": V, "out": out, **change}
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan):
        with pytest.raises(kind, match=message):
            call(**given)
    assert (out == 3).all()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps_an_input(name: str) -> None:
    rng = np.random.default_rng(0)
    buffer = rng.standard_normal((41, 16)).astype(np.float16)
    given: dict[str, Any] = dict.fromkeys("qkv", rng.standard_normal((40, 16)).astype(np.float16))
    given[name], out, before = buffer[:40], buffer[1:], buffer.copy()
    with pytest.raises(ValueError, match=f"out: shares memory with {name}, must not overlap"):
        cuflash.attention(**given, out=out)
    same(buffer, before)


def test_shapes_in_the_other_layout() -> None:
    q, k, v = (swapped(x, "bnhd") for x in (Q, K, V))
    with pytest.raises(ValueError, match=r"k: 3 heads.*\(axes in the order bhnd\)"):
        cuflash.attention(q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]], layout="bnhd")
    with pytest.raises(ValueError, match=r"q: .*\(\[B,\] N, \[H,\] D\)"):
        cuflash.attention(q[0, 0, 0], k, v, layout="bnhd")
    with pytest.raises(ValueError, match=r"out: shape \(2, 4, 37, 24\), must be \(2, 37, 4, 24\)"):
        cuflash.attention(q, k, v, layout="bnhd", out=np.zeros(OUT, np.float16))


@pytest.mark.parametrize("gpu", [False, True])
def test_errors_of_vjp(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    place: Any = on_gpu if gpu else np.asarray
    out, vjp = cuflash.attention_vjp(*(place(x) for x in (Q, K, V)))
    dlse = place(np.zeros(OUT[:-1], np.float32))
    with pytest.raises(TypeError, match=r"dout: got list, must be .* like q"):
        vjp([1.0])
    with pytest.raises(ValueError, match=r"dout: shape .*, must be \(2, 4, 37, 24\) like out"):
        vjp(out[:, :, :, :8])
    with pytest.raises(TypeError, match="dout: dtype float32, must be float16 like q"):
        vjp(out.astype(np.float32))
    with pytest.raises(TypeError, match="dlse: got float16, must be float32"):
        vjp(out, dlse.astype(np.float16))
    with pytest.raises(ValueError, match=r"dlse: shape .*, must be \(2, 4, 37\) like lse"):
        vjp(out, dlse[:1])


# -- On the way to the GPU -------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Launcher:
    return fake_cupy.install(monkeypatch)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("batch", [2, None])
def test_gpu_arrays_reach_the_launcher(
    launcher: fake_cupy.Launcher, options: dict[str, Any], layout: str, batch: int | None
) -> None:
    q, k, v = arrays(dtype=BF16, batch=batch)
    given = [on_gpu(swapped(x, layout).copy()) for x in (q, k, v)]
    plan = cuflash.plan(*given, layout=layout, **options)
    masks = {name: x for name, x in options.items() if name != "numerics"}
    out, lse = emulation.flash(q, k, v, plan=plan, **masks)
    same(swapped(cuflash.attention(*given, layout=layout, **options), layout), out)
    (found, found_lse), vjp = cuflash.attention_vjp(
        *given, layout=layout, return_lse=True, **options
    )
    same(swapped(found, layout), out)
    same(found_lse, lse)
    dout = np.random.default_rng(5).standard_normal(out.shape).astype(BF16)
    expected = emulation.flash_vjp(q, k, v, dout, dlse=lse, plan=plan, **masks)
    gradients = vjp(on_gpu(swapped(dout, layout)), found_lse)
    for gradient, x, wanted in zip(gradients, given, expected, strict=True):
        assert gradient.shape == x.shape
        assert gradient.flags.c_contiguous
        same(swapped(gradient, layout), wanted)
    wide = plan.numerics.out == "float32" or plan.numerics.delta == "rounded"
    assert launcher.calls == ["forward", "forward" if wide else "forward with rest", "backward"]


def test_a_gradient_is_compiled_beside_its_forward(launcher: fake_cupy.Launcher) -> None:
    x = on_gpu(np.ones((2, 5, 16), np.float16))
    cuflash.attention(x, x, x)
    assert launcher.ahead == []
    for _ in range(2):
        cuflash.attention_vjp(x, x, x)
        assert [(p.n_q, p.d) for p in launcher.ahead] == [(5, 16)]
    cuflash.attention_vjp(x[:, :3], x, x)
    assert len(launcher.ahead) == 2
    launcher.refuses = True
    out, _ = cuflash.attention_vjp(x[:, :2], x, x)  # the backward would say so
    assert out.shape == (2, 2, 16)
    cuflash.attention_vjp(x[:, :0], x, x)
    assert len(launcher.ahead) == 3


def test_strides_are_read_in_place(launcher: fake_cupy.Launcher) -> None:
    buffer = np.random.default_rng(0).standard_normal((2, 30, 3, 4, 16)).astype(np.float16)
    q, k, v = (on_gpu(buffer[:, :, i]) for i in range(3))
    one_head = np.broadcast_to(k[:, :, :1], k.shape, subok=True)
    cuflash.attention(q, one_head, v, layout="bnhd")
    assert all(overlap(x, on_gpu(buffer)) for x in launcher.inputs)
    assert element_strides(launcher.inputs[0]) == (30 * 192, 16, 192)
    assert element_strides(launcher.inputs[1]) == (30 * 192, 0, 192)


@pytest.mark.parametrize("case", ["step", "address", "row", "negative"])
def test_what_kernels_cannot_read_is_copied(launcher: fake_cupy.Launcher, case: str) -> None:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 40, 68)).astype(np.float16)
    flat = wide.reshape(-1)
    x = {
        "step": wide[:, :, 0:64:2],
        "address": flat[1 : 1 + 2 * 40 * 32].reshape(2, 40, 32),
        "row": wide[:, :, :32],
        "negative": wide[:, ::-1, :32].copy()[:, ::-1],
    }[case]
    other = rng.standard_normal((2, 40, 32)).astype(np.float16)
    found = cuflash.attention(on_gpu(x), on_gpu(other), on_gpu(other))
    plan = cuflash.plan(on_gpu(x), on_gpu(other), on_gpu(other))
    same(found, emulation.flash(x, other, other, plan=plan)[0])
    assert not overlap(launcher.inputs[0], on_gpu(x))
    assert overlap(launcher.inputs[1], on_gpu(other))


@pytest.mark.parametrize("case", ["ready", "step"])
def test_out_on_the_gpu(launcher: fake_cupy.Launcher, case: str) -> None:
    given = [on_gpu(x) for x in (Q, K, V)]
    wide = on_gpu(np.zeros((2, 4, 37, 48), np.float16))
    out = wide[..., :24] if case == "ready" else wide[..., ::2]
    assert cuflash.attention(*given, out=out) is out
    same(out, np.asarray(cuflash.attention(*given)))


@pytest.mark.parametrize("sizes", [{"n_k": 0}, {"n_q": 0}, {"heads": 0, "kv_heads": 0}])
def test_empty_launches_nothing(launcher: fake_cupy.Launcher, sizes: dict[str, int]) -> None:
    given = [on_gpu(x) for x in arrays(**sizes)]
    (out, lse), vjp = cuflash.attention_vjp(*given, return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    gradients = vjp(out)
    assert [g.shape for g in gradients] == [x.shape for x in given]
    assert not any(g.any() for g in gradients)
    assert launcher.calls == []


def test_everything_happens_on_the_device_of_q(launcher: fake_cupy.Launcher) -> None:
    out, vjp = cuflash.attention_vjp(*(on_gpu(x, device=1) for x in (Q, K, V)))
    assert [x.device.id for x in (out, *vjp(out))] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"k": K}, TypeError, r"k: got numpy.ndarray, must be cupy.FakeArray like q"),
        ({"v": on_gpu(V, 1)}, ValueError, r"v: on device 1, must be on device 0 like q"),
        ({"out": np.zeros(OUT, np.float16)}, TypeError, r"out: got numpy.ndarray, must be cupy"),
        (
            {"out": on_gpu(np.zeros(OUT, np.float16), 1)},
            ValueError,
            r"out: on device 1, must be on device 0 like q",
        ),
        (
            {"v": on_gpu(V[..., :20])},
            ValueError,
            r"v: head dimension 20, must be a multiple of 8 on the GPU",
        ),
        (
            {"q": on_gpu(Q.astype(np.float64))},
            TypeError,
            r"q: dtype float64, must be one of float16, bfloat16, float32",
        ),
        (
            {"out": on_gpu(Q), "v": on_gpu(K)},
            ValueError,
            r"out: shares memory with q, must not overlap q, k or v",
        ),
    ],
)
def test_errors_on_the_gpu(
    launcher: fake_cupy.Launcher, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = {"q": on_gpu(Q), "k": on_gpu(K), "v": on_gpu(V), **change}
    with pytest.raises(kind, match=message):
        cuflash.attention(**given)
    assert launcher.calls == []


# -- Parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", planner.RULES)
@pytest.mark.parametrize(
    ("d", "tile_n"), [(8, 96), (64, 96), (72, 64), (128, 48), (136, 64), (256, 64)]
)
def test_plan_of_the_sm80_kernels(
    launcher: fake_cupy.Launcher, arch: str, d: int, tile_n: int
) -> None:
    q, k, v = (on_gpu(x) for x in arrays(d=d, d_v=8))
    plan = planner.plan_for(GpuProblem.of(q, k, v), arch, {"p": "split"})
    assert plan.tile_n == tile_n
    assert plan.arch in RULES
    assert plan.numerics.p == "split"


def test_unknown_arch(launcher: fake_cupy.Launcher) -> None:
    with pytest.raises(ValueError, match="arch: got 'sm75', must be one of"):
        planner.plan_for(GpuProblem.of(*(on_gpu(x) for x in (Q, K, V))), "sm75")
    with pytest.raises(ValueError, match="arch: got sm_75, must be sm_80 or newer"):
        planner.arch_of(75)


def test_overlap_within_one_array() -> None:
    x = np.zeros((4, 6, 8), np.float16)
    assert not overlaps_itself(x[::2, ::-1].transpose(2, 0, 1))
    assert overlaps_itself(np.lib.stride_tricks.as_strided(x, (4, 8), (8, 2)))
    assert not overlaps_itself(np.lib.stride_tricks.as_strided(x, (1, 8), (0, 2)))


def test_the_portable_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUFLASH_KERNELS, read once a process."""

    def family(chosen: str) -> str:
        monkeypatch.setenv("CUFLASH_KERNELS", chosen)
        planner.portable_only.cache_clear()
        return planner.family_of("sm90", "bfloat16", emulation.Numerics())

    try:
        assert [family("sm80"), family("")] == ["sm80", "sm90"]
        with pytest.raises(ValueError, match="CUFLASH_KERNELS: got 'sm70', must be 'sm80' or not"):
            family("sm70")
    finally:
        planner.portable_only.cache_clear()
