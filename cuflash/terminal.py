"""What every command does with stdout and stderr: Markdown out, one line for what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys

from emulation.report.inputs import InputError
from emulation.report.text import printable


def usable() -> None:
    """Before the work: stdout must be open. A closed stderr becomes silence."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # lives as long as the process
    if sys.stdout is None:
        raise InputError("stdout: closed: must be open")


def tell(line: str) -> None:
    """One line on stderr, where it does not mix with what is piped."""
    with contextlib.suppress(OSError):
        print(f"cuflash: {printable(line)}", file=sys.stderr, flush=True)


def write(markdown: str) -> None:
    """Markdown on stdout, drawn by rich on a terminal.

    Raises BrokenPipeError where the reader left, and InputError where it cannot be written; the
    rest of the process is then spared its flush.
    """
    with contextlib.suppress(AttributeError, ValueError):
        # An ASCII terminal still gets the figures.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        if sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.markdown import Markdown

                Console().print(Markdown(markdown))
                return
        sys.stdout.write(markdown)
        sys.stdout.flush()
    except BrokenPipeError:
        detach()
        raise
    except OSError as error:
        detach()
        reason = error.strerror or str(error)
        raise InputError(f"stdout: cannot be written: {reason}") from None


def detach() -> None:
    """Point stdout at nothing: Python's flush at exit needs a descriptor that takes it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
