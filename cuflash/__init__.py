"""Exact attention for NumPy and CuPy arrays, and the commands that explain its rounding.

Imports neither CuPy nor a driver: a GPU array brings the first, a launch the second.
"""

from cuflash.attention import attention, attention_vjp, plan

__all__ = ["attention", "attention_vjp", "plan"]
