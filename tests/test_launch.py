"""From a checked call to a kernel: parameter structs, kernels looked up, checks remembered."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import compiler, sm80_backward, sm80_float32, sm80_forward
from cuflash.launch import Launch, packed, tail_of
from cuflash.launch import run as launch
from cuflash.problem import GpuProblem, element_strides
from emulation.plan import default_plan
from tests import fake_cupy
from tests.fake_cupy import on_gpu

STRUCTS = {
    "forward": sm80_forward.FORWARD_PARAMS,
    "delta": sm80_backward.DELTA_PARAMS,
    "gradient": sm80_backward.GRADIENT_PARAMS,
    "forward float32": sm80_float32.FORWARD_PARAMS,
    "delta float32": sm80_float32.DELTA_PARAMS,
}


def array(*shape: int) -> Any:
    return on_gpu(np.zeros(shape, np.float16))


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_filled_as_numpy_fills_them(name: str) -> None:
    dtype = STRUCTS[name]
    names = dtype.names or ()
    strided = [n.removesuffix("_strides") for n in names if n.endswith("_strides")]
    plain = [n for n in names if dtype[n] == np.uint64 and n not in strided]
    arrays = {n: array(2, 3, 5 + i, 8) for i, n in enumerate((*strided, *plain))}
    rng = np.random.default_rng(0)
    fields: dict[str, Any] = {"band": (7, 9, 2, 2**31 - 1, 0), "c": np.float32(0.1)}
    fields |= {n: int(rng.integers(1, 1 << 30)) for n in names if dtype[n] == np.int32}
    fields |= {n: float(rng.random()) for n in ("cap", "stale_limit", "scale")}
    if "descending" in fields:
        fields["descending"] = True
    given = [arrays[n] for n in strided], [arrays[n] for n in plain]
    found = packed(dtype, *given, tail_of(dtype, fields))
    wanted = np.zeros(1, dtype)
    for n in names:
        if n in arrays:
            wanted[n] = arrays[n].data.ptr
        elif n.endswith("_strides"):
            wanted[n] = element_strides(arrays[n.removesuffix("_strides")])
        else:
            wanted[n] = fields[n]
    assert found.dtype == dtype
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_wants_every_field(name: str) -> None:
    dtype = STRUCTS[name]
    with pytest.raises(KeyError):
        tail_of(dtype, {"band": (1, 2, 3, 4, 5)})


# -- checks that are remembered


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Launcher:
    return fake_cupy.install(monkeypatch)


def test_a_remembered_check_keeps_types_apart(fake: fake_cupy.Launcher) -> None:
    """1 == True == 1.0, and only one of them is a valid argument each time."""
    x = array(2, 5, 16)
    for good, bad, message in (
        ({"causal": True}, {"causal": 1}, "causal: got 1, must be a bool"),
        ({"causal": False}, {"causal": 0.0}, "causal: got 0.0, must be a bool"),
        ({"window": (1, 0)}, {"window": (True, 0)}, "window: left is True"),
        ({"window": (1, None)}, {"window": (1.0, None)}, "window: left is 1.0"),
        ({"scale": 1.0}, {"scale": True}, "scale: got True, must be a positive"),
        ({"softcap": 1}, {"softcap": True}, "softcap: got True, must be a positive"),
    ):
        for _ in range(2):
            cuflash.plan(x, x, x, **good)
            with pytest.raises(TypeError, match=message):
                cuflash.plan(x, x, x, **bad)


def test_windows_of_any_sequence(fake: fake_cupy.Launcher) -> None:
    x = array(2, 5, 16)
    for window in ([1, None], (1, None), (np.int64(1), None)):
        assert GpuProblem.of(x, x, x, window=window).window == (1, None)
    wrong: list[Any] = [(), (1,), (1, 2, 3), "12", 3]
    for window in wrong:
        with pytest.raises(TypeError, match="window: got"):
            GpuProblem.of(x, x, x, window=window)


def test_equal_calls_share_one_problem(fake: fake_cupy.Launcher) -> None:
    first = GpuProblem.of(array(2, 5, 16), array(1, 7, 16), array(1, 7, 24), causal=True)
    again = GpuProblem.of(array(2, 5, 16), array(1, 7, 16), array(1, 7, 24), causal=True)
    other = GpuProblem.of(array(2, 5, 16), array(1, 7, 16), array(1, 7, 24))
    assert first.shapes is again.shapes
    assert first.shapes is not other.shapes
    assert cuflash.plan(first.q, first.q, first.q) is cuflash.plan(first.q, first.q, first.q)


def test_what_is_remembered_is_bounded() -> None:
    from cuflash import planner, problem

    for remembered in (
        problem._checked, planner._plan, sm80_forward._prepared, sm80_backward._prepared,
        sm80_float32._prepared_forward, sm80_float32._prepared_backward, compiler.shared_memory,
    ):  # fmt: skip
        assert remembered.cache_info().maxsize


def test_numerics_of_none_and_of_nothing_differ_in_float32(fake: fake_cupy.Launcher) -> None:
    x = on_gpu(np.zeros((2, 5, 16), np.float32))
    assert cuflash.plan(x, x, x).numerics.accumulate == "promoted"
    assert cuflash.plan(x, x, x, numerics={}).numerics.accumulate == "tensor-core"


def test_fields_of_a_problem_with_batch_and_groups(fake: fake_cupy.Launcher) -> None:
    p = GpuProblem.of(array(3, 6, 5, 16), array(3, 2, 7, 16), array(3, 2, 7, 24), window=(3, None))
    fields = sm80_backward.gradient_fields(p.shapes, default_plan(p.shapes))
    want = {"batch": 3, "heads": 6, "group": 3, "n_q": 5, "d": 16, "d_v": 24, "pitch": 128}
    assert want.items() <= fields.items()
    assert fields["band"] == (5, 7, 2, 3, 2**31 - 1)


# -- kernels, compiled and loaded


class Driver:
    """CuPy's part: counts what is loaded, refuses files that are gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.loaded, self.allowed = 0, 0, 0
        self.calls: list[tuple[Any, ...]] = []
        import cupy

        cuda: Any = cupy.cuda
        self.stream = SimpleNamespace(ptr=7, is_capturing=lambda: False)
        monkeypatch.setattr(cuda.runtime, "getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(cuda, "get_current_stream", lambda: self.stream, raising=False)
        monkeypatch.setattr(cupy, "RawModule", self.module, raising=False)

    def module(self, path: str) -> Any:
        assert Path(path).is_file()
        self.loaded += 1
        driver = self

        class Function:
            def __setattr__(self, name: str, value: int) -> None:
                assert name == "max_dynamic_shared_size_bytes"
                driver.allowed = value

            def __call__(self, *args: Any, **rest: Any) -> None:
                driver.calls.append((*args, rest))

        return SimpleNamespace(get_function=lambda symbol: Function())


@pytest.fixture
def driver(
    fake: fake_cupy.Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "source_dir", lambda: Path(__file__).parent / "kernels")
    compiler.forget()
    others = set(threading.enumerate())
    yield Driver(monkeypatch)
    for thread in set(threading.enumerate()) - others:
        thread.join()  # what is compiled ahead does not reach into the next test
    compiler.forget()


WANTED: compiler.Wanted = ("scale.cu", "cuflash::test::scale<float, 3>", (), 60_000)


def test_a_kernel_that_is_compiled_ahead_is_waited_for(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, go_on, runs = compiler._compile, threading.Event(), threading.Event(), []

    def slow(*args: Any) -> Any:
        runs.append(args[3])
        begun.set()
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(compiler, "_compile", slow)
    compiler.ahead([WANTED], 0)
    assert begun.wait(60)
    threading.Timer(0.1, go_on.set).start()
    assert len(compiler.kernels([WANTED])) == 1
    compiler.ahead([WANTED], 0)
    assert runs == [WANTED[1]]


def test_a_kernel_is_compiled_ahead_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shapes ask for it before it is used."""
    asked: list[Any] = []
    monkeypatch.setattr(compiler, "_in_silence", lambda *each: asked.append(each))
    other: compiler.Wanted = ("scale.cu", "cuflash::test::scale<float, 4>", (), 0)
    for wanted in ([WANTED], [WANTED, other], [other, WANTED]):
        compiler.ahead(wanted, 0)
    compiler.ahead([WANTED], 1)  # of the same architecture
    assert sorted(asked) == sorted((each, "sm_90") for each in (WANTED, other))


def test_what_fails_ahead_fails_when_it_is_asked_for(driver: Driver) -> None:
    wanted: compiler.Wanted = ("scale.cu", "cuflash::test::nothing<float>", (), 0)
    compiler.ahead([wanted], 0)
    with pytest.raises(compiler.CompileError, match="nothing"):
        compiler.kernels([wanted])


def test_a_kernel_is_loaded_once_a_device(driver: Driver) -> None:
    first = compiler.kernels([WANTED])
    assert compiler.kernels([WANTED]) == first
    assert compiler.kernels([WANTED], 0) == first
    assert (driver.loaded, driver.allowed) == (1, 60_000)
    driver.device = 1
    assert compiler.kernels([WANTED]) != first
    assert driver.loaded == 2


def test_a_cache_that_is_emptied_or_moved_is_filled_again(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.kernels([WANTED])
    shutil.rmtree(tmp_path / "cache")
    driver.device = 1
    compiler.kernels([WANTED])
    assert (tmp_path / "cache").is_dir()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "moved"))
    driver.device = 2
    compiler.kernels([WANTED])
    assert len(list((tmp_path / "moved").iterdir())) == 2


def test_threads_get_the_same_kernels(driver: Driver) -> None:
    wanted = [WANTED, (WANTED[0], WANTED[1].replace("3", "4"), (), 0)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compiler.kernels(wanted), range(16)))
    assert all(each == found[0] for each in found)
    assert driver.loaded == 2


def test_nothing_starts_if_one_kernel_does_not_compile(driver: Driver) -> None:
    good = Launch(compiler_instantiation(WANTED[1]), 1, 32)
    bad = Launch(compiler_instantiation("cuflash::test::absent<1>"), 1, 32)
    struct = np.zeros(1, np.int32)
    with pytest.raises(compiler.CompileError, match="absent"):
        launch((good, bad), (struct, struct), 0, ())
    assert driver.calls == []
    launch((good, good), (struct, struct), 0, ())
    assert driver.calls == [((1,), (32,), (struct,), {"shared_mem": 0})] * 2


def test_a_captured_launch_keeps_its_arrays(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's replay may come when nobody else holds the workspace any more."""
    from cuflash import launch as module

    monkeypatch.setattr(module, "_captured", [])
    kernel, struct = Launch(compiler_instantiation(WANTED[1]), 1, 32), np.zeros(1, np.int32)
    work = np.zeros(3)
    launch((kernel,), (struct,), 0, (work, None))
    assert module._captured == []
    driver.stream = SimpleNamespace(ptr=7, is_capturing=lambda: True)
    launch((kernel,), (struct,), 0, (work, None))
    assert len(module._captured) == 1
    assert module._captured[0] is work


def compiler_instantiation(name: str) -> Any:
    from cuflash.launch import Instantiation

    return Instantiation(WANTED[0], name)
