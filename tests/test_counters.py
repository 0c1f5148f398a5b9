"""Which launches share a counter of handed-out work: those of one stream, and no others."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import counters
from cuflash.counters import counter, stream_id


class Streams:
    """CuPy's current stream, and the driver's numbers of streams by handle."""

    def __init__(self) -> None:
        self.current = SimpleNamespace(ptr=0, is_capturing=lambda: False)
        self.numbers: dict[int, int] = {}
        self.asked: list[int] = []
        self.made = 0

    def use(self, pointer: int, number: int = 0, capturing: bool = False) -> None:
        self.current = SimpleNamespace(ptr=pointer, is_capturing=lambda: capturing)
        self.numbers[pointer] = number

    def zeros(self, shape: int, dtype: Any) -> Any:
        assert (shape, dtype) == (1, np.uint32)
        self.made += 1
        return np.zeros(shape, dtype)

    def get_id(self, pointer: Any, found: Any) -> int:
        self.asked.append(pointer.value)
        if pointer.value not in self.numbers:
            return 709
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = self.numbers[pointer.value]
        return 0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    cuda = SimpleNamespace(get_current_stream=lambda: found.current)
    monkeypatch.setattr(counters, "cupy", lambda: SimpleNamespace(cuda=cuda, zeros=found.zeros))
    monkeypatch.setattr(counters, "driver", lambda: SimpleNamespace(cuStreamGetId=found.get_id))
    monkeypatch.setattr(counters, "_counters", {})
    return found


def test_launches_of_a_stream_share_a_counter(streams: Streams) -> None:
    streams.use(64, 7)
    first = counter(0)
    assert counter(0) is first
    streams.use(80, 8)
    assert counter(0) is not first
    streams.use(64, 7)
    assert counter(0) is first
    assert streams.made == 2


def test_a_handle_that_is_used_again_is_another_stream(streams: Streams) -> None:
    """So is that of every thread's own default stream in another thread."""
    streams.use(64, 7)
    first = counter(0)
    streams.use(64, 9)
    assert counter(0) is not first


def test_devices_have_their_own(streams: Streams) -> None:
    assert counter(0) is not counter(1)
    assert counter(0) is counter(0)


def test_the_null_stream_needs_no_number(streams: Streams) -> None:
    """Handle 0, which no stream beside it has: number 0 may be another stream's."""
    null = counter(0)
    assert streams.asked == []
    streams.use(64, 0)
    assert counter(0) is not null
    assert streams.asked == [64]
    assert stream_id(0) != stream_id(64)


def test_every_captured_call_has_its_own(streams: Streams) -> None:
    streams.use(64, 7)
    usual = counter(0)
    streams.use(64, 7, capturing=True)
    found = [counter(0) for _ in range(3)]
    assert len({id(x) for x in (usual, *found)}) == 4
    streams.use(64, 7)
    assert counter(0) is usual


def test_without_a_number_none_is_shared(streams: Streams) -> None:
    streams.use(64, 7)
    streams.numbers.clear()
    assert stream_id(64) is None
    assert counter(0) is not counter(0)
    assert counters._counters == {}


def test_no_more_than_so_many_are_kept(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MOST", 3)
    found = []
    for number in range(10):
        streams.use(64, number)
        found.append(counter(0))
        assert counter(0) is found[-1]
        assert len(counters._counters) <= 3
    assert len({id(x) for x in found}) == 10


def test_threads_of_a_stream_share_its_counter(streams: Streams) -> None:
    streams.use(64, 7)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: counter(0), range(64)))
    assert all(x is found[0] for x in found)
    assert streams.made == 1
