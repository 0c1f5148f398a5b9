"""Independent pieces of work: seeded by their own key, run in any order by any number of workers,
kept when finished.

A task is a module-level function and JSON arguments, and its result is JSON. Its seed comes from
what it is, so results do not depend on who runs it or when; each runs on one thread, since a
threaded BLAS may add in another order.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulation import rounding
from emulation.claims.settings import Settings
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError
from emulation.report.json_report import plain
from emulation.report.text import install

#: Bumped by hand never: the text of every module is in the key (`sources_digest`).
SCHEMA = "cuflash.task/1"

#: How long a Dask scheduler may take to answer.
CONNECT_SECONDS = 3

Done = Callable[["Task", "Outcome"], None]


@dataclass(frozen=True)
class Task:
    """One piece of work of a claim.

    function: "module:name", called as name(seed=..., **arguments). gpu: needs the GPU, so it runs
    in the calling process, one at a time. name is unique within its claim. cost: in any unit;
    the costliest start first, so that none is left alone at the end.
    """

    claim: int
    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False
    cost: float = 0.0

    @property
    def identity(self) -> str:
        """What the task is, as canonical JSON; where the captures lie (`data`) is no part of it."""
        arguments = {name: value for name, value in self.arguments.items() if name != "data"}
        return json.dumps(
            [self.claim, self.name, self.function, arguments], sort_keys=True, allow_nan=False
        )

    @property
    def seed(self) -> int:
        """31 bits of the identity's digest.

        >>> Task(4, "a", "m:f").seed == Task(4, "a", "m:f").seed != Task(4, "b", "m:f").seed
        True
        """
        return int.from_bytes(hashlib.sha256(self.identity.encode()).digest()[:4], "big") >> 1

    @property
    def key(self) -> str:
        """Name of the kept result: changes with the task and with the text of this package."""
        text = "\n".join((SCHEMA, sources_digest(), str(self.gpu), self.identity))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Outcome:
    """What a task gave, and what it took. kept: found among the finished ones."""

    value: Any
    seconds: float
    cpu_seconds: float
    kept: bool = False


@functools.cache
def sources_digest() -> str:
    """Digest of the text of every module of `emulation`: results of other code are not resumed."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """BLAS and the emulator's own loops on one thread each."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits(1))
        if "torch" in sys.modules:
            torch: Any = sys.modules["torch"]
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        fast = rounding.fast_path(importlib.import_module("numpy"))
        if fast is not None:
            loops: Any = fast
            stack.callback(setattr, loops, "WORKERS", loops.WORKERS)
            loops.WORKERS = 1
        yield


def execute(task: Task) -> Outcome:
    """Run one task here. Its value is what JSON makes of it, so a kept one is the same."""
    module, _, name = task.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    start, cpu = time.perf_counter(), time.process_time()
    with one_thread():
        value = function(seed=task.seed, **task.arguments)
    value = json.loads(json.dumps(plain(value), allow_nan=False))
    return Outcome(value, time.perf_counter() - start, time.process_time() - cpu)


def _path(cache: str, task: Task) -> Path:
    return Path(cache) / f"{task.key}.json"


