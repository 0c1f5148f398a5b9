"""bench/hazards.py: of what racecheck says, which is no finding."""

from __future__ import annotations

import pytest

from bench import hazards
from cuflash import sm90_backward
from tests.test_sm90_backward import plan_of

KERNEL = (
    "cuflash::sm90::backward<cuflash::sm90::BackwardShape<cuflash::Fp16, (int)64, (int)64, "
    "(int)128>, (bool)0, (bool)0, (bool)0>(cuflash::sm90::BackwardParams)"
)
CENTERED = KERNEL.replace("(bool)0>", "(bool)1>")
WIDE = (
    "cuflash::sm90::backward_wide<cuflash::sm90::WideShape<cuflash::Fp16, (int)256, (int)256>, "
    "(bool)0, (bool)0, (bool)1>(cuflash::sm90::BackwardParams)"
)
OTHER = "cuflash::forward<(int)64>(cuflash::Params)"


def log(
    later: int, earlier: int, *, writer: str = KERNEL, reader: str = KERNEL, errors: int = 1
) -> list[str]:
    """A log of one hazard."""
    return [
        f"========= Error: Race reported between Write access at void {writer}+{later:#x}",
        f"=========     and Read access at void {reader}+{earlier:#x} [256 hazards]",
        f"========= RACECHECK SUMMARY: 1 hazards displayed ({errors} errors, 0 warnings)",
    ]


def address(opcode: str) -> int:
    return next(at for at, name in hazards.instructions(KERNEL).items() if name == opcode)


def test_the_kernel_is_one_that_runs() -> None:
    plan = plan_of("float16", 64)
    shape = sm90_backward.shape_of(64, 64, False)
    found = sm90_backward.backward_instantiation(plan, 64, 64, False, shape)
    assert hazards.name_expression(KERNEL) == found.name_expression


@pytest.mark.parametrize(
    ("kernel", "pair"), [(k, pair) for k, pairs in hazards.PAIRS.items() for pair in sorted(pairs)]
)
def test_pairs_behind_an_arrival_of_lane_0_are_no_findings(
    kernel: str, pair: tuple[str, str]
) -> None:
    name = {"backward": CENTERED, "backward_wide": WIDE}[kernel]
    found = {opcode: at for at, opcode in hazards.instructions(name).items()}
    later, earlier = (found[opcode] for opcode in pair)
    allowed, findings = hazards.judge(log(later, earlier, writer=name, reader=name))
    assert (list(allowed.values()), findings) == ([1], [])
    assert len(hazards.judge(log(earlier, later, writer=name, reader=name))[1]) == 1


@pytest.mark.parametrize("write", ["STS.128", "STSM.16.MT88.4", "UBLKCP.G.S", "UTMALDG.4D"])
def test_other_writes_are_findings(write: str) -> None:
    assert len(hazards.judge(log(address(write), address("LDS.64")))[1]) == 1


@pytest.mark.parametrize("read", ["LDS.128", "LDS.U16", "LDS"])
def test_other_reads_are_findings(read: str) -> None:
    assert len(hazards.judge(log(address("UBLKCP.S.G"), address(read)))[1]) == 1


def test_other_kernels_and_what_was_not_printed_are_findings() -> None:
    write, read = address("UBLKCP.S.G"), address("LDS.64")
    assert len(hazards.judge(log(write, read, writer=OTHER, reader=OTHER))[1]) == 1
    assert hazards.judge(log(write, read, errors=16))[1] == [
        "1 hazards in the log, 16 in its summary"
    ]
    assert hazards.judge([])[1] == ["0 hazards in the log, -1 in its summary"]
