"""FlashAttention-3 as a peer: its forward from the wheel `fa3-fwd==0.0.3`, its backward from the
library of the wheel `dew-flash-attn-cu13`, which is called through JAX. Either may be missing; a
line says why.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy

from bench.timing import Cell, Timer, replays


def forward() -> Callable[..., Any] | None:
    """flash_attn_func on (B, N, H, D) tensors."""
    try:
        module: Any = importlib.import_module("fa3_fwd_interface")
    except ImportError as error:
        print(f"without FlashAttention-3: {error}")
        return None
    return cast(Callable[..., Any], module.flash_attn_func)


def _library() -> str | None:
    """libdew_flash_attn3.so: named by FA3_LIBRARY, or of the installed wheel."""
    named = os.environ.get("FA3_LIBRARY")
    if named:
        return named
    spec = importlib.util.find_spec("dew_flash_attn")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).with_name("libdew_flash_attn3.so"))


class Backward:
    """Its gradients, on JAX's own stream. Raises ImportError or OSError where they cannot run."""

    def __init__(self) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.jax: Any = importlib.import_module("jax")
        path = _library()
        if path is None:
            raise ImportError("neither FA3_LIBRARY nor dew_flash_attn is there")
        library = ctypes.CDLL(path)
        for name in ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd"):
            capsule = self.jax.ffi.pycapsule(getattr(library, name))
            self.jax.ffi.register_ffi_target(name, capsule, platform="CUDA")

    def timer(self, cell: Cell, tensors: list[Any], flop: float) -> Timer:
        """Milliseconds of one backward of q, k, v, dout (B, H, N, D), which are copied into
        (B, N, H, D).
        """
        jax, np = self.jax, self.jax.numpy
        import torch

        half = np.bfloat16 if cell.dtype == torch.bfloat16 else np.float16
        q, k, v, dout = (
            np.from_dlpack(x.transpose(1, 2).contiguous().view(torch.int16)).view(half)
            for x in tensors
        )
        out, lse, run = self.calls(q, k, v, cell.causal)
        arrays = (dout, q, k, v, out, lse)
        calls = replays(flop)

        def milliseconds() -> float:
            jax.block_until_ready(run(*arrays))
            start = time.perf_counter()
            for _ in range(calls):
                last = run(*arrays)
            jax.block_until_ready(last)
            return (time.perf_counter() - start) / calls * 1e3

        return milliseconds

    def calls(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any, Callable[..., Any]]:
        """Out and LSE of JAX arrays (B, N, H, D), and the function of (dout, q, k, v, out, lse)
        that gives dq, dk and dv.
        """
        jax, np = self.jax, self.jax.numpy
        shape, half = jax.ShapeDtypeStruct, q.dtype
        given = {
            "softmax_scale": numpy.float64(1 / math.sqrt(q.shape[3])),
            "is_causal": causal,
            "window_size_left": numpy.int64(-1),
            "window_size_right": numpy.int64(-1),
        }
        batch, n, heads, _ = q.shape
        results = (
            shape(q.shape, half),
            shape((batch, heads, n), np.float32),
            shape((1, 1, 1, 1), np.float32),
            shape((1, 1, 1), np.float32),
        )
        out, lse, _, _ = jax.ffi.ffi_call("dew_flash3_mha_fwd", results)(q, k, v, **given)
        # Rows of every sequence rounded up to the backward's largest block, and one block more.
        scratch = shape((heads * (batch * n + 128 * (batch + 1)),), np.float32)
        gradients = (shape(q.shape, half), shape(k.shape, half), shape(v.shape, half))
        call = jax.ffi.ffi_call("dew_flash3_mha_bwd", (*gradients, scratch, scratch))
        return out, lse, jax.jit(lambda *x: call(*x, **given)[:3])


def backward() -> Backward | None:
    """The peer, or None."""
    try:
        return Backward()
    except (ImportError, OSError) as error:
        print(f"without FlashAttention-3's backward: {error}")
        return None
