"""Speed of the Hopper forward on this GPU beside cuDNN and FlashAttention-2 (through PyTorch) and
FlashAttention-3 (the wheel `fa3-fwd==0.0.3`, if it is installed).

    python -m bench.sm90_forward [--rounds 5] [--d 64 128 256] [--n 1024 4096 16384] [--more]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 4 B H N N D (half if causal). Kernels
are timed by events around replays of a CUDA graph (FA3: around calls), peers interleave with ours,
and each figure is the median of the rounds with its spread. Clock and power are read while the
default runs; the host's own time per call is a column of its own. --more adds fp16, grouped heads,
a window, other head dimensions and lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import cupy
import torch
from torch.nn.attention import SDPBackend

import cuflash
from bench import fa3
from bench.common import gpu, write
from bench.timing import (
    COLUMNS,
    TOKENS,
    Cell,
    Timer,
    attention_of_torch,
    called_torch,
    captured_cupy,
    captured_torch,
    cells,
    host_microseconds,
    interleaved,
    matmul,
    under_load,
)

#: What a user may choose: the default (row-max, unrounded sums), row sums of the rounded P, and the
#: reference that seldom moves.
NUMERICS: dict[str, dict[str, str] | None] = {
    "cuflash": None,
    "cuflash rounded": {"row_sum": "rounded"},
    "cuflash stale": {"reference": "stale"},
}


def more() -> list[Cell]:
    """Other formats, groups, masks, head dimensions and lengths."""
    found = [
        Cell(d, 4096, causal, 4, COLUMNS // d, dtype=torch.float16)
        for d in (64, 128, 256)
        for causal in (False, True)
    ]
    for causal in (False, True):
        found += [
            Cell(128, TOKENS, causal, 1, 64, kv_heads=8),
            Cell(96, 4096, causal, 4, 21),
            Cell(192, 4096, causal, 4, 10),
            Cell(128, 512, causal, 32, 16),
            Cell(128, 131072, causal, 1, 16),
        ]
    return [*found, Cell(128, 32768, True, 1, 16, window=(1024, 0))]


def measure(cell: Cell, rounds: int, flash: Callable[..., Any] | None) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    q, k, v = cell.drawn(3)
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    out = cupy.empty(ours[0].shape, ours[0].dtype)

    def call(numerics: dict[str, str] | None = None) -> Any:
        masks = {"causal": cell.causal, "window": cell.window}
        return cuflash.attention(*ours, **masks, numerics=numerics, out=out)  # type: ignore[arg-type]

    def runs(name: str, peer: Callable[[], Any]) -> bool:
        """Whether a peer takes this problem: FlashAttention-3's wheel has no fp16, no window."""
        try:
            peer()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # not about the problem
            raise
        except RuntimeError as error:
            print(f"{cell.name}: not by {name}: {str(error)[-100:]}")
            return False
        torch.cuda.synchronize()
        return True

    timers: dict[str, Timer] = {}
    for name, numerics in NUMERICS.items():
        timers[name] = captured_cupy(lambda numerics=numerics: call(numerics), cell.flop)  # type: ignore[misc]
    if cell.window is None:
        peers = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
        for name, backend in peers.items():
            peer = attention_of_torch(q, k, v, cell.causal, backend)
            if runs(name, peer):
                timers[name] = captured_torch(peer, cell.flop)
    if flash is not None:
        turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        window = cell.window or (-1, -1)

        def fa3_forward() -> Any:
            return flash(*turned, causal=cell.causal, window_size=window)

        if runs("fa3", fa3_forward):
            timers["fa3"] = called_torch(fa3_forward, cell.flop)
    found = interleaved(timers, cell.flop, rounds)
    return found | under_load(call, cell.flop) | {"host_us": host_microseconds(call)}


def line(cell: Cell, row: dict[str, Any]) -> str:
    """A row as text."""
    speeds = {k: x["median"] for k, x in row.items() if isinstance(x, dict)}
    best = max((x for k, x in speeds.items() if k in ("cudnn", "fa3")), default=float("nan"))
    text = "  ".join(f"{k} {x:6.1f}" for k, x in speeds.items())
    ratio = speeds["cuflash"] / best
    clock = f"{row['clock_mhz']:.0f} MHz, {row['power_w']:.0f} W, host {row['host_us']:.0f} us"
    return f"{cell.name:24} {text}  {ratio:.3f} of the best peer, {clock}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--n", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--more", action="store_true")
    given = parser.parse_args()
    flash = fa3.forward()
    figures: dict[str, Any] = {"matmul 8192, bf16": matmul(given.rounds)}
    print("matmul 8192, bf16:", figures["matmul 8192, bf16"])
    for cell in cells(given.d, given.n) + (more() if given.more else []):
        row = figures[cell.name] = measure(cell, given.rounds, flash)
        print(line(cell, row), flush=True)
    print(write("sm90_forward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
