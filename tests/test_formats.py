"""formats: the numbers of every format against ml_dtypes and NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from emulation import formats
from emulation.formats import FORMATS, Format, format_of

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", DTYPES)
def test_properties_are_those_of_the_dtype(name: str) -> None:
    info: Any = ml_dtypes.finfo(DTYPES[name])  # type: ignore[no-untyped-call]
    f = FORMATS[name]
    assert f.max == float(info.max)
    assert f.smallest_normal == float(info.smallest_normal)
    assert f.smallest_subnormal == float(info.smallest_subnormal)
    assert f.unit_roundoff == float(info.eps) / 2
    assert f.bits == info.bits


def test_tf32_has_the_precision_of_float16_and_the_range_of_float32() -> None:
    f = FORMATS["tf32"]
    assert f.precision == formats.FLOAT16.precision
    assert (f.emin, f.emax) == (formats.FLOAT32.emin, formats.FLOAT32.emax)
    assert f.max == float(np.array([0x7F7FE000], np.uint32).view(np.float32)[0])


@pytest.mark.parametrize("name", DTYPES)
def test_format_of_takes_names_dtypes_and_formats(name: str) -> None:
    f = FORMATS[name]
    assert format_of(name) is format_of(f) is format_of(np.dtype(DTYPES[name])) is f
    assert format_of(DTYPES[name]) is f


def test_format_of_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="float17"):
        format_of("float17")
    with pytest.raises(TypeError, match="float64"):
        format_of(np.float64)
    with pytest.raises(AttributeError):
        FORMATS["float32"].precision = 25  # type: ignore[misc]


@pytest.mark.parametrize("f", FORMATS.values(), ids=FORMATS)
def test_every_value_fits_float32(f: Format) -> None:
    for x in (f.max, f.smallest_subnormal, f.smallest_normal):
        assert float(np.float32(x)) == x > 0
