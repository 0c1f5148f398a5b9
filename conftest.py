"""Modules that need an optional package are collected only where it is installed."""

from __future__ import annotations

import importlib.util
import os

# Small products: threads that wait for each other cost more than they give (NumPy's import reads).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else ["cuflash/torch.py", "emulation/claims/character_model.py"]
)
