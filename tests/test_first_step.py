"""A wrong step, planted in a copy of the emulator, is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emulation import Numerics, Plan
from emulation import flash as emulated
from emulation.machine import Machine
from emulation.plan import default_plan
from emulation.problem import Array, Problem
from emulation.samples import sample
from emulation.tiled import arithmetic_of
from tests.first_step import explained

# The package's attribute of this name is the function.
flash_module: Any = __import__("sys").modules["emulation.flash"]
tiled: Any = __import__("sys").modules["emulation.tiled"]

Patch = Callable[[pytest.MonkeyPatch], None]


def up(x: Array) -> Array:
    """The next float32."""
    return np.nextafter(x, np.float32(np.inf), dtype=np.float32)


def wrapped(name: str, change: Callable[..., Any]) -> Patch:
    """Replaces a step by change(its result, its arguments)."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        module = flash_module if hasattr(flash_module, name) else tiled
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: change(real(*args), args))

    return patch


def wrong_key(result: tuple[Array, Array], args: Any) -> tuple[Array, Array]:
    """Column 5 of a tile has P too large by an ulp of bfloat16."""
    x, p = result
    p = p.copy()
    p[:, 5:6] *= np.float32(1 + 2.0**-7)
    return x, p


def wrong_scale(result: Any, args: Any) -> Any:
    """c, unless it is 1."""
    return result if result.c == 1 else replace(result, c=up(result.c))


def wrong_alpha(alpha: Any, args: Any) -> Any:
    """alpha where something is rescaled."""
    return alpha if alpha is None else np.where(alpha == 1, alpha, up(alpha))


def wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row sum of the product."""
    real = tiled._accumulate

    def accumulate(m: Any, plan: Any, names: Any, *rest: Any) -> Any:
        found = real(m, plan, names, *rest)
        return up(found) if names[0] == "row sum" else found

    monkeypatch.setattr(tiled, "_accumulate", accumulate)


def wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """P V in steps of four products."""
    real = tiled._accumulate

    def accumulate(m: Any, plan: Any, names: Any, *rest: Any) -> Any:
        if names[0] == "PV accumulation":
            m = Machine(**arithmetic_of(replace(plan, step=4)))
        return real(m, plan, names, *rest)

    monkeypatch.setattr(tiled, "_accumulate", accumulate)


def wrong_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output cast truncates."""

    class Truncating(Machine):
        def cast(self, name: str, x: Any, fmt: str) -> Any:
            if name != "output cast" or fmt == "float32":
                return super().cast(name, x, fmt)
            return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    monkeypatch.setattr(flash_module, "machine_of", lambda plan: Truncating(**arithmetic_of(plan)))


def wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several rows hide the diagonal's key."""
    real = tiled.visible

    def visible(columns: Array, lo: Array, hi: Array) -> Any:
        return real(columns, lo, hi - 1) if len(lo) > 1 else real(columns, lo, hi)

    monkeypatch.setattr(tiled, "visible", visible)


STEPS: dict[str, tuple[Patch, dict[str, str]]] = {
    "S": (wrapped("scores", lambda s, args: up(s)), {}),
    "score scaling": (wrapped("constants", wrong_scale), {}),
    "P": (wrapped("_probabilities", wrong_key), {}),
    "l": (wrong_sum, {"out": "float32", "row_sum": "rounded"}),
    "l, unrounded": (wrapped("join", lambda l_sum, args: up(l_sum)), {"row_sum": "unrounded"}),
    "rescale": (wrapped("_alpha", wrong_alpha), {"out": "float32"}),
    "O": (wrong_product, {"out": "float32"}),
    "output cast": (wrong_cast, {}),
    "LSE": (wrapped("_lse", lambda lse, args: up(lse)), {}),
    "mask": (wrong_mask, {}),
}


#: float32 is not cast, and its sums and products are other steps than those changed here.
HALVES_ONLY = ("l", "O", "output cast")
CASES = [(name, "bfloat16") for name in STEPS]
CASES += [(name, "float32") for name in STEPS if name not in HALVES_ONLY]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_planted_step_is_named(name: str, dtype: str) -> None:
    patch, fields = STEPS[name]
    q, k, v = sample("rising", n=20, n_k=45, d=16, heads=2, dtype=dtype)
    masks: dict[str, Any] = {"causal": True, "window": (30, None)}
    plan = default_plan(Problem.of(q, k, v), fields, tile_n=16)

    def planted(q: Array, k: Array, v: Array, *, numerics: Numerics, **masks: Any) -> Any:
        changed: Plan = replace(plan, numerics=numerics)
        with pytest.MonkeyPatch.context() as monkeypatch:
            patch(monkeypatch)
            return emulated(q, k, v, plan=changed, **masks)

    got = planted(q, k, v, numerics=plan.numerics, **masks)
    want = emulated(q, k, v, plan=plan, **masks)
    said = explained(planted, q, k, v, plan, masks, got, want)
    assert said is not None
    assert f"first step that differs: {name.partition(',')[0]}:" in said, said


def test_softcap_is_named() -> None:
    q, k, v = sample("normal", n=9, n_k=20, d=16, dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v), tile_n=16)

    def planted(q: Array, k: Array, v: Array, *, numerics: Numerics, **masks: Any) -> Any:
        if masks.get("softcap") is not None:
            masks["softcap"] *= 1 + 2.0**-20
        return emulated(q, k, v, plan=replace(plan, numerics=numerics), **masks)

    masks: dict[str, Any] = {"softcap": 2.0}
    got = planted(q, k, v, numerics=plan.numerics, **masks)
    want = emulated(q, k, v, plan=plan, **masks)
    said = explained(planted, q, k, v, plan, masks, got, want)
    assert said is not None
    assert "first step that differs: softcap:" in said, said


def test_equal_bits_say_nothing() -> None:
    q, k, v = sample("normal", n=9, n_k=20, d=16, dtype="bfloat16")
    plan = default_plan(Problem.of(q, k, v))
    found = emulated(q, k, v, plan=plan)
    assert explained(lambda *a, **k: found, q, k, v, plan, {}, found, found) is None
