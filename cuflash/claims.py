"""`cuflash claims`: the article's claims, measured with the emulator and, on a GPU, the kernels."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulation.claims import MODULES, Claim, Settings, claims, measure, page
from emulation.claims import gpu as gpu_tasks
from emulation.claims.tasks import Outcome, Task
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError


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
        help="under three minutes on two cores, no GPU used (default)",
    )
    size.add_argument(
        "--full", action="store_true", help="the published sizes; uses a GPU where there is one"
    )
    parser.add_argument("--data", metavar="FOLDER", help="captures beside the bundled one")
    parser.add_argument(
        "--dask", metavar="ADDRESS", help="run on the workers of this Dask scheduler"
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="processes (default: one per core)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure all again, resume nothing that is finished"
    )
    parser.add_argument(
        "-o",
        "--output",
        default="claims.html",
        metavar="FILE",
        help="HTML, with .md and .json beside it (default: claims.html)",
    )


def _numbers(value: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", value):
        raise argparse.ArgumentTypeError(f"{value or 'empty'}: must be N or N,N,...")
    numbers = [int(n) for n in value.split(",")]
    for n in numbers:
        if n not in MODULES:
            raise argparse.ArgumentTypeError(f"{n}: must be 1 to {max(MODULES)}")
    return numbers


def _positive(value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", value) or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value or 'empty'}: must be an integer >= 1")
    return int(value)


def cache_folder() -> str:
    """Where finished tasks are kept: the user's cache, or below CUFLASH_CACHE_DIR."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.environ.get("CUFLASH_CACHE_DIR") or os.path.join(base, "cuflash")
    return os.path.join(root, "claims")


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, write the three files, return the Markdown. Raises InputError."""
    stem = args.output.removesuffix(".html")
    if not stem:
        raise InputError("--output: empty: must name a file")
    files = {
        kind: OutputFile.check("--output", f"{stem}.{kind}") for kind in ("html", "md", "json")
    }
    try:
        from emulation.claims import plots  # noqa: F401
    except ImportError as error:
        raise InputError(f"--output: {args.output}: {error}") from None
    if args.data is not None and not (Path(args.data) / "manifest.json").is_file():
        raise InputError(f"--data: {args.data}: must be a folder with a manifest.json")
    use_gpu = args.full and gpu_tasks.available()
    settings = Settings(
        size="full" if args.full else "quick",
        gpu=use_gpu,
        data=args.data,
        kernels="cuflash",
        workers=args.workers,
        dask=args.dask,
        cache=None if args.fresh else cache_folder(),
    )
    chosen = claims(args.only)
    with _Bars(chosen, settings) as bars:
        try:
            results = measure(chosen, settings, bars.done)
        except ImportError as error:
            raise InputError(f"claims: {error}") from None
        except OSError as error:
            if args.dask is None:
                raise
            raise InputError(f"--dask: {args.dask}: {error}") from None
    machine = machine_of(use_gpu)
    files["json"].write(page.to_json(results, machine=machine, command=command))
    files["md"].write(page.to_markdown(results, full=args.full))
    files["html"].write(page.to_html(results, machine=machine, command=command, full=args.full))
    return page.to_markdown(results, full=args.full)


def machine_of(use_gpu: bool) -> dict[str, Any]:
    """What the figures were made on."""
    found: dict[str, Any] = {"processor": platform.machine(), "cores": os.cpu_count()}
    if use_gpu:
        cp = importlib.import_module("cupy")
        found["gpu"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found["cupy"] = cp.__version__
    return found


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
