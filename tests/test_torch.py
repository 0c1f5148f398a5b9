"""cuflash.torch: PyTorch's semantics, cuflash's bits, the oracle's gradients."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
import emulation
from emulation import oracle
from emulation.bounds import backward_bound, forward_bound

torch: Any = pytest.importorskip("torch")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def sdpa(*arguments: Any, **options: Any) -> Any:
    from cuflash.torch import scaled_dot_product_attention

    return scaled_dot_product_attention(*arguments, **options)


def tensors(
    shape: tuple[int, ...], dtype: str = "float16", device: str = "cpu", *,
    kv_heads: int | None = None, n_k: int | None = None, grad: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    generator = torch.Generator().manual_seed(sum(shape))
    kv = list(shape)
    if kv_heads is not None:
        kv[-3] = kv_heads
    if n_k is not None:
        kv[-2] = n_k
    made = (torch.randn(s, generator=generator) for s in (shape, kv, kv))
    return tuple(x.to(getattr(torch, dtype)).to(device).requires_grad_(grad) for x in made)


def array(x: Any) -> Any:
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(
        found.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(20, 16), (3, 20, 16), (2, 3, 20, 16), (2, 1, 3, 20, 16)], ids=str
)
def test_the_bits_are_the_emulators(shape: tuple[int, ...], dtype: str) -> None:
    q, k, v = tensors(shape, dtype, n_k=30)
    for causal in (False, True):
        found = sdpa(q, k, v, is_causal=causal)
        assert found.shape == shape
        assert found.dtype == q.dtype
        flat = [array(x).reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        expected, _ = emulation.flash(*flat, causal="top-left" if causal else False)
        same(array(found).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_arithmetic_is_that_of_attention(dtype: str) -> None:
    """Over several tiles, where float32 sums by other rules than a half format."""
    q, k, v = tensors((2, 40, 64), dtype, n_k=300)
    same(array(sdpa(q, k, v)), cuflash.attention(array(q), array(k), array(v)))


@pytest.mark.parametrize(
    ("is_causal", "scale", "enable_gqa", "n_k"),
    list(itertools.product([False, True], [None, 0.3], [False, True], [12, 31])),
)
def test_it_means_what_pytorch_means(
    is_causal: bool, scale: float | None, enable_gqa: bool, n_k: int
) -> None:
    q, k, v = tensors((2, 4, 20, 16), "float32", kv_heads=2 if enable_gqa else 4, n_k=n_k)
    wide = [x.double() for x in (q, k, v)]
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    theirs = torch.nn.functional.scaled_dot_product_attention(*wide, **options).numpy()
    ours = array(sdpa(q, k, v, **options)).astype(np.float64)
    problem = emulation.Problem.of(
        *(array(x) for x in (q, k, v)), scale=scale, causal="top-left" if is_causal else False
    )
    bound = forward_bound(problem, emulation.default_plan(problem))[0].reshape(ours.shape)
    # A row of a top-left diagonal always sees key 0, so PyTorch's has no NaN here.
    assert (np.abs(ours - theirs) <= bound + 1e-12).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", [None, {"reference": "power-of-two", "p": "split"}], ids=str)
def test_gradients_are_the_oracles(dtype: str, numerics: Any) -> None:
    q, k, v = tensors((2, 4, 24, 16), dtype, kv_heads=2, grad=True)
    out = sdpa(q, k, v, is_causal=True, enable_gqa=True, numerics=numerics)
    dout = tensors(tuple(out.shape), dtype, n_k=9)[0]
    out.backward(dout)
    a, b, c = (array(x) for x in (q, k, v))
    exact = oracle.attention_vjp(a, b, c, array(dout), causal="top-left")
    problem = emulation.Problem.of(a, b, c, causal="top-left")
    plan = emulation.default_plan(problem, numerics)
    bounds = backward_bound(problem, plan, array(dout))
    for (name, x), limit in zip((("dq", q), ("dk", k), ("dv", v)), bounds, strict=True):
        error = np.abs(array(x.grad).astype(np.float64) - getattr(exact, name))
        assert (error <= limit.reshape(error.shape)).all(), name
        assert error.max() > 0


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuflash.torch as module

    given: list[Any] = []

    def spy(*arrays: Any, **options: Any) -> Any:
        given.extend(arrays)
        return cuflash.attention(*arrays, **options)

    monkeypatch.setattr(module, "attention", spy)
    for dtype in DTYPES:
        given.clear()
        q, k, v = tensors((2, 20, 16), dtype)
        out = sdpa(q.transpose(0, 1).transpose(0, 1), k, v)
        assert [a.__array_interface__["data"][0] for a in given] == [
            x.data_ptr() for x in (q, k, v)
        ]
        assert out.is_contiguous()


def test_only_what_is_asked_gets_a_gradient() -> None:
    q, k, v = tensors((20, 16))
    k.requires_grad_(True)
    out = sdpa(q, k, v)
    assert [x is None for x in torch.autograd.grad(out.sum(), (k,))] == [False]
    assert q.grad is None
    assert not sdpa(q, k.detach(), v).requires_grad


def test_a_change_in_place_is_noticed() -> None:
    q, k, v = tensors((20, 16), grad=True)
    out = sdpa(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_wide_outputs() -> None:
    q, k, v = tensors((20, 16), "bfloat16", grad=True)
    out = sdpa(q, k, v, numerics={"out": "float32"})
    assert out.dtype == torch.float32
    out.sum().backward()
    assert q.grad.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compile_breaks_the_graph_and_gives_the_same_bits() -> None:
    q, k, v = tensors((2, 20, 16), grad=True)

    def model(q: Any, k: Any, v: Any) -> Any:
        return 2 * sdpa(q, k, v, is_causal=True) + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")(q, k, v)
    same(array(compiled), array(model(q, k, v)))
    compiled.sum().backward()
    assert q.grad is not None


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attn_mask": torch.ones(20, 20)}, ValueError, "attn_mask: given, must be None"),
    ({"dropout_p": 0.1}, ValueError, "dropout_p: got 0.1, must be 0"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p: got nan, must be 0"),
    ({"is_causal": 1}, TypeError, "is_causal: got 1"),
    ({"scale": float("inf")}, ValueError, "scale: "),
    ({"numerics": {"p": "no"}}, ValueError, "numerics.p: got 'no'"),
    ({"query": torch.zeros(16)}, ValueError, "query: shape .16,., must have 2 axes or more"),
    ({"query": np.zeros((20, 16))}, TypeError, "query: got ndarray"),
    ({"query": torch.zeros(3, 20, 16).double()}, TypeError, "query: dtype torch.float64"),
    ({"key": torch.zeros(3, 20, 16)}, TypeError, "k: dtype float32"),
    ({"key": torch.zeros(1, 20, 16).half()}, ValueError, "key: leading axes .1,., must be .3,."),
    ({"value": torch.zeros(20, 16).half()}, ValueError, "value: shape .20, 16., must have 3 axes"),
    ({"value": torch.zeros(3, 20, 16, device="meta")}, ValueError, "value: on meta"),
    ({"key": torch.zeros(3, 20, 16).to_sparse()}, TypeError, "key: layout torch.sparse_coo"),
    ({"query": torch.zeros(2, 3, 4, 20, 16).half(), "enable_gqa": True}, ValueError, "key: shape"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=lambda x: str(x)[:40])
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = tensors((3, 20, 16))
    with pytest.raises(error, match=message):
        sdpa(**{"query": q, "key": k, "value": v, **change})


# -- On a GPU --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_bits_and_gradients(dtype: str) -> None:
    cupy = pytest.importorskip("cupy")

    q, k, v = tensors((2, 4, 200, 64), dtype, "cuda", kv_heads=2, grad=True)
    out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    dout = torch.ones_like(out)
    out.backward(dout)
    a = [cupy.asarray(array(x)) for x in (q, k, v)]
    expected, vjp = cuflash.attention_vjp(*a, causal="top-left")
    same(array(out), cupy.asnumpy(expected))
    grads = vjp(cupy.asarray(array(dout)))
    for x, g in zip((q, k, v), grads, strict=True):
        same(array(x.grad), cupy.asnumpy(g))
    host = [array(x) for x in (q, k, v, dout)]
    exact = oracle.attention_vjp(
        host[0], host[1], host[2], host[3], causal="top-left", tier="float64", certified_rows=0
    )
    problem = emulation.Problem.of(*(array(x) for x in (q, k, v)), causal="top-left")
    bounds = backward_bound(problem, cuflash.plan(*a, causal="top-left"), array(dout))
    for (name, x), limit in zip((("dq", q), ("dk", k), ("dv", v)), bounds, strict=True):
        error = np.abs(array(x.grad).astype(np.float64) - getattr(exact, name))
        assert (error <= limit.reshape(error.shape)).all(), name


@pytest.mark.gpu
def test_gpu_stream_is_pytorchs_current_one() -> None:
    pytest.importorskip("cupy")
    q, k, v = tensors((1, 8, 4096, 64), "bfloat16", "cuda")
    expected = array(sdpa(q, k, v))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(200_000_000)  # a tenth of a second: whoever does not queue reads zeros
        late.copy_(q)
        out = sdpa(late, k, v)
        # Queued behind the sleep, and nobody waited for it.
        assert not side.query()
    side.synchronize()
    same(array(out), expected)


@pytest.mark.gpu
def test_gpu_memory_is_shared() -> None:
    cupy = pytest.importorskip("cupy")

    from cuflash.torch import _array, _on, _tensor

    q = tensors((2, 20, 64), "bfloat16", "cuda")[0]
    with _on(q):
        a = _array(q)
        assert isinstance(a, cupy.ndarray)
        assert a.data.ptr == q.data_ptr()
        assert _tensor(a, q).data_ptr() == q.data_ptr()
