"""Public attention kernels as a GPU machine has them: called on NumPy arrays, bits given back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.problem import Array

#: Triton's tutorial: queries and keys per tile.
TRITON = (128, 64)
Pair = tuple[Array, Array | None]


@dataclass(frozen=True)
class Task:
    """One call: q (H, N_q, D), k and v (H_kv, N_k, D), and the group that its counts go to."""

    group: str
    q: Array
    k: Array
    v: Array
    causal: bool


def _on_gpu(x: Array) -> Any:
    """(1, H, N, D) on the GPU, bit for bit."""
    import torch

    kind = torch.bfloat16 if str(x.dtype) == "bfloat16" else torch.float16
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(kind)[None].cuda()


def _from_gpu(x: Any, like: Array) -> Array:
    import torch

    bits: Array = x[0].contiguous().view(torch.int16).cpu().numpy()
    return bits.view(like.dtype)


def _lse(x: Any, n_q: int) -> Array:
    """(H, N_q) float32: some kernels pad the rows, some add an axis."""
    x = x.float().cpu().numpy()
    x = x.reshape(x.shape[1], -1) if x.ndim == 4 else x[0]
    return np.ascontiguousarray(x[:, :n_q])


def _grouped(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    group = q.shape[1] // k.shape[1]
    return tuple(x.repeat_interleave(group, dim=1).contiguous() for x in (k, v))


def _aten(name: str, *args: Any) -> Callable[[Any, Any, Any, bool], Any]:
    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        import torch

        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
        given = (causal if a is Ellipsis else a for a in args)
        return operator(q, *_grouped(q, k, v), *given)[:2]

    return call


def _fa3(q: Any, k: Any, v: Any, causal: bool) -> Any:
    module: Any = importlib.import_module("fa3_fwd_interface")
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    try:
        found = module.flash_attn_func(*turned, causal=causal, return_attn_probs=True)
    except TypeError:
        found = module.flash_attn_func(*turned, causal=causal)
    out, lse = found[:2] if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), lse


def _triton(q: Any, k: Any, v: Any, causal: bool) -> Any:
    kernel: Any = importlib.import_module("bench.triton_forward")
    m, n = TRITON
    out, log2 = kernel.forward(q, *_grouped(q, k, v), causal, m, min(n, q.shape[3]))
    return out, log2 * np.float32(np.log(2.0)).item()  # in fp32: rn(log2 rn(ln 2))


#: How each kernel is called; Ellipsis stands for causal.
CALLS: dict[str, Callable[[Any, Any, Any, bool], Any]] = {
    "fa3": _fa3,
    "fa2": _aten("flash_attention", 0.0, ...),
    "cudnn": _aten("cudnn_attention", None, True, 0.0, ...),
    "efficient": _aten("efficient_attention", None, True, 0.0, ...),
    "triton": _triton,
    "math": _aten("attention_math", None, 0.0, ...),
}
#: Kernels with gradients: PyTorch's by its name for them, FlashAttention-3's through JAX.
BACKENDS = {
    "fa3": "",
    "fa2": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


@functools.cache
def _fa3_with_gradients() -> Any:
    return importlib.import_module("bench.fa3").Backward()


def fa3_with_gradients(task: Task, dout: Array) -> dict[str, Array]:
    """out, lse, dq, dk and dv of the library that has FlashAttention-3's backward."""
    peer = _fa3_with_gradients()
    jnp = peer.jax.numpy
    q, k, v, do = (jnp.asarray(x[None].swapaxes(1, 2)) for x in (task.q, task.k, task.v, dout))
    out, lse, run = peer.calls(q, k, v, task.causal)
    found = {"out": out} | dict(zip(("dq", "dk", "dv"), run(do, q, k, v, out, lse), strict=True))
    turned = {n: np.ascontiguousarray(np.asarray(x).swapaxes(1, 2)[0]) for n, x in found.items()}
    return turned | {"lse": np.asarray(lse)[0]}


def called(kernel: str, task: Task) -> Pair:
    """Out (H, N_q, D_v) and LSE (H, N_q), None where the kernel gives none."""
    q, k, v = (_on_gpu(x) for x in (task.q, task.k, task.v))
    out, lse = CALLS[kernel](q, k, v, task.causal)
    if kernel == "math":
        lse = None
    return _from_gpu(out, task.q), None if lse is None else _lse(lse, task.q.shape[1])


def gradients(kernel: str, task: Task, dout: Array) -> tuple[Array, Array, Array]:
    """dq, dk, dv of one of `BACKENDS`; as many key heads as query heads."""
    if kernel == "fa3":
        found = fa3_with_gradients(task, dout)
        return found["dq"], found["dk"], found["dv"]
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (_on_gpu(x).requires_grad_() for x in (task.q, task.k, task.v))
    with sdpa_kernel(getattr(SDPBackend, BACKENDS[kernel])):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=task.causal)
        out.backward(_on_gpu(dout))
    return tuple(_from_gpu(x.grad, y) for x, y in ((q, task.q), (k, task.k), (v, task.v)))  # type: ignore[return-value]
