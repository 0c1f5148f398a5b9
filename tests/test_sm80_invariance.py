"""A row's bits depend on that row, the keys it sees and the Plan: not on run, batch, neighbours,
heads, N_q, stream, thread, device, capture, addresses, or what memory held. Compared on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from emulation.samples import sample
from tests.gpu_memory import embedded, poisoned
from tests.on_gpu import check, uneven_means

pytestmark = pytest.mark.gpu

NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = ["float16", "bfloat16", "float32"]
#: Keys whose means differ: dQ of some rows is centred.
MEANS = "means"


@pytest.fixture(autouse=True)
def cupy() -> Iterator[Any]:
    """CuPy; what a test leaves in its pool goes back to the GPU, which other processes use, too."""
    module: Any = pytest.importorskip("cupy")
    yield module
    module.get_default_memory_pool().free_all_blocks()


def drawn(n: int, d: int, heads: int, dtype: str, kind: str = "sink") -> list[Any]:
    """q, k, v and dout on the device."""
    import cupy

    q, k, v = sample("normal" if kind == MEANS else kind, n=n, d=d, heads=heads, dtype=dtype)
    arrays = (q, uneven_means(k) if kind == MEANS else k, v)
    dout = sample("normal", n=n, d=d, heads=heads, dtype=dtype, seed=3)[0]
    return [cupy.asarray(x) for x in (*arrays, dout)]


def everything(q: Any, k: Any, v: Any, dout: Any, **masks: Any) -> tuple[Any, ...]:
    """out, lse, dq, dk, dv."""
    import cuflash

    (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **masks)
    return (out, lse, *vjp(dout))


def words(x: Any) -> Any:
    """Bits as integers."""
    import cupy

    return cupy.ascontiguousarray(x).view(f"u{x.itemsize}")


def differ(got: Iterable[Any], want: Iterable[Any]) -> Any:
    """How many words differ, on the device."""
    return sum((words(x) != words(y)).sum() for x, y in zip(got, want, strict=True))


def assert_equal(what: str, got: Iterable[Any], want: Iterable[Any]) -> None:
    for name, x, y in zip(NAMES, got, want, strict=False):
        assert x.shape == y.shape, (what, name)
        wrong = int((words(x) != words(y)).sum())
        assert wrong == 0, f"{what}: {name}: {wrong} of {x.size} differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_thousand_runs(d: int, dtype: str) -> None:
    """flash-attention#414, #2244: gradients differ from run to run."""
    arrays = drawn(520, d, 16, dtype)
    first = everything(*arrays, causal=True)
    wrong = sum(differ(everything(*arrays, causal=True), first) for _ in range(1000))
    assert int(wrong) == 0
    assert all(bool(np.isfinite(float(abs(x.astype("f4")).sum()))) for x in first)


