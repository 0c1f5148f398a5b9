"""How claims run: tasks seeded by what they are, resumed, the same for any workers; the command."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cuflash import cli
from emulation.claims import Settings, claims, measure, tasks
from emulation.claims.claim import task
from emulation.claims.tasks import Outcome, Task, reach, run_tasks

ROOT = Path(__file__).parent.parent
CHOSEN = [2, 3, 5]


def figures(settings: Settings) -> list[Any]:
    return [(r.number, r.figures, r.verdict, r.seeds) for r in measure(claims(CHOSEN), settings)]


def square(seed: int, *, x: float, log: str) -> dict[str, Any]:
    """A task of the tests; writes down that it ran."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{x}\n")
    if x < 0:
        raise ValueError("x: negative, must be 0 or more")
    return {"seed": seed, "square": x * x}


def squares(log: Path, *xs: float) -> list[Task]:
    return [task(99, str(x), square, x=x, log=str(log)) for x in xs]


def test_seeds_come_from_the_task() -> None:
    settings = Settings("tiny")
    for claim in claims(CHOSEN):
        first, again = (claim.tasks(settings) for _ in range(2))
        assert [t.seed for t in first] == [t.seed for t in again]
        assert len({t.seed for t in first}) == len(first)
    # Where captures lie, what a task costs and who runs it change neither seed nor result.
    a = Task(1, "a", "m:f", {"n": 1, "data": "/one"})
    assert a.seed == Task(1, "a", "m:f", {"n": 1, "data": "/two"}, cost=3.0).seed
    assert a.seed != Task(1, "a", "m:f", {"n": 2}).seed


def test_any_number_of_workers_gives_the_same() -> None:
    one = figures(Settings("tiny", workers=1))
    assert one == figures(Settings("tiny", workers=2))


def test_a_dask_cluster_gives_the_same() -> None:
    distributed: Any = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster
    ):  # fmt: skip
        found = figures(Settings("tiny", dask=cluster.scheduler_address))
    assert found == figures(Settings("tiny", workers=1))


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", str(tmp_path / "cache")
    settings = Settings("tiny", workers=1, cache=cache)
    with pytest.raises(ValueError, match="x: negative"):
        run_tasks(squares(log, 1.0, 2.0, -1.0, 3.0), settings)
    before = log.read_text().split()
    assert "1.0" in before
    done: list[tuple[Task, Outcome]] = []
    found = run_tasks(squares(log, 1.0, 2.0, 3.0), settings, lambda t, o: done.append((t, o)))
    assert [o.value["square"] for o in found] == [1.0, 4.0, 9.0]
    # Nothing that was kept ran again, and the kept are the same as fresh ones.
    assert sorted(log.read_text().split()) == sorted({*before, "2.0", "3.0"})
    assert next(o.kept for o in found)
    assert len(done) == 3
    fresh = run_tasks(squares(log, 1.0, 2.0, 3.0), Settings("tiny", workers=1))
    assert [o.value for o in fresh] == [o.value for o in found]


def test_other_code_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, settings = tmp_path / "log", Settings("tiny", workers=1, cache=str(tmp_path / "cache"))
    run_tasks(squares(log, 1.0), settings)
    assert run_tasks(squares(log, 1.0), settings)[0].kept
    monkeypatch.setattr(tasks, "sources_digest", lambda: "of another package")
    assert not run_tasks(squares(log, 1.0), settings)[0].kept


def test_a_broken_file_is_work_not_done(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    settings = Settings("tiny", workers=1, cache=str(cache))
    run_tasks(squares(log, 1.0), settings)
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text()[:20])
    assert run_tasks(squares(log, 1.0), settings)[0].value["square"] == 1.0


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="size: got 'huge', must be one of tiny, quick, full"):
        Settings("huge")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernels: None"):
        Settings("full", gpu=True)
    with pytest.raises(ValueError, match="claim: got 13, must be 1 to 12"):
        claims([13])
    with pytest.raises(ValueError, match="tasks: two of one identity"):
        run_tasks(squares(Path("log"), 1.0, 1.0), Settings("tiny"))


