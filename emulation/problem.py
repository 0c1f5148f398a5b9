"""Problem: one attention problem, checked once. Every floor above takes its arrays, mask and heads
from here.

Every mask that attention kernels know (causal, window, both alignments) lets query i see one run of
keys, the band [lo[i], hi[i]); so a mask is two integer vectors and never an N x N array.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from emulation.arguments import check_plain, echo

Array = NDArray[Any]
Causal = Literal["bottom-right", "top-left"] | bool
Window = tuple[int | None, int | None]

DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256

#: Least and largest scale, as powers of two: float32 holds them, and them times log2(e), as normal
#: numbers, which keep all their digits.
LEAST, MOST_SCALE = -126, 127
#: Largest softcap. The machine's tanh, 1 - 2 / (1 + 2^x), errs by up to 2^-21 whatever the score
#: (derived in `bound_terms`), a capped score by softcap 2^-21: here by 1/32, a weight by 3 %.
MOST_SOFTCAP = 16


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """The canonical name of an array dtype ("bfloat16" for ml_dtypes.bfloat16)."""
    return str(np.dtype(dtype).name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a format name from `DTYPES`.

    >>> numpy_dtype("bfloat16").itemsize
    2
    """
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _check_array(name: str, x: Any) -> None:
    check_plain(name, x, f"an array of {', '.join(DTYPES)}")
    if dtype_name(x.dtype) not in DTYPES:
        raise TypeError(f"{name}: dtype {x.dtype}, must be one of {', '.join(DTYPES)}")
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, must have 2 to 4 axes: ([B,] [H,] N, D)")


