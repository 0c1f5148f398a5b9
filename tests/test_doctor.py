"""`cuflash doctor`: every missing thing is a line with its command, never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cuflash import cli, compiler, doctor
from cuflash.doctor import Finding


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiler.nvrtc.cache_clear()
    compiler.header_dir.cache_clear()


class FakeDriver:
    """libcuda with one GPU."""

    def __init__(self, version: int, capability: tuple[int, int], error: int = 0) -> None:
        self.version, self.capability, self.error = version, capability, error

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802  # as libcuda names it
        number._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.error

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"A GPU"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = self.capability[attribute - 75]
        return 0


def gpu(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> dict[str, Finding]:
    """What is found with CuPy installed and this driver."""
    cupy = ModuleType("cupy")
    vars(cupy).update(__version__="14.0", __file__="/somewhere/cupy/__init__.py")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(doctor, "_libcuda", lambda: driver)
    return {f.name: f for f in doctor.examine()}


def test_everything_in_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = gpu(monkeypatch, FakeDriver(13000, (9, 0)))
    assert found["GPU 0"] == Finding("GPU 0", "ok", "A GPU, sm_90")
    assert found["cache"].text.endswith("made when first needed")
    assert {f.name for f in found.values() if f.state == "missing"} == set()
    assert cli.main(["doctor"]) == 0
    assert "GPU: everything is in place." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("driver", "name", "text", "mend"),
    [
        (
            FakeDriver(12040, (9, 0)),
            "driver",
            "CUDA 12.4, older",
            "python -m pip install '.[cuda12]'",
        ),
        (FakeDriver(13000, (7, 5)), "GPU", "none is sm_80", None),
        (FakeDriver(13000, (9, 0), error=100), "GPU", "cuInit: error 100", None),
    ],
)
def test_unusable_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, name: str, text: str, mend: str | None
) -> None:
    found = gpu(monkeypatch, driver)
    assert found[name].state == "missing"
    assert text in found[name].text
    assert found[name].mend == mend
    assert not doctor.gpu_usable(list(found.values()))


def test_nothing_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_library() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    for module in ("cupy", "cuda", "cuda.bindings", "numba", "flint", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(doctor, "_libcuda", no_library)
    monkeypatch.setattr(compiler, "source_dir", lambda: tmp_path / "absent")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.count("python -m pip install '.[cuda13]'") == 2
    for line in (
        "- missing: **CUDA sources** none at",
        "- missing: **NVRTC** ",
        "- missing: **CuPy** ",
        "- missing: **driver** no libcuda.so.1",
        "has mode 0777: others may write (chmod go-w ",
        "**numba** not found",
        "python -m pip install '.[oracle]'",
        "python -m pip install --force-reinstall --no-deps .",
        "GPU: not usable until",
        "The commands are for a checkout of cuflash",
    ):
        assert line in said


def test_headers_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "header_version", lambda place: (11, 8))
    found = {f.name: f for f in doctor.examine()}["CUDA headers"]
    assert (found.state, found.mend) == ("missing", "python -m pip install '.[cuda13]'")
    assert "11.8 at" in found.text


def test_check_that_breaks_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise KeyError("oops")

    monkeypatch.setitem(doctor.CHECKS, "cache", broken)
    assert Finding("cache", "missing", "KeyError: 'oops'") in doctor.examine()


def test_cache_is_counted(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "a.cubin").write_bytes(bytes(2_000_000))
    found = {f.name: f for f in doctor.examine()}["cache"]
    assert found.text == f"{tmp_path / 'cache'}, mode 0700, 1 kernels, 2.0 MB"


def test_chosen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUFLASH_KERNELS is shown where it is set, and missing where every call would refuse it."""

    def found() -> list[Finding]:
        return [f for f in doctor.examine() if f.name == "CUFLASH_KERNELS"]

    monkeypatch.delenv("CUFLASH_KERNELS", raising=False)
    assert found() == []
    monkeypatch.setenv("CUFLASH_KERNELS", "sm80")
    assert found() == [Finding("CUFLASH_KERNELS", "ok", "sm80: the portable kernels alone")]
    monkeypatch.setenv("CUFLASH_KERNELS", "foo")
    text, mend = "got 'foo', must be 'sm80' or not set", "unset CUFLASH_KERNELS"
    assert found() == [Finding("CUFLASH_KERNELS", "missing", text, mend)]
