"""Around the kernels: errors of the public calls on CuPy arrays (real or faked), the memory that
calls take, and how long the first call takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from bench.first_call import first_calls
from tests import fake_cupy
from tests.gpu_memory import BLOCK, measured

gpu = pytest.mark.gpu

SHAPES = {"q": (2, 4, 37, 16), "k": (2, 2, 70, 16), "v": (2, 2, 70, 24), "out": (2, 4, 37, 24)}
BF16 = np.dtype(ml_dtypes.bfloat16)

Change = Callable[[Any, dict[str, Any]], dict[str, Any]]  # (place on the GPU, arguments) -> changed


def shaped(**shapes: tuple[int, ...]) -> Change:
    """Other shapes."""
    return lambda place, given: {n: place(np.zeros(s, np.float16)) for n, s in shapes.items()}


def typed(**dtypes: Any) -> Change:
    """Other formats."""
    return lambda place, given: {n: place(np.zeros(SHAPES[n], t)) for n, t in dtypes.items()}


def option(**values: Any) -> Change:
    """Other options."""
    return lambda place, given: values


def aliased(place: Any, given: dict[str, Any]) -> dict[str, Any]:
    """out is v's memory, shifted by one row."""
    buffer = place(np.zeros((3, 4, 70, 24), np.float16))
    return {"v": buffer[:2, :2], "out": buffer[1:, :, :37]}


def broadcast_out(place: Any, given: dict[str, Any]) -> dict[str, Any]:
    """All heads of out are one."""
    one = place(np.zeros((2, 1, 37, 24), np.float16))
    strides = (one.strides[0], 0, *one.strides[2:])
    if isinstance(one, np.ndarray):
        return {"out": np.lib.stride_tricks.as_strided(one, SHAPES["out"], strides, subok=True)}
    import cupy

    return {"out": cupy.lib.stride_tricks.as_strided(one, SHAPES["out"], strides)}


