"""Errors of float32 attention on the tensor core, beside correctly rounded fp32 FMA chains: against
the oracle, in units of the FMA chains' own. Writes bench/results/float32.json.

    python -m bench.float32
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.common import write
from emulation import Numerics, oracle
from emulation.backward import flash_vjp
from emulation.flash import flash
from emulation.plan import Plan, default_plan
from emulation.problem import Problem
from emulation.samples import sample

NAMES = ("out", "dq", "dk", "dv")
PLANS: dict[str, dict[str, Any]] = {
    "fma": {"wide": "fma"},
    "split, promoted": {},
    "split, tensor-core": {"numerics": Numerics()},
}


def errors(kind: str, n: int, d: int) -> dict[str, Any]:
    q, k, v = sample(kind, n=n, d=d, dtype="float32")
    dout = sample(kind if kind == "one-signed" else "normal", n=n, d=d, dtype="float32", seed=9)[2]
    gradients = oracle.attention_vjp(q, k, v, dout)
    want = (oracle.attention(q, k, v).out, gradients.dq, gradients.dk, gradients.dv)
    row: dict[str, Any] = {"kind": kind, "n": n, "d": d}
    for label, fields in PLANS.items():
        plan: Plan = dataclasses.replace(default_plan(Problem.of(q, k, v)), **fields)
        got = (flash(q, k, v, plan=plan)[0], *flash_vjp(q, k, v, dout, plan=plan))
        gaps = [np.abs(x.astype(np.float64) - y) for x, y in zip(got, want, strict=True)]
        row[label] = {
            name: {"rms": float(np.sqrt(np.mean(x**2))), "max": float(x.max())}
            for name, x in zip(NAMES, gaps, strict=True)
        }
    return row


def main() -> None:
    rows = []
    for kind in ("normal", "outlier", "one-signed", "peaked"):
        for n, d in ((256, 64), (1024, 64), (256, 128), (1024, 128)):
            rows.append(row := errors(kind, n, d))
            ratios = [
                f"{label}: "
                + " ".join(f"{row[label][x]['rms'] / row['fma'][x]['rms']:.2f}" for x in NAMES)
                for label in list(PLANS)[1:]
            ]
            print(f"{kind:>10} {n:5} {d:4}  " + "  ".join(ratios), flush=True)
    print(write("float32", rows))


if __name__ == "__main__":
    main()
