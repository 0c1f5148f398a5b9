"""Other people's attention kernels as Plans.

Forward: fa3-fwd 0.0.3; FlashAttention-2, cuDNN 9.19 and the memory-efficient kernel as called by
PyTorch 2.11, found from their outputs on an H200. PyTorch's "math" path and Triton's tutorial are
read from their sources. Nor do outputs so far tell cuDNN's c = "floats" from "float scale".

Backward, dK and dV (dQ is summed in no fixed order, or not known): FlashAttention-3's and -2's are
read from their sources, and so is the memory-efficient kernel's. cuDNN's is closed: the operations
are those of its frontend's graph, how they round and the order of delta were searched for, by
counts of equal elements alone (tests/golden/peers_gradients_h200.json). Bits recorded afterwards,
of head dimensions 32 to 256, agree in all of dK and dV (bench/results/peers_compare.txt). Other
head dimensions were not run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from emulation.arguments import one_of
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import Problem

_NUMERICS = Numerics(reference="row-max", row_sum="unrounded", delta="rounded")

#: Keys per tile by head dimension: (largest D, full, causal).
_TILES = {
    "fa3": ((64, 192, 128), (96, 144, 144), (128, 176, 128), (192, 112, 112), (256, 80, 80)),
    "fa2": ((64, 128, 128), (256, 64, 64)),
    "cudnn": ((256, 128, 128),),
    "efficient": ((64, 64, 64), (256, 128, 128)),
    "fa2-split": ((64, 256, 256), (128, 128, 128), (256, 64, 64)),
    "triton": ((16, 16, 16), (32, 32, 32), (256, 64, 64)),
}

SMS = 132  #: of an H200: what FlashAttention-2 decides its splits by

_ORDERS: dict[str, dict[str, Any]] = {
    "fa3": {
        "direction": "right-to-left", "c": "float scale", "score": "fused", "alpha": "maxima",
        "row_sum_order": "running", "join": "02+13", "inverse": "hardware", "lse": "c ln2",
    },
    "fa2": {
        "direction": "right-to-left", "c": "float scale", "score": "unfused", "alpha": "maxima",
        "row_sum_order": "running", "join": "02+13", "inverse": "ieee", "lse": "scale",
    },
    "cudnn": {
        "direction": "left-to-right", "c": "floats", "score": "unfused", "alpha": "references",
        "row_sum_order": "tile", "join": "01+23", "inverse": "hardware", "lse": "reference",
    },
    "efficient": {
        "direction": "left-to-right", "score": "scaled", "alpha": "references", "step": 8,
        "row_sum_order": "groups", "join": "01+23", "inverse": "ieee", "lse": "natural",
    },
    "triton": {
        "direction": "left-to-right", "c": "floats", "score": "fused", "alpha": "references",
        "row_sum_order": "joined", "join": "02+13", "inverse": "hardware", "lse": "log2f",
    },
    "math": {"algorithm": "unfused", "wide": "fma", "lse": "natural"},
}  # fmt: skip
_ORDERS["fa2-split"] = _ORDERS["fa2"]

#: Queries per tile of FlashAttention-2's backward by head dimension.
_TILE_M = ((64, 128), (256, 64))
#: The memory-efficient backward by head dimension: largest D, queries and keys per tile.
_EFFICIENT = ((64, 64, 64), (128, 128, 128), (256, 128, 64))
#: Queries of one block of Triton's tutorial, which also masks so many keys.
TRITON_BLOCK = 128


def _backward(kernel: str, problem: Problem) -> BackwardPlan:
    """What is known of a kernel's backward, as far as dK and dV go."""
    width = max(problem.d, problem.d_v)
    if kernel == "fa3":  # head dimensions are filled up to these
        held = next(d for d in (64, 96, 128, 192, 256) if width <= d)
        threads = 16 if held % 128 == 0 else 8 if held % 64 == 0 else 4
        return BackwardPlan(delta_threads=threads)
    if kernel in ("fa2", "fa2-split"):
        held = next(d for d in (32, 64, 96, 128, 192, 256) if width <= d)
        return BackwardPlan(
            tile_m=next(m for d, m in _TILE_M if width <= d),
            queries="descending",
            score="unfused",
            delta_threads=8 if held % 64 == 0 else 4,
        )
    if kernel == "efficient":
        tile_m, tile_n = next(tiles for d, *tiles in _EFFICIENT if width <= d)
        return BackwardPlan(
            tile_m=tile_m,
            tile_n=tile_n,
            starts=1 if problem.causal else key_ranges(problem),
            accumulate="tensor-core",
            score="natural",
            exponential="expf",
            ds_p="rounded",
            scale="dS",
            delta_threads=tile_n // 32,
            delta_join="neighbours",
        )
    if kernel == "cudnn":
        return BackwardPlan(score="natural fused", scale="dS", delta_sum="pairs")
    return BackwardPlan()


