"""Floating-point formats as data: what a format can hold, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals.

    A finite value is k * 2^(e - precision + 1) with emin <= e <= emax and |k| < 2^precision.
    Formats without an infinity (`has_inf` False) keep the largest code for NaN, so their largest
    finite value is one step lower.

    >>> FLOAT16.max, FLOAT16.smallest_normal == 2**-14, E4M3.max
    (65504.0, True, 448.0)
    """

    name: str
    precision: int  #: significant bits, the hidden one included
    emin: int  #: exponent of the smallest normal number 2^emin
    emax: int  #: exponent of the largest numbers, in [2^emax, 2^(emax + 1))
    bits: int  #: width in memory (TF32: of its 32 bits 19 are used)
    has_inf: bool = True

    @property
    def max(self) -> float:
        """Largest finite value."""
        lost = 1 if self.has_inf else 2
        return float((2**self.precision - lost) * 2.0 ** (self.emax - self.precision + 1))

    @property
    def smallest_normal(self) -> float:
        """2^emin."""
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        """The grid below 2^emin, and the smallest positive value."""
        return 2.0 ** (self.emin - self.precision + 1)

    @property
    def unit_roundoff(self) -> float:
        """2^-precision: largest relative error of one rounding to nearest of a normal number."""
        return 2.0**-self.precision


FLOAT32 = Format("float32", precision=24, emin=-126, emax=127, bits=32)
TF32 = Format("tf32", precision=11, emin=-126, emax=127, bits=19)
BFLOAT16 = Format("bfloat16", precision=8, emin=-126, emax=127, bits=16)
FLOAT16 = Format("float16", precision=11, emin=-14, emax=15, bits=16)
E5M2 = Format("e5m2", precision=3, emin=-14, emax=15, bits=8)
E4M3 = Format("e4m3", precision=4, emin=-6, emax=8, bits=8, has_inf=False)

FORMATS: dict[str, Format] = {f.name: f for f in (FLOAT32, TF32, BFLOAT16, FLOAT16, E5M2, E4M3)}

#: Array dtypes whose names differ from the format's.
_ALIASES = {"float8_e5m2": "e5m2", "float8_e4m3fn": "e4m3"}


def format_of(x: Any) -> Format:
    """The `Format` of a format name, of an array dtype, or of a Format (itself).

    Raises ValueError for a name and TypeError for a dtype that is no format of `FORMATS`.

    >>> format_of("bfloat16").precision, format_of(np.dtype(np.float16)) is FLOAT16
    (8, True)
    """
    if isinstance(x, Format):
        return x
    if isinstance(x, str):
        if x not in FORMATS:
            raise ValueError(f"format: got {x!r}, must be one of {', '.join(FORMATS)}")
        return FORMATS[x]
    name = str(np.dtype(x).name)
    name = _ALIASES.get(name, name)
    if name not in FORMATS:
        raise TypeError(f"format: dtype {x!r}, must be one of {', '.join(FORMATS)}")
    return FORMATS[name]