# -- The command -----------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.html"
    words = ["claims", "--only", "3,2", "--quick", "--workers", "1", "--fresh", "-o", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert "**holds**" in said.out
    assert "cuflash: claim 2: " in said.err
    stem = str(out).removesuffix(".html")
    assert said.err.endswith(f"cuflash: wrote {stem}.html, {stem}.md, {stem}.json\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.html", "c.json", "c.md"]
    assert (tmp_path / "c.md").read_text() == said.out
    data = json.loads((tmp_path / "c.json").read_text())
    assert [c["number"] for c in data["claims"]] == [2, 3]
    assert data["command"] == " ".join(["cuflash", *words])


def test_command_resumes(tmp_path: Path) -> None:
    environment = os.environ | {"CUFLASH_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "cuflash", "claims", "--only", "3", "-o", "c.html"]
    environment["PYTHONPATH"] = str(ROOT)
    texts = []
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        texts.append((tmp_path / "c.json").read_text())
    assert texts[0] == texts[1], "the second run has the times of the first: nothing ran"
    assert len(list((tmp_path / "cache" / "claims").iterdir())) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "13"], "--only: 13: must be 1 to 12"),
        (["--only", "4;5"], "--only: 4;5: must be N or N,N,..."),
        (["--quick", "--full"], "--full: not allowed with argument --quick"),
        (["--only", "3,3"], "--only: 3,3: must name each claim once"),
        (["--workers", "0"], "--workers: 0: must be an integer, 1 to 9999"),
        (["--workers", "10000"], "--workers: 10000: must be an integer, 1 to 9999"),
        (["--workers", "1", "--dask", "tcp://x:1"], "--dask: not allowed with argument --workers"),
        (["--dask", "nonsense"], "--dask: nonsense: missing port number"),
        (["--dask", "no://x:1"], "--dask: no://x:1: unknown address scheme"),
        (["--data", "/nowhere"], "--data: /nowhere: must be a folder with a manifest.json"),
        (["-o", ""], "--output: empty: must name a file"),
        (["-o", "-"], "--output: -: must end in .html"),
        (["-o", "c.md"], "--output: c.md: must end in .html"),
        (["-o", "/dev/null"], "--output: /dev/null: must end in .html"),
        (["-o", "/dev"], "--output: /dev: must be a file, not a directory"),
        (["-o", "/nowhere/c.html"], "--output: /nowhere/c.html: cannot be written"),
    ],
)
def test_wrong_arguments(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["claims", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cuflash: {message}")
    assert said.count("\n") == 1


def test_a_failed_connection_leaves_no_client_to_be_collected() -> None:
    distributed = pytest.importorskip("distributed")
    for address in ("nonsense", "no://x:1", "tcp://127.0.0.1:1"):
        with pytest.raises((OSError, ValueError)):
            reach(address)
        assert not [x for x in gc.get_objects() if isinstance(x, distributed.Client)]


def test_a_device_behind_a_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").symlink_to("/dev/null")
    assert cli.main(["claims", "--only", "3", "-o", str(tmp_path / "c.html")]) == 2
    assert "must be a file, not a device or pipe" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_a_scheduler_that_does_not_answer_ends_it_at_once(tmp_path: Path) -> None:
    """Also where all is finished and nobody would be asked."""
    command = [sys.executable, "-m", "cuflash", "claims", "--only", "3", "-o", "c.html"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "CUFLASH_CACHE_DIR": str(tmp_path / "cache")
    }  # fmt: skip
    options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "timeout": 60}
    subprocess.run([*command, "--workers", "1"], check=True, **options)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        found = subprocess.run([*command, "--dask", address], check=False, **options)
    assert time.monotonic() - start < 20  # the library alone would wait for 30 s
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.startswith(f"cuflash: --dask: {address}: ".encode())
    assert found.stderr.count(b"\n") == 1


def test_an_unusable_cache_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file"))
    words = ["claims", "--only", "3", "--workers", "1", "-o", str(tmp_path / "c.html")]
    assert cli.main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"cuflash: CUFLASH_CACHE_DIR: .*/file/claims: .*keeps nothing", lines[0])
    assert lines[-1].startswith("cuflash: wrote ")
    assert len(lines) == 3


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state != "Z":
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("number", "whole_group", "code", "said"),
    [
        (signal.SIGTERM, False, 143, b"cuflash: terminated; run again to go on\n"),
        (signal.SIGINT, True, 130, b"cuflash: interrupted; run again to go on\n"),
    ],
)
def test_signals_end_every_process(
    number: int, whole_group: bool, code: int, said: bytes, tmp_path: Path
) -> None:
    """Ctrl-C reaches the group as a terminal sends it, SIGTERM only the command."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "CUFLASH_CACHE_DIR": str(tmp_path / "cache")
    }  # fmt: skip
    run = subprocess.Popen(
        [sys.executable, "-m", "cuflash", "claims", "--only", "4", "--workers", "2"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        kept, limit = tmp_path / "cache" / "claims", time.monotonic() + 60
        while not (kept.is_dir() and any(p.suffix == ".json" for p in kept.iterdir())):
            assert time.monotonic() < limit
            assert run.poll() is None
            time.sleep(0.05)
        assert len(members(run.pid)) >= 3  # the command and two workers
        (os.killpg if whole_group else os.kill)(run.pid, number)
        out, err = run.communicate(timeout=30)
        limit = time.monotonic() + 10
        while (left := members(run.pid)) and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert (run.returncode, out, err) == (code, b"", said)
    assert left == []
    assert not (tmp_path / "claims.html").exists()


# -- On a GPU --------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_tasks_run() -> None:
    pytest.importorskip("cupy")
    settings = Settings("tiny", gpu=True, kernels="cuflash", workers=4)
    results = {r.number: r for r in measure(claims([1, 4, 6, 9, 11, 12]), settings)}
    assert results[1].verdict.kind == "holds"
    assert all(k["differing_bits"] == 0 for k in results[4].figures["kernels"])
    assert all(k["equal"] == 1 for k in results[6].figures["kernels"])
    assert any(r["gpu"] for r in results[9].figures["runs"])
    assert any(e["gpu"] for e in results[11].figures["exceptions"])
    for k in results[12].figures["kernels"]:
        assert k["kind"] == "normal" or k["errors"]["full"] < k["errors"]["rounded"]
