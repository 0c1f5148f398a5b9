"""CUDA's expf and logf: their documented accuracy, and special values."""

from __future__ import annotations

import numpy as np

from emulation.cuda_math import expf, log2f, logf
from emulation.problem import Array


def ulps(got: Array, exact: Array) -> float:
    return float(np.max(np.abs(got - exact) / np.spacing(np.abs(exact.astype(np.float32)))))


def test_logf_is_within_one_ulp() -> None:
    """CUDA documents 1 ulp; a wrong coefficient of the polynomial would pass it."""
    x = (np.arange(0, 2**23, 13, dtype=np.uint32) + 0x3F000000).view(np.float32)
    assert ulps(logf(x), np.log(x.astype(np.float64))) < 1
    tiny = (x.astype(np.float64) * 2.0**-130).astype(np.float32)
    assert ulps(logf(tiny), np.log(tiny.astype(np.float64))) < 1


def test_log2f_is_within_one_ulp() -> None:
    x = (np.arange(0, 2**23, 13, dtype=np.uint32) + 0x3F000000).view(np.float32)
    assert ulps(log2f(x), np.log2(x.astype(np.float64))) < 1
    tiny = (x.astype(np.float64) * 2.0**-130).astype(np.float32)
    assert ulps(log2f(tiny), np.log2(tiny.astype(np.float64))) < 1
    whole = np.float32(2.0) ** np.arange(-126, 128, dtype=np.float32)
    assert np.array_equal(log2f(whole), np.arange(-126, 128))


def test_expf_is_within_two_ulp() -> None:
    x = np.random.default_rng(0).uniform(-87, 88, 1 << 18).astype(np.float32)
    assert ulps(expf(x), np.exp(x.astype(np.float64))) < 2.0


def test_special_values() -> None:
    with np.errstate(all="ignore"):
        special = np.array([0, -0.0, 1, -1, np.inf, np.nan], np.float32)
        log, log2 = logf(special), log2f(special)
        exp = expf(np.array([0, -0.0, -np.inf, 200, -200], np.float32))
    assert np.array_equal(log, log2, equal_nan=True)
    assert log[:3].tolist() == [-np.inf, -np.inf, 0.0]
    assert np.isnan(log[[3, 5]]).all()
    assert log[4] == np.inf
    assert exp.tolist() == [1.0, 1.0, 0.0, np.inf, 0.0]
