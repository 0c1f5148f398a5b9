"""Recorded H200 bits against the emulated machine: every tensor-core output, ex2, rcp, lg2, and
three kernels.

    python -m bench.golden [--golden FOLDER] [--fresh RECORDING.npz]

Prints, for the NumPy and the numba path, how many of how many values differ; exits with 1 if one
does. --fresh compares a new recording of `bench.record_golden` with the recorded one instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench.common import write
from emulation import Plan, flash, plan_of, sfu, tensor_core
from emulation.problem import Array
from emulation.rounding import Backend

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
CHUNK = 1 << 20
Count = tuple[int, int]


def differing(a: Array, b: Array) -> int:
    """Values whose bits differ."""
    return int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))


def tensor_core_counts(folder: Path, backend: Backend) -> Iterator[tuple[str, Count]]:
    """wgmma and mma.sync, one k16 step each."""
    with np.load(folder / "tensor_core_h200.npz") as z:
        for fmt, dtype in (("f16", np.dtype(np.float16)), ("bf16", np.dtype(ml_dtypes.bfloat16))):
            wrong = total = 0
            for kind in ("normal", "wide", "sub", "zeros", "prob"):
                a, b = (z[f"{fmt}_{kind}_{x}"].view(dtype) for x in "AB")
                c, d = (z[f"{fmt}_{kind}_{x}"] for x in "CD")
                got = tensor_core.mma(a, b, c, backend=backend)
                wrong, total = wrong + differing(got, d), total + d.size
            yield f"tensor core {fmt}", (wrong, total)


def _against(
    f: Callable[[Array], Array], x: Array, ideal: Callable[[Array], Array], ulps: Array
) -> Count:
    wrong = 0
    for start in range(0, x.size, CHUNK):
        part = slice(start, start + CHUNK)
        expected = ideal(x[part].astype(np.float64)).astype(np.float32)
        expected = (expected.view(np.int32) + ulps[part]).view(np.float32)
        wrong += differing(f(x[part]), expected)
    return wrong, x.size


def sfu_counts(folder: Path, backend: Backend) -> Iterator[tuple[str, Count]]:
    """ex2, rcp and lg2 over every mantissa that was recorded."""
    m = np.arange(1 << 23, dtype=np.int32)
    one_two = (m | 0x3F800000).view(np.float32)
    with np.load(folder / "ex2_h200.npz") as z:
        negative = -(0.5 + m * 2.0**-24).astype(np.float32)
        for name, x in (("pos_1_2", one_two), ("neg_1_half", negative)):
            count = _against(lambda y: sfu.ex2(y, backend=backend), x, np.exp2, z[name])
            yield f"ex2 {name}", count
    with np.load(folder / "rcp_lg2_h200.npz") as z:
        count = _against(lambda y: sfu.rcp(y, backend=backend), one_two, np.reciprocal, z["rcp"])
        yield "rcp [1, 2)", count
        for e in (-1, 0, 1):
            x = np.ldexp(one_two, e).astype(np.float32)
            small = np.delete(m, z[f"lg2_{e}_bigi"])
            wrong, _ = _against(
                lambda y: sfu.lg2(y, backend=backend), x[small], np.log2, z[f"lg2_{e}"][small]
            )
            # Where the result is so small that its distance in units of the last place leaves int8.
            big = sfu.lg2(x[z[f"lg2_{e}_bigi"]], backend=backend)
            wrong += differing(big, z[f"lg2_{e}_bigv"])
            yield f"lg2 2^{e}", (wrong, x.size)


def peer_counts(folder: Path) -> Iterator[tuple[str, Count]]:
    """O and LSE of FlashAttention-3, FlashAttention-2 and cuDNN."""
    with np.load(folder / "peers_h200.npz") as z:
        cases = sorted({n.split("/")[1] for n in z.files if n.startswith("in/")})
        for kernel in ("fa3", "fa2", "cudnn"):
            wrong = total = 0
            for case in cases:
                q, k, v = (z[f"in/{case}/{n}"].view(ml_dtypes.bfloat16) for n in "qkv")
                causal = case.endswith("causal")
                plan = plan_of(kernel, q, k, v, causal=causal)
                out, lse = flash(q, k, v, plan=plan, causal=causal)
                bits = z[f"{kernel}/{case}/o"]
                wrong += int(np.count_nonzero(out.view(np.uint16) != bits))
                wrong += differing(lse, z[f"{kernel}/{case}/l"])
                total += out.size + lse.size
            yield f"{kernel} O and LSE", (wrong, total)


def changed(fresh: Path, recorded: Path) -> list[str]:
    """Names of the arrays of a fresh recording of `bench.record_golden` that are not as recorded:
    of other bits, dtype or shape, or in one of both only.

    A Plan is compared as a Plan: its text is older than the fields that were added since, and the
    defaults fill them in.
    """
    with np.load(fresh) as a, np.load(recorded) as b:
        return [n for n in sorted({*a.files, *b.files}) if not _as_recorded(n, a, b)]


def _as_recorded(name: str, a: Any, b: Any) -> bool:
    if name not in a.files or name not in b.files:
        return False
    x, y = a[name], b[name]
    if name.endswith("/plan"):
        return Plan.from_json(str(x)) == Plan.from_json(str(y))
    return bool((x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, default=GOLDEN)
    parser.add_argument("--fresh", type=Path, help="a recording to compare with the recorded one")
    chosen = parser.parse_args()
    folder = chosen.golden
    if chosen.fresh is not None:
        others = changed(chosen.fresh, folder / "cuflash_h200.npz")
        print(f"golden bits: {len(others)} arrays are not as recorded", *others)
        return int(bool(others))
    figures: dict[str, Count] = {}
    backends: tuple[Backend, ...] = ("numpy", "numba")
    for backend in backends:
        for counts in (tensor_core_counts(folder, backend), sfu_counts(folder, backend)):
            figures |= {f"{name}, {backend}": count for name, count in counts}
    figures |= dict(peer_counts(folder))
    for name, (wrong, total) in figures.items():
        print(f"{name:28} {wrong:8,d} of {total:12,d} differ")
    print(write("golden", figures))
    return int(any(wrong for wrong, _ in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
