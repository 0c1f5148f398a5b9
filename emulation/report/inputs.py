"""Reads what a report is about from an .npz file that nobody vouches for.

Every header is checked against the archive's own sizes before a byte of data is read, and nothing
is unpickled; all that can be wrong ends in one `InputError`.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
import zipfile
from dataclasses import dataclass
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from emulation.problem import Array, numpy_dtype
from emulation.report.text import printable
from emulation.rounding import round_to

MAX_BYTES = 1 << 30
"""Largest member read, uncompressed; stops archives that unpack to far more than they weigh."""

_REQUIRED, _OPTIONAL, _SCALARS = ("q", "k", "v"), ("dout", "out"), ("scale", "causal")
_FLOATS = "must be float16, bfloat16, float32 or float64"


class InputError(ValueError):
    """What is wrong with an input, as one line "argument: value: rule"."""


@dataclass(frozen=True)
class Capture:
    """q, k, v and, where the file has them, dout, out, scale, causal; in the file's formats."""

    q: Array
    k: Array
    v: Array
    dout: Array | None
    out: Array | None
    scale: float | None
    causal: bool | str | None
    ignored: tuple[str, ...]


def read(path: str) -> Capture:
    """The arrays of an .npz file.

    Raises InputError for anything but a regular, whole, unencrypted archive that holds q, k and v
    as arrays of floats, each at most `MAX_BYTES`; never loads pickles. Arrays saved as
    ml_dtypes.bfloat16 are recognised.
    """
    name = printable(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise InputError(f"INPUT: {name}: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"INPUT: {name}: is a directory, must be an .npz file")
    if not stat.S_ISREG(mode):
        raise InputError(f"INPUT: {name}: must be a regular file")
    # An archive can be broken in as many ways as zipfile, zlib, lzma and the header parser have
    # errors. Whatever they raise is a fact about the file.
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _capture(archive)
    except InputError:
        raise
    except zipfile.BadZipFile as error:
        raise InputError(
            f"INPUT: {name}: {reason(error)}; must be an .npz file (numpy.savez)"
        ) from None
    except Exception as error:
        raise InputError(f"INPUT: {name}: cannot be read: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error) or type(error).__name__, 160)


def _capture(archive: zipfile.ZipFile) -> Capture:
    names = [info.filename for info in archive.infolist()]
    known = {f"{n}.npy" for n in (*_REQUIRED, *_OPTIONAL, *_SCALARS)}
    for required in _REQUIRED:
        if f"{required}.npy" not in names:
            held = ", ".join(printable(n.removesuffix(".npy"), 40) for n in names[:8]) or "nothing"
            raise InputError(
                f"{required}: missing: the file must hold q, k and v (it holds {held})"
            )
    arrays = {n: _array(archive, n) for n in (*_REQUIRED, *_OPTIONAL) if f"{n}.npy" in names}
    return Capture(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        dout=arrays.get("dout"),
        out=arrays.get("out"),
        scale=_scale(archive) if "scale.npy" in names else None,
        causal=_causal(archive) if "causal.npy" in names else None,
        ignored=tuple(printable(n, 60) for n in names if n not in known),
    )


def header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an .npy header."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise InputError(f"{name}: .npy version {version[0]}.{version[1]}: must be 1.0 or 2.0")
    shape, fortran, dtype = readers[version](file)
    if any(n < 0 for n in shape):
        raise InputError(f"{name}: shape {_brief(shape)}: must not be negative")
    if not dtype.itemsize:
        raise InputError(f"{name}: dtype {_brief(dtype)}: {_FLOATS}")
    return shape, fortran, dtype


def member(archive: zipfile.ZipFile, name: str) -> Array:
    """One member without Python objects, its header proven by the sizes in the archive."""
    infos = [info for info in archive.infolist() if info.filename == f"{name}.npy"]
    if len(infos) != 1:
        raise InputError(f"{name}: {len(infos)} members of this name: must be one")
    size = infos[0].file_size
    if size > MAX_BYTES:
        raise InputError(f"{name}: {size} bytes uncompressed: must be at most {MAX_BYTES}")
    with archive.open(infos[0]) as file:
        shape, fortran, dtype = header(file, name)
        if dtype.hasobject:
            raise InputError(f"{name}: holds Python objects: {_FLOATS} (pickles are not loaded)")
        held, claimed = size - file.tell(), math.prod(shape) * dtype.itemsize
        if held != claimed:
            raise InputError(
                f"{name}: shape {_brief(shape)} of {_brief(dtype)} is {_brief(claimed)} bytes: "
                f"must be the {held} bytes in the file"
            )
        data = file.read(claimed)
        # Reading on to the end is what makes zipfile compare the checksum.
        if len(data) != claimed or file.read(1):
            raise InputError(f"{name}: {len(data)} bytes: must be {claimed}, the file is cut short")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _brief(value: object) -> str:
    return printable(value, 60)


def _array(archive: zipfile.ZipFile, name: str) -> Array:
    return checked_floats(name, member(archive, name))


def checked_floats(name: str, x: Array, axes: tuple[int, int] = (2, 4)) -> Array:
    """x in the machine's byte order, if it holds floats in so many axes and is not empty; two bytes
    without a type are bfloat16.
    """
    dtype = x.dtype
    if dtype == np.dtype(ml_dtypes.bfloat16):
        return _shaped(name, x, axes)
    if dtype == np.dtype("V2"):
        # NumPy does not know ml_dtypes.bfloat16 by name and stores its two bytes as void.
        x = x.view(ml_dtypes.bfloat16)
    elif dtype.kind == "f" and dtype.itemsize <= 8:
        x = x.astype(dtype.newbyteorder("="), copy=False)
    else:
        raise InputError(f"{name}: dtype {printable(dtype, 60)}: {_FLOATS}")
    return _shaped(name, x, axes)


def _shaped(name: str, x: Array, axes: tuple[int, int]) -> Array:
    if not axes[0] <= x.ndim <= axes[1]:
        raise InputError(
            f"{name}: shape {_brief(x.shape)}: must be (N, D), (H, N, D) or (B, H, N, D)"
        )
    if not x.size:
        raise InputError(f"{name}: shape {x.shape}: must not be empty")
    return x


def _scalar(archive: zipfile.ZipFile, name: str, rule: str) -> Any:
    x = member(archive, name)
    if x.size != 1 or x.dtype.kind not in "biufU":
        raise InputError(f"{name}: shape {_brief(x.shape)}, dtype {printable(x.dtype, 60)}: {rule}")
    return x.reshape(-1)[0].item()


def _scale(archive: zipfile.ZipFile) -> float:
    rule = "must be one positive finite number"
    value = _scalar(archive, "scale", rule)
    if isinstance(value, bool | str) or not (math.isfinite(value) and value > 0):
        raise InputError(f"scale: {printable(value, 40)}: {rule}")
    return float(value)


def _causal(archive: zipfile.ZipFile) -> bool | str:
    rule = 'must be one of true, false, "bottom-right" and "top-left"'
    value = _scalar(archive, "causal", rule)
    if value in (0, 1):
        return bool(value)
    if value not in ("bottom-right", "top-left"):
        raise InputError(f"causal: {printable(value, 40)}: {rule}")
    return str(value)


def to_format(name: str, x: Array, fmt: str) -> Array:
    """x in the format, every value rounded once; raises InputError where one becomes infinite.

    >>> str(to_format("q", np.array([[1 + 2.0**-8 + 2.0**-40]]), "bfloat16")[0, 0])
    '1.00781'
    """
    target = numpy_dtype(fmt)
    if x.dtype == target:
        return x
    with np.errstate(all="ignore"):
        narrow = round_to(x, fmt) if x.dtype == np.float64 else x.astype(np.float32)
        y = np.asarray(narrow).astype(target)
        lost = np.argwhere(np.isinf(y.astype(np.float32)) & np.isfinite(x.astype(np.float64)))
    if len(lost):
        at = tuple(int(i) for i in lost[0])
        raise InputError(f"{name}: {float(x[at]):g} at {at}: must be within the range of {fmt}")
    return y


def check_finite(name: str, x: Array) -> None:
    """Raises InputError at the first NaN or infinity."""
    bad = np.argwhere(~np.isfinite(x.astype(np.float64)))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise InputError(f"{name}: {float(x[at])} at {at}: must be finite")
