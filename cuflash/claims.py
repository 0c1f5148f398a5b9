"""`cuflash claims`: the article's claims, measured with the emulator and, on a GPU, the kernels."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cuflash import terminal
from emulation.claims import MODULES, Claim, ClaimResult, Settings, claims, measure, page
from emulation.claims import gpu as gpu_tasks
from emulation.claims.machine import describe
from emulation.claims.tasks import Outcome, Task, reach
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError

MOST_WORKERS = 9999
"""More processes are a slip of the hand; there are never more than tasks."""


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    known = f"1 to {max(MODULES)}"
    parser.add_argument(
        "--only", type=_numbers, metavar="N[,N...]", help=f"only these claims ({known})"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="about 90 s of CPU over all cores, no GPU used (default)",
    )
    size.add_argument(
        "--full", action="store_true", help="the published sizes; uses a GPU where there is one"
    )
    parser.add_argument("--data", metavar="FOLDER", help="captures beside the bundled one")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dask", metavar="ADDRESS", help="run on the workers of this Dask scheduler"
    )
    where.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help=f"processes, 1 to {MOST_WORKERS}, never more than tasks (default: one per core)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure all again, resume nothing that is finished"
    )
    parser.add_argument(
        "-o",
        "--output",
        default="claims.html",
        metavar="FILE",
        help="a name in .html; .md and .json go beside it (default: claims.html)",
    )


def _numbers(value: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", value):
        raise argparse.ArgumentTypeError(f"{value or 'empty'}: must be N or N,N,...")
    numbers = [int(n) for n in value.split(",")]
    for n in numbers:
        if n not in MODULES:
            raise argparse.ArgumentTypeError(f"{n}: must be 1 to {max(MODULES)}")
    if len(set(numbers)) != len(numbers):
        raise argparse.ArgumentTypeError(f"{value}: must name each claim once")
    return numbers


def _workers(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or not 1 <= int(value) <= MOST_WORKERS:
        rule = f"must be an integer, 1 to {MOST_WORKERS}"
        raise argparse.ArgumentTypeError(f"{value or 'empty'}: {rule}")
    return int(value)


def cache_folder() -> str:
    """Where finished tasks are kept: the user's cache, or below CUFLASH_CACHE_DIR."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.environ.get("CUFLASH_CACHE_DIR") or os.path.join(base, "cuflash")
    return os.path.join(root, "claims")


def _usable_cache() -> str | None:
    """The cache folder, or None after one line where it cannot be written."""
    folder = cache_folder()
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        terminal.tell(f"CUFLASH_CACHE_DIR: {folder}: {reason}: goes on, and keeps nothing")
        return None


def _files(output: str) -> dict[str, OutputFile]:
    """The checked places of the three files. Raises InputError."""
    if not output:
        raise InputError("--output: empty: must name a file")
    if os.path.isdir(output):
        raise InputError(f"--output: {output}: must be a file, not a directory")
    stem, kind = os.path.splitext(output)
    if kind != ".html":
        raise InputError(f"--output: {output}: must end in .html (.md and .json go beside it)")
    files = {k: OutputFile.check("--output", f"{stem}.{k}") for k in ("html", "md", "json")}
    for file in files.values():
        if file.direct:
            raise InputError(f"--output: {file.path}: must be a file, not a device or pipe")
    return files


class _Terminated(BaseException):
    """SIGTERM arrived."""


@contextlib.contextmanager
def _stoppable(kept: bool) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the work and its processes, and leave one line."""

    def stop(number: int, _: object) -> NoReturn:
        # Threads that feed the workers lose them, and would say so at length.
        threading.excepthook = lambda _: None
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # nobody else may set them
        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    how = "run again to go on" if kept else "nothing is kept"
    try:
        yield
    except KeyboardInterrupt:
        terminal.tell(f"interrupted; {how}")
        raise
    except _Terminated:
        terminal.tell(f"terminated; {how}")
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, write the three files, return the Markdown. Raises InputError."""
    files = _files(args.output)
    try:
        from emulation.claims import plots  # noqa: F401
    except ImportError as error:
        raise InputError(f"--output: {args.output}: {error}") from None
    if args.data is not None and not (Path(args.data) / "manifest.json").is_file():
        raise InputError(f"--data: {args.data}: must be a folder with a manifest.json")
    cache = None if args.fresh else _usable_cache()
    with _stoppable(cache is not None):
        results, use_gpu = _measured(args, cache)
    machine = describe(use_gpu)
    files["json"].write(page.to_json(results, machine=machine, command=command))
    files["md"].write(page.to_markdown(results, full=args.full))
    files["html"].write(page.to_html(results, machine=machine, command=command, full=args.full))
    stem = args.output.removesuffix(".html")
    terminal.tell("wrote " + ", ".join(f"{stem}.{kind}" for kind in files))
    return page.to_markdown(results, full=args.full)


def _measured(args: argparse.Namespace, cache: str | None) -> tuple[list[ClaimResult], bool]:
    if args.dask is not None:
        # Before any work, and also where all of it is finished already.
        try:
            reach(args.dask)
        except (ImportError, OSError, ValueError) as error:
            raise InputError(f"--dask: {args.dask}: {error}") from None
    use_gpu = args.full and gpu_tasks.available()
    settings = Settings(
        size="full" if args.full else "quick",
        gpu=use_gpu,
        data=args.data,
        kernels="cuflash",
        workers=args.workers,
        dask=args.dask,
        cache=cache,
    )
    chosen = claims(args.only)
    with _Bars(chosen, settings) as bars:
        try:
            return measure(chosen, settings, bars.done), use_gpu
        except ImportError as error:
            raise InputError(f"claims: {error}") from None
        except OSError as error:
            if args.dask is None:
                raise
            raise InputError(f"--dask: {args.dask}: {error}") from None


class _Bars:
    """A bar for every claim where stderr is a terminal and rich is installed, else a line when a
    claim's tasks are done.
    """

    def __init__(self, chosen: Sequence[Claim], settings: Settings) -> None:
        self.left = Counter(t.claim for claim in chosen for t in claim.tasks(settings))
        self.titles = {claim.number: claim.title for claim in chosen}
        self.seconds: dict[int, float] = defaultdict(float)
        self.start = time.monotonic()
        self.bars: Any = None
        self.rows: dict[int, Any] = {}

    def __enter__(self) -> _Bars:
        if sys.stderr.isatty():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return self
            self.bars = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            for number, title in self.titles.items():
                name = f"{number:>2} {title}"
                self.rows[number] = self.bars.add_task(name, total=self.left[number])
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def done(self, task: Task, outcome: Outcome) -> None:
        """One task is finished."""
        self.left[task.claim] -= 1
        self.seconds[task.claim] += 0 if outcome.kept else outcome.seconds
        if self.bars is not None:
            self.bars.advance(self.rows[task.claim])
        elif not self.left[task.claim]:
            line = f"cuflash: claim {task.claim}: {self.seconds[task.claim]:.1f} s of work, "
            line += f"done after {time.monotonic() - self.start:.1f} s"
            print(line, file=sys.stderr, flush=True)