def _kept(settings: Settings, task: Task) -> Outcome | None:
    if settings.cache is None:
        return None
    try:
        text = _path(settings.cache, task).read_text(encoding="utf-8")
        found = json.loads(text)
        return Outcome(found["value"], found["seconds"], found["cpu_seconds"], kept=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a file that cannot be read is work not done


def _keep(cache: str | None, task: Task, outcome: Outcome) -> None:
    if cache is None:
        return
    data = {"task": json.loads(task.identity), "value": outcome.value}
    data |= {"seconds": outcome.seconds, "cpu_seconds": outcome.cpu_seconds}
    text = json.dumps(data, allow_nan=False)
    with contextlib.suppress(InputError):  # a full disk: the work is done, and kept by nobody
        OutputFile("--cache", str(_path(cache, task)), False).write(text)


def _execute_and_keep(index: int, task: Task, cache: str | None) -> tuple[int, Outcome]:
    outcome = execute(task)
    _keep(cache, task, outcome)
    return index, outcome


def run_tasks(tasks: Sequence[Task], settings: Settings, done: Done | None = None) -> list[Outcome]:
    """Outcomes in the order of the tasks; `done` is called after each, in this thread.

    Finished tasks of `settings.cache` are taken from there, and every task is kept as soon as it
    is done, so that an interrupted run goes on where it was. Tasks of the GPU run here while the
    workers have the others. Raises what a task raises, and ValueError for two tasks of one
    identity.
    """
    if len({task.identity for task in tasks}) != len(tasks):
        raise ValueError("tasks: two of one identity, names must be unique within a claim")
    if settings.cache is not None:
        os.makedirs(settings.cache, exist_ok=True)
    outcomes: dict[int, Outcome] = {}

    def finish(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        if done is not None:
            done(tasks[index], outcome)

    here: list[int] = []
    there: list[int] = []
    for index, task in enumerate(tasks):
        kept = _kept(settings, task)
        if kept is not None:
            finish(index, kept)
        else:
            (here if task.gpu else there).append(index)
    there.sort(key=lambda index: -tasks[index].cost)
    with _workers(settings, tasks, there) as results:
        for index in here:
            outcome = execute(tasks[index])
            _keep(settings.cache, tasks[index], outcome)
            finish(index, outcome)
        for index, outcome in results:
            if settings.dask is not None:  # its workers may have other disks
                _keep(settings.cache, tasks[index], outcome)
            finish(index, outcome)
    return [outcomes[index] for index in range(len(tasks))]


@contextlib.contextmanager
def _workers(
    settings: Settings, tasks: Sequence[Task], indices: Sequence[int]
) -> Iterator[Iterator[tuple[int, Outcome]]]:
    """Results of the tasks at `indices` as they finish, in any order."""
    if not indices:
        yield iter(())
        return
    try:
        import joblib
    except ImportError as error:
        raise ImportError(f"claims run through joblib: {install('claims')}") from error
    with contextlib.ExitStack() as stack:
        if settings.dask is None:
            # This process needs a core of its own where it drives a GPU.
            cores = max(1, joblib.cpu_count() - settings.gpu)
            workers = min(settings.workers or cores, len(indices))
            cache = settings.cache
            stack.enter_context(joblib.parallel_config("loky", inner_max_num_threads=1))
            # A worker that has grown is replaced, which is fine; where warnings are errors, this
            # one would end the thread that replaces it.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", message="A worker stopped while", category=UserWarning
            )
        else:
            stack.enter_context(_client(settings.dask))
            stack.enter_context(joblib.parallel_config("dask"))
            workers, cache = -1, None
        pool = joblib.Parallel(
            n_jobs=workers,
            batch_size=1,
            pre_dispatch="all",
            return_as="generator_unordered",
        )
        call = joblib.delayed(_execute_and_keep)
        with _ignored_interrupts():
            results = pool(call(index, tasks[index], cache) for index in indices)
        stack.callback(results.close)
        try:
            yield results
        except BaseException:
            if settings.dask is None:
                _end_workers()
            raise


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Processes born meanwhile ignore Ctrl-C, which reaches all of a terminal: the caller ends
    them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_workers() -> None:
    """End loky's processes now: nobody waits for what they do."""
    loky: Any = importlib.import_module("joblib.externals.loky")
    loky.get_reusable_executor().shutdown(wait=True, kill_workers=True)
    # The thread that fed them may still let go of a semaphore; stopped midway by the end of the
    # interpreter, it would leave one whose tracker complains.
    for thread in threading.enumerate():
        if "Feeder" in thread.name:
            thread.join(timeout=2)


def reach(address: str) -> None:
    """Connect to the Dask scheduler at `address` and leave again.

    Raises OSError within seconds where nothing answers or what does is no scheduler, ValueError
    for what is no address, and ImportError with the command that installs dask.
    """
    try:
        with _client(address):
            pass
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # whatever else reading another protocol's answer ends in
        raise OSError("what answers there is no Dask scheduler") from error


def _client(address: str) -> Any:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise ImportError(f"needs dask: {install('claims')}") from error
    try:
        return distributed.Client(address, set_as_default=True, timeout=CONNECT_SECONDS)
    except Exception as error:
        failed = error
    # A half-made client is closed when it is collected, and a collection while another one starts
    # would wait for that one's lock for ever. So it goes here, once no traceback holds it.
    link: BaseException | None = failed
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()
    raise failed
