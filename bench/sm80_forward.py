"""Speed of the sm80 forward on this GPU beside PyTorch's flash (FlashAttention-2) and cuDNN
kernels.

    python bench/sm80_forward.py [--rounds 5]

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


def _torch_runner(q: Any, k: Any, v: Any, causal: bool, backend: SDPBackend) -> Callable[[], Any]:
    def run() -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def _captured_torch(run: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: graph.replay()


def _captured_cupy(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    return lambda: graph.launch(stream), stream


def _milliseconds_torch(replay: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS


def _milliseconds_cupy(replay: Callable[[], None], stream: Any) -> float:
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    for _ in range(REPLAYS):
        replay()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / REPLAYS


def _host_microseconds(run: Callable[[], Any]) -> float:
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

    replay, stream = _captured_cupy(run)
    peers = {
        "fa2": _captured_torch(_torch_runner(q, k, v, causal, SDPBackend.FLASH_ATTENTION)),
        "cudnn": _captured_torch(_torch_runner(q, k, v, causal, SDPBackend.CUDNN_ATTENTION)),
    }
    times: dict[str, list[float]] = {"cuflash": [], **{name: [] for name in peers}}
    for _ in range(rounds):
        times["cuflash"].append(_milliseconds_cupy(replay, stream))
        for name, peer in peers.items():
            times[name].append(_milliseconds_torch(peer))
    flop = 4 * batch * heads * n * n * d / (2 if causal else 1)
    row: dict[str, Any] = {
        name: {
            "median": flop / statistics.median(ms) / 1e9,
            "min": flop / max(ms) / 1e9,
            "max": flop / min(ms) / 1e9,
        }
        for name, ms in times.items()
    }
    row["host_us"] = _host_microseconds(run)
    return row


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