ERRORS: list[tuple[str, Change, type[Exception], str]] = [
    ("axes", shaped(q=(16,)), ValueError, r"q: shape \(16,\), must have 2 to 4 axes"),
    ("five axes", shaped(q=(1, 2, 4, 37, 16)), ValueError, r"q: shape .*, must have 2 to 4 axes"),
    ("k of 3 axes", shaped(k=(2, 70, 16)), ValueError, r"k, v: 3 and 4 axes, must be 4 like q"),
    ("width of k", shaped(k=(2, 2, 70, 24)), ValueError, r"k: head dimension 24, must be 16"),
    ("lengths", shaped(v=(2, 2, 71, 24)), ValueError, r"v: shape .*, must be like k"),
    ("batch", shaped(q=(3, 4, 37, 16)), ValueError, r"k: batch 2, must be 3 like q"),
    (
        "heads",
        shaped(k=(2, 3, 70, 16), v=(2, 3, 70, 24)),
        ValueError,
        r"k: 3 heads, must divide the 4 heads of q",
    ),
    (
        "D 7",
        shaped(q=(2, 4, 37, 7), k=(2, 2, 70, 7)),
        ValueError,
        r"q: head dimension 7, must be a multiple of 8",
    ),
    ("D_v 7", shaped(v=(2, 2, 70, 7)), ValueError, r"v: head dimension 7, must be a multiple of 8"),
    (
        "D 264",
        shaped(q=(2, 4, 37, 264), k=(2, 2, 70, 264)),
        ValueError,
        r"q: head dimension 264, must be 1 to 256",
    ),
    ("D_v 264", shaped(v=(2, 2, 70, 264)), ValueError, r"v: head dimension 264, must be 1 to 256"),
    ("D 0", shaped(q=(2, 4, 37, 0), k=(2, 2, 70, 0)), ValueError, r"q: head dimension 0, must be"),
    ("dtype of q", typed(q=np.float64), TypeError, r"q: dtype float64, must be one of float16"),
    ("dtype of k", typed(k=BF16), TypeError, r"k: dtype bfloat16, must be float16 like q"),
    ("integers", typed(v=np.int16), TypeError, r"v: dtype int16, must be one of float16"),
    ("NumPy k", lambda place, given: {"k": np.zeros(SHAPES["k"], np.float16)}, TypeError,
     r"k: got numpy.ndarray, must be cupy\..* like q"),
    ("list v", option(v=[1.0]), TypeError, r"v: got list, must be cupy\..* like q"),
    ("NumPy out", lambda place, given: {"out": np.zeros(SHAPES["out"], np.float16)}, TypeError,
     r"out: got numpy.ndarray, must be cupy\..* like q"),
    ("layout", option(layout="bhdn"), ValueError, r"layout: got 'bhdn', must be one of"),
    ("layout of another type", option(layout=3), ValueError, r"layout: got 3, must be one of"),
    ("bnhd", option(layout="bnhd"), ValueError, r"k: .* \(axes in the order bhnd\)"),
    ("shape of out", shaped(out=(2, 4, 37, 16)), ValueError, r"out: shape .*, must be \(2, 4, 37"),
    ("dtype of out", typed(out=np.float32), TypeError, r"out: dtype float32, must be float16"),
    ("format of out", option(numerics={"out": "float32"}), TypeError,
     r"out: dtype float16, must be float32"),
    ("out is q", lambda place, given: {"v": given["k"], "out": given["q"]}, ValueError,
     r"out: shares memory with q, must not overlap q, k or v"),
    ("out over v", aliased, ValueError, r"out: shares memory with v, must not overlap"),
    ("out over itself", broadcast_out, ValueError, r"out: strides .*, must give every element an"),
    ("scale NaN", option(scale=float("nan")), ValueError, r"scale: got nan, must be a positive"),
    ("scale inf", option(scale=np.inf), ValueError, r"scale: got inf, must be a positive finite"),
    ("scale 0", option(scale=0), ValueError, r"scale: got 0, must be a positive finite number"),
    ("scale of a type", option(scale="1"), TypeError, r"scale: got '1', must be a positive finite"),
    ("softcap NaN", option(softcap=np.nan), ValueError, r"softcap: got nan, must be a positive"),
    ("softcap -1", option(softcap=-1.0), ValueError, r"softcap: got -1.0, must be a positive"),
    ("window NaN", option(window=(np.nan, 0)), TypeError, r"window: left is nan, must be None"),
    ("window -1", option(window=(-1, -3)), ValueError, r"window: left is -1, must be >= 0"),
    ("window of three", option(window=(1, 2, 3)), TypeError, r"window: got \(1, 2, 3\), must be"),
    ("causal NaN", option(causal=float("nan")), TypeError, r"causal: got nan, must be a bool"),
    ("causal", option(causal="left"), ValueError, r"causal: got 'left', must be False, True"),
    ("numerics", option(numerics={"p": "half"}), ValueError, r"numerics.p: got 'half', must be"),
    ("field", option(numerics={"q": 1}), ValueError, r"numerics: unknown field 'q', must be one"),
    ("return_lse", option(return_lse=1), TypeError, r"return_lse: got 1, must be True or False"),
]  # fmt: skip


