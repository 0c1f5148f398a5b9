"""The disk cache of compiled kernels: private to its owner, checked on every read, never required.

An entry is `<key>.json` (symbol, compile log, and the hash of its cubin, itself under a hash) and
`<hash>.cubin`. A cubin's name is the hash of its content and both files appear by renaming, so
processes that compile at the same time cannot mix their results; whatever does not match its hash
counts as absent. A directory or file that somebody else owns or may write to is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """$CUFLASH_CACHE_DIR, else $XDG_CACHE_HOME/cuflash, else ~/.cache/cuflash. It need not exist.

    An empty variable counts as unset; so does a relative $XDG_CACHE_HOME, as its standard says.
    """
    own = os.environ.get("CUFLASH_CACHE_DIR")
    if own:
        return Path(own).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~"), ".cache")
    return base.absolute() / "cuflash"


def fault(directory: Path) -> str | None:
    """Why an existing directory cannot be trusted, or None. Raises OSError."""
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user id {found.st_uid}, not {os.geteuid()}"
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        return f"has mode {mode:04o}: others may write (chmod go-w '{directory}')"
    return None


_private_lock = threading.Lock()
_private: dict[int, Path] = {}  # by process: a forked child neither shares nor removes its parent's


def private_dir() -> Path:
    """This process's own directory, removed when it ends."""
    with _private_lock:
        pid = os.getpid()
        if pid not in _private or not _private[pid].is_dir():
            path = _private[pid] = Path(tempfile.mkdtemp(prefix="cuflash-"))
            atexit.register(_remove, path, pid)
        return _private[pid]


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _warn_once(directory: Path, why: str) -> None:
    warnings.warn(
        f"cuflash: cache {directory} {why}; kernels are compiled anew in every process "
        "(CUFLASH_CACHE_DIR names another directory)",
        RuntimeWarning,
        stacklevel=2,
    )


def usable_dir() -> Path:
    """The cache directory, made with mode 0700 if absent; else, with one warning, `private_dir`."""
    directory = cache_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = fault(directory)
    except OSError as error:
        why = f"cannot be used ({error.strerror or error})"
    if why is None:
        return directory
    _warn_once(directory, why)
    return private_dir()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> bytes | None:
    """A file's bytes, None where it is absent, a link, or not its owner's alone to write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        own = found.st_uid == os.geteuid() and not found.st_mode & OTHERS
        return file.read() if stat.S_ISREG(found.st_mode) and own else None


def _write(path: Path, data: bytes) -> None:
    """Put data at path in one step; readers see all of it or what was there before."""
    fd, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def get(directory: Path, key: str) -> tuple[Path, dict[str, Any]] | None:
    """The cubin's path and what was stored beside it; None for an absent or damaged entry."""
    text = _read(directory / f"{key}.json")
    if text is None:
        return None
    try:
        entry = json.loads(text)
        check, data, cubin = entry["check"], entry["data"], entry["cubin"]
        intact = check == _check(key, data, cubin)
    except (ValueError, KeyError, TypeError):
        return None
    path = directory / f"{cubin}.cubin"
    content = _read(path) if intact else None
    return (path, data) if content is not None and _digest(content) == cubin else None


def put(directory: Path, key: str, cubin: bytes, data: Mapping[str, Any]) -> Path:
    """Store an entry; the cubin's path, in `private_dir` where `directory` cannot be written."""
    name = _digest(cubin)
    entry = {"check": _check(key, dict(data), name), "cubin": name, "data": dict(data)}
    text = json.dumps(entry, indent=1).encode()
    try:
        path = directory / f"{name}.cubin"
        _write(path, cubin)
        _write(directory / f"{key}.json", text)
    except OSError as error:
        _warn_once(directory, f"cannot be written ({error.strerror or error})")
        path = private_dir() / f"{name}.cubin"
        _write(path, cubin)
    return path


def _check(key: str, data: dict[str, Any], cubin: str) -> str:
    return _digest(json.dumps([key, data, cubin], sort_keys=True).encode())
