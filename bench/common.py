"""What every benchmark shares: inputs, the machine's description, medians, and the result file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from emulation.problem import Array, numpy_dtype
from emulation.samples import capture, sample

RESULTS = Path(__file__).parent / "results"

#: Random inputs that the project's figures are measured on.
STANDARD = ("normal", "outlier", "tied-max", "one-signed")


def machine() -> dict[str, Any]:
    """Processor, cores and versions: what a CPU figure depends on."""
    import numba

    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.date.today().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def timed(run: Callable[[], Any], rounds: int = 5) -> dict[str, float]:
    """Median and spread of several runs, in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def captures(
    folder: Path | None, dtype: str
) -> Iterator[tuple[str, int, Array, Array, Array, bool]]:
    """(file, head, q, k, v, causal) of every head of every capture; the bundled head without a
    folder.

    A capture is an npz with q (H, N, D), k and v (H_kv, N, D); `manifest.json` beside it says which
    are causal.
    """
    if folder is None:
        q, k, v, options = capture(dtype)
        yield "bundled", 0, q, k, v, options["causal"]
        return
    manifest = json.loads((folder / "manifest.json").read_text())
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as z:
            q, k, v = (z[n].astype(np.float32).astype(numpy_dtype(dtype)) for n in "qkv")
        group = len(q) // len(k)
        for h in range(len(q)):
            kv = slice(h // group, h // group + 1)
            yield path.stem, h, q[h : h + 1], k[kv], v[kv], bool(manifest[path.name]["causal"])


def standard_inputs(
    dtype: str, n: int = 1024, d: int = 64
) -> Iterator[tuple[str, Array, Array, Array]]:
    """The random inputs, one head each."""
    for kind in STANDARD:
        yield (kind, *sample(kind, n=n, d=d, dtype=dtype))


def nvidia_smi(fields: str, form: str = "csv,noheader") -> list[str]:
    """What nvidia-smi says of CuPy's current device, which need not be the first that it lists."""
    import cupy

    device = f"--id={cupy.cuda.Device().pci_bus_id}"
    command = ["nvidia-smi", device, f"--query-gpu={fields}", f"--format={form}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return said.strip().split(", ")


def gpu() -> dict[str, Any]:
    """Card, driver and clocks as nvidia-smi gives them."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit"
    return dict(zip(fields.split(","), nvidia_smi(fields), strict=True))


def added(before: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Counts of two parts of one measurement as one; what a part lacks counts 0 there."""
    found = {}
    for name, either in (before | figures).items():
        empty: Any = {} if isinstance(either, dict) else 0
        x, y = before.get(name, empty), figures.get(name, empty)
        found[name] = added(x, y) if isinstance(either, dict) else x + y
    return found


def write(name: str, figures: Any, extra: dict[str, Any] | None = None) -> Path:
    """bench/results/NAME.json: the figures and the machine that made them."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    made_by = machine() | (extra or {})
    path.write_text(json.dumps({"machine": made_by, "figures": figures}, indent=1) + "\n")
    return path
