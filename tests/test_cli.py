"""The command line: what it writes, and that any error is one line, exit code 2, no file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emulation
from cuflash import cli
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError, read
from emulation.report.json_report import versions

Members = dict[str, Any]


def arrays(n: int = 40, d: int = 8, heads: int | None = None, dtype: Any = np.float16) -> Members:
    shape = (n, d) if heads is None else (heads, n, d)
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(dtype) for name in ("q", "k", "v")}


def save(path: Path, members: Members) -> str:
    np.savez(path, **members)
    return str(path)


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return str(path)


def npy(x: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, x, allow_pickle=True)
    return buffer.getvalue()


def header(shape: str, descr: str = "'<f2'", version: tuple[int, int] = (1, 0)) -> bytes:
    """An .npy header that claims what it likes, without data."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder of its own."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> Callable[..., str]:
    """Run a command that must fail; returns its one line, after checking what a failure must be."""

    def run(*argv: str) -> str:
        before = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        assert cli.main(["report", *argv]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(r"cuflash: [^\n]+: [^\n]+\n", shown.err), shown.err
        assert "Traceback" not in shown.err
        assert {p: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
        return shown.err

    return run


# -- arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--window", "-1,2"], "--window: -1,2: must be L,R"),
        (["--window", "3"], "--window: 3: must be L,R"),
        (["--window", "1,2,3"], "must be L,R"),
        (["--window"], "--window: expected one argument"),
        (["--softcap", "0"], "--softcap: 0: must be a positive finite number"),
        (["--softcap", "nan"], "--softcap: nan"),
        (["--scale", "-1"], "--scale: -1: must be a positive"),
        (["--scale", "inf"], "--scale: inf"),
        (["--scale", ""], "--scale: empty"),
        (["--head", "1,1"], "--head: 1,1: must name each head once"),
        (["--head", "-1"], "--head: -1: must be H"),
        (["--head", "1"], "--head: 1: must be less than 1"),
        (["--rows", "0"], "--rows: 0: must be an integer >= 1"),
        (["--rows", "5", "--causal-alignment", "top-left"], "--rows: 5: must not"),
        (["--seed", "x"], "--seed: x: must be an integer >= 0"),
        (["--dtype", "fp8"], "--dtype: fp8: must be one of fp16, bf16, fp32"),
        (
            ["--causal-alignment", "left"],
            "--causal-alignment: left: must be one of bottom-right, top-left",
        ),
        (["--causal", "--causal-alignment", "top-left"], "not allowed with"),
        (["--numerics", "p"], "--numerics: p: must be field=value"),
        (["--numerics", "p=split", "q=split"], "--numerics: q: must be one of reference, row_sum"),
        (["--numerics", "p=halved"], "halved"),
        (["--numerics", "p=split", "p=input"], "--numerics: p: must be given once"),
        (["--state", "float64"], "--state: float64: must be one of float32"),
        (["--algorithm", "standard", "--numerics", "p=split"], "--numerics: p=split: must go with"),
        (["--seed", "3"], "--seed: 3: must go with --backward"),
        (["--algorithm", "sdpa"], "--algorithm: sdpa: must be one of flash, standard"),
        (["--against", "flash"], "--against: flash: must differ from --algorithm"),
        (["--frobnicate"], "arguments: --frobnicate: not known, see `cuflash report --help`"),
        (["a.npz", "b.npz"], "arguments: b.npz: not known"),
        (["--sca", "2"], "not known"),
        (["-o", "."], "--output: .: must be a file"),
        (["-o", ""], "--output: empty: must name a file"),
        (["-o", "none/report.html"], "--output: none/report.html: cannot be written: No such file"),
        (["-o", "a\0b"], "--output: a\ufffdb: cannot be written"),
        (["-o", "x" * 300], "cannot be written: File name too long"),
        (["--json", "/proc/nothing/x.json"], "--json: /proc/nothing/x.json: cannot be written"),
        (["--json", "same", "-o", "same"], ": must differ from --output"),
    ],
)
def test_wrong_arguments(
    argv: list[str], words: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("computed before all was checked")

    monkeypatch.setattr(emulation, "attribute", never)
    assert words in refused(*argv)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rapport"]) == 2
    assert (
        capsys.readouterr().err
        == "cuflash: COMMAND: rapport: must be one of report, explain, claims, doctor\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cuflash {versions()['cuflash']}\n"


def test_help_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "report" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_code:
        cli.main(["report", "--help"])
    assert exit_code.value.code == 0
    assert "--numerics" in capsys.readouterr().out


# -- malformed input -------------------------------------------------------------------


def _with(**changes: Any) -> Members:
    return {n: x for n, x in {**arrays(), **changes}.items() if x is not None}


BAD_ARRAYS: dict[str, tuple[Members, str]] = {
    "no v": (_with(v=None), "v: missing: the file must hold q, k and v"),
    "rank 1": (_with(q=np.zeros(8, np.float16)), "q: shape (8,): must be (N, D)"),
    "rank 5": (_with(k=np.zeros((1, 1, 1, 4, 8))), "k: shape (1, 1, 1, 4, 8): must be (N, D)"),
    "rank 0": (_with(q=np.float16(1)), "q: shape (): must be"),
    "mixed ranks": (_with(v=np.zeros((1, 40, 8), np.float16)), "k, v: 2 and 3 axes: must be 2"),
    "integers": (_with(q=np.zeros((40, 8), np.int32)), "q: dtype int32: must be float16"),
    "complex": (_with(q=np.zeros((40, 8), np.complex64)), "q: dtype complex64: must be float16"),
    "text": (_with(k=np.full((40, 8), "x")), "k: dtype <U1: must be float16"),
    "bytes": (_with(k=np.full((40, 8), b"x")), "k: dtype |S1: must be float16"),
    "bool": (_with(k=np.zeros((40, 8), bool)), "k: dtype bool: must be float16"),
    "long double": (_with(k=np.zeros((40, 8), np.longdouble)), "k: dtype float128: must be"),
    "void": (_with(k=np.zeros((40, 8), "V3")), "k: dtype |V3: must be float16"),
    "record": (_with(k=np.zeros((40, 8), [("a", "f2")])), "k: dtype [('a', '<f2')]: must be"),
    "objects": (_with(v=np.full((40, 8), None)), "v: holds Python objects: must be float16"),
    "empty": (_with(q=np.zeros((0, 8), np.float16)), "q: shape (0, 8): must not be empty"),
    "no heads": (arrays(heads=0), "q: shape (0, 40, 8): must not be empty"),
    "D differs": (_with(k=np.zeros((40, 4), np.float16)), "k: head dimension 4: must be 8"),
    "N differs": (_with(v=np.zeros((41, 8), np.float16)), "v: shape (41, 8): must"),
    "D too large": (arrays(4, 300), "q: head dimension 300: must be 1 to 256"),
    "heads": (
        {**arrays(heads=4), **{n: np.zeros((3, 40, 8), np.float16) for n in ("k", "v")}},
        "k: 3 heads: must divide the 4 heads of q",
    ),
    "NaN": (_with(k=np.full((40, 8), np.nan, np.float16)), "k: nan at (0, 0): must be finite"),
    "infinite": (
        _with(v=np.full((40, 8), -np.inf, np.float16)),
        "v: -inf at (0, 0): must be finite",
    ),
    "overflow": (
        {n: np.full((40, 8), 1e60) for n in ("q", "k", "v")},
        "q: 1e+60 at (0, 0): must be within the range of float32",
    ),
    "mixed formats": (
        _with(v=np.zeros((40, 8), np.float32)),
        "v: dtype float32: must be float16 like q (or give --dtype)",
    ),
    "too many keys": (
        _with(k=np.zeros((300_000, 1), np.float16), v=np.zeros((300_000, 1), np.float16)),
        "k: 300000 keys: must be at most 262144",
    ),
    "dout": (_with(dout=np.zeros((39, 8))), "dout: shape (39, 8): must be (40, 8) like the output"),
    "out": (_with(out=np.zeros((40, 9))), "out: shape (40, 9): must be (40, 8) like the output"),
    "out NaN": (_with(out=np.full((40, 8), np.nan)), "out: nan at (0, 0): must be finite"),
    "scale": (_with(scale=-1.0), "scale: -1.0: must be one positive finite number"),
    "scales": (_with(scale=np.ones(3)), "scale: shape (3,), dtype float64: must be one positive"),
    "scale text": (_with(scale="big"), "scale: big: must be one positive finite number"),
    "causal": (_with(causal="left"), "causal: left: must be one of true, false"),
    "causal 2": (_with(causal=2), "causal: 2: must be one of"),
    "causal object": (_with(causal=np.array(None)), "causal: holds Python objects"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_wrong_arrays(case: str, refused: Callable[..., str], tmp_path: Path) -> None:
    members, words = BAD_ARRAYS[case]
    assert words in refused(save(tmp_path / "input.npz", members))


GOOD = {name: npy(x) for name, x in arrays().items()}
BAD_MEMBERS: dict[str, tuple[bytes, str]] = {
    "claims a terabyte": (header("(1099511627776, 8)"), "q: shape (1099511627776, 8) of float16"),
    "claims too much": (header("(41, 8)") + bytes(640), "bytes: must be the 640 bytes in the file"),
    "claims too little": (header("(39, 8)") + bytes(640), "is 624 bytes: must be the 640"),
    "claims beyond 64 bits": (header(f"({10**30}, 8)"), "must be the 0 bytes in the file"),
    "negative": (header("(-1, 8)") + bytes(640), "q: shape (-1, 8): must not be negative"),
    "no header": (b"hello", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "version 9": (header("(40, 8)", version=(9, 0)) + bytes(640), ".npy version 9.0: must be 1.0"),
    "header of code": (header("__import__('os').abort()"), "cannot be read"),
    "header of depth": (header("(" * 3000 + ")" * 3000), "cannot be read"),
    "many axes": (header("(" + "1," * 80 + ")") + bytes(2), "found 80"),
    "pickle": (npy(np.array([{"a": 1}], dtype=object)), "q: holds Python objects"),
    "zero width": (header("(40, 8)", "'|V0'"), "q: dtype |V0: must be float16"),
    "cut short": (npy(np.zeros((40, 8), np.float16))[:-9], "must be the 631 bytes in the file"),
}


@pytest.mark.parametrize("case", BAD_MEMBERS)
def test_lying_members(case: str, refused: Callable[..., str], tmp_path: Path) -> None:
    data, words = BAD_MEMBERS[case]
    assert words in refused(zipped(tmp_path / "input.npz", {**GOOD, "q": data}))


def test_archive_that_unpacks_to_too_much(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulation.report.inputs.MAX_BYTES", 1 << 20)
    bomb = header("(2097152, 8)") + bytes(1 << 25)
    path = zipped(tmp_path / "bomb.npz", {**GOOD, "q": bomb}, zipfile.ZIP_DEFLATED)
    assert os.path.getsize(path) < 1 << 17
    assert "bytes uncompressed: must be at most 1048576" in refused(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_member_given_twice(refused: Callable[..., str], tmp_path: Path) -> None:
    path = zipped(tmp_path / "input.npz", GOOD)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("q.npy", GOOD["q"])
    assert "q: 2 members of this name: must be one" in refused(path)


def test_damaged_archives(refused: Callable[..., str], tmp_path: Path) -> None:
    whole = Path(zipped(tmp_path / "whole.npz", GOOD, zipfile.ZIP_DEFLATED)).read_bytes()
    broken = tmp_path / "broken.npz"
    rng = np.random.default_rng(0)
    for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:cut])
        assert "INPUT: " in refused(str(broken))
    for _ in range(60):  # one byte changed: an error or a report, never a traceback
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        broken.write_bytes(bytes(data))
        with contextlib.suppress(InputError):
            read(str(broken))


def test_not_an_archive(refused: Callable[..., str], tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "must be an .npz file" in refused(str(tmp_path / "one.npy"))
    assert "is a directory" in refused(str(tmp_path))
    assert "INPUT: missing.npz: No such file" in refused("missing.npz")
    assert "must be a regular file" in refused("/dev/null")
    assert "INPUT: a\ufffd[31mb: " in refused("a\x1b[31mb")
    assert "INPUT: a\ufffdb: embedded null byte" in refused("a\0b")


def test_encrypted_archive(refused: Callable[..., str], tmp_path: Path) -> None:
    path = Path(zipped(tmp_path / "input.npz", GOOD))
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(mark)
        while at >= 0:
            data[at + offset] |= 1
            at = data.find(mark, at + 1)
    path.write_bytes(bytes(data))
    assert "cannot be read" in refused(str(path))


def test_input_is_never_overwritten(refused: Callable[..., str], tmp_path: Path) -> None:
    path = save(tmp_path / "input.npz", arrays())
    assert "must differ from INPUT, which is not overwritten" in refused(path, "-o", path)
    os.symlink(path, "link.npz")
    assert "must differ" in refused("link.npz", "--json", path)


def test_overflow_inside_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    members = {n: np.full((40, 8), 6e4, np.float16) for n in ("q", "k", "v")}
    path = save(tmp_path / "a.npz", {**members, "k": -members["k"]})
    argv = ["--algorithm", "standard", "--state", "float16", "--scale", "1"]
    assert "left the range of its formats" in refused(path, *argv)


# -- what is written -------------------------------------------------------------------


def test_report_of_a_file(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a<b>&.npz", {**arrays(heads=2), "extra": np.zeros(1)})
    argv = ["report", path, "--causal", "--window", "20,", "--softcap", "30", "--backward"]
    argv += ["--numerics", "reference=row-max", "-o", "r.html", "--json", "r.json"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert shown.err == "cuflash: wrote r.html, r.json\n"
    assert shown.out.startswith("# Where the error of flash attention comes from")
    assert "extra.npy" in shown.out
    assert sorted(p.name for p in folder.iterdir()) == ["r.html", "r.json"]
    page, data = Path("r.html").read_text("utf-8"), json.loads(Path("r.json").read_text("utf-8"))
    assert "a&lt;b&gt;&amp;.npz" in page
    assert "a<b>" not in page
    assert set(data["outputs"]) == {"out", "lse", "dq", "dk", "dv"}
    assert data["options"]["causal"] == "bottom-right"
    assert data["options"]["window"] == [20, "unbounded"]
    assert [p["tile_n"] for p in data["tile_sweep"]] == [32]
    first = Path("r.html").read_bytes(), Path("r.json").read_bytes()
    assert cli.main(argv) == 0
    assert (Path("r.html").read_bytes(), Path("r.json").read_bytes()) == first


def test_observed_output_and_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = arrays()
    path = save(tmp_path / "a.npz", {**members, "out": np.zeros((40, 8))})
    assert cli.main(["report", path, "--no-html"]) == 0
    assert "the observed output differs" in capsys.readouterr().out
    path = save(tmp_path / "b.npz", members)
    assert cli.main(["report", path, "--no-html", "--against", "standard"]) == 0
    shown = capsys.readouterr().out
    assert "# Why flash and standard attention differ" in shown
    assert "flash (the first) minus standard (the second)" in shown
    argv = ["--algorithm", "standard", "--state", "bfloat16", "--no-html"]
    assert cli.main(["report", path, *argv]) == 0
    assert "standard\\[bfloat16\\]" in capsys.readouterr().out


def test_state_goes_with_every_algorithm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "a.npz", arrays())
    numerics = ["--numerics", "reference=power-of-two", "p=split"]
    both = ["--against", "standard"]
    names = "flash\\[bfloat16\\]", "standard\\[bfloat16\\]"
    for argv, held in (
        (numerics, names[:1]),
        ([*numerics, *both], names),
        (["--algorithm", "standard", "--against", "flash", *numerics], names),
    ):
        assert cli.main(["report", path, "--state", "bfloat16", "--no-html", *argv]) == 0
        title = capsys.readouterr().out.splitlines()[0]
        assert all(name in title for name in held)


@pytest.mark.parametrize(
    ("stored", "argv", "worked", "words"),
    [
        (np.float32, [], "float32", ""),
        (np.float32, ["--dtype", "bf16"], "bfloat16", "float32, rounded here to bfloat16."),
        (np.float16, ["--dtype", "fp32"], "float32", "float16, widened here to float32."),
        (np.float64, [], "float32", "float64, rounded here to float32 (--dtype chooses)."),
    ],
)
def test_formats_are_the_files_or_said_at_the_top(
    stored: Any,
    argv: list[str],
    worked: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = save(tmp_path / "a.npz", arrays(dtype=stored))
    assert cli.main(["report", path, "-o", "r.html", *argv]) == 0
    top = capsys.readouterr().out.split("Input: ")[0]
    page = Path("r.html").read_text("utf-8")
    assert ("rounded here" in top or "widened here" in top) == bool(words)
    if words:
        assert f"- q, k and v of the file are {words}" in top
        assert f"<li>q, k and v of the file are {words}</li>" in page.split("</header>")[0]
    assert f">out · {worked} · 40 × 8" in page


def test_seed_is_listed_only_where_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "a.npz", {**arrays(), "dout": np.ones((40, 8), np.float32)})
    argv = ["--backward", "--seed", "3", "--no-html"]
    assert cli.main(["report", path, *argv]) == 0
    shown = capsys.readouterr().out
    assert "so --seed changes nothing" in shown
    assert "dout of the file is float32, rounded here to float16." in shown
    assert ", seed 3" not in shown
    assert cli.main(["report", save(tmp_path / "b.npz", arrays()), *argv]) == 0
    assert ", seed 3" in capsys.readouterr().out


def test_long_work_is_announced_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "a.npz", arrays())
    monkeypatch.setitem(cli.SECONDS, "flash", 1e-3)
    assert cli.main(["report", path, "--no-html"]) == 0
    assert re.fullmatch(r"cuflash: about \d+0 s of work \([^\n]*\)\n", capsys.readouterr().err)


def test_numerics_may_stand_before_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", arrays())
    assert cli.main(["report", "--no-html", "--numerics", "p=split", path]) == 0


def test_sweep_gives_the_rows_other_tiles(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", arrays(n=300))
    argv = ["report", path, "--causal", "--numerics", "reference=row-max", "row_sum=unrounded"]
    assert cli.main([*argv, "--no-html", "--json", "r.json"]) == 0
    points = json.loads(Path("r.json").read_text("utf-8"))["tile_sweep"]
    assert [(p["tile_n"], p["tiles"]) for p in points] == [(32, 10), (64, 5), (128, 3), (256, 2)]
    assert points[0]["groups"]["rescale"] > 0


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Path("r.html")
    target.write_text("old", "utf-8")
    target.chmod(0o640)
    file = OutputFile.check("--output", "r.html")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(InputError, match=r"--output: .*r\.html: cannot be written: No space"):
            file.write("new")
    assert target.read_text("utf-8") == "old"
    assert os.listdir() == ["r.html"]
    file.write("new")
    assert target.read_text("utf-8") == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_links_and_devices_are_written_through() -> None:
    Path("real").write_text("old", "utf-8")
    os.symlink("real", "link")
    OutputFile.check("--output", "link").write("new")
    assert os.path.islink("link")
    assert Path("real").read_text("utf-8") == "new"
    OutputFile.check("--output", "/dev/null").write("gone")
    assert not Path("/dev/null").is_file()


def test_missing_matplotlib_is_said_before_the_work(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith(("matplotlib", "emulation.report.drawing", "emulation.report.pictures")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("emulation.report.pictures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "python -m pip install '.[report]'" in refused()
