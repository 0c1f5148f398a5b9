"""Writes report files whole or not at all, and finds out before the work whether it can."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass

from emulation.report.inputs import InputError
from emulation.report.text import printable


@dataclass(frozen=True)
class OutputFile:
    """A checked place for a file. `direct`: a device or pipe, written in place."""

    argument: str
    path: str
    direct: bool

    @staticmethod
    def check(argument: str, path: str) -> OutputFile:
        """Prove by a temporary file that `path` can be written. Raises InputError."""
        shown = printable(path)
        if not path:
            raise InputError(f"{argument}: empty: must name a file")
        try:
            # Through links, so that a linked file is written rather than its link replaced.
            real = os.path.realpath(path)
            try:
                kind, exists = os.stat(real).st_mode, True
            except FileNotFoundError:
                kind, exists = stat.S_IFREG, False
            if stat.S_ISDIR(kind):
                raise InputError(f"{argument}: {shown}: must be a file, not a directory")
            if exists and not os.access(real, os.W_OK):
                raise InputError(f"{argument}: {shown}: must be writable")
            if not stat.S_ISREG(kind):
                return OutputFile(argument, real, True)
            handle, probe = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".cuflash-")
            os.close(handle)
            os.unlink(probe)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"{argument}: {shown}: cannot be written: {printable(reason)}"
            ) from None
        return OutputFile(argument, real, False)

    def write(self, content: str) -> None:
        """Write UTF-8 text, whole or not at all. Raises InputError."""
        try:
            if self.direct:
                with open(self.path, "w", encoding="utf-8", newline="\n") as file:
                    file.write(content)
                return
            self._replace(content.encode())
        except OSError as error:
            reason = printable(error.strerror or str(error))
            raise InputError(
                f"{self.argument}: {printable(self.path)}: cannot be written: {reason}"
            ) from None

    def _replace(self, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(self.path), prefix=".cuflash-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                # mkstemp gives 0600; a new file gets open()'s mode, an old one keeps its own.
                try:
                    mode = stat.S_IMODE(os.stat(self.path).st_mode)
                except FileNotFoundError:
                    umask = os.umask(0)
                    os.umask(umask)
                    mode = 0o666 & ~umask
                os.fchmod(file.fileno(), mode)
            os.replace(temporary, self.path)
        except BaseException:
            # Also for Ctrl-C between the two.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
