"""An array module that is not NumPy, to run without a GPU the code that CuPy arrays run.

`Foreign` arrays are NumPy's, but inside `foreign_arrays()` the emulator takes them for another
module's, and what that module and their own operators return is foreign again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from emulation import rounding, sfu, tensor_core


class Foreign(np.ndarray[Any, np.dtype[Any]]):
    """A NumPy array under another type."""

    @staticmethod
    def of(x: Any) -> Any:
        """x as a Foreign array, unless it is no array."""
        return np.asarray(x).view(Foreign) if isinstance(x, np.ndarray | np.generic) else x


class Module:
    """NumPy with Foreign results."""

    __name__ = "foreign"

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **keywords: Foreign.of(found(*args, **keywords))


MODULE: Any = Module()


@contextmanager
def foreign_arrays() -> Iterator[None]:
    """Inside, `namespace` of a Foreign array is the foreign module."""
    plain = rounding.namespace

    def namespace(x: Any) -> Any:
        return MODULE if isinstance(x, Foreign) else plain(x)

    with ExitStack() as stack:
        for module in (rounding, sfu, tensor_core):
            stack.enter_context(patch.object(module, "namespace", namespace))
        # By which checks tell another module's arrays from a subclass of NumPy's.
        stack.enter_context(patch.object(Foreign, "__module__", "cupy"))
        stack.enter_context(np.errstate(all="ignore"))
        yield
