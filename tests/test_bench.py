"""What benchmarks share, and records that must agree with themselves."""

from __future__ import annotations

import json

from bench.common import RESULTS, added


def test_parts_of_a_measurement_add_up() -> None:
    whole = {"runs": 5, "problems": {"a": 3, "b": 2}}
    part = {"runs": 4, "problems": {"b": 4}}
    want = {"runs": 9, "problems": {"a": 3, "b": 6}}
    assert added(whole, part) == added(part, whole) == want
    assert added({}, whole) == added(whole, {}) == whole


def test_the_soak_counts_every_run() -> None:
    figures = json.loads((RESULTS / "soak.json").read_text())["figures"]
    assert sum(figures["problems"].values()) == figures["runs"] > 0
    assert figures["differing"] == figures["differing from the emulator"] == 0