@pytest.fixture(params=["fake", pytest.param("cupy", marks=gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """NumPy to the GPU's array; there, whatever asks for a kernel fails."""
    if request.param == "fake":
        launcher = fake_cupy.install(monkeypatch)
        monkeypatch.setattr(launcher, "forward", refuse)
        return fake_cupy.on_gpu
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr("cuflash.launch.kernels", refuse)
    return cupy.asarray


def refuse(*_: Any) -> Any:
    raise AssertionError("a kernel was asked for")


@pytest.mark.parametrize(
    ("change", "kind", "message"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS]
)
def test_errors_name_argument_value_and_rule(
    place: Any, change: Change, kind: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {n: place(np.full(s, 3, np.float16)) for n, s in SHAPES.items()}
    out = given["out"]
    given |= change(place, given)
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.plan):
        for _ in range(2):
            with pytest.raises(kind, match=message):
                call(**given)
    assert bool((out == 3).all())


@gpu
def test_arrays_on_two_devices() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    q = cupy.zeros((5, 16), np.float16)
    with cupy.cuda.Device(1):
        k = cupy.zeros((5, 16), np.float16)
    for name, given in (("k", (q, k, q)), ("v", (q, q, k))):
        with pytest.raises(ValueError, match=f"{name}: on device 1, must be on device 0 like q"):
            cuflash.attention(*given)
    with pytest.raises(ValueError, match="out: on device 1, must be on device 0 like q"):
        cuflash.attention(q, q, q, out=k)


@gpu
def test_errors_of_vjp() -> None:
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(np.ones(SHAPES[n], np.float16)) for n in "qkv")
    out, vjp = cuflash.attention_vjp(q, k, v)
    slope = cupy.zeros(SHAPES["q"][:3], np.float32)
    for given, kind, message in (
        ((np.ones(SHAPES["out"], np.float16),), TypeError, "dout: got numpy.ndarray, must be cupy"),
        ((out[..., :8],), ValueError, r"dout: shape .*, must be \(2, 4, 37, 24\) like out"),
        ((out.astype(np.float32),), TypeError, "dout: dtype float32, must be float16 like q"),
        ((out, slope.astype(np.float16)), TypeError, "dlse: got float16, must be float32"),
        ((out, slope[:1]), ValueError, r"dlse: shape .*, must be \(2, 4, 37\) like lse"),
    ):
        with pytest.raises(kind, match=message):
            vjp(*given)


# -- memory


def rounded(*sizes: int) -> int:
    """Bytes that CuPy's pool hands out for arrays of these sizes."""
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


@gpu
@pytest.mark.parametrize("n", [1024, 16_384, 131_072])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_peak_memory(n: int, dtype: str) -> None:
    """Beside out a forward takes LSE; with a gradient to come, what rounding O left; a backward its
    results, two numbers a row and, of halves, dQ in float32 with a count for each block of rows,
    and one more number and a bit a row, as it may be centred.
    """
    cupy = pytest.importorskip("cupy")
    heads, d = 2, 64
    with measured() as peak:
        q, k, v, out = (cupy.zeros((heads, n, d), dtype) for _ in range(4))
        lse, whole = heads * n * 4, q.nbytes
        cuflash.attention(q, k, v, causal=True)  # compiles
        peak.restart()
        cuflash.attention(q, k, v, causal=True, out=out)
        assert 0 < peak.bytes <= rounded(lse)
        peak.restart()
        _, vjp = cuflash.attention_vjp(q, k, v, causal=True, out=out)
        rest = whole if dtype == "float16" else 0
        assert 0 < peak.bytes <= rounded(lse, rest)
        peak.restart()
        vjp(out)
        work = [2 * heads * n * 4]
        if dtype == "float16":
            work += [heads * n * d * 4, 4 * (heads * n // 32 + 1), heads * n * 4, heads * n // 8]
        assert 0 < peak.bytes <= rounded(whole, whole, whole, *work)


# -- the first call


@gpu
def test_first_call_and_later_processes(tmp_path: Path) -> None:
    """Compiled in 3 seconds, loaded in 0.1. The best of three, since other work shares the host."""
    pytest.importorskip("cupy")
    cold, warm = [], []
    for _ in range(3):
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        cold.append(first_calls(directory, 128))
        warm.append(first_calls(directory, 128))
        assert list(directory.glob("*.cubin"))
    for i, what in enumerate(("forward", "backward")):
        assert min(x[i] for x in cold) <= 3.0, (what, cold)
        assert min(x[i] for x in warm) <= 0.1, (what, warm)
