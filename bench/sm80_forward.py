"""Speed of the sm80 forward on this GPU beside PyTorch's flash (FlashAttention-2) and cuDNN
kernels.

    CUFLASH_KERNELS=sm80 python -m bench.sm80_forward [--rounds 5]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 4 B H N N D (half if causal). Kernels
are timed by events around replays of a CUDA graph, so that the host is out of the figures; peers
interleave with ours, and each figure is the median of the rounds with its spread. The host's own
time per call is a column of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

import cupy
from torch.nn.attention import SDPBackend

import cuflash
from bench.common import gpu, write
from bench.timing import (
    Cell,
    attention_of_torch,
    captured_cupy,
    captured_torch,
    cells,
    host_microseconds,
    interleaved,
)


def measure(cell: Cell, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    q, k, v = cell.drawn(3)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    out = cupy.empty(ours[0].shape, ours[0].dtype)

    def run() -> Any:
        return cuflash.attention(*ours, causal=cell.causal, out=out)

    peers = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    timers = {"cuflash": captured_cupy(run, cell.flop)} | {
        name: captured_torch(attention_of_torch(q, k, v, cell.causal, backend), cell.flop)
        for name, backend in peers.items()
    }
    return interleaved(timers, cell.flop, rounds) | {"host_us": host_microseconds(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures = {}
    for cell in cells((64, 128, 256), (1024, 4096, 16384)):
        row = figures[cell.name] = measure(cell, rounds)
        speeds = {k: row[k]["median"] for k in ("cuflash", "fa2", "cudnn")}
        ratio = speeds["cuflash"] / speeds["fa2"]
        text = "  ".join(f"{k} {x:6.1f}" for k, x in speeds.items())
        print(
            f"{cell.name:24} {text}  {ratio:.3f} of fa2, host {row['host_us']:.0f} us", flush=True
        )
    print(write("sm80_forward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
