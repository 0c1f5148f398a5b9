"""Speed of the sm80 forward on this GPU beside PyTorch's flash (FlashAttention-2) and cuDNN
kernels.

    python -m bench.sm80_forward [--rounds 5]

bf16, 16,384 tokens in all, 2,048 columns in all; TFLOP/s by 4 B H N N D (half if causal). Kernels
are timed by events around replays of a CUDA graph, so that the host is out of the figures; peers
interleave with ours, and each figure is the median of the rounds with its spread. The host's own
time per call is a column of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import torch
import torch.nn.functional as F  # noqa: N812  # the name PyTorch's users know
from torch.nn.attention import SDPBackend, sdpa_kernel

import cuflash
from bench.common import gpu, write

TOKENS, COLUMNS, REPLAYS = 16384, 2048, 20


#: A kernel captured in a graph, and how long some replays take in milliseconds.
Timer = Callable[[], float]


def attention_of_torch(
    q: Any, k: Any, v: Any, causal: bool, backend: SDPBackend
) -> Callable[[], Any]:
    """PyTorch's attention, on one of its kernels."""

    def run() -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def captured_torch(run: Callable[[], Any]) -> Timer:
    """A graph of one call, timed on PyTorch's stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return called_torch(graph.replay)


def called_torch(run: Callable[[], Any]) -> Timer:
    """Calls one after the other on PyTorch's stream; the queue hides the host where kernels are
    long.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def milliseconds() -> float:
        start.record()
        for _ in range(REPLAYS):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / REPLAYS

    return milliseconds


def captured_cupy(run: Callable[[], Any]) -> Timer:
    """A graph of one call, timed on its own stream."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def milliseconds() -> float:
        start.record(stream)
        for _ in range(REPLAYS):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / REPLAYS

    return milliseconds


def interleaved(timers: dict[str, Timer], flop: float, rounds: int) -> dict[str, Any]:
    """TFLOP/s of each: median of the rounds and their spread, the kernels taking turns."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    return {
        name: {
            "median": flop / statistics.median(ms) / 1e9,
            "min": flop / max(ms) / 1e9,
            "max": flop / min(ms) / 1e9,
        }
        for name, ms in times.items()
    }


def host_microseconds(run: Callable[[], Any]) -> float:
    """What one call costs the host."""
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(10):
        run()
    elapsed = time.perf_counter() - start
    cupy.cuda.Device().synchronize()
    return elapsed * 1e5


def measure(d: int, n: int, causal: bool, rounds: int) -> dict[str, Any]:
    """TFLOP/s of every kernel at one size."""
    batch, heads = TOKENS // n, COLUMNS // d
    shape = (batch, heads, n, d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = [cupy.from_dlpack(x) for x in (q, k, v)]
    out = cupy.empty(shape, ours[0].dtype)

    def run() -> Any:
        return cuflash.attention(*ours, causal=causal, out=out)

    peers = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    timers = {"cuflash": captured_cupy(run)} | {
        name: captured_torch(attention_of_torch(q, k, v, causal, backend))
        for name, backend in peers.items()
    }
    flop = 4 * batch * heads * n * n * d / (2 if causal else 1)
    return interleaved(timers, flop, rounds) | {"host_us": host_microseconds(run)}


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
                speeds = {k: row[k]["median"] for k in ("cuflash", "fa2", "cudnn")}
                ratio = speeds["cuflash"] / speeds["fa2"]
                text = "  ".join(f"{k} {x:6.1f}" for k, x in speeds.items())
                print(f"{name:24} {text}  {ratio:.2f} of fa2, host {row['host_us']:.0f} us")
    print(write("sm80_forward", figures, extra=gpu()))


if __name__ == "__main__":
    main()
