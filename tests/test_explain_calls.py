"""`explain` as people call it: lost formats, names, other libraries' arrays, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash.cli import main
from emulation import explain, flash, flash_vjp, plan_of, testing, tolerance
from emulation.explain import case
from emulation.explain.call import held
from emulation.explain.pages import candidates
from emulation.problem import Array
from emulation.samples import sample

FAST: dict[str, Any] = {"arithmetic": False, "sources": False}


def small(dtype: str = "bfloat16", heads: int = 1, n: int = 40) -> tuple[Array, ...]:
    """q, k, v, out of a causal kernel."""
    q, k, v = sample("normal", n=n, d=16, heads=heads, dtype=dtype)
    return q, k, v, flash(q, k, v, causal=True)[0]


def saved(folder: Path, **arrays: Array) -> list[str]:
    """The command for these arrays, in files."""
    words = ["explain", "--causal"]
    for name, x in arrays.items():
        np.save(folder / f"{name}.npy", x)
        words += [f"--{name}", str(folder / f"{name}.npy")]
    return words


# -- formats ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_values_in_float32(dtype: str) -> None:
    """What .float().numpy() leaves is judged as what it was; the verdict is the same."""
    halves = small(dtype)
    wide = [x.astype(np.float32) for x in halves]
    found = explain(*wide, causal=True)
    assert found.is_rounding
    assert found.facts["dtype"] == dtype
    assert found.notes[0].startswith(f"q, k, v and out are {dtype} values held in float32")
    same = explain(*halves, causal=True)
    assert found.judgements["out"].rms == same.judgements["out"].rms
    assert found.kernels[0].name == same.kernels[0].name
    asked = explain(*wide, causal=True, dtype="float32", **FAST)
    assert (asked.facts["dtype"], asked.is_rounding) == ("float32", False)
    assert f"dtype {dtype} judges it so" in asked.notes[0]


def test_float32_stays_float32() -> None:
    """A float32 kernel's output holds no bfloat16 values, whatever q, k and v hold."""
    q, k, v = (x.astype(np.float32) for x in small()[:3])
    out, _ = flash(q, k, v, causal=True)
    found = explain(q, k, v, out, causal=True, **FAST)
    assert (found.facts["dtype"], found.is_rounding, found.notes) == ("float32", True, ())
    assert held([q, k, v], [np.full((2, 2), np.nan, np.float32)]) == "bfloat16"
    assert held([q, k.astype(np.float64), v], []) is None


def test_assertion_guesses_no_format() -> None:
    wide = [x.astype(np.float32) for x in small()]
    with pytest.raises(AssertionError, match="dtype bfloat16 judges it so"):
        testing.assert_attention_close(wide[3], *wide[:3], causal=True)
    testing.assert_attention_close(wide[3], *wide[:3], causal=True, dtype="bf16")


