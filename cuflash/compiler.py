"""The compiler: CUDA sources -> NVRTC -> cubin in the user's cache -> CuPy function.

The sources are the files of cuda/; nothing here writes CUDA. Every flag is ours: no fast-math, no
contraction (kernels say `__fmaf_rn`), no flush to zero. Compiling needs neither a GPU nor a driver
nor CuPy; `load` needs all three.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import cache

FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")
OLDEST = 80
"""The oldest compute capability that the kernels run on."""
SPECIFIC = {"sm90": "a"}
"""Suffix of the target by folder of sources that use what only one architecture has (wgmma)."""
DEFAULT_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a launch may have without asking for more."""

INSTALL = "pip install 'cuflash[cuda13]'"
INSTALL_12 = "pip install 'cuflash[cuda12]'"


class MissingError(RuntimeError):
    """Something that must be installed first; the message names the command."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


@dataclass(frozen=True)
class Log:
    """What ptxas says of one kernel: sizes in bytes, except registers (per thread)."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0  #: static shared memory
    notes: tuple[str, ...] = ()  #: numbered remarks, such as "C7508: ... setmaxnreg ignored ..."
    text: str = ""  #: the whole log

    @staticmethod
    def parse(text: str, symbol: str) -> Log:
        """The figures of kernel `symbol`. Spills count in functions that it calls, too.

        >>> log = Log.parse('''ptxas info    : Compiling entry function 'k' for 'sm_90a'
        ... ptxas info    : (C7510) Potential Performance Loss: wgmma serialized in function 'k'
        ... ptxas info    : Function properties for k
        ... ptxas         .     8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
        ... ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem''', "k")
        >>> log.registers, log.stack, log.spill_stores, log.spill_loads, log.shared
        (168, 8, 16, 24, 1024)
        >>> log.notes
        ("C7510: Potential Performance Loss: wgmma serialized in function 'k'",)
        """
        found: dict[str, int] = {"spill_stores": 0, "spill_loads": 0}
        entry = function = ""
        for line in text.splitlines():
            if match := re.search(r"Compiling entry function '(.+?)'", line):
                entry = match[1]
            elif match := re.search(r"Function properties for (\S+)", line):
                function = match[1]
            elif match := re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
            ):
                if function == symbol:
                    found["stack"] = int(match[1])
                if symbol in (function, entry):
                    found["spill_stores"] += int(match[2])
                    found["spill_loads"] += int(match[3])
            elif entry == symbol and (match := re.search(r"Used (\d+) registers(.*)", line)):
                found["registers"] = int(match[1])
                shared = re.search(r"(\d+) bytes smem", match[2])
                found["shared"] = int(shared[1]) if shared else 0
        notes = re.findall(r"\((C\d{4})\)\s*(.+)", text)
        said = tuple(dict.fromkeys(f"{number}: {rest.strip()}" for number, rest in notes))
        return Log(**found, notes=said, text=text)


@dataclass(frozen=True)
class Compiled:
    """One kernel on disk: the cubin, the symbol in it, and what ptxas said."""

    path: Path
    symbol: str
    log: Log


# -- What is installed -----------------------------------------------------------------


@functools.cache
def source_dir() -> Path:
    """Where the CUDA sources are: in the installed package, or cuda/ of the checkout."""
    here = Path(__file__).resolve().parent
    return next((d for d in (here / "cuda", here.parent / "cuda") if d.is_dir()), here / "cuda")


@functools.cache
def nvrtc() -> Any:
    """The module `cuda.bindings.nvrtc`, with its library found. Raises MissingError."""
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as error:
        raise MissingError(f"cuda-bindings: {error}; {INSTALL}") from None
    try:
        module.nvrtcVersion()
    except Exception as error:  # its class depends on the version of cuda-bindings
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise MissingError(f"NVRTC: not found ({why[0]}); {INSTALL}") from None
    return module


def nvrtc_version() -> tuple[int, int]:
    """Such as (13, 0). Raises MissingError."""
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


def nvrtc_path() -> Path | None:
    """The file of the loaded NVRTC, None where it cannot be told."""
    nvrtc()
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception:  # as above; the path only helps
        return None
    return Path(found) if found else None


