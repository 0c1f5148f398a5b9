"""Other people's attention kernels as Plans, found from their outputs and verified bit for bit on
an H200.

Forward only. Versions: fa3-fwd 0.0.3, FlashAttention-2 and cuDNN 9.19 as called by PyTorch 2.11.
"""

from __future__ import annotations

from typing import Any

from emulation.arguments import one_of
from emulation.plan import Numerics, Plan
from emulation.problem import Problem

_NUMERICS = Numerics(reference="row-max", row_sum="unrounded", delta="rounded")

#: Keys per tile by head dimension: (largest D, full, causal).
_TILES = {
    "fa3": ((64, 192, 128), (96, 144, 144), (128, 176, 128), (192, 112, 112), (256, 80, 80)),
    "fa2": ((64, 128, 128), (256, 64, 64)),
    "cudnn": ((256, 128, 128),),
}

_ORDERS: dict[str, dict[str, Any]] = {
    "fa3": {
        "direction": "right-to-left", "score": "fused", "alpha": "maxima",
        "row_sum_order": "running", "join": "02+13", "inverse": "hardware", "lse": "c ln2",
    },
    "fa2": {
        "direction": "right-to-left", "score": "unfused", "alpha": "maxima",
        "row_sum_order": "running", "join": "02+13", "inverse": "ieee", "lse": "scale",
    },
    "cudnn": {
        "direction": "left-to-right", "score": "unfused", "alpha": "references",
        "row_sum_order": "tile", "join": "01+23", "inverse": "hardware", "lse": "reference",
    },
}  # fmt: skip


def plan_of(
    kernel: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any = False,
    scale: float | None = None,
) -> Plan:
    """The Plan of a public kernel: "fa3", "fa2" (without its split-KV path) or "cudnn".

    q, k, v as for `flash`. Half formats only; raises ValueError naming argument, value and rule.

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
    full, diagonal = next(tiles for d, *tiles in _TILES[kernel] if width <= d)
    return Plan(
        numerics=_NUMERICS,
        format=problem.dtype,  # type: ignore[arg-type]  # checked by Problem
        tile_n=diagonal if problem.causal else full,
        **_ORDERS[kernel],
    )
