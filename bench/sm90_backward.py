"""Speed of the Hopper backward on this GPU beside cuDNN (through PyTorch) and FlashAttention-3 (the
package `flash_attn_interface`, if it is installed with its backward).

    python -m bench.sm90_backward [--rounds 5] [--d 64 128 256] [--n 1024 4096 16384]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 10 B H N N D (half if causal), all
kernels of the backward included. Ours is deterministic and timed by events around replays of a CUDA
graph; the peers add with atomics, and their gradients cannot be captured: they are called one after
the other. Peers interleave with ours; each figure is the median of the rounds with its spread.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any, cast

import cupy
import torch
from torch.nn.attention import SDPBackend

import cuflash
from bench.common import gpu, write
from bench.sm80_backward import gradient_of_torch
from bench.timing import Cell, called_torch, captured_cupy, cells, interleaved


def fa3() -> Callable[..., Any] | None:
    """FlashAttention-3 with gradients, None where it is not installed."""
    try:
        module: Any = importlib.import_module("flash_attn_interface")
    except ImportError:
        return None
    return cast(Callable[..., Any], module.flash_attn_func)


def gradient_of_fa3(
    flash: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any, causal: bool
) -> Callable[[], Any]:
    """Its backward; it takes (B, N, H, D)."""
    turned = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v, dout)]
    inputs = [x.requires_grad_() for x in turned[:3]]
    out = flash(*inputs, causal=causal)
    return lambda: torch.autograd.grad(out, inputs, turned[3], retain_graph=True)


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    q, k, v, dout = cell.drawn(4)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    _, vjp = cuflash.attention_vjp(*ours, causal=cell.causal)
    gradient, flop = cupy.from_dlpack(dout), 2.5 * cell.flop
    peer = gradient_of_torch(q, k, v, dout, cell.causal, SDPBackend.CUDNN_ATTENTION)
    runs = {
        "cuflash": captured_cupy(lambda: vjp(gradient), flop),
        "cudnn": called_torch(peer, flop),
    }
    flash = fa3()
    if flash is not None:
        runs["fa3"] = called_torch(gradient_of_fa3(flash, q, k, v, dout, cell.causal), flop)
    return interleaved(runs, flop, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[1024, 4096, 16384])
    given = parser.parse_args()
    figures = {}
    for cell in cells(given.d, given.n):
        row = figures[cell.name] = measure(cell, given.rounds)
        speeds = {kernel: x["median"] for kernel, x in row.items()}
        best = max(x for kernel, x in speeds.items() if kernel != "cuflash")
        text = "  ".join(f"{kernel} {x:6.1f}" for kernel, x in speeds.items())
        print(f"{cell.name:24} {text}  {speeds['cuflash'] / best:.3f} of the best peer", flush=True)
    print(write("sm90_backward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