def key_ranges(problem: Problem) -> int:
    """Into how many ranges of keys the memory-efficient backward cuts its work, by PyTorch's
    default; tile number j of the keys is of range j mod so many.

    One for each tile, but one alone where up to two tiles meet 256 blocks of work or more, and
    beyond head dimension 128 no more than 200 over the number of heads.
    """
    width = max(problem.d, problem.d_v)
    tile = next(tile_n for d, _, tile_n in _EFFICIENT if width <= d)
    ranges = -(-problem.n_k // tile)
    if problem.heads >= 256 and problem.n_k <= 2 * tile:
        return 1
    if width > 128:
        ranges = min(ranges, 200 // max(1, problem.heads))
    return max(1, ranges)


def splits_of(problem: Problem, sms: int = SMS) -> int:
    """Into how many ranges FlashAttention-2 splits the keys; 1: not at all.

    The fewest whose last wave of thread blocks fills at least 0.85 of what the best number fills.
    """
    width = max(problem.d, problem.d_v)
    tile = next(full for d, full, _ in _TILES["fa2-split"] if width <= d)
    tiles, slots = -(-problem.n_k // tile), 2 * sms
    work = problem.heads * -(-problem.n_q // 64)
    if work >= 0.8 * slots or tiles < 2:
        return 1
    filled: dict[int, float] = {}
    for splits in range(1, min(128, slots, tiles) + 1):
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
            waves = work * splits / slots
            filled[splits] = waves / math.ceil(waves)
    best = max(filled.values(), default=0.0)
    return next((s for s, share in filled.items() if share >= 0.85 * best), 1)


def plan_of(
    kernel: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any = False,
    scale: float | None = None,
) -> Plan:
    """The Plan of a public kernel: "fa3", "fa2", "cudnn", PyTorch's memory-"efficient" one and its
    unfused "math" path, Triton's tutorial ("triton").

    "fa2" walks all keys at once; "fa2-split" is what it does with little work for the GPU: ranges
    of keys (as many as `splits_of` says, for all heads of q together), merged. "triton" tunes
    itself: this is 128 queries (`diagonal`) by 64 keys (`tile_n`), others are a
    `dataclasses.replace` away; its own LSE is in log2. q, k, v as for `flash`. Half formats only;
    raises ValueError naming argument, value and rule.

    >>> import numpy as np
    >>> x = np.zeros((16, 128), np.float16)
    >>> plan_of("fa3", x, x, x).tile_n
    176
    """
    one_of("kernel", kernel, _ORDERS)
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    if problem.dtype == "float32":
        raise ValueError(f"q: dtype float32, must be float16 or bfloat16 ({kernel} takes no other)")
    width = max(problem.d, problem.d_v)
    more: dict[str, Any] = {}
    numerics = _NUMERICS
    if kernel == "fa2-split":
        more["splits"] = splits_of(problem)
        kernel = "fa2" if more["splits"] == 1 else kernel
    if kernel == "efficient" and width > 128:
        # O waits in memory: every tile's product starts from 0.
        numerics = dataclasses.replace(numerics, accumulate="promoted")
        more["finish"] = "fold"
    if kernel == "triton" and problem.causal:
        more["diagonal"] = TRITON_BLOCK
    if kernel != "math":
        full, causal_tile = next(tiles for d, *tiles in _TILES[kernel] if width <= d)
        more["tile_n"] = causal_tile if problem.causal else full
    return Plan(
        numerics=numerics,
        format=problem.dtype,  # type: ignore[arg-type]  # checked by Problem
        backward=_backward(kernel, problem),
        **_ORDERS[kernel],
        **more,
    )
