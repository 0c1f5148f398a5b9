"""Reads single arrays from files that nobody vouches for: .npy, .npz and .safetensors.

FILE, or FILE:NAME for one array among several. Headers are checked against the file's size before
data is read, nothing is unpickled, and what can be wrong ends in one `InputError`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import warnings
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from emulation.problem import Array
from emulation.report.inputs import MAX_BYTES, InputError, checked_floats, header, member, reason
from emulation.report.text import printable

#: Formats of a .safetensors header that hold floats.
_SAFE: dict[str, Any] = {
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip
_ENDS = (".npy", ".npz", ".safetensors")
_MAX_HEADER = 100 << 20


def read_array(
    argument: str, path: str, name: str | None = None, axes: tuple[int, int] = (2, 4)
) -> Array:
    """One array of floats. argument: what the error names; name: which array where a file has
    several and the path does not say (FILE:NAME): by default that of the argument.

    Raises InputError for anything but a regular, whole file of a known kind that holds such an
    array, of at most `MAX_BYTES`. bfloat16 is recognised in all three (.npy and .npz: as the two
    bytes that ml_dtypes saves).
    """
    file, colon, chosen = path.rpartition(":")
    if colon and not os.path.exists(path) and re.search(r"\.(npz|safetensors)$", file):
        path, name = file, chosen
    shown = printable(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}: {shown}: {reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{argument}: {shown}: must be a regular file")
    end = os.path.splitext(path)[1]
    if end not in _ENDS:
        raise InputError(f"{argument}: {shown}: must end in {', '.join(_ENDS)}")
    wanted = name or argument.lstrip("-")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if end == ".npy":
                x = _npy(argument, path)
            elif end == ".npz":
                x = _npz(argument, path, wanted)
            else:
                x = _safetensors(argument, path, wanted)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{argument}: {shown}: cannot be read: {reason(error)}") from None
    return checked_floats(argument, x, axes)


def _npy(argument: str, path: str) -> Array:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if file.read(6) != npy.MAGIC_PREFIX:
            raise InputError(f"{argument}: {printable(path)}: is no .npy file (numpy.save)")
        file.seek(0)
        shape, fortran, dtype = header(file, argument)
        if dtype.hasobject:
            raise InputError(f"{argument}: holds Python objects: must hold floats")
        held, claimed = size - file.tell(), math.prod(shape) * dtype.itemsize
        _check_size(argument, held, claimed, f"shape {shape} of {dtype}")
        data = file.read(claimed)
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _check_size(argument: str, held: int, claimed: int, what: str) -> None:
    if claimed > MAX_BYTES:
        raise InputError(f"{argument}: {claimed} bytes: must be at most {MAX_BYTES}")
    if held != claimed:
        short = ", the file is cut short" if held < claimed else ""
        raise InputError(
            f"{argument}: {printable(what, 80)} is {claimed} bytes: must be the {held} bytes "
            f"in the file{short}"
        )


def _pick(argument: str, names: list[str], wanted: str) -> str:
    if wanted in names:
        return wanted
    if len(names) == 1:
        return names[0]
    held = ", ".join(printable(n, 40) for n in names[:8]) or "nothing"
    raise InputError(f"{argument}: no array {printable(wanted, 40)} in the file: must be of {held}")


def _npz(argument: str, path: str, wanted: str) -> Array:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n.removesuffix(".npy") for n in archive.namelist()]
            return member(archive, _pick(argument, names, wanted))
    except zipfile.BadZipFile as error:
        raise InputError(
            f"{argument}: {printable(path)}: {reason(error)}; must be an .npz file (numpy.savez)"
        ) from None


def _safetensors(argument: str, path: str, wanted: str) -> Array:
    """The format: eight bytes of length, a JSON header of that length, then the data."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise InputError(
                f"{argument}: {printable(path)}: header of {length} bytes: must be within the "
                f"{size} bytes of a .safetensors file"
            )
        table = json.loads(file.read(length))
        entries = {n: e for n, e in table.items() if n != "__metadata__"}
        entry = entries[_pick(argument, list(entries), wanted)]
        kind, shape = entry["dtype"], [int(n) for n in entry["shape"]]
        if kind not in _SAFE or any(n < 0 for n in shape):
            raise InputError(
                f"{argument}: {printable(kind, 20)} of shape {printable(shape, 60)}: "
                f"must be one of {', '.join(_SAFE)}"
            )
        first, last = (int(n) for n in entry["data_offsets"])
        claimed = math.prod(shape) * np.dtype(_SAFE[kind]).itemsize
        if not 0 <= first <= last:
            raise InputError(f"{argument}: offsets {first} to {last}: must ascend from 0 on")
        _check_size(argument, last - first, claimed, f"shape {tuple(shape)} of {kind}")
        left = size - 8 - length - first
        if left < claimed:
            _check_size(argument, max(left, 0), claimed, f"shape {tuple(shape)} of {kind}")
        file.seek(8 + length + first)
        data = file.read(claimed)
    return np.frombuffer(data, _SAFE[kind]).reshape(shape)