@pytest.mark.parametrize("dtype", ["fp16", "float16", np.float16, np.dtype(np.float16)])
def test_names_of_formats(dtype: Any) -> None:
    q, k, v = (x.astype(np.float64) for x in sample("normal", n=24, d=16, dtype="float32"))
    half = [x.astype(np.float16) for x in (q, k, v)]
    out, _ = flash(*half)
    assert explain(q, k, v, out, dtype=dtype, **FAST).is_rounding
    assert (tolerance(q, k, v, dtype=dtype).out == tolerance(*half).out).all()
    testing.assert_attention_close(out, q, k, v, dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp8", "", 3, [], object()])
def test_no_format(dtype: Any) -> None:
    q, k, v, out = small()
    for call in (
        lambda: explain(q, k, v, out, dtype=dtype),
        lambda: tolerance(q, k, v, dtype=dtype),
    ):
        with pytest.raises(ValueError, match=r"dtype: got .*, must be one of fp16, bf16, fp32, "):
            call()


def test_command_says_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, out = (x.astype(np.float32) for x in small())
    words = saved(tmp_path, q=q, k=k, v=v, out=out, against=flash(q, k, v, causal=True)[0])
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "- q, k, v and out are bfloat16 values held in float32: judged as bfloat16" in printed
    assert "Options: dtype bfloat16," in printed
    assert "--out was judged as bfloat16, --against as float32." in printed
    assert main([*words, "--dtype", "fp32"]) == 0
    assert capsys.readouterr().out.startswith("# This is another computation\n")


# -- names and places ------------------------------------------------------------------


def test_plan_by_name() -> None:
    q, k, v, _ = small(heads=2)
    plan = plan_of("fa3", q, k, v, causal=True)
    out, _ = flash(q, k, v, plan=plan, causal=True)
    named, made = (explain(q, k, v, out, plan=p, causal=True, **FAST) for p in ("fa3", plan))
    assert named.judgements["out"].allowed == made.judgements["out"].allowed
    assert (
        tolerance(q, k, v, plan="fa3", causal=True).out
        == tolerance(q, k, v, plan=plan, causal=True).out
    ).all()
    with pytest.raises(ValueError, match="plan: got 'fa9', must be one of 'fa3', 'fa2'"):
        explain(q, k, v, out, plan="fa9")
    with pytest.raises(TypeError, match="plan: got int, must be a Plan, a name or None"):
        tolerance(q, k, v, plan=3)  # type: ignore[arg-type]


class Tensor:
    """An array of another library."""

    __module__ = "torch"
    dtype, shape, ndim = "torch.float32", (40, 16), 2


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "dout", "dk"])
def test_arrays_of_other_libraries(name: str) -> None:
    given: dict[str, Any] = dict(zip(("q", "k", "v", "out"), small(), strict=True))
    given |= {"lse": None, "dout": given["out"]}
    grads = {"dq": given["q"], "dk": given["k"]}
    (grads if name in grads else given)[name] = Tensor()
    with pytest.raises(
        TypeError, match=f"^{name}: got torch.Tensor, must be a NumPy or CuPy array$"
    ):
        explain(**given, grads=grads)
    if name in ("q", "k", "v", "dout"):
        part = {n: given[n] for n in ("q", "k", "v", "dout")}
        with pytest.raises(TypeError, match=f"^{name}: got torch.Tensor, must be"):
            tolerance(**part)


@pytest.mark.parametrize("axes", [3, 4])
def test_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: int) -> None:
    """bnhd: (N, H, D) as well as (B, N, H, D); lse stays (B, H, N), as of `cuflash.attention`."""
    q, k, v = sample("normal", n=40, d=16, heads=3, dtype="bfloat16")
    out, lse = flash(q, k, v, causal=True)
    arrays = [x[None] if axes == 4 else x for x in (q, k, v, out)]
    moved = (np.ascontiguousarray(x.swapaxes(-3, -2)) for x in arrays)
    files = dict(zip(("q", "k", "v", "out"), moved, strict=True))
    words = saved(tmp_path, **files, lse=lse[None] if axes == 4 else lse)
    assert main([*words, "--layout", "bnhd"]) == 0
    assert capsys.readouterr().out.startswith("# This is rounding\n")


