"""What GPU tests share: results of the kernels with all memory poisoned, and the assertion that
they have the emulator's bits, which names the first step that differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import emulation
from emulation import Numerics, Plan
from emulation.problem import Array
from tests.first_step import differing, explained
from tests.gpu_memory import embedded, poisoned

NAMES = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = NAMES[2:]


def assert_same(name: str, got: Array, want: Array) -> None:
    """Equal bits, any NaN equal to any NaN; else the first difference is named."""
    differ = differing(got, want)
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        pytest.fail(
            f"{name}: {int(differ.sum())} of {differ.size} differ; first at {at}: "
            f"{got.astype(np.float32)[at]!r}, expected {want.astype(np.float32)[at]!r}"
        )


def forward(
    q: Array, k: Array, v: Array, *, numerics: Numerics | dict[str, str] | None = None, **masks: Any
) -> tuple[Array, Array]:
    """out and lse of the kernels, NumPy to NumPy: a `first_step.Run`."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    arrays = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = cuflash.attention(*arrays, numerics=numerics, return_lse=True, **masks)
    return cupy.asnumpy(out), cupy.asnumpy(lse)


@dataclass(frozen=True)
class Results:
    """All results of the kernels as NumPy arrays, and the Plan that they obeyed."""

    plan: Plan
    arrays: dict[str, Array]


def dout_of(q: Array, v: Array, seed: int = 5) -> Array:
    """dO for q (..., N_q, D) and v (..., D_v), in their format."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(np.float32)
    return found.astype(q.dtype)


def uneven_means(k: Array) -> Array:
    """Keys (H, N, D) of which the first head's have a large mean, the second's none, the third's
    from two fifths on, and the fourth's one that the second half takes back; and so on. Under a
    causal mask some rows of the last two are centred and others are not.
    """
    wide = k.astype(np.float32)
    n = k.shape[1]
    wide[0::4] += 3.0
    wide[2::4, n * 2 // 5 :] += 6.0
    wide[3::4, : n // 2] += 3.0
    wide[3::4, n // 2 :] -= 3.0
    return wide.astype(k.dtype)


def results(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    dlse: Array | None = None,
    *,
    numerics: Numerics | dict[str, str] | None = None,
    **masks: Any,
) -> Results:
    """Forward and backward with NaN in all memory that they get and around all that they read."""
    cupy = pytest.importorskip("cupy")
    import cuflash

    with poisoned():
        arrays = [embedded(x) for x in (q, k, v)]
        plan = cuflash.plan(*arrays, numerics=numerics, **masks)
        (out, lse), vjp = cuflash.attention_vjp(
            *arrays, numerics=numerics, return_lse=True, **masks
        )
        slope = None if dlse is None else cupy.asarray(dlse)
        found = (out, lse, *vjp(embedded(dout), slope))
        return Results(plan, {n: cupy.asnumpy(x) for n, x in zip(NAMES, found, strict=True)})


def check(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None = None,
    dlse: Array | None = None,
    *,
    numerics: Numerics | dict[str, str] | None = None,
    **masks: Any,
) -> Results:
    """`results`, with bits equal to the emulator's under the same Plan."""
    dout = dout_of(q, v) if dout is None else dout
    got = results(q, k, v, dout, dlse, numerics=numerics, **masks)
    with np.errstate(all="ignore"):
        want = emulation.flash(q, k, v, plan=got.plan, **masks)
        gradients = emulation.flash_vjp(q, k, v, dout, dlse=dlse, plan=got.plan, **masks)
    pair = (got.arrays["out"], got.arrays["lse"])
    said = explained(forward, q, k, v, got.plan, masks, pair, want)
    if said is not None:
        pytest.fail(said)
    for name, expected in zip(GRADIENTS, gradients, strict=True):
        assert_same(f"{name} (out and lse agree)", got.arrays[name], expected)
    return got
