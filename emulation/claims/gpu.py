"""CuPy and the kernels, brought only by tasks that need a GPU."""

from __future__ import annotations

import importlib
from typing import Any


def load(kernels: str) -> tuple[Any, Any]:
    """CuPy, and the module of kernels (`Settings.kernels`)."""
    return importlib.import_module("cupy"), importlib.import_module(kernels)


def available() -> bool:
    """Whether CuPy can be imported and sees a device.

    >>> available() in (True, False)
    True
    """
    try:
        cp = importlib.import_module("cupy")
        return int(cp.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # no CuPy, no driver, no device: each has errors of its own
        return False
