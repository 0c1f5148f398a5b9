"""How the speed of kernels is measured: problems, timers that leave the host out, peers in turns,
and what the card does meanwhile.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cupy
import torch
import torch.nn.functional as F  # noqa: N812  # the name PyTorch's users know
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import nvidia_smi

TOKENS, COLUMNS = 16384, 2048
#: A round lasts about so long, after as long a warm-up: the card's power control takes some ten
#: milliseconds, and a kernel behind a cool one would run at its clock.
ROUND_SECONDS, FEWEST, MOST = 0.03, 2, 200

#: Milliseconds of one call, over a round of them.
Timer = Callable[[], float]


@dataclass(frozen=True)
class Cell:
    """One problem of the tables."""

    d: int
    n: int
    causal: bool = False
    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None
    dtype: torch.dtype = torch.bfloat16
    window: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """As it stands in the results."""
        parts = [f"D={self.d} N={self.n} {'causal' if self.causal else 'full'}"]
        if self.kv_heads is not None:
            parts.append(f"heads {self.heads}:{self.kv_heads}")
        if self.window is not None:
            parts.append(f"window {self.window[0]}")
        if self.dtype != torch.bfloat16:
            parts.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(parts)

    @property
    def flop(self) -> float:
        """Operations of the forward: 4 for every (row, key) seen and column, half of all if
        causal.
        """
        if self.window is not None:
            seen = float(self.n * (self.window[0] + 1 + self.window[1]))
        else:
            seen = self.n * self.n / (2 if self.causal else 1)
        return 4 * self.batch * self.heads * self.d * seen

    def drawn(self, count: int) -> list[torch.Tensor]:
        """q, k, v, and dout if count is 4."""
        heads = (self.heads, self.kv_heads or self.heads, self.kv_heads or self.heads, self.heads)
        return [
            torch.randn(self.batch, h, self.n, self.d, device="cuda", dtype=self.dtype)
            for h in heads[:count]
        ]


def cells(d: Iterable[int], n: Iterable[int]) -> list[Cell]:
    """The standard table: bf16, 16,384 tokens and 2,048 columns in all."""
    return [
        Cell(width, length, causal, batch=TOKENS // length, heads=COLUMNS // width)
        for width, length, causal in itertools.product(d, n, (False, True))
    ]


def attention_of_torch(
    q: Any, k: Any, v: Any, causal: bool, backend: SDPBackend
) -> Callable[[], Any]:
    """PyTorch's attention, on one of its kernels."""
    grouped = q.shape[1] != k.shape[1]

    def run() -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return run


def captured_torch(run: Callable[[], Any], flop: float) -> Timer:
    """A graph of one call, timed on PyTorch's stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return called_torch(graph.replay, flop)


def called_torch(run: Callable[[], Any], flop: float) -> Timer:
    """Calls one after the other on PyTorch's stream; the queue hides the host where kernels are
    long.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = replays(flop)

    def milliseconds() -> float:
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / calls

    return milliseconds


def captured_cupy(run: Callable[[], Any], flop: float) -> Timer:
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
    calls = replays(flop)

    def milliseconds() -> float:
        start.record(stream)
        for _ in range(calls):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / calls

    return milliseconds


def replays(flop: float) -> int:
    """Calls of a round, taking a peer's usual 500 TFLOP/s for granted."""
    return max(FEWEST, min(MOST, int(ROUND_SECONDS * 500e12 / flop)))


def interleaved(timers: dict[str, Timer], flop: float, rounds: int) -> dict[str, Any]:
    """TFLOP/s of each: median of the rounds and their spread. In a round every kernel has its turn,
    in random order, and warms the card by itself first.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    order, shuffle = list(timers), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            timers[name]()
            times[name].append(timers[name]())
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


def under_load(run: Callable[[], Any], flop: float) -> dict[str, float]:
    """Clock in MHz and power in W while calls of `run` keep the card busy for half a second."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(max(2, int(0.5 * 500e12 / flop))):
            run()
        time.sleep(0.25)
        clock, power = nvidia_smi("clocks.sm,power.draw", "csv,noheader,nounits")
        stream.synchronize()
    return {"clock_mhz": float(clock), "power_w": float(power)}


def matmul(rounds: int, size: int = 8192) -> dict[str, float]:
    """TFLOP/s of PyTorch's bf16 matrix product: what the card gives at best."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flop = 2.0 * size**3
    found = interleaved({"matmul": called_torch(lambda: a @ b, flop)}, flop, rounds)
    return dict(found["matmul"])
