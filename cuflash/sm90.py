"""The kernels of cuda/sm90, Hopper's own: the forward of half formats. The backward of what it left
runs on cuda/sm80.
"""

from __future__ import annotations

from cuflash.sm80_backward import backward
from cuflash.sm90_forward import forward, instantiations

__all__ = ["backward", "forward", "instantiations"]
