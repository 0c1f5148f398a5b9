"""Records what cuflash's kernels give for small problems on this GPU:
tests/golden/cuflash_h200.npz.

    python -m bench.record_golden [OUTPUT.npz]

Run it when a Plan's arithmetic changes on purpose; tests/test_golden.py then holds the emulator to
the new bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import cuflash
from emulation.problem import Array
from tests.golden_cases import CASES

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "cuflash_h200.npz"


def _bits(x: Any) -> Array:
    host: Array = cupy.asnumpy(x)
    return host.view(np.uint16) if host.dtype.itemsize == 2 else host


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    recorded: dict[str, Array] = {}
    for name, case in CASES.items():
        q, k, v, dout = (cupy.asarray(x) for x in case.inputs())
        options: dict[str, Any] = {"numerics": case.numerics, **case.options}
        plan = cuflash.plan(q, k, v, **options)
        (out, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
        arrays = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *vjp(dout)), strict=True))
        recorded |= {f"{name}/{x}": _bits(value) for x, value in arrays.items()}
        recorded[f"{name}/plan"] = np.array(json.dumps(plan.to_json()))
    np.savez_compressed(target, **recorded)  # type: ignore[arg-type]  # the stub has a keyword first
    print(f"{target}: {target.stat().st_size} bytes, {len(CASES)} problems")


if __name__ == "__main__":
    main()
