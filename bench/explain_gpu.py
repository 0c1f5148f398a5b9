"""Public kernels on a GPU against their Plans: equal bits of O and LSE, by kernel and input.

    python -m bench.explain --gpu [--data FOLDER] [--elements 1e8] [--workers 14]

Kernels: FlashAttention-3 (module fa3_fwd_interface, if it is there), FlashAttention-2 (with its
split keys where it splits them), cuDNN, the memory-efficient kernel and the unfused path ("math")
of PyTorch. Fresh random inputs of every kind, groups of heads, N_q != N_k, D 32 to 256, full and
causal, captures. The kernels run here; their Plans run on CPU processes, which share nothing with
them. What a kernel refuses is listed. Results: bench/results/explain_gpu.json.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import captures, gpu, write
from emulation import Plan, Problem, plan_of, standard
from emulation.explain.whose import emulated
from emulation.problem import Array
from emulation.samples import KINDS, sample

WIDTHS = (64, 128, 32, 96, 192, 256)
#: Queries, keys, query heads, key heads. With 48 and more heads FlashAttention-2 splits no keys.
SHAPES = (
    (512, 512, 48, 48), (300, 300, 8, 2), (257, 700, 48, 48), (1000, 1000, 16, 4), (64, 900, 6, 6),
)  # fmt: skip
Pair = tuple[Array, Array | None]


@dataclass(frozen=True)
class Task:
    """One call: q (H, N_q, D), k and v (H_kv, N_k, D), and the group that its counts go to."""

    group: str
    q: Array
    k: Array
    v: Array
    causal: bool


def tasks(folder: Path | None) -> Iterator[Task]:
    """Without end: captures first, then every kind in turn."""
    for dtype in ("bfloat16", "float16"):
        for name, _, q, k, v, causal in captures(folder, dtype):
            yield Task(f"capture {name}", q, k, v, causal)
    for seed in itertools.count():
        for i, kind in enumerate(sorted(KINDS)):
            turn = seed * len(KINDS) + i
            n_q, n_k, heads, kv_heads = SHAPES[turn % len(SHAPES)]
            d, dtype = WIDTHS[turn % len(WIDTHS)], ("bfloat16", "float16")[turn // 2 % 2]
            causal = n_q == n_k and turn % 3 != 0
            q = sample(kind, n=n_q, n_k=2, d=d, heads=heads, dtype=dtype, seed=seed)[0]
            _, k, v = sample(kind, n=1, n_k=n_k, d=d, heads=kv_heads, dtype=dtype, seed=seed + 1)
            yield Task(kind, q, k, v, causal)


def _on_gpu(x: Array) -> Any:
    """(1, H, N, D) on the GPU, bit for bit."""
    import torch

    kind = torch.bfloat16 if str(x.dtype) == "bfloat16" else torch.float16
    return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(kind)[None].cuda()


def _from_gpu(x: Any, like: Array) -> Array:
    import torch

    bits: Array = x[0].contiguous().view(torch.int16).cpu().numpy()
    return bits.view(like.dtype)


def _lse(x: Any, n_q: int) -> Array:
    """(H, N_q) float32: some kernels pad the rows, some add an axis."""
    x = x.float().cpu().numpy()
    x = x.reshape(x.shape[1], -1) if x.ndim == 4 else x[0]
    return np.ascontiguousarray(x[:, :n_q])


def _aten(name: str, *args: Any) -> Callable[[Any, Any, Any, bool], Any]:
    def call(q: Any, k: Any, v: Any, causal: bool) -> Any:
        import torch

        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
        return operator(q, k, v, *(causal if a is Ellipsis else a for a in args))[:2]

    return call


def _fa3(q: Any, k: Any, v: Any, causal: bool) -> Any:
    module: Any = importlib.import_module("fa3_fwd_interface")
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    try:
        found = module.flash_attn_func(*turned, causal=causal, return_attn_probs=True)
    except TypeError:
        found = module.flash_attn_func(*turned, causal=causal)
    out, lse = found[:2] if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), lse


#: How each kernel is called; Ellipsis stands for causal.
CALLS: dict[str, Callable[[Any, Any, Any, bool], Any]] = {
    "fa3": _fa3,
    "fa2": _aten("flash_attention", 0.0, ...),
    "cudnn": _aten("cudnn_attention", None, True, 0.0, ...),
    "efficient": _aten("efficient_attention", None, True, 0.0, ...),
    "math": _aten("attention_math", None, 0.0, ...),
}


def called(kernel: str, task: Task) -> Pair:
    """Out (H, N_q, D_v) and LSE (H, N_q), None where the kernel gives none."""
    q, k, v = (_on_gpu(x) for x in (task.q, task.k, task.v))
    out, lse = CALLS[kernel](q, k, v, task.causal)
    if kernel == "math":
        lse = None
    return _from_gpu(out, task.q), None if lse is None else _lse(lse, task.q.shape[1])


def plan_for(kernel: str, task: Task) -> Plan | None:
    """The kernel's Plan; None for the unfused path."""
    if kernel == "math":
        return None
    known = "fa2-split" if kernel == "fa2" else kernel
    return plan_of(known, task.q, task.k, task.v, causal=task.causal)


