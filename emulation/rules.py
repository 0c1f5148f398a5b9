"""The tensor core's rules as data: a table of architectures, and a rule made concrete for one
product, which `emulation.tensor_core` executes, and `emulation.fast` compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from emulation.formats import FLOAT16, Format

Output = Literal["float32", "float16"]


@dataclass(frozen=True)
class Rule:
    """How one architecture accumulates.

    step: products per step (L), by operand format; a step of K products is one exact sum.
    fraction_bits: bits kept behind the binary point of the largest exponent (F), by operand format.
    zero_exponent: floor of that largest exponent, by output format ("float32", "float16").
    output_precision: significant bits of the float32 output, by operand format where it is not 24
    (fp8: E8M13).
    """

    arch: str
    step: Mapping[str, int]
    fraction_bits: Mapping[str, int]
    zero_exponent: Mapping[str, int]
    output_precision: Mapping[str, int]


def _rule(arch: str, bits: int, half: int, tf32: int = 0, fp8: int = 0, fp8_bits: int = 0) -> Rule:
    """A Rule from the numbers of the published tables; 0: the architecture lacks the format."""
    step = {"float16": half, "bfloat16": half, "tf32": tf32, "e4m3": fp8, "e5m2": fp8}
    if arch in ("sm70", "sm75"):
        del step["bfloat16"]
    step = {name: length for name, length in step.items() if length}
    wide = fp8_bits >= bits
    return Rule(
        arch=arch,
        step=step,
        fraction_bits={n: fp8_bits if n in ("e4m3", "e5m2") else bits for n in step},
        zero_exponent={"float32": -108 - bits, "float16": 4 - bits},
        output_precision={n: 14 for n in ("e4m3", "e5m2") if n in step and not wide},
    )


#: Step lengths and fraction bits as published (MMA-Sim 2.1.1, the Leeds models, Hawkeye), which
#: agree but for the fp8 floor of sm90. Measured by us: sm90, float16 and bfloat16, wgmma k16 and
#: mma.sync m16n8k16 (tests/golden).
RULES: dict[str, Rule] = {
    "sm70": _rule("sm70", bits=23, half=4),
    "sm75": _rule("sm75", bits=24, half=8),
    "sm80": _rule("sm80", bits=24, half=8, tf32=4),
    "sm86": _rule("sm86", bits=24, half=8, tf32=4),
    "sm89": _rule("sm89", bits=24, half=8, tf32=4, fp8=16, fp8_bits=13),
    "sm90": _rule("sm90", bits=25, half=16, tf32=8, fp8=32, fp8_bits=13),
    "sm100": _rule("sm100", bits=25, half=16, tf32=8, fp8=32, fp8_bits=25),
}


@dataclass(frozen=True)
class Step:
    """A Rule made concrete for one product: what both implementations need to know."""

    fmt: Format  #: of the operands
    length: int
    fraction_bits: int
    zero_exponent: int
    out: Format  #: precision and exponent range of the result
    nearest: bool  #: round the result to nearest even instead of toward zero

    @staticmethod
    def of(rule: Rule, fmt: Format, length: int | None = None, out: Output = "float32") -> Step:
        """The step of `rule` for operands of fmt; ValueError for what the architecture lacks."""
        if fmt.name not in rule.step:
            have = ", ".join(rule.step)
            raise ValueError(f"fmt: {fmt.name} on {rule.arch}, must be one of {have}")
        if out not in ("float32", "float16"):
            raise ValueError(f'out: got {out!r}, must be "float32" or "float16"')
        if length is not None and length < 1:
            raise ValueError(f"step: got {length}, must be >= 1")
        precision = rule.output_precision.get(fmt.name, 24)
        return Step(
            fmt=fmt,
            length=rule.step[fmt.name] if length is None else length,
            fraction_bits=rule.fraction_bits[fmt.name],
            zero_exponent=rule.zero_exponent[out],
            out=FLOAT16 if out == "float16" else Format("accumulator", precision, -126, 127, 32),
            nearest=out == "float16",
        )
