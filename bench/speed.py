"""How long the CPU side takes: oracle, emulated forward, attribution, report.

    python -m bench.speed

Times are medians of several runs in this process (the report: a whole command), with peak memory
where it is bounded.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.common import timed, write
from emulation import attribute, explain, flash, oracle
from emulation.samples import sample


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _report() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cuflash", "report", "-o", str(Path(folder) / "r.html")]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    figures: dict[str, Any] = {}
    q, k, v = sample("normal", n=1024, d=64, dtype="bfloat16")
    figures["attribution, forward, N=1k D=64"] = timed(lambda: attribute(q, k, v))
    figures["attribution, forward, N=1k D=64"]["peak_gb"] = _peak_gb()
    figures["attribution, forward + backward, N=1k D=64"] = timed(
        lambda: attribute(q, k, v, dout=q)
    )
    figures["oracle (Arb), N=1k D=64"] = timed(lambda: oracle.attention(q, k, v, tier="arb"))
    figures["oracle (Arb), N=1k D=64"]["radius"] = oracle.attention(q, k, v, tier="arb").radius
    for n, rounds in ((1024, 5), (4096, 5), (8192, 3)):
        x = sample("normal", n=n, d=64, dtype="bfloat16")
        figure = timed(lambda x=x: flash(*x), rounds)  # type: ignore[misc]
        figure["million_products_per_s"] = 2 * n * n * 64 / figure["median_s"] / 1e6
        figures[f"emulated forward, N={n} D=64"] = figure
    q, k, v = sample("normal", n=8192, d=128, dtype="bfloat16")
    out, lse = flash(q, k, v, causal=True)
    verdict = timed(lambda: explain(q, k, v, out, lse=lse, causal=True), 3)
    figures["explain, N=8k D=128, causal"] = verdict
    figures["cuflash report (whole command)"] = timed(_report, 3)
    for name, figure in figures.items():
        print(f"{name:46}", "  ".join(f"{key} {value:.3g}" for key, value in figure.items()))
    print(write("speed", figures))


if __name__ == "__main__":
    main()
