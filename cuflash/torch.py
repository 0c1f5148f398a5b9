"""PyTorch's entrance: scaled_dot_product_attention on tensors, by the kernels or the emulator.

An autograd function over DLPack: nothing is copied on the way in or out. Imports PyTorch, so it is
not imported by `cuflash`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import compiler
from cuflash.attention import attention, attention_vjp
from emulation.plan import Numerics

torch: Any = importlib.import_module("torch")
_Function: Any = torch.autograd.Function


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch is untyped here
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    numerics: Numerics | dict[str, Any] | None = None,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, with `numerics` beside it.

    query (..., H, L, E), key (..., H_kv, S, E), value (..., H_kv, S, E_v): tensors of one device
    and one dtype (float16, bfloat16, float32), any strides; 2 axes (L, E) or more. Leading axes
    are equal, but that with enable_gqa key and value may have fewer heads, a divisor of query's.
    is_causal: query i sees keys 0 to i (PyTorch's alignment, top-left). scale defaults to
    1 / sqrt(E). numerics as in `cuflash.attention`. Returns (..., H, L, E_v) in query's dtype
    (float32 under numerics out="float32"). A row that sees no key gives 0; NaN and Inf reach only
    rows that see them.

    CUDA tensors run on the GPU, queued on PyTorch's current stream of their device, without
    waiting; CPU tensors run on the emulator, bit for bit the same under the same Plan.
    Differentiable once, deterministically, in query, key and value, which must not be changed in
    place before the backward. Under torch.compile the call is a graph break and runs eagerly;
    torch.func and vmap are not supported.

    Not supported, and refused by name: attn_mask, dropout_p other than 0. Raises ValueError or
    TypeError naming argument, value and rule.

    >>> q = torch.eye(4, 16, dtype=torch.float16, requires_grad=True)
    >>> out = scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> out[0, :2].tolist(), torch.autograd.grad(out.sum(), q)[0].shape
    ([1.0, 0.0], torch.Size([4, 16]))
    """
    if attn_mask is not None:
        raise ValueError("attn_mask: given, must be None (is_causal is the only mask)")
    if not dropout_p == 0:
        raise ValueError(f"dropout_p: got {dropout_p!r}, must be 0 (there is no dropout)")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: got {is_causal!r}, must be True or False")
    _check(query, key, value, enable_gqa)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    # None is not the default Numerics: what float32 runs by default is its own.
    chosen = None if numerics is None else Numerics.of(numerics)
    return _folded(query, key, value, is_causal, float(scale), chosen)


def _check(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    """What arrays cannot say: tensors, one device, shapes as PyTorch means them."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, must be a torch.Tensor")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name}: layout {x.layout}, must be a dense strided tensor")
        if x.device != query.device:
            raise ValueError(f"{name}: on {x.device}, must be on {query.device} like query")
        if x.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: on {x.device}, must be on the CPU or a CUDA device")
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"{name}: dtype {x.dtype}, must be float16, bfloat16 or float32")
        if x.dim() < 2 or x.dim() != query.dim():
            rule = "2 axes or more" if x is query else f"{query.dim()} axes like query"
            raise ValueError(f"{name}: shape {tuple(x.shape)}, must have {rule}")
    batch = slice(None, -3) if enable_gqa and query.dim() > 2 else slice(None, -2)
    for name, x in (("key", key), ("value", value)):
        if x.shape[batch] != query.shape[batch]:
            hint = "" if enable_gqa else " (fewer heads: enable_gqa=True)"
            raise ValueError(
                f"{name}: leading axes {tuple(x.shape[batch])}, must be "
                f"{tuple(query.shape[batch])} like query{hint}"
            )


class _Attention(_Function):  # type: ignore[misc]  # torch is untyped here
    """Keeps the vjp of the call, and the tensors it reads, so that PyTorch sees them change."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, causal: bool, scale: float, numerics: Numerics | None
    ) -> Any:
        options = {"causal": "top-left" if causal else False, "scale": scale, "numerics": numerics}
        with _on(q):
            arrays = [_array(x) for x in (q, k, v)]
            if any(ctx.needs_input_grad[:3]):
                out, ctx.vjp = attention_vjp(*arrays, **options)  # type: ignore[arg-type]
            else:
                out = attention(*arrays, **options)  # type: ignore[arg-type]
            found = _tensor(out, q)
        ctx.save_for_backward(q, k, v)
        ctx.dtype = q.dtype
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # as above
    def backward(ctx: Any, dout: Any) -> Any:
        q, *_ = ctx.saved_tensors  # raises if one was changed in place
        with _on(q):
            grads = ctx.vjp(_array(dout.to(ctx.dtype)))
            found = [_tensor(g, q).to(ctx.dtype) for g in grads]
        wanted = (g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False))
        return (*wanted, None, None, None)


def _folded(q: Any, k: Any, v: Any, causal: bool, scale: float, numerics: Numerics | None) -> Any:
    """The call on at most four axes; more are folded into the first, which may copy."""
    lead = q.shape[:-2]
    if q.dim() > 4:
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    out = _Attention.apply(q, k, v, causal, scale, numerics)
    return out.reshape(*lead, *out.shape[-2:])


@contextlib.contextmanager
def _on(x: Any) -> Iterator[None]:
    """CuPy on x's device and on PyTorch's current stream there; nothing for the CPU."""
    if x.device.type == "cpu":
        yield
        return
    cp = compiler.cupy()
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with cp.cuda.Device(x.device.index), cp.cuda.ExternalStream(stream, x.device.index):
        yield


def _array(x: Any) -> Any:
    """The tensor's memory as a CuPy or NumPy array."""
    x = x.detach()
    if x.device.type == "cuda":
        return compiler.cupy().from_dlpack(x)
    if x.dtype == torch.bfloat16:  # NumPy's DLPack has no bfloat16
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _tensor(x: Any, like: Any) -> Any:
    """The array's memory as a tensor."""
    if like.device.type == "cuda":
        return torch.from_dlpack(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
