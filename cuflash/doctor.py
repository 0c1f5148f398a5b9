"""`cuflash doctor`: what is installed and found, and the command that mends each missing thing.

Every check stands alone and turns any failure into a line, so that the list is complete on a
machine where much is broken.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import platform
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cuflash import cache, compiler, planner
from emulation.report.text import install, printable

COMPUTE_CAPABILITY = (75, 76)
"""CUdevice_attribute numbers of its major and minor part."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, how it stands, what was found, the command that mends it."""

    name: str
    state: Literal["ok", "missing", "optional"]  #: "missing" stands in the way of the GPU
    text: str
    mend: str | None = None


def examine() -> list[Finding]:
    """Look at everything. Raises nothing; needs nothing."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                findings += check()
        except Exception as error:
            why = str(error).strip().splitlines() or [""]
            findings.append(Finding(name, "missing", f"{type(error).__name__}: {why[0]}"))
    return findings


def gpu_usable(findings: list[Finding]) -> bool:
    """Whether nothing stands in the way of the GPU."""
    return all(f.state != "missing" for f in findings)


def to_markdown(findings: list[Finding]) -> str:
    """The findings as a list, and the verdict."""
    lines = ["# cuflash doctor", ""]
    for f in findings:
        mend = "" if f.mend is None else f": `{f.mend}`"
        lines.append(f"- {f.state}: **{f.name}** {f.text}{mend}")
    usable = "everything is in place."
    missing = "not usable until the missing things are mended. Emulator, oracle and reports work."
    lines += ["", f"GPU: {usable if gpu_usable(findings) else missing}", ""]
    if any(f.mend for f in findings):
        lines += ["The commands are for a checkout of cuflash, in its folder.", ""]
    return "\n".join(lines)


def _python() -> Iterator[Finding]:
    text = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    yield Finding("Python", "ok", text)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _cuflash() -> Iterator[Finding]:
    yield Finding("cuflash", "ok", f"{_version('cuflash')} at {Path(__file__).parent}")
    root = compiler.source_dir()
    count = len(compiler.sources(root)) if root.is_dir() else 0
    if count:
        yield Finding("CUDA sources", "ok", f"{count} files at {root}")
    else:
        reinstall = "python -m pip install --force-reinstall --no-deps ."
        yield Finding("CUDA sources", "missing", f"none at {root}", reinstall)


def _kernels() -> Iterator[Finding]:
    """Only where something is set; every call on a GPU refuses what is no choice."""
    try:
        chosen = planner.chosen_kernels()
    except ValueError as error:
        text = printable(str(error).partition(": ")[2], 160)
        yield Finding("CUFLASH_KERNELS", "missing", text, "unset CUFLASH_KERNELS")
        return
    if chosen:
        yield Finding("CUFLASH_KERNELS", "ok", f"{chosen}: the portable kernels alone")


def _nvrtc() -> Iterator[Finding]:
    try:
        major, minor = compiler.nvrtc_version()
    except compiler.MissingError as error:
        yield Finding("NVRTC", "missing", *_parted(error))
        return
    text = f"{major}.{minor} at {compiler.nvrtc_path() or 'an unknown place'}"
    yield Finding("NVRTC", "ok", f"{text} (cuda-bindings {_version('cuda-bindings')})")
    headers = compiler.header_dir()
    if headers is not None:
        yield Finding("CUDA headers", "ok", f"{major}.{minor} at {headers}")
        return
    others = [
        f"{version[0]}.{version[1]} at {place}"
        for place in compiler.header_candidates()
        if (version := compiler.header_version(place))
    ]
    found = f"only {', '.join(others)}" if others else "none"
    mend = install("cuda13" if major >= 13 else "cuda12")
    yield Finding("CUDA headers", "missing", f"{found}; must be NVRTC's {major}.{minor}", mend)


def _parted(error: compiler.MissingError) -> tuple[str, str | None]:
    """What is missing, and the command."""
    text, semicolon, mend = str(error).partition(": ")[2].rpartition("; ")
    if not semicolon:
        return mend, None
    known = {compiler.INSTALL: "cuda13", compiler.INSTALL_12: "cuda12"}
    return text, install(known[mend]) if mend in known else mend


def _cupy() -> Iterator[Finding]:
    try:
        cp = compiler.cupy()
    except compiler.MissingError as error:
        yield Finding("CuPy", "missing", *_parted(error))
        return
    yield Finding("CuPy", "ok", f"{cp.__version__} at {Path(cp.__file__).parent}")


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver() -> Iterator[Finding]:
    """Through libcuda itself, so that it tells of the GPU also where CuPy is missing."""
    try:
        cuda = _libcuda()
    except OSError:
        text = "no libcuda.so.1; install NVIDIA's driver (580 or newer for CUDA 13)"
        yield Finding("driver", "missing", f"{text}, or pass the GPU to the container")
        return
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    major, minor = number.value // 1000, number.value % 1000 // 10
    try:
        needed = compiler.nvrtc_version()[0]
    except compiler.MissingError:
        needed = 12
    if major < needed:
        text = f"CUDA {major}.{minor}, older than NVRTC; update the driver, or"
        yield Finding("driver", "missing", text, install("cuda12") if major >= 12 else None)
    else:
        yield Finding("driver", "ok", f"CUDA {major}.{minor}")
    error = cuda.cuInit(0)
    count = ctypes.c_int()
    if error == 0:
        error = cuda.cuDeviceGetCount(ctypes.byref(count))
    if error != 0 or count.value == 0:
        text = f"none (cuInit: error {error}; see nvidia-smi and CUDA_VISIBLE_DEVICES)"
        yield Finding("GPU", "missing", text)
    gpus = [_gpu(cuda, index) for index in range(count.value)]
    if gpus and all(capability < compiler.OLDEST for _, capability in gpus):
        # One GPU that is new enough is enough; the others are only listed.
        yield Finding("GPU", "missing", "none is sm_80 (Ampere) or newer")
    for index, (name, capability) in enumerate(gpus):
        fit = capability >= compiler.OLDEST
        text = f"{name}, sm_{capability}" + ("" if fit else ", too old: must be sm_80 or newer")
        yield Finding(f"GPU {index}", "ok" if fit else "optional", text)


def _gpu(cuda: ctypes.CDLL, index: int) -> tuple[str, int]:
    """Name and compute capability."""
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    parts = []
    for attribute in COMPUTE_CAPABILITY:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        parts.append(value.value)
    return name.value.decode(errors="replace"), parts[0] * 10 + parts[1]


def _cache() -> Iterator[Finding]:
    """Kernels run without a usable cache, too, so that it never counts as missing."""
    directory = cache.cache_dir()
    try:
        found = directory.stat()
    except FileNotFoundError:
        yield Finding("cache", "ok", f"{directory}, made when first needed")
        return
    except OSError as error:
        yield Finding("cache", "optional", f"{directory}: {error.strerror}; not used")
        return
    why = cache.fault(directory)
    if why is not None:
        yield Finding("cache", "optional", f"{directory} is not used: it {why}")
        return
    files = [path for path in directory.iterdir() if path.suffix in (".cubin", ".json")]
    size = sum(path.stat().st_size for path in files) / 1e6
    kernels = sum(path.suffix == ".cubin" for path in files)
    mode = stat.S_IMODE(found.st_mode)
    yield Finding("cache", "ok", f"{directory}, mode {mode:04o}, {kernels} kernels, {size:.1f} MB")


def _optional(module: str, distribution: str, extra: str) -> Callable[[], Iterator[Finding]]:
    def check() -> Iterator[Finding]:
        mend = install(extra)
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield Finding(distribution, "optional", f"not found ({error})", mend)
        except Exception as error:
            yield Finding(distribution, "optional", f"broken ({type(error).__name__})", mend)
        else:
            yield Finding(distribution, "ok", _version(distribution))

    return check


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "cuflash": _cuflash,
    "CUFLASH_KERNELS": _kernels,
    "NVRTC": _nvrtc,
    "CuPy": _cupy,
    "driver": _driver,
    "cache": _cache,
    "numba": _optional("numba", "numba", "report"),
    "python-flint": _optional("flint", "python-flint", "oracle"),
    "matplotlib": _optional("matplotlib", "matplotlib", "report"),
}
