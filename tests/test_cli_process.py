"""The command line as a process of its own: exit codes, pipes, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuflash import cli
from tests.test_cli import arrays, save


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, beside where inputs are saved."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def process(*argv: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "cuflash", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(cli.__file__))},
        **more,
    )


def test_process_refuses_in_one_line(cwd: Path) -> None:
    run = process("report", "missing.npz")
    out, err = run.communicate()
    assert (run.returncode, out) == (2, b"")
    assert err == b"cuflash: INPUT: missing.npz: No such file or directory\n"
    assert list(cwd.iterdir()) == []


@pytest.mark.usefixtures("cwd")
def test_process_reports_the_bundled_head() -> None:
    run = process("report", "--json", "r.json")
    out, err = run.communicate()
    assert (run.returncode, err) == (0, b"cuflash: wrote report.html, r.json\n")
    assert b"bundled capture" in out
    assert os.path.getsize("report.html") < 1_000_000
    assert json.loads(Path("r.json").read_text("utf-8"))["options"]["causal"] == "bottom-right"


@pytest.mark.usefixtures("cwd")
def test_process_survives_an_ascii_terminal_and_a_closed_pipe(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", arrays())
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "cuflash", "report", path, "--no-html"]
    env["PYTHONPATH"] = os.path.dirname(os.path.dirname(cli.__file__))
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert done.stderr == b""
    run = process("report", path, "--json", "r.json")
    assert run.stdout is not None
    run.stdout.close()
    assert run.stderr is not None
    with run.stderr:
        assert run.stderr.read() == b"cuflash: wrote report.html, r.json\n"
    assert run.wait() == 0
    assert os.path.exists("r.json")


@pytest.mark.usefixtures("cwd")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("> /dev/full", "stdout: cannot be written: No space left on device"),
        (">&-", "stdout: closed: must be open"),
    ],
)
@pytest.mark.parametrize("command", ["report --no-html", "claims --only 3 --workers 1", "doctor"])
def test_process_without_a_usable_stdout(
    command: str, target: str, said: str, tmp_path: Path
) -> None:
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(cli.__file__))}
    line = f"{sys.executable} -m cuflash {command} {target}"
    env |= {"CUFLASH_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(line, shell=True, env=env, capture_output=True, check=False)
    assert run.returncode == 2
    assert run.stderr.decode().splitlines()[-1] == f"cuflash: {said}"
    assert b"Traceback" not in run.stderr


def test_process_interrupted_is_quiet(tmp_path: Path, cwd: Path) -> None:
    run = process("report", save(tmp_path / "a.npz", arrays(n=4000, d=64)), "--backward")
    assert run.stderr is not None
    assert run.stderr.readline().startswith(b"cuflash: about ")  # it is at work
    run.send_signal(signal.SIGINT)
    out, err = run.communicate()
    assert (run.returncode, out, err) == (130, b"", b"")
    assert list(cwd.iterdir()) == []
