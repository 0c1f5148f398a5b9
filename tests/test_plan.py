"""Numerics and Plan: what may be chosen, what is refused, and that a Plan survives JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from emulation import BackwardPlan, Numerics, Plan, Problem, default_plan, flash


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Numerics)])
def test_every_numerics_value_is_accepted_and_others_named(field: str) -> None:
    for value in get_args(get_type_hints(Numerics)[field]):
        assert getattr(Numerics.of({field: value}), field) == value
    with pytest.raises(ValueError, match=rf"numerics\.{field}: got 'wrong', must be one of '"):
        Numerics.of({field: "wrong"})


def test_unknown_numerics_field() -> None:
    with pytest.raises(
        ValueError, match="numerics: unknown field 'speed', must be one of reference"
    ):
        Numerics.of({"speed": "fast"})
    with pytest.raises(TypeError, match="numerics: got str, must be Numerics"):
        Numerics.of("fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"c": "twice"}, r"plan\.c: got 'twice', must be one of 'once', 'float scale', 'floats'"),
        ({"direction": "up"}, r"plan\.direction: got 'up'"),
        ({"tile_n": 24}, r"plan\.tile_n: got 24, must be a positive multiple of 16"),
        ({"tile_n": 0}, r"plan\.tile_n: got 0"),
        ({"tile_n": 2**40}, r"plan\.tile_n: got 1099511627776, must be .*, at most 65536"),
        ({"arch": "sm00"}, r"plan\.arch: got 'sm00', must be one of 'sm70'"),
        ({"arch": ["sm90"]}, r"plan\.arch: got \['sm90'\], must be one of"),
        ({"step": 0}, r"plan\.step: got 0, must be 1 to 256, or None"),
        ({"format": np.zeros(2)}, r"plan\.format: got array\(.*, must be one of"),
        ({"state": "float64"}, r"plan\.state: got 'float64'"),
        (
            {"numerics": Numerics(reference="stale"), "format": "float16", "stale_limit": 30},
            r"plan\.stale_limit: got 30, must be 1 to 14 in float16",
        ),
        (
            {"numerics": Numerics(reference="stale"), "alpha": "maxima"},
            r"plan\.alpha: got 'maxima', must be \"references\" with 'stale'",
        ),
        (
            {"numerics": Numerics(reference="power-of-two"), "lse": "scale"},
            r"plan\.lse: got 'scale', must be \"sum\" or \"reference\" with 'power-of-two'",
        ),
    ],
)
def test_bad_plan_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"numerics": {"p": "split"}}, r"plan\.numerics: got \{.*, must be a Numerics"),
        ({"numerics": None}, r"plan\.numerics: got None, must be a Numerics"),
        ({"backward": None}, r"plan\.backward: got None, must be a BackwardPlan"),
        ({"backward": {"tile_m": 32}}, r"plan\.backward: got \{.*, must be a BackwardPlan"),
        ({"tile_n": True}, r"plan\.tile_n: got True, must be an integer"),
        ({"tile_n": 64.0}, r"plan\.tile_n: got 64\.0, must be an integer"),
        ({"step": "a"}, r"plan\.step: got 'a', must be an integer"),
        ({"stale_limit": None}, r"plan\.stale_limit: got None, must be an integer"),
    ],
)
def test_plan_fields_of_another_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Plan(**fields)
    with pytest.raises(TypeError, match=r"plan\.backward: got None, must be a dict"):
        Plan.from_json({"backward": None})


def test_integers_of_numpy_are_integers() -> None:
    """The same Plan, and one that prints and hashes alike."""
    given = Plan(
        tile_n=np.int64(64),  # type: ignore[arg-type]
        step=np.int32(8),  # type: ignore[arg-type]
        stale_limit=np.int16(9),  # type: ignore[arg-type]
        backward=BackwardPlan(tile_m=np.uint8(32)),  # type: ignore[arg-type]
    )
    plain = Plan(tile_n=64, step=8, stale_limit=9, backward=BackwardPlan(tile_m=32))
    assert given == plain
    assert hash(given) == hash(plain)
    assert json.dumps(given.to_json()) == json.dumps(plain.to_json())


def test_bad_backward_plan() -> None:
    with pytest.raises(ValueError, match=r"plan\.backward\.tile_m: got 7"):
        BackwardPlan(tile_m=7)
    with pytest.raises(ValueError, match=r"plan\.backward\.center: got 8, must be 0 or a positive"):
        BackwardPlan(center=8)
    with pytest.raises(TypeError, match=r"plan\.backward\.center: got False, must be an integer"):
        BackwardPlan(center=False)
    with pytest.raises(ValueError, match=r"plan\.backward\.dq_order: got 'any'"):
        BackwardPlan(dq_order="any")  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    plan = Plan(
        numerics=Numerics(reference="lazy", p="split"),
        format="float16",
        tile_n=48,
        c="float scale",
        backward=BackwardPlan(tile_m=32, dq_order="descending"),
    )
    assert Plan.from_json(json.dumps(plan.to_json())) == plan
    older = {name: x for name, x in plan.to_json().items() if name != "c"}
    assert Plan.from_json(older) == dataclasses.replace(plan, c="once")
    with pytest.raises(ValueError, match="plan: not JSON"):
        Plan.from_json("{")
    with pytest.raises(TypeError, match="plan: got list"):
        Plan.from_json("[1]")
    with pytest.raises(ValueError, match=r"plan\.backward: unknown field 'warps'"):
        Plan.from_json({"backward": {"warps": 4}})
    with pytest.raises(ValueError, match="plan: unknown field 'warps'"):
        Plan.from_json({"warps": 4})


def test_every_field_is_printed() -> None:
    text = str(Plan())
    assert all(f.name in text for f in dataclasses.fields(Plan))


@pytest.mark.parametrize(("d", "tile"), [(8, 128), (64, 128), (65, 128), (192, 96), (256, 80)])
def test_default_tile(d: int, tile: int) -> None:
    x = np.zeros((4, d), np.float16)
    plan = default_plan(Problem.of(x, x, x))
    assert (plan.tile_n, plan.format) == (tile, "float16")


def test_plan_must_fit_the_problem() -> None:
    x = np.zeros((4, 16), np.float16)
    with pytest.raises(ValueError, match="plan: format bfloat16, must be float16 like q"):
        flash(x, x, x, plan=Plan())
    with pytest.raises(ValueError, match="numerics: given beside plan"):
        flash(x, x, x, plan=Plan(format="float16"), numerics=Numerics())
    with pytest.raises(TypeError, match="plan: got dict"):
        flash(x, x, x, plan={})  # type: ignore[arg-type]