def header_candidates() -> list[Path]:
    """Directories that may hold CUDA's headers: those installed beside NVRTC first."""
    found: list[Path] = []
    library = nvrtc_path()
    if library is not None:
        base = library.resolve().parent.parent
        found += [base / "include", base.parent / "cuda_runtime" / "include"]
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        major = nvrtc_version()[0]
        found += [Path(place, f"cu{major}", "include"), Path(place, "cuda_runtime", "include")]
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    found += [Path(root, "include") for root in (*roots, "/usr/local/cuda") if root]
    return list(dict.fromkeys(found))


def header_version(directory: Path) -> tuple[int, int] | None:
    """CUDA's version as its cuda.h says it, None without one."""
    try:
        text = (directory / "cuda.h").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", text, re.M)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


@functools.cache
def header_dir() -> Path | None:
    """The first directory of headers of NVRTC's own version, or None. Raises MissingError."""
    version = nvrtc_version()
    return next((d for d in header_candidates() if header_version(d) == version), None)


# -- Compile ---------------------------------------------------------------------------


def check_arch(arch: str) -> None:
    """ValueError for what is no architecture or too old, MissingError for one newer than NVRTC."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise ValueError(f'arch: got {arch!r}, must be like "sm_80" or "sm_90a"')
    if int(match[1]) < OLDEST:
        raise ValueError(f"arch: got {arch!r}, must be sm_{OLDEST} or newer")
    error, known = nvrtc().nvrtcGetSupportedArchs()
    if int(error) == 0 and int(match[1]) not in known:
        major, minor = nvrtc_version()
        raise MissingError(
            f"NVRTC: version {major}.{minor} knows up to sm_{max(known)}, must know {arch}; "
            "pip install -U 'cuflash[cuda13]'"
        )


def _stamp(path: Path) -> list[Any]:
    """A file or the files of a directory by name and size: enough to tell two releases apart."""
    if path.is_dir():
        return sorted([entry.name, entry.stat().st_size] for entry in os.scandir(path))
    return [path.stat().st_size]


def sources(root: Path) -> dict[str, bytes]:
    """All project sources by path below root."""
    files = (p for p in root.rglob("*") if p.suffix in (".cu", ".cuh"))
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(files)}


def cache_key(
    texts: dict[str, bytes],
    source: str,
    name_expression: str,
    arch: str,
    options: tuple[str, ...],
) -> str:
    """Hash of everything that the cubin depends on."""
    library, headers = nvrtc_path(), header_dir()
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # flags, and what entries mean
    parts = [
        [own, source, name_expression, arch, options, nvrtc_version()],
        None if library is None else _stamp(library),
        None if headers is None else _stamp(headers),
        [[name, hashlib.sha256(text).hexdigest()] for name, text in sorted(texts.items())],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_lock = threading.Lock()
_key_locks: dict[tuple[Any, ...], threading.Lock] = {}
_compiled: dict[tuple[Any, ...], Compiled] = {}
_functions: dict[tuple[int, Path, str], Any] = {}
_kernels: dict[tuple[int, Wanted], Any] = {}
_begun: set[tuple[str, Wanted]] = set()  # compiled ahead, by architecture
# All hold instantiations, of which there are finitely many; nothing is held per shape.


def forget() -> None:
    """Drop what this process remembers of sources and kernels; the disk keeps its entries."""
    with _lock:
        _key_locks.clear()
        _compiled.clear()
        _functions.clear()
        _kernels.clear()
        _begun.clear()


def compile_kernel(
    source: str,
    name_expression: str,
    arch: str,
    options: tuple[str, ...] = (),
    *,
    root: Path | None = None,
) -> Compiled:
    """One instantiation of a kernel as a cubin, from the cache where it is there.

    source is a file below cuda/ ("sm80/forward.cu"), name_expression the instantiation that C++
    would name ("cuflash::forward<128, 64>"; an `extern "C"` kernel by its name), arch the target
    ("sm_80", "sm_90a"); options are added to the flags ("-DX=1"). root is another tree of sources.
    A process looks at the sources once for each kernel. Thread safe. Raises MissingError,
    CompileError (with NVRTC's log), ValueError for arch, FileNotFoundError for source.
    """
    call = (root, source, name_expression, arch, options)
    if call in _compiled:
        return _compiled[call]
    with _lock:
        own_lock = _key_locks.setdefault(call, threading.Lock())
    with own_lock:
        if call not in _compiled:
            where = source_dir() if root is None else root
            _compiled[call] = _from_disk(where, source, name_expression, arch, options)
        return _compiled[call]


def _from_disk(
    root: Path, source: str, name_expression: str, arch: str, options: tuple[str, ...]
) -> Compiled:
    check_arch(arch)
    texts = sources(root)
    if source not in texts:
        raise FileNotFoundError(f"source: {source} is not below {root}")
    key = cache_key(texts, source, name_expression, arch, options)
    directory = cache.usable_dir()
    entry = cache.get(directory, key)
    if entry is not None:
        path, data = entry
        stored = {**data["log"], "notes": tuple(data["log"]["notes"])}
        return Compiled(path, data["symbol"], Log(**stored))
    cubin, symbol, text = _compile(root, source, texts[source], name_expression, arch, options)
    if sources(root) != texts:  # edited meanwhile: the key would not name what was compiled
        return _from_disk(root, source, name_expression, arch, options)
    log = Log.parse(text, symbol)
    data = {"symbol": symbol, "log": dataclasses.asdict(log)}
    data |= {"source": source, "name": name_expression, "arch": arch, "options": list(options)}
    return Compiled(cache.put(directory, key, cubin, data), symbol, log)


def _check(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if int(error) != 0:
        raise CompileError(f"NVRTC: {what}: {error.name}")
    return values[0] if values else None


def _compile(
    root: Path,
    source: str,
    text: bytes,
    name_expression: str,
    arch: str,
    options: tuple[str, ...],
) -> tuple[bytes, str, str]:
    """Cubin, symbol and log of one name expression."""
    rtc = nvrtc()
    headers = header_dir()
    flags = [f"--gpu-architecture={arch}", *FLAGS, f"--include-path={root}"]
    flags += [] if headers is None else [f"--include-path={headers}"]
    flags += options
    name = os.fsencode(root / source)
    program = _check(rtc.nvrtcCreateProgram(text, name, 0, [], []), "create program")
    try:
        expression = name_expression.encode()
        _check(rtc.nvrtcAddNameExpression(program, expression), name_expression)
        (error,) = rtc.nvrtcCompileProgram(program, len(flags), [os.fsencode(f) for f in flags])
        buffer = b" " * _check(rtc.nvrtcGetProgramLogSize(program), "log size")
        _check(rtc.nvrtcGetProgramLog(program, buffer), "log")
        log = buffer.rstrip(b"\0 \n").decode(errors="replace")
        if int(error) != 0:
            raise CompileError(_refusal(source, name_expression, arch, error.name, log, headers))
        symbol = _check(rtc.nvrtcGetLoweredName(program, expression), "lowered name")
        cubin = b" " * _check(rtc.nvrtcGetCUBINSize(program), "cubin size")
        _check(rtc.nvrtcGetCUBIN(program, cubin), "cubin")
        return cubin, symbol.decode(), log
    finally:
        rtc.nvrtcDestroyProgram(program)


def _refusal(
    source: str, name_expression: str, arch: str, error: str, log: str, headers: Path | None
) -> str:
    said = f"{source}: {name_expression} for {arch}: {error}\n{log}"
    if headers is None and "open source file" in log:
        major, minor = nvrtc_version()
        said += (
            f"\nCUDA headers: none of version {major}.{minor} found, as NVRTC has; "
            f"{INSTALL if major >= 13 else INSTALL_12}"
        )
    return said


# -- Load ------------------------------------------------------------------------------


def cupy() -> Any:
    """The module CuPy. Raises MissingError."""
    try:
        import cupy as module
    except ImportError as error:
        why = str(error).strip().splitlines() or ["cannot be imported"]
        raise MissingError(f"CuPy: {why[0]}; {INSTALL}") from None
    return module


def device() -> int:
    """Number of the current device. Raises MissingError."""
    cp = cupy()
    try:
        return int(cp.cuda.runtime.getDevice())
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise _no_driver(error) from None


def _no_driver(error: Exception) -> MissingError:
    return MissingError(
        f"NVIDIA driver: {error}; install a driver for this GPU (CUDA 13 needs 580 or newer, "
        f"an older one takes {INSTALL_12}), then see `cuflash doctor`"
    )


def capability(number: int | None = None) -> int:
    """Compute capability of a device (None: the current one), such as 90. Raises MissingError.

    A GPU older than sm_80 is a MissingError, too: no kernel runs there.
    """
    cp = cupy()
    try:
        found = int(cp.cuda.Device(number).compute_capability)
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise _no_driver(error) from None
    if found < OLDEST:
        raise MissingError(f"GPU: sm_{found}, must be sm_{OLDEST} (Ampere) or newer")
    return found


@functools.lru_cache(maxsize=64)
def shared_memory(number: int) -> tuple[int, int]:
    """Bytes that a device has for one block, and in one multiprocessor. Raises MissingError."""
    found = cupy().cuda.Device(number).attributes  # CuPy asks the driver for all of them
    block, whole = "MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor"
    return int(found[block]), int(found[whole])


@functools.lru_cache(maxsize=64)
def multiprocessors(number: int) -> int:
    """Of a device. Raises MissingError."""
    return int(cupy().cuda.Device(number).attributes["MultiProcessorCount"])


def load(compiled: Compiled) -> Any:
    """The kernel as a CuPy function of the current device (`cupy.RawKernel`), loaded once.

    Needs CuPy, a driver and a GPU: raises MissingError. Thread safe.
    """
    key = (device(), compiled.path, compiled.symbol)
    if key not in _functions:
        capability()
        with _lock:
            if key not in _functions:
                module = cupy().RawModule(path=str(compiled.path))
                _functions[key] = module.get_function(compiled.symbol)
    return _functions[key]


Wanted = tuple[str, str, tuple[str, ...], int]
"""Source, name expression, options, and bytes of dynamic shared memory."""


def kernels(wanted: Sequence[Wanted], number: int | None = None) -> list[Any]:
    """Kernels that are compiled and loaded for the current device (its number, if known), and
    allowed their shared memory: `compile_kernel` and `load`, looked up once a device.

    What is not compiled yet is compiled at once, each kernel in a thread of its own. A cubin that
    left the disk since it was compiled is compiled anew. Raises their errors. Thread safe.
    """
    on = device() if number is None else number
    found = [_kernels.get((on, each)) for each in wanted]
    if None in found:
        missing = {each for each, known in zip(wanted, found, strict=True) if known is None}
        arch = f"sm_{capability(on)}"
        with ThreadPoolExecutor(len(missing)) as pool:
            compiled = list(pool.map(lambda each: _on_disk(each, arch), missing))
        ready = {
            each: _allowed(load(x), each[3]) for each, x in zip(missing, compiled, strict=True)
        }
        _kernels.update({(on, each): function for each, function in ready.items()})
        found = [ready.get(each, known) for each, known in zip(wanted, found, strict=True)]
    return found


def ahead(wanted: Sequence[Wanted], number: int) -> None:
    """Starts to compile what `kernels` will be asked for on device `number`, each kernel once and
    in a thread of its own, and does not wait: who asks while it is compiled waits for the rest, and
    so does a process that ends. An error is dropped, since `kernels` finds it, too. Thread safe.
    Raises MissingError as `capability` does.
    """
    arch = f"sm_{capability(number)}"
    with _lock:
        new = {(arch, each) for each in wanted if (number, each) not in _kernels} - _begun
        _begun.update(new)
    for _, each in new:
        threading.Thread(target=_in_silence, args=(each, arch)).start()


def _in_silence(wanted: Wanted, arch: str) -> None:
    with contextlib.suppress(Exception):
        _on_disk(wanted, arch)


def _allowed(function: Any, shared: int) -> Any:
    """The function, allowed as much shared memory."""
    if shared > DEFAULT_SHARED:
        function.max_dynamic_shared_size_bytes = shared
    return function


def _on_disk(wanted: Wanted, arch: str) -> Compiled:
    """`compile_kernel`, but for a cubin that is still there."""
    source, name_expression, options, _ = wanted
    arch += SPECIFIC.get(source.partition("/")[0], "")
    compiled = compile_kernel(source, name_expression, arch, options)
    if not compiled.path.is_file():
        with _lock:
            _compiled.pop((None, source, name_expression, arch, options), None)
        compiled = compile_kernel(source, name_expression, arch, options)
    return compiled
