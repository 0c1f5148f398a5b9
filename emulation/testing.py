"""Assertions for other people's test suites: tolerances derived from the arithmetic, not chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation.explain.call import explain
from emulation.plan import Plan


def assert_attention_close(
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    lse: Any = None,
    grads: Any = None,
    dout: Any = None,
    dtype: Any = None,
    plan: Plan | str | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
) -> None:
    """Raise AssertionError unless out (and lse, grads) may come from a correct attention kernel.

    In place of `allclose(out, reference, atol=1e-2)`: compared is with the exact result, and an
    element may differ by what a correct kernel can differ there. It fails, with the verdict and the
    computation that fits, if an element is beyond the bound, if the error is larger than
    independent roundings leave, or if it holds the difference of a known mistake. NaN fails.
    Arguments as in `emulation.explain` and `tolerance`. dtype: the kernel's format, to which q, k,
    v and dout are rounded first; None is theirs, also where they hold only bfloat16 values in
    float32, which the error then says. Wrong arguments raise TypeError or ValueError.

    >>> from emulation import flash
    >>> from emulation.samples import sample
    >>> q, k, v = sample("normal", n=40, d=16)
    >>> out, lse = flash(q, k, v, causal=True)
    >>> assert_attention_close(out, q, k, v, lse=lse, causal=True)
    >>> try:
    ...     assert_attention_close(out, q, k, v, causal="top-left", window=(7, None))
    ... except AssertionError as error:
    ...     print(str(error).split(".")[0])
    Another computation
    """
    if dtype is None and all(getattr(x, "dtype", None) == np.float32 for x in (q, k, v)):
        dtype = "float32"  # `explain` guesses a format from the values; an assertion must not
    found = explain(
        q, k, v, out, lse=lse, grads=grads, dout=dout, dtype=dtype, plan=plan, scale=scale,
        causal=causal, window=window, softcap=softcap, arithmetic=False, sources=False,
    )  # fmt: skip
    if not found.is_rounding:
        raise AssertionError(str(found))
