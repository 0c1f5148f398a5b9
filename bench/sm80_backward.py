"""Speed of the sm80 backward on this GPU beside PyTorch's flash (FlashAttention-2) and cuDNN
kernels.

    CUFLASH_KERNELS=sm80 python -m bench.sm80_backward [--rounds 5]

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
from bench.timing import (
    Cell,
    attention_of_torch,
    called_torch,
    captured_cupy,
    cells,
    interleaved,
)


def gradient_of_torch(
    q: Any, k: Any, v: Any, dout: Any, causal: bool, backend: SDPBackend
) -> Callable[[], Any]:
    """The backward of PyTorch's attention, on one of its kernels."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention_of_torch(inputs[0], inputs[1], inputs[2], causal, backend)()
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    q, k, v, dout = cell.drawn(4)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    _, vjp = cuflash.attention_vjp(*ours, causal=cell.causal)
    gradient, flop = cupy.from_dlpack(dout), 2.5 * cell.flop
    runs = {"cuflash": captured_cupy(lambda: vjp(gradient), flop)}
    peers = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in peers.items():
        runs[name] = called_torch(gradient_of_torch(q, k, v, dout, cell.causal, backend), flop)
    return interleaved(runs, flop, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures = {}
    for cell in cells((64, 128, 256), (1024, 4096, 16384)):
        row = figures[cell.name] = measure(cell, rounds)
        text = "  ".join(f"{kernel} {x['median']:6.1f}" for kernel, x in row.items())
        ratio = row["cuflash"]["median"] / row["fa2"]["median"]
        print(f"{cell.name:24} {text}  {ratio:.3f} of fa2", flush=True)
    print(write("sm80_backward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
