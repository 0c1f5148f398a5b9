"""The counters from which kernels hand out their work: one a stream, 0 between launches.

A launch finds its counter at 0 and, in its last step, leaves it so (cuda/sm90/forward.cu). Two
launches may share one if they cannot overlap: those on one stream cannot, whichever threads made
them. A graph may be launched on any stream, so a captured call gets a counter of its own, which
the graph clears before each of its launches. A launch that never began changed nothing. One that
was cut short leaves a counter that is not 0, but it has ended its CUDA context, too: every later
call fails.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from cuflash.compiler import cupy
from cuflash.tensor_map import driver

#: With more streams than this all begin anew. An array that is let go returns to its stream's part
#: of CuPy's pool, whose next user comes after the launches that still count in it.
MOST = 256

_counters: dict[tuple[int, int], Any] = {}
_lock = threading.Lock()


def stream_id(pointer: int) -> int | None:
    """What tells a stream from all others, also from those that had its handle before or have it in
    another thread; None if the driver does not say.

    The null stream is every thread's and never ends, and asking for it takes a context.
    """
    if pointer == 0:
        return -1  # the driver's are not negative
    found = ctypes.c_uint64()
    error = driver().cuStreamGetId(ctypes.c_void_p(pointer), ctypes.byref(found))
    return None if error else found.value


def counter(device: int) -> Any:
    """A uint32 in the memory of `device`, the current one, that is 0 when the next launch on the
    current stream begins; for kernels that leave it at 0.
    """
    xp = cupy()
    stream = xp.cuda.get_current_stream()
    captured = stream.ptr != 0 and stream.is_capturing()  # the null stream cannot be captured
    number = None if captured else stream_id(stream.ptr)
    if number is None:
        return xp.zeros(1, np.uint32)
    key = device, number
    found = _counters.get(key)
    if found is None:
        with _lock:
            found = _counters.get(key)
            if found is None:
                if len(_counters) >= MOST:
                    _counters.clear()
                found = _counters[key] = xp.zeros(1, np.uint32)
    return found
