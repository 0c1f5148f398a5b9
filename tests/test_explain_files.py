"""`cuflash explain`: files of three kinds, one line for each that is broken, three reports."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash.cli import main
from emulation import flash
from emulation.problem import Array
from emulation.report.arrays import read_array
from emulation.report.inputs import InputError
from emulation.samples import sample

KINDS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


def safetensors(path: Path, **arrays: Array) -> Path:
    """Writes the format by its documentation."""
    names = {np.dtype(dtype): name for name, dtype in KINDS.items()}
    table: dict[str, Any] = {"__metadata__": {"by": "a test"}}
    data = b""
    for name, x in arrays.items():
        span = [len(data), len(data) + x.nbytes]
        table[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": span}
        data += x.tobytes()
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """q, k, v, out, lse of a correct kernel, and of one without its mask."""
    q, k, v = sample("normal", n=48, d=16, heads=2, dtype="bfloat16")
    out, lse = flash(q, k, v, causal=True)
    for name, x in {"q": q, "k": k, "v": v, "out": out, "lse": lse}.items():
        np.save(tmp_path / f"{name}.npy", x)
    np.save(tmp_path / "unmasked.npy", flash(q, k, v)[0])
    return tmp_path


def command(folder: Path, **other: str) -> list[str]:
    files = {n: str(folder / f"{n}.npy") for n in ("q", "k", "v", "out")} | other
    return ["explain", "--causal", *(w for n, f in files.items() for w in (f"--{n}", f))]


@pytest.mark.parametrize("dtype", KINDS)
def test_three_kinds_of_file(tmp_path: Path, dtype: str) -> None:
    x = np.arange(24).reshape(2, 3, 4).astype(KINDS[dtype])
    other = np.zeros((2, 2), KINDS[dtype])
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", q=x, k=other)
    safetensors(tmp_path / "x.safetensors", q=x, k=other)
    for name in ("x.npy", "x.npz", "x.npz:q", "x.safetensors", "x.safetensors:q"):
        got = read_array("--q", str(tmp_path / name))
        assert got.dtype == x.dtype
        assert got.tobytes() == x.tobytes()
    assert read_array("--q", str(tmp_path / "x.safetensors:k")).shape == (2, 2)
    with pytest.raises(InputError, match="no array w in the file: must be of"):
        read_array("--w", str(tmp_path / "x.safetensors"))


def test_correct_and_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = {n: str(folder / f"report.{n}") for n in ("html", "json", "md")}
    files = ["-o", out["html"], "--json", out["json"], "--markdown", out["md"]]
    assert main([*command(folder), "--lse", str(folder / "lse.npy"), *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# This is rounding\n")
    assert Path(out["md"]).read_text() == printed
    data = json.loads(Path(out["json"]).read_text())
    assert data["kind"] == "rounding"
    assert data["arithmetic"][0]["name"] == "cuflash"
    assert (data["arithmetic"][0]["out"], data["arithmetic"][0]["lse"]) == (1.0, 1.0)
    page = Path(out["html"]).read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert main(command(folder, out=str(folder / "unmasked.npy"))) == 0
    assert "mask dropped" in capsys.readouterr().out


def test_against(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, against=str(folder / "unmasked.npy"))) == 0
    printed = capsys.readouterr().out
    assert "--out is rounding; --against is another computation" in printed


def test_layout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(B, N, H, D) files with --layout bnhd."""
    for name in ("q", "k", "v", "out"):
        x = read_array(name, str(folder / f"{name}.npy"))
        np.save(folder / f"{name}.npy", x[None].swapaxes(1, 2))
    assert main([*command(folder), "--layout", "bnhd"]) == 0
    assert capsys.readouterr().out.startswith("# This is rounding\n")


def cut(folder: Path, name: str) -> str:
    data = (folder / "out.npy").read_bytes()
    (folder / name).write_bytes(data[:-10])
    return str(folder / name)


def test_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with a file: exit code 2, one line that names argument, value and rule."""
    q = read_array("q", str(folder / "q.npy")).astype(np.float32)
    np.save(folder / "ints.npy", q.astype(np.int64))
    np.save(folder / "wide.npy", q)
    np.save(folder / "shape.npy", q[:, :7].astype(ml_dtypes.bfloat16))
    q[1, 2, 3] = np.nan
    np.save(folder / "nan.npy", q.astype(ml_dtypes.bfloat16))
    (folder / "text.npy").write_text("not an array")
    (folder / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    good = safetensors(folder / "short.safetensors", out=q)
    good.write_bytes(good.read_bytes()[:-4])
    cases = {
        "--out: ": [("out", cut(folder, "cut.npy")), ("out", str(folder / "gone.npy"))],
        "--out: shape (2, 7, 16), must be": [],
    }
    cases["--out: shape (2, 7, 16): must be (2, 48, 16)"] = [("out", str(folder / "shape.npy"))]
    cases["--out: dtype int64"] = [("out", str(folder / "ints.npy"))]
    cases["--k: dtype float32: must be bfloat16 like q"] = [("k", str(folder / "wide.npy"))]
    cases["--q: nan at (1, 2, 3): must be finite"] = [("q", str(folder / "nan.npy"))]
    cases["is no .npy file"] = [("v", str(folder / "text.npy"))]
    cases["header of 1099511627776 bytes"] = [("out", str(folder / "bad.safetensors"))]
    cases["the file is cut short"] = [
        ("out", str(folder / "short.safetensors")), ("out", cut(folder, "cut.npy")),
    ]  # fmt: skip
    cases["must end in .npy, .npz, .safetensors"] = [("out", __file__)]
    for told, wrong in cases.items():
        for name, path in wrong:
            assert main(command(folder, **{name: path})) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.count("\n") == 1
            assert told in captured.err, captured.err


def test_nan_in_the_output_is_a_finding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = read_array("out", str(folder / "out.npy")).copy()
    out[1, 40, 3] = np.nan
    np.save(folder / "out.npy", out)
    assert main(command(folder)) == 0
    assert "not finite" in capsys.readouterr().out