@pytest.mark.parametrize("kind", ["sink", MEANS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_heads_and_neighbours(dtype: str, kind: str, cupy: Any) -> None:
    """A head alone, with others, with others that changed, in a batch: flash-attention#1570."""
    arrays = drawn(300, 64, 6, dtype, kind)
    want = everything(*arrays, causal=True)
    for h in (0, 3, 5):
        alone = everything(*(x[h : h + 1] for x in arrays), causal=True)
        assert_equal(f"head {h} alone", alone, [x[h : h + 1] for x in want])
    changed = [x.copy() for x in arrays]
    for x in changed:
        x[:3].fill(cupy.nan)
        x[4:5].fill(cupy.nan)
    found = everything(*changed, causal=True)
    for h in (3, 5):
        own = slice(h, h + 1)
        assert_equal("others NaN", [x[own] for x in found], [x[own] for x in want])
    host = [cupy.asnumpy(x) for x in arrays]
    batch = [cupy.asarray(np.stack([x[::-1], x, x[[1, 1, 0, 5, 2, 2]]])) for x in host]
    found = everything(*batch, causal=True)
    assert_equal("in a batch", [x[1] for x in found], want)
    assert_equal("elsewhere in a batch", [x[0] for x in found], [x[::-1] for x in want])


@pytest.mark.parametrize("numerics", [None, {"p": "split"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_memory_held_where_rows_are_centred(
    d: int, dtype: str, numerics: dict[str, str] | None
) -> None:
    """Sums of rows of dS are written in blocks that have a centred row, and read there alone: bits
    are the emulator's while all memory holds NaN.
    """
    q, k, v = sample("normal", n=400, d=d, heads=4, dtype=dtype)
    k = uneven_means(k)
    for causal in (False, True):
        got = check(q, k, v, numerics=numerics, causal=causal)
        assert got.plan.backward.center > 0


@pytest.mark.parametrize("kind", ["normal", MEANS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128])
def test_decode_rows_are_prefill_rows(d: int, dtype: str, kind: str) -> None:
    """A query alone on its keys has out, lse and dq of the same query among others."""
    n = 330
    q, k, v, dout = drawn(n, d, 4, dtype, kind)
    want = everything(q, k, v, dout, causal=True)[:3]
    for i in (0, 1, 15, 63, 64, 127, 128, 255, 256, 300, n - 1):
        row, keys = slice(i, i + 1), slice(0, i + 1)
        found = everything(q[:, row], k[:, keys], v[:, keys], dout[:, row], causal=True)[:3]
        assert_equal(f"row {i}", found, [x[:, row] for x in want])
    last = slice(n - 70, n)
    found = everything(q[:, last], k, v, dout[:, last], causal=True)[:3]
    assert_equal("the last 70 rows", found, [x[:, last] for x in want])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_nobody_sees(dtype: str) -> None:
    """More keys behind the mask change nothing that is seen."""
    q, k, v, dout = drawn(200, 64, 4, dtype)
    masks = {"causal": "top-left"}
    want = everything(q[:, :130], k[:, :130], v[:, :130], dout[:, :130], **masks)
    found = everything(q[:, :130], k, v, dout[:, :130], **masks)
    assert_equal("forward and dq", found[:3], want[:3])
    assert_equal("dk and dv", [x[:, :130] for x in found[3:]], want[3:])
    assert not any(bool(words(x[:, 130:]).any()) for x in found[3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 72, 256])
def test_what_memory_held(d: int, dtype: str, cupy: Any) -> None:
    """Outputs, workspaces and everything beside the inputs NaN, or zero."""
    arrays = drawn(161, d, 6, dtype)
    k, v = arrays[1][::3], arrays[2][::3]
    masks: dict[str, Any] = {"causal": True, "softcap": 20.0}
    want = everything(arrays[0], k, v, arrays[3], **masks)
    assert all(bool(cupy.isfinite(x.astype("f4")).all()) for x in want)
    with poisoned():
        inside = [embedded(cupy.asnumpy(x)) for x in (arrays[0], k, v, arrays[3])]
        for _ in range(3):
            assert_equal("poisoned", everything(*inside, **masks), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams(dtype: str, cupy: Any) -> None:
    """On a stream of its own, and on several at once."""
    arrays = drawn(400, 64, 8, dtype)
    want = everything(*arrays, causal=True)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    found = []
    for _ in range(5):
        for stream in streams:
            with stream:
                found.append(everything(*arrays, causal=True))
    cupy.cuda.Device().synchronize()
    for each in found:
        assert_equal("a stream", each, want)


def together(work: list[Callable[[], None]]) -> None:
    """All at once, each in a thread; the first error is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(each: Callable[[], None]) -> None:
        try:
            start.wait(60)
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads(cupy: Any) -> None:
    """Threads with their own streams, inputs and options, that meet kernels for the first time
    together.
    """
    from cuflash import compiler

    options: list[dict[str, Any]] = [
        {"causal": True}, {"window": (40, 3)}, {"softcap": 7.0}, {"numerics": {"p": "split"}},
    ]  # fmt: skip
    problems = [drawn(150 + 10 * i, (64, 128)[i % 2], 4, DTYPES[i % 3]) for i in range(8)]
    found: list[list[Any]] = [[] for _ in problems]
    cupy.cuda.Device().synchronize()
    compiler.forget()

    def worker(i: int) -> Callable[[], None]:
        def run() -> None:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                for _ in range(10):
                    found[i].append(everything(*problems[i], **options[i % 4]))
                stream.synchronize()

        return run

    together([worker(i) for i in range(8)])
    for i, problem in enumerate(problems):
        want = everything(*problem, **options[i % 4])
        for each in found[i]:
            assert_equal(f"thread {i}", each, want)


def test_two_devices(cupy: Any) -> None:
    """Each call runs where its arrays are, whatever device is current."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host = [cupy.asnumpy(x) for x in drawn(200, 64, 4, "bfloat16")]
    found = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            arrays = [cupy.asarray(x) for x in host]
        results = everything(*arrays, causal=True)
        assert all(x.device.id == device for x in results)
        with cupy.cuda.Device(device):
            found.append([cupy.asnumpy(x.view(f"u{x.itemsize}")) for x in results])
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_sees_new_values(dtype: str, cupy: Any) -> None:
    """Forward and backward captured once; replays read what stands in the inputs by then."""
    arrays = drawn(200, 64, 4, dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        everything(*arrays, causal=True)  # compiles, and leaves memory to the stream
        stream.synchronize()
        stream.begin_capture()
        results = everything(*arrays, causal=True)
        graph = stream.end_capture()
    for seed in (1, 2, 3):
        fresh = sample("normal", n=200, d=64, heads=4, dtype=dtype, seed=seed)
        for x, y in zip(arrays, (*fresh, fresh[0]), strict=True):
            x[...] = cupy.asarray(y)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        copies = [cupy.asarray(cupy.asnumpy(x)) for x in arrays]
        assert_equal(f"replay {seed}", results, everything(*copies, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replays_touch_nobody_elses_memory(dtype: str, cupy: Any) -> None:
    """A graph's workspace is not given back: what is allocated after the capture stays as it is."""
    arrays = drawn(300, 64, 4, dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        want = everything(*arrays, causal=True)
        stream.synchronize()
        stream.begin_capture()
        results = everything(*arrays, causal=True)
        graph = stream.end_capture()
        sizes = [2**i for i in range(9, 23)]
        others = [cupy.full(size, 0x7FC07FC0, np.uint32) for size in sizes for _ in range(8)]
        for _ in range(3):
            graph.launch(stream)
            stream.synchronize()
            assert_equal("replay", results, want)
            assert all(bool((x == 0x7FC07FC0).all()) for x in others)


@pytest.mark.parametrize("axis", ["row", "head", "batch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_beyond_two_to_the_31(dtype: str, axis: str, cupy: Any) -> None:
    """flash-attention#2611: inputs and dO far apart in one buffer, in every axis."""
    import cuflash

    shape = (2, 3, 70, 64)
    arrays = [x.reshape(shape) for x in drawn(70, 64, 6, dtype)]
    want = everything(*arrays, causal=True)
    far = ("batch", "head", "row").index(axis)
    step = (1 << 31) // (shape[far] - 1) // 8 * 8 + 16  # in elements, on 16-byte boundaries
    assert (shape[far] - 1) * step > 1 << 31
    near = [i for i in range(3) if i != far]
    strides = [0, 0, 0, 1]
    strides[far], strides[near[1]], strides[near[0]] = step, 64, 64 * shape[near[1]]
    size = arrays[0].itemsize
    buffer = cupy.empty(
        sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1, arrays[0].dtype
    )
    view = cupy.lib.stride_tricks.as_strided(buffer, shape, [s * size for s in strides])
    for i in range(4):  # q, k, v and dO take turns in it
        view[...] = arrays[i]
        given = [view if i == j else x for j, x in enumerate(arrays)]
        assert_equal(f"array {i}", everything(*given, causal=True), want)
    assert cuflash.attention(*arrays[:3], causal=True, out=view) is view
    assert_equal("out", [view], want[:1])


def test_an_output_beyond_two_to_the_31(cupy: Any) -> None:
    """2^31 elements of output: the last head equals the same head alone."""
    import cuflash

    heads, n = 16_400, 2048
    q, k, v = (x[:1] for x in drawn(n, 64, 1, "float16")[:3])
    k, v = k[:, :16], v[:, :16]
    want = cuflash.attention(q, k, v)
    wide = [cupy.broadcast_to(x, (heads, *x.shape[1:])) for x in (q, k, v)]
    out = cuflash.attention(*wide)
    assert out.size > 1 << 31
    for h in (0, heads // 2, heads - 1):
        assert_equal(f"head {h}", [out[h : h + 1]], [want])
