"""Modules that need an optional package are collected only where it is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else ["cuflash/torch.py", "emulation/claims/character_model.py"]
)
