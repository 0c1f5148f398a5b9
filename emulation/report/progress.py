"""A bar for work of over a second; silent where nobody watches or rich is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from emulation.report.text import printable


class Progress:
    """A bar on stderr for work of over a second, if that is a terminal and rich is installed."""

    def __init__(self, total: float) -> None:
        self.total, self.done, self.now = total, 0.0, 0.0
        self.start = time.monotonic()
        self.bar: Any = None
        self.enabled = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def announce(self, seconds: float) -> None:
        """One line before work of over ten seconds, where no bar will be seen."""
        if seconds >= 10 and not self.enabled:
            digits = 10 ** (len(str(int(seconds))) - 1)
            about = round(seconds / digits) * digits
            line = f"cuflash: about {about} s of work (--rows and --head choose less)"
            print(line, file=sys.stderr, flush=True)

    def part(self, weight: float, title: str, stages: int = 1) -> Callable[[str, float], None]:
        """The callback for the next piece of work, which counts `weight` of the total.

        The work may run through `stages` stages, each from 0 to 1.
        """
        base, self.done = self.done, self.done + weight
        passed, last = 0, 0.0

        def report(stage: str, fraction: float) -> None:
            nonlocal passed, last
            if fraction < last:
                passed = min(passed + 1, stages - 1)
            last = fraction
            inside = (passed + min(max(fraction, 0.0), 1.0)) / stages
            self.show(base + weight * inside, printable(f"{title}: {stage}", 60))

        return report

    def show(self, value: float, text: str) -> None:
        """Move the bar; it appears at the first call after a second."""
        if not self.enabled:
            return
        if self.bar is None:
            if time.monotonic() - self.start < 1.0:
                return
            try:
                from rich import progress as rich_progress
                from rich.console import Console
            except ImportError:
                self.enabled = False
                return
            columns = (
                rich_progress.TextColumn("{task.description}", markup=False),
                rich_progress.BarColumn(),
                rich_progress.TimeRemainingColumn(),
            )
            self.bar = rich_progress.Progress(
                *columns, console=Console(stderr=True), transient=True
            )
            self.task = self.bar.add_task(text, total=self.total)
            self.bar.start()
        self.now = max(self.now, value)
        self.bar.update(self.task, completed=self.now, description=text)
