"""What a claim is: tasks, figures gathered from them, and a rule that makes the verdict.

Nobody writes a verdict: `judge` sees the figures and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from emulation.claims.settings import Settings
from emulation.claims.tasks import Outcome, Task, run_tasks

#: The last is no verdict: what the rule needs is not there.
Kind = Literal["holds", "holds if", "does not hold", "not measured"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """kind, and one sentence in figures: the condition of "holds if", or what is true instead.

    condition: the same in a few words, for a table; of "holds if" and "not measured".
    """

    kind: Kind
    text: str
    condition: str = ""


@dataclass(frozen=True)
class Plot:
    """Lines or points over a common x: data, so that it can be drawn again from the JSON.

    series: name -> [[x, y], ...]; a name that is a group of `sources` has that group's colour.
    """

    title: str
    x: str
    y: str
    series: dict[str, list[list[float]]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class ClaimResult:
    """Figures, setting, seeds and verdict of one claim. seconds: of all its tasks, added up.

    missing: parts that were not measured, each with what it needs.
    """

    number: int
    title: str
    says: str
    rule: str
    setting: str
    verdict: Verdict
    figures: Figures
    table: list[dict[str, Any]]
    plots: list[Plot]
    seeds: dict[str, int]
    seconds: float
    cpu_seconds: float
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    says: the article's sentence. rule: `judge` in words. setting: what is measured on what.
    gather: {task name: value} -> figures; tabulate and draw show figures. missing: the parts that
    these settings, or what is installed, leave out.
    """

    number: int
    title: str
    says: str
    rule: str
    setting: Callable[[Settings], str]
    tasks: Callable[[Settings], list[Task]]
    gather: Callable[[Mapping[str, Any]], Figures]
    judge: Callable[[Figures], Verdict]
    tabulate: Callable[[Figures], list[dict[str, Any]]]
    draw: Callable[[Figures], list[Plot]]
    missing: Callable[[Settings], list[str]] = lambda _: []

    def run(self, settings: Settings) -> ClaimResult:
        """Run the claim alone."""
        tasks = self.tasks(settings)
        return self.conclude(settings, tasks, run_tasks(tasks, settings))

    def conclude(
        self, settings: Settings, tasks: Sequence[Task], outcomes: Sequence[Outcome]
    ) -> ClaimResult:
        """The result, from the outcomes of this claim's tasks."""
        values = {task.name: outcome.value for task, outcome in zip(tasks, outcomes, strict=True)}
        figures = self.gather(values)
        return ClaimResult(
            number=self.number,
            title=self.title,
            says=self.says,
            rule=self.rule,
            setting=self.setting(settings),
            verdict=self.judge(figures),
            figures=figures,
            table=self.tabulate(figures),
            plots=self.draw(figures),
            seeds={task.name: task.seed for task in tasks},
            seconds=sum(outcome.seconds for outcome in outcomes),
            cpu_seconds=sum(outcome.cpu_seconds for outcome in outcomes),
            missing=self.missing(settings),
        )


def cells_and_kernels(values: Mapping[str, Any]) -> Figures:
    """Outcomes of the emulator's tasks, and of those whose names begin with "kernel "."""
    kernels = {name for name in values if name.startswith("kernel ")}
    return {
        "cells": [v for name, v in values.items() if name not in kernels],
        "kernels": [v for name, v in values.items() if name in kernels],
    }


def no_gpu(settings: Settings) -> list[str]:
    """The kernels, as a missing part, where no GPU is used."""
    return [] if settings.gpu else ["the kernels themselves (needs --full and a GPU)"]


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more.

    >>> listed(["a", "b"]), listed(list("abcdefg"), most=2)
    ('a, b', 'a, b and 5 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def task(
    claim: int,
    name: str,
    function: Callable[..., Any],
    gpu: bool = False,
    cost: float = 0.0,
    **arguments: Any,
) -> Task:
    """A Task of a module-level function."""
    where = f"{function.__module__}:{function.__qualname__}"
    return Task(claim, name, where, arguments, gpu, cost)
