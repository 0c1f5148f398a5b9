"""What a claim is: tasks, figures gathered from them, and a rule that makes the verdict.

Nobody writes a verdict: `judge` sees the figures and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from emulation.claims.settings import Settings
from emulation.claims.tasks import Outcome, Task, run_tasks

Kind = Literal["holds", "holds if", "does not hold"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """kind, and one sentence in figures: the condition of "holds if", or what is true instead."""

    kind: Kind
    text: str


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
    """Figures, setting, seeds and verdict of one claim. seconds: of all its tasks, added up."""

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


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    says: the article's sentence. rule: `judge` in words. setting: what is measured on what.
    gather: {task name: value} -> figures; tabulate and draw show figures.
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
        )


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
