"""README's Python snippets run, and print what their comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from emulation import flash
from emulation.samples import sample

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
TESTING, EMULATION, GPU, TORCH = range(4)


def run(code: str, capsys: pytest.CaptureFixture[str], **names: Any) -> dict[str, Any]:
    """Run a snippet: every `print` prints its comment, in which "..." stands for anything."""
    said = [line.partition("  # ")[2] for line in code.splitlines() if line.startswith("print(")]
    exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(said)
    for got, comment in zip(printed, said, strict=True):
        assert comment, "a print says what it prints"
        pattern = re.escape(comment).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, got), f"README says {comment!r}, it prints {got!r}"
    return names


def test_every_snippet_is_one_of_these() -> None:
    assert len(SNIPPETS) == 4
    assert "assert_attention_close" in SNIPPETS[TESTING]
    assert "emulation.attribute" in SNIPPETS[EMULATION]
    assert "import cupy" in SNIPPETS[GPU]
    assert "cuflash.torch" in SNIPPETS[TORCH]


def test_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert SNIPPETS[EMULATION].count("print(") >= 3
    run(SNIPPETS[EMULATION], capsys)


def test_in_a_test_suite(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = sample("normal", n=40, d=16)
    out, lse = flash(q, k, v, causal=True)
    names = run(SNIPPETS[TESTING], capsys, q=q, k=k, v=v, out=out, lse=lse)
    assert names["bounds"].out.shape == out.shape
    wrong, _ = flash(q, k, v)
    with pytest.raises(AssertionError, match="mask dropped"):
        run(SNIPPETS[TESTING], capsys, q=q, k=k, v=v, out=wrong, lse=lse)


def test_in_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    torch: Any = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, 64, 32, dtype=torch.bfloat16) for _ in range(3))
    assert run(SNIPPETS[TORCH], capsys, q=q, k=k, v=v)["out"].shape == q.shape


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    names = run(SNIPPETS[GPU], capsys)
    assert names["dq"].shape == names["q"].shape


def test_a_comment_that_is_not_printed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="README says '2', it prints '1'"):
        run("print(1)  # 2\n", capsys)
