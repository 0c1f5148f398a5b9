"""Errors of dQ, dK and dV on a GPU beside FlashAttention-2, cuDNN and FlashAttention-3 (see
bench/fa3.py): rms over the rms of merely rounding the exact gradient, 1.0 being the floor.

    python -m bench.gradients [--data FOLDER]

On every capture (FOLDER's, else the bundled head) and the standard inputs, in bfloat16 and float16;
the exact gradients in float64 on the GPU. A capture's figure is over all its heads and DRAWS draws
of dO: of nearly one-hot rows few elements make the error, and one draw moves it by 7 %. `worst
head` is the largest of a single head and draw.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend

import cuflash
from bench.common import captures, gpu, standard_inputs, write
from bench.gpu_kernels import Task, fa3_with_gradients
from bench.sm80_backward import gradient_of_torch
from emulation.problem import Array, numpy_dtype
from emulation.samples import sample

NAMES = ("dq", "dk", "dv")
OURS: dict[str, dict[str, str] | None] = {
    "cuflash": None,
    "cuflash, delta rounded": {"delta": "rounded"},
    "cuflash, split": {"p": "split"},
}
DRAWS = 4
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def inputs(folder: Path | None, dtype: str) -> Iterator[tuple[str, Array, Array, Array, bool]]:
    """(name, q, k, v, causal) of single heads."""
    for file, _, q, k, v, causal in captures(folder, dtype):
        yield file, q, k, v, causal
    for kind, q, k, v in standard_inputs(dtype):
        yield kind, q, k, v, False


def exact(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> list[Any]:
    """dQ, dK, dV in float64 of one head (N, D) with scale 1/sqrt(D)."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    s = q @ k.T * scale
    if causal:
        rows = cupy.arange(len(q))[:, None] + len(k) - len(q)
        s = cupy.where(cupy.arange(len(k)) <= rows, s, -cupy.inf)
    p = cupy.exp(s - s.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = dout @ v.T
    ds = p * (dp - (dp * p).sum(axis=1, keepdims=True)) * scale
    return [ds @ k, ds.T @ q, p.T @ dout]


def _torch(x: Any) -> torch.Tensor:
    """The same memory; bfloat16 travels as integers."""
    if x.dtype == np.float16:
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)


def _cupy(x: torch.Tensor) -> Any:
    """As float64."""
    return cupy.from_dlpack(x.to(torch.float64).contiguous())


def runs(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> dict[str, Callable[[], list[Any]]]:
    """Gradients of every kernel for (1, 1, N, D) arrays."""

    def ours(numerics: dict[str, str] | None) -> list[Any]:
        _, vjp = cuflash.attention_vjp(q, k, v, causal=causal, numerics=numerics)
        return [x[0, 0].astype(np.float64) for x in vjp(dout)]

    def peer(backend: SDPBackend) -> list[Any]:
        run = gradient_of_torch(_torch(q), _torch(k), _torch(v), _torch(dout), causal, backend)
        return [_cupy(x[0, 0]) for x in run()]

    def flash() -> list[Any]:
        of_q, of_k, of_v, do = (x[0].get() for x in (q, k, v, dout))
        gradients = fa3_with_gradients(Task("", of_q, of_k, of_v, causal), do)
        return [cupy.asarray(gradients[name][0], np.float64) for name in NAMES]

    found: dict[str, Callable[[], list[Any]]] = {}
    for name, numerics in OURS.items():
        found[name] = lambda numerics=numerics: ours(numerics)  # type: ignore[misc]
    for name, backend in PEERS.items():
        found[name] = lambda backend=backend: peer(backend)  # type: ignore[misc]
    found["fa3"] = flash
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    folder = parser.parse_args().data
    refused: set[str] = set()
    squares: dict[str, dict[str, list[list[float]]]] = {}
    for dtype in ("bfloat16", "float16"):
        half = numpy_dtype(dtype)
        for number, (name, *head, causal) in enumerate(inputs(folder, dtype)):
            n, d = head[0].shape[-2:]
            draws = sample("normal", n=n, n_k=2, d=d, heads=DRAWS, dtype=dtype, seed=number)[0]
            row = squares.setdefault(f"{name}, {dtype}", {})
            for draw in draws:
                q, k, v, dout = (cupy.asarray(x).reshape(1, 1, n, d) for x in (*head, draw))
                want = exact(q[0, 0], k[0, 0], v[0, 0], dout[0, 0], causal)
                rounded = [cupy.asarray(x.get().astype(half).astype(np.float64)) for x in want]
                found = {"floor": rounded}
                for kernel, run in runs(q, k, v, dout, causal).items():
                    try:
                        found[kernel] = run()
                    except Exception as error:  # a peer that does not take this
                        if kernel in OURS:
                            raise
                        refused.add(f"{kernel}, {dtype}, D = {d}: {str(error)[:200]}")
                for kernel, got in found.items():
                    errors = [float(((x - y) ** 2).mean()) for x, y in zip(got, want, strict=True)]
                    row.setdefault(kernel, []).append(errors)
    figures: dict[str, Any] = {}
    for name, row in squares.items():
        floor = np.array(row.pop("floor"))
        figures[name] = {
            kernel: {
                "heads": np.sqrt(np.array(errors).mean(0) / floor.mean(0)).tolist(),
                "worst head": np.sqrt(np.array(errors) / floor).max(0).tolist(),
            }
            for kernel, errors in row.items()
        }
        for kernel, figure in figures[name].items():
            text = "  ".join(f"{g} {x:.3f}" for g, x in zip(NAMES, figure["heads"], strict=True))
            print(f"{name:40} {kernel:24} {text}", flush=True)
    print(*sorted(refused), sep="\n")
    print(write("gradients", figures, extra=gpu()))


if __name__ == "__main__":
    main()