def compared(task: Task, plan: Plan | None, heads: slice, got: Pair) -> list[int]:
    """Elements and differing elements of O, and of LSE, of some heads (whole groups)."""
    group = len(task.q) // len(task.k)
    of_kv = slice(heads.start // group, -(-heads.stop // group))
    q, k, v = task.q[heads], task.k[of_kv], task.v[of_kv]
    if plan is None:
        wide = (x.astype(np.float32) for x in (q, k, v))
        out, lse = standard(*wide, causal=task.causal)
        out = out.astype(q.dtype)
    else:
        rows = np.arange(q.shape[1])
        out, lse = emulated(Problem.of(q, k, v, causal=task.causal), plan, rows)
    theirs = got[0][heads]
    counts = [out.size, int((out.view(np.uint16) != theirs.view(np.uint16)).sum()), 0, 0]
    if got[1] is not None:
        part = got[1][heads]
        counts[2:] = [lse.size, int((lse.view(np.uint32) != part.view(np.uint32)).sum())]
    return counts


def _slices(task: Task, kernel: str) -> list[slice]:
    """Heads of a task, whole groups at a time; of the slow unfused path only the first."""
    group = len(task.q) // len(task.k)
    step = group * max(1, 4 // group)
    slices = [slice(i, min(i + step, len(task.q))) for i in range(0, len(task.q), step)]
    return slices[:1] if kernel == "math" else slices


def main(folder: Path | None, workers: int, elements: int) -> int:
    """Runs until so many elements of O are compared; 1 if a fused kernel's bits differ."""
    start = time.perf_counter()
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "NUMBA")}
    context = multiprocessing.get_context("spawn")
    refused: dict[str, str] = {}
    queued: list[tuple[str, str, Future[list[int]]]] = []
    planned = 0
    with ProcessPoolExecutor(workers, context) as pool:
        for task in tasks(folder):
            for kernel in CALLS:
                word = f"{kernel}, {task.q.dtype}, D {task.q.shape[2]}"
                if word in refused:
                    continue
                try:
                    got = called(kernel, task)
                except Exception as error:  # what a kernel does not take, it says in many ways
                    refused[word] = f"{type(error).__name__}: {error}"[:200]
                    continue
                plan = plan_for(kernel, task)
                for heads in _slices(task, kernel):
                    job = pool.submit(compared, task, plan, heads, got)
                    queued.append((kernel, task.group, job))
                    planned += int(np.prod(task.q[heads].shape))
            if planned >= elements or (not planned and len(refused) >= 50):
                break
        print(f"kernels: {planned} elements, {time.perf_counter() - start:.0f} s", flush=True)
        table: dict[str, dict[str, list[int]]] = {}
        for kernel, group, job in queued:
            line = table.setdefault(kernel, {}).setdefault(group, [0, 0, 0, 0])
            for i, n in enumerate(job.result()):
                line[i] += n
    totals = {
        kernel: [sum(line[i] for line in groups.values()) for i in range(4)]
        for kernel, groups in table.items()
    }
    for kernel, (o, o_wrong, lse, lse_wrong) in totals.items():
        print(f"{kernel}: O {o_wrong} of {o} differ, LSE {lse_wrong} of {lse}")
        for group, line in table[kernel].items():
            if line[1] or line[3]:
                print(f"    {group}: O {line[1]} of {line[0]}, LSE {line[3]} of {line[2]}")
    for word, why in refused.items():
        print(f"refused: {word}: {why}")
    figures = {
        "columns": ["O", "O differing", "LSE", "LSE differing"],
        "totals": totals, "groups": table, "refused": refused,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print(write("explain_gpu", figures, extra=gpu()))
    return int(any(x[1] or x[3] for n, x in totals.items() if n != "math"))
