"""What compute-sanitizer watches: forward and backward of every recorded problem in its format and
in float32, and of strided, batched, grouped and single-row problems with a gradient of LSE.

    compute-sanitizer --tool memcheck python -m bench.sanitized
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

import cuflash
from emulation.samples import sample
from tests.golden_cases import CASES

#: Queries, keys, head dimensions, options.
SHAPES: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (1, 130, 64, 64, {"causal": True}),
    (129, 65, 72, 40, {"window": (20, 3)}),
    (70, 200, 128, 128, {"causal": True, "softcap": 5.0}),
    (40, 90, 192, 256, {"causal": "top-left"}),
]


def run(arrays: Any, dout: Any, dlse: Any = None, **options: Any) -> None:
    """All kernels of one problem."""
    _, vjp = cuflash.attention_vjp(*arrays, **options)
    vjp(dout, dlse)


def main() -> None:
    count = 0
    for case in CASES.values():
        for dtype in (case.dtype, "float32"):
            *arrays, dout = (cupy.asarray(x) for x in case._replace(dtype=dtype).inputs())
            run(arrays, dout, numerics=case.numerics, **case.options)
            count += 1
    for dtype in ("float16", "bfloat16", "float32"):
        for n_q, n_k, d, d_v, options in SHAPES:
            lengths = {
                "q": (n_q, d, 6),
                "k": (n_k, d, 2),
                "v": (n_k, d_v, 2),
                "dout": (n_q, d_v, 6),
            }
            given = {}
            for name, (n, width, heads) in lengths.items():
                x = sample("normal", n=n, d=width, heads=2 * heads, dtype=dtype)[0]
                x = x.reshape(2, heads, n, width).swapaxes(1, 2)  # (B, N, H, D) in memory
                given[name] = cupy.asarray(np.ascontiguousarray(x)).swapaxes(1, 2)
            dlse = cupy.ones((2, 6, n_q), np.float32)
            dout = given.pop("dout")
            run(given.values(), dout, dlse, **options)
            count += 1
    cupy.cuda.Device().synchronize()
    print(f"{count} problems, forward and backward")


if __name__ == "__main__":
    main()
