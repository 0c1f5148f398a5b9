"""Speed of the sm80 backward on this GPU beside PyTorch's flash (FlashAttention-2) and cuDNN
kernels.

    python -m bench.sm80_backward [--rounds 5]

As bench/sm80_forward.py, but PyTorch's gradients cannot be captured in a graph and are called one
after the other; TFLOP/s by 2.5 times the forward's operations, all kernels of the backward
included. Ours is deterministic; the peers' add with atomics.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend

import cuflash
from bench.common import gpu, write
from bench.sm80_forward import (
    COLUMNS,
    TOKENS,
    attention_of_torch,
    called_torch,
    captured_cupy,
    interleaved,
)


def gradient_of_torch(
    q: Any, k: Any, v: Any, dout: Any, causal: bool, backend: SDPBackend
) -> Callable[[], Any]:
    """The backward of PyTorch's attention, on one of its kernels."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention_of_torch(inputs[0], inputs[1], inputs[2], causal, backend)()
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def measure(d: int, n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    batch, heads = TOKENS // n, COLUMNS // d
    shape = (batch, heads, n, d)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    _, vjp = cuflash.attention_vjp(*ours, causal=causal)
    gradient = cupy.from_dlpack(dout)
    runs = {"cuflash": captured_cupy(lambda: vjp(gradient))}
    for name, backend in (
        ("fa2", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        runs[name] = called_torch(gradient_of_torch(q, k, v, dout, causal, backend))
    flop = 10 * batch * heads * n * n * d / (2 if causal else 1)
    return interleaved(runs, flop, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures = {}
    for d in (64, 128, 256):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                name = f"D={d} N={n} {'causal' if causal else 'full'}"
                row = figures[name] = measure(d, n, causal, rounds)
                text = "  ".join(f"{kernel} {x['median']:6.1f}" for kernel, x in row.items())
                ratio = row["cuflash"]["median"] / row["fa2"]["median"]
                print(f"{name:24} {text}  {ratio:.2f} of fa2")
    print(write("sm80_backward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