# -- gradients -------------------------------------------------------------------------


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Six query heads of three key heads, of which two may be judged."""
    monkeypatch.setattr(case, "GRADIENTS", 2 * 2 * 24 * 24)
    q, k, v = sample("normal", n=24, d=16, heads=6, dtype="bfloat16")
    k, v = k[:3], v[:3]
    out, lse = flash(q, k, v)
    dout = sample("normal", n=24, d=16, heads=6, dtype="bfloat16", seed=5)[0]
    grads = flash_vjp(q, k, v, dout)
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "grads": list(grads)[:3]}


def test_gradients_of_some_heads(graded: dict[str, Any]) -> None:
    found = explain(**graded, **FAST)
    assert found.kind == "rounding"
    note = "Gradients of 2 of 3 key heads, and of the queries that read them, were judged: 0, 2."
    assert note in found.notes
    judged = found.judgements["dk"]
    assert (judged.size, judged.checked) == (3 * 24 * 16, 2 * 24 * 16)
    graded["grads"][1] = graded["grads"][1].copy()
    graded["grads"][1][2, 3, 5] = 9.0
    wrong = explain(**graded, **FAST)
    assert not wrong.is_rounding
    assert (wrong.judgements["dk"].where, wrong.judgements["dk"].heads) == ((2, 3, 5), (2, 2))
    assert "(row 3 of head 2)" in str(wrong)
    assert any(text.startswith(note) for text in wrong.notes)


def test_gradients_of_one_head_too_large(
    graded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, "GRADIENTS_OF_ONE", 1000)
    with pytest.raises(
        ValueError, match="grads: 1152 scores of one key head, must be at most 1000"
    ):
        explain(**graded)


def test_dout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, out = small()
    with pytest.raises(ValueError, match="dout: given without grads, must come with them"):
        explain(q, k, v, out, dout=q)
    assert main(saved(tmp_path, q=q, k=k, v=v, out=out, dout=out)) == 2
    assert capsys.readouterr().err.endswith("must come with --dq, --dk or --dv\n")


# -- what is said ----------------------------------------------------------------------


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, out = small()
    wrong = flash(q, k, v)[0]
    right = saved(tmp_path, q=q, k=k, v=v, out=out)
    assert main([*right, "--fail"]) == 0
    np.save(tmp_path / "wrong.npy", wrong)
    path = str(tmp_path / "wrong.npy")
    assert main([*right, "--against", path, "--fail"]) == 1
    assert main([*right, "--out", path]) == 0
    assert main([*right, "--out", path, "--fail"]) == 1
    assert capsys.readouterr().out.count("# This is") == 4
    with pytest.raises(SystemExit) as left:
        main(["explain", "--help"])
    assert left.value.code == 0
    assert "exit code: 0 whatever the verdict; with --fail 1" in " ".join(
        capsys.readouterr().out.split()
    )


def test_no_candidates_of_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, out = small()
    assert main(saved(tmp_path, q=q, k=k, v=v, out=out)) == 0
    assert "What computation it is" not in capsys.readouterr().out
    out[0, 31, 5] += np.asarray(0.25, ml_dtypes.bfloat16)
    found = explain(q, k, v, out, causal=True, **FAST)
    assert any(m.explained < 0 for m in found.others)
    _, lines = candidates(found)
    assert {line[2] for line in lines if line[2].startswith("-")} == set()
    assert "nothing" in {line[2] for line in lines}


def test_row_and_head_of_what_is_wrong() -> None:
    q, k, v, out = small(heads=3)
    out[1, 5, 2] += np.asarray(0.5, ml_dtypes.bfloat16)
    assert "(row 5 of head 1), at worst" in str(explain(q, k, v, out, causal=True, **FAST))
    out[2, 9, 2] += np.asarray(0.5, ml_dtypes.bfloat16)
    assert "(rows 5 to 9 of heads 1 to 2)" in str(explain(q, k, v, out, causal=True, **FAST))


def test_nan_in_the_other_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v, out = small(heads=2)
    other = out.copy()
    other[1, 7, 3], other[1, 9, 0] = np.nan, np.inf
    other[0, 4, 4] += np.asarray(0.5, ml_dtypes.bfloat16)
    assert main(saved(tmp_path, q=q, k=k, v=v, out=out, against=other)) == 0
    printed = capsys.readouterr().out
    assert (
        "--against holds 2 of 1280 elements that are not finite, the first nan at (1, 7, 3)."
        in printed
    )
    assert "they differ most, where both are finite, at (0, 4, 4), by 0.5" in printed


def test_repr_is_short() -> None:
    q, k, v, out = small()
    found = explain(q, k, v, out, causal=True)
    assert repr(found) == "<Verdict: rounding; beyond: out 0 of 640>"
    assert len(repr(found.judgements["out"])) < 500


def test_grads_of_no_kind() -> None:
    q, k, v, out = small()
    with pytest.raises(TypeError, match="grads: must be \\(dq, dk, dv\\)"):
        explain(q, k, v, out, dout=out, grads=(q, k))
