"""Speed of the Hopper backward on this GPU beside cuDNN (through PyTorch) and FlashAttention-3 (see
bench/fa3.py).

    python -m bench.sm90_backward [--rounds 5] [--d 64 128 256] [--n 1024 4096 16384]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 10 B H N N D (half if causal), all
kernels of the backward included. Ours is deterministic and timed by events around replays of a CUDA
graph; the peers add with atomics, and their gradients cannot be captured: they are called one after
the other (FlashAttention-3 by the host's clock). Peers interleave with ours; each figure is the
median of the rounds with its spread.
"""

from __future__ import annotations

import argparse
from typing import Any

import cupy
from torch.nn.attention import SDPBackend

import cuflash
from bench import fa3
from bench.common import gpu, write
from bench.sm80_backward import gradient_of_torch
from bench.timing import Cell, Timer, called_torch, captured_cupy, cells, interleaved


def measure(cell: Cell, rounds: int, flash: fa3.Backward | None) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    q, k, v, dout = cell.drawn(4)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    _, vjp = cuflash.attention_vjp(*ours, causal=cell.causal)
    gradient, flop = cupy.from_dlpack(dout), 2.5 * cell.flop
    peer = gradient_of_torch(q, k, v, dout, cell.causal, SDPBackend.CUDNN_ATTENTION)
    runs: dict[str, Timer] = {
        "cuflash": captured_cupy(lambda: vjp(gradient), flop),
        "cudnn": called_torch(peer, flop),
    }
    if flash is not None:
        runs["fa3"] = flash.timer(cell, [q, k, v, dout], flop)
    return interleaved(runs, flop, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[1024, 4096, 16384])
    given = parser.parse_args()
    flash, figures = fa3.backward(), {}
    for cell in cells(given.d, given.n):
        row = figures[cell.name] = measure(cell, given.rounds, flash)
        speeds = {kernel: x["median"] for kernel, x in row.items()}
        best = max(x for kernel, x in speeds.items() if kernel != "cuflash")
        text = "  ".join(f"{kernel} {x:6.1f}" for kernel, x in speeds.items())
        print(f"{cell.name:24} {text}  {speeds['cuflash'] / best:.3f} of the best peer", flush=True)
    print(write("sm90_backward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