def _check_number(name: str, x: Any, most: int) -> float:
    """x as a float from 2^-126 to 2^most."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real | np.number):
        raise TypeError(f"{name}: got {echo(x)}, must be a positive finite number")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: got {echo(x)}, must be a positive finite number")
    if not 2.0**LEAST <= value <= 2.0**most:
        raise ValueError(
            f"{name}: got {echo(x)}, must be 2**{LEAST} to 2**{most}, finite and normal in float32"
        )
    return value


def _check_softcap(softcap: Any, scale: float) -> float:
    """A softcap that the machine can apply to scores of this scale."""
    cap = _check_number("softcap", softcap, MOST_SOFTCAP)
    factor = 2.0 * math.log2(math.e) * scale / cap
    if not 2.0**LEAST <= factor < 2.0**MOST_SCALE:
        raise ValueError(
            f"softcap: got {echo(softcap)} beside scale {scale}, must keep 2 log2(e) scale / "
            f"softcap 2**{LEAST} to 2**{MOST_SCALE}, finite and normal in float32"
        )
    return cap


def check_causal(causal: Any) -> Literal[False, "bottom-right", "top-left"]:
    """False, or the alignment of the diagonal (True means "bottom-right")."""
    if not isinstance(causal, bool | np.bool_ | str):
        raise TypeError(f'causal: got {echo(causal)}, must be a bool, "bottom-right" or "top-left"')
    if causal is False or (isinstance(causal, np.bool_) and not causal):
        return False
    if causal is True or isinstance(causal, np.bool_) or causal == "bottom-right":
        return "bottom-right"
    if causal == "top-left":
        return "top-left"
    raise ValueError(
        f'causal: got {echo(causal)}, must be False, True, "bottom-right" or "top-left"'
    )


def check_window(window: Any) -> Window | None:
    """None, or (left, right), each None (unbounded) or an integer >= 0."""
    if window is None:
        return None
    if isinstance(window, str) or not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(f"window: got {echo(window)}, must be None or a pair (left, right)")
    sides: list[int | None] = []
    for side, value in zip(("left", "right"), window, strict=True):
        if value is None:
            sides.append(None)
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"window: {side} is {echo(value)}, must be None (unbounded) or an integer >= 0"
            )
        if value < 0:
            raise ValueError(f"window: {side} is {value}, must be >= 0 (None is unbounded)")
        sides.append(min(int(value), 2**31 - 1))  # further than any key
    return None if sides == [None, None] else (sides[0], sides[1])


def check_problem(problem: Any) -> None:
    """TypeError unless it is a Problem."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem: got {type(problem).__name__}, must be a Problem (Problem.of makes one)"
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked attention problem, head axes flattened.

    q (H, N_q, D), k (H_kv, N_k, D), v (H_kv, N_k, D_v) keep the caller's dtype; query head h reads
    key head `kv_head(h)`. `lead` is the shape that was flattened into H, so that outputs can be
    given it back. Made by `Problem.of`, which raises TypeError or ValueError naming argument, value
    and rule. Values are not looked at: NaN and Inf pass (see `nonfinite`).
    """

    q: Array
    k: Array
    v: Array
    lead: tuple[int, ...]
    kv_lead: tuple[int, ...]
    scale: float
    causal: Literal[False, "bottom-right", "top-left"]
    window: Window | None
    softcap: float | None

    @staticmethod
    def of(
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        causal: Any = False,
        window: Any = None,
        softcap: float | None = None,
    ) -> Problem:
        """Check and flatten.

        scale: 2^-126 to 2^127, 1 / sqrt(D) by default. softcap: 2^-126 to 2^16, and with 2 log2(e)
        scale / softcap from 2^-126 to 2^127; None is none. A capped score errs by up to softcap
        2^-21, absolutely and however small it is, since tanh is formed as 1 - 2 / (1 + 2^x): with
        50 by 2.4e-5, with 2^16 by 1/32, and beyond that the arithmetic means little.

        >>> p = Problem.of(*[np.zeros((2, 6, 5, 8), np.float16)] * 3, causal=True)
        >>> p.q.shape, p.lead, p.scale == 1 / math.sqrt(8)
        ((12, 5, 8), (2, 6), True)
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_array(name, x)
        if not q.ndim == k.ndim == v.ndim:
            raise ValueError(f"k, v: {k.ndim} and {v.ndim} axes, must be {q.ndim} like q")
        for name, x in (("k", k), ("v", v)):
            if dtype_name(x.dtype) != dtype_name(q.dtype):
                raise TypeError(f"{name}: dtype {x.dtype}, must be {q.dtype} like q")
        d, d_v = int(q.shape[-1]), int(v.shape[-1])
        if k.shape[-1] != d:
            raise ValueError(f"k: head dimension {k.shape[-1]}, must be {d} like q")
        for name, width in (("q", d), ("v", d_v)):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: head dimension {width}, must be 1 to {MAX_HEAD_DIM}")
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"v: shape {tuple(v.shape)}, must be like k {tuple(k.shape)} but for the last axis"
            )
        if q.ndim == 4 and q.shape[0] != k.shape[0]:
            raise ValueError(f"k: batch {k.shape[0]}, must be {q.shape[0]} like q")
        if q.ndim >= 3:
            heads, kv_heads = int(q.shape[-3]), int(k.shape[-3])
            if (heads == 0) != (kv_heads == 0) or (kv_heads and heads % kv_heads):
                raise ValueError(f"k: {kv_heads} heads, must divide the {heads} heads of q")
        held = 1.0 / math.sqrt(d) if scale is None else _check_number("scale", scale, MOST_SCALE)
        return Problem(
            q=q.reshape(math.prod(q.shape[:-2]), *q.shape[-2:]),
            k=k.reshape(math.prod(k.shape[:-2]), *k.shape[-2:]),
            v=v.reshape(math.prod(v.shape[:-2]), *v.shape[-2:]),
            lead=tuple(q.shape[:-2]),
            kv_lead=tuple(k.shape[:-2]),
            scale=held,
            causal=check_causal(causal),
            window=check_window(window),
            softcap=None if softcap is None else _check_softcap(softcap, held),
        )

    @property
    def dtype(self) -> str:
        """Format name of q, k and v."""
        return dtype_name(self.q.dtype)

    @property
    def heads(self) -> int:
        """Number of query heads, batch included."""
        return int(self.q.shape[0])

    @property
    def n_q(self) -> int:
        """Number of queries."""
        return int(self.q.shape[1])

    @property
    def n_k(self) -> int:
        """Number of keys."""
        return int(self.k.shape[1])

    @property
    def d(self) -> int:
        """Head dimension of q and k."""
        return int(self.q.shape[2])

    @property
    def d_v(self) -> int:
        """Head dimension of v and of the output."""
        return int(self.v.shape[2])

    @property
    def group(self) -> int:
        """Query heads that share one key head (1 without GQA)."""
        return self.heads // int(self.k.shape[0]) if self.heads else 1

    def kv_head(self, head: int) -> int:
        """The flattened key head that the flattened query head reads."""
        return head // self.group

    def band(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First visible key and one past the last, per query; lo == hi == 0 where a query sees
        nothing.

        The window counts from the diagonal of the causal alignment (bottom-right when causal is
        False).

        >>> x = np.zeros((3, 8), np.float16)
        >>> lo, hi = Problem.of(x, x, x, causal=True, window=(1, None)).band()
        >>> lo.tolist(), hi.tolist()
        ([0, 0, 1], [1, 2, 3])
        """
        n_q, n_k = self.n_q, self.n_k
        diagonal = np.arange(n_q, dtype=np.int64) + (0 if self.causal == "top-left" else n_k - n_q)
        lo = np.zeros(n_q, np.int64)
        hi = np.full(n_q, n_k, np.int64)
        left, right = self.window if self.window is not None else (None, None)
        if left is not None:
            lo = np.maximum(lo, diagonal - left)
        if right is not None:
            hi = np.minimum(hi, diagonal + right + 1)
        if self.causal:
            hi = np.minimum(hi, diagonal + 1)
        empty = hi <= lo
        return np.where(empty, 0, lo), np.where(empty, 0, hi)

    def seen_keys(self) -> NDArray[np.bool_]:
        """Which keys at least one query sees (N_k,)."""
        lo, hi = self.band()
        steps = np.zeros(self.n_k + 1, np.int64)
        np.add.at(steps, lo, 1)
        np.add.at(steps, hi, -1)
        return np.cumsum(steps)[: self.n_k] > 0

    def nonfinite(self) -> str | None:
        """Where the first NaN or Inf stands that some query would see, or None; for callers that
        refuse them.
        """
        lo, hi = self.band()
        seen = self.seen_keys()
        for name, x, rows in (("q", self.q, hi > lo), ("k", self.k, seen), ("v", self.v, seen)):
            bad = np.argwhere(~np.isfinite(np.asarray(x, np.float32)) & rows[None, :, None])
            if len(bad):
                at = tuple(int(i) for i in bad[0])
                return f"{name}: {float(x[at])} at (head, row, column) {at}, must be finite"
        return None
