"""Speed of the Hopper forward on this GPU beside cuDNN (through PyTorch) and FlashAttention-3 (the
wheel `fa3-fwd==0.0.3`, if it is installed).

    python -m bench.sm90_forward [--rounds 5] [--d 64 128 256] [--n 1024 4096 16384]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 4 B H N N D (half if causal). Kernels
are timed by events around replays of a CUDA graph (FA3: around calls), peers interleave with ours,
and each figure is the median of the rounds with its spread. The host's own time per call is a
column of its own.
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
from bench.sm80_forward import (
    COLUMNS,
    TOKENS,
    Timer,
    attention_of_torch,
    called_torch,
    captured_cupy,
    captured_torch,
    host_microseconds,
    interleaved,
)

#: What a user may choose: the default, and the article's row sum.
NUMERICS: dict[str, dict[str, str] | None] = {
    "cuflash": None,
    "cuflash unrounded": {"row_sum": "unrounded"},
    "cuflash stale": {"reference": "stale"},
}


def fa3() -> Callable[..., Any] | None:
    """FlashAttention-3's forward, None where it is not installed."""
    try:
        module: Any = importlib.import_module("fa3_fwd_interface")
    except ImportError:
        return None
    return cast(Callable[..., Any], module.flash_attn_func)


def measure(d: int, n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    batch, heads = TOKENS // n, COLUMNS // d
    shape = (batch, heads, n, d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    out = cupy.empty(shape, ours[0].dtype)
    timers: dict[str, Timer] = {}
    for name, numerics in NUMERICS.items():

        def run(numerics: dict[str, str] | None = numerics) -> Any:
            return cuflash.attention(*ours, causal=causal, numerics=numerics, out=out)

        timers[name] = captured_cupy(run)
    peer = attention_of_torch(q, k, v, causal, SDPBackend.CUDNN_ATTENTION)
    timers["cudnn"] = captured_torch(peer)
    flash = fa3()
    if flash is not None:
        turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        timers["fa3"] = called_torch(lambda: flash(*turned, causal=causal))
    flop = 4 * batch * heads * n * n * d / (2 if causal else 1)
    host = host_microseconds(lambda: cuflash.attention(*ours, causal=causal, out=out))
    return interleaved(timers, flop, rounds) | {"host_us": host}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[1024, 4096, 16384])
    given = parser.parse_args()
    figures = {}
    for d in given.d:
        for n in given.n:
            for causal in (False, True):
                name = f"D={d} N={n} {'causal' if causal else 'full'}"
                row = figures[name] = measure(d, n, causal, given.rounds)
                speeds = {k: x["median"] for k, x in row.items() if k != "host_us"}
                best = max(x for k, x in speeds.items() if k in ("cudnn", "fa3"))
                text = "  ".join(f"{k} {x:6.1f}" for k, x in speeds.items())
                ratio = speeds["cuflash"] / best
                print(
                    f"{name:24} {text}  {ratio:.3f} of the best peer, host {row['host_us']:.0f} us"
                )
    print(write("sm90_forward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
