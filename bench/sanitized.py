"""What compute-sanitizer watches: forward and backward of every recorded problem in its format and
in float32; of strided, batched, grouped and single-row problems with a gradient of LSE; and of
problems that take the rare paths, with NaN and Inf behind a mask, with gradients so small that dQ
is added exactly, and with keys whose mean has dQ centred.

    compute-sanitizer --tool memcheck python -m bench.sanitized

initcheck before its version 2025.4 does not see what bulk copies write: O and what rounding takes
from it, of the Hopper forward, the first share of dQ's sums, and dK and dV, of its backward. With
--fill results and workspaces are filled first, so that it has nothing to say of them, and what it
would say is checked here: two fillings, NaN and a number, give the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import cupy
import numpy as np

import cuflash
from cuflash import compiler, sm80_backward, sm90_backward
from emulation.samples import sample
from tests.golden_cases import CASES, GoldenCase

#: Queries, keys, head dimensions, options.
SHAPES: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (1, 130, 64, 64, {"causal": True}),
    (129, 65, 72, 40, {"window": (20, 3)}),
    (70, 200, 128, 128, {"causal": True, "softcap": 5.0}),
    (40, 90, 192, 256, {"causal": "top-left"}),
]


#: Head dimensions of the rare paths: every kernel of the Hopper backward, and odd columns.
RARE = ((64, 64), (72, 40), (128, 128), (192, 128), (256, 256))


class Filled:
    """CuPy, but that new arrays of floats hold the byte `value`."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(cupy, name)

    def empty(self, shape: Any, dtype: Any) -> Any:
        found = cupy.empty(shape, dtype)
        if found.size > 0 and np.dtype(dtype).kind not in "iu":
            found.view(np.uint8).fill(self.value)
        return found


@contextlib.contextmanager
def filled(value: int | None) -> Iterator[None]:
    """Results and workspaces begin as bytes `value`; None: as they come."""
    if value is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for module in (compiler, sm80_backward, sm90_backward):
            stack.enter_context(mock.patch.object(module, "cupy", return_value=Filled(value)))
        yield


def run(arrays: Any, dout: Any, dlse: Any = None, *, fill: bool = False, **options: Any) -> None:
    """All kernels of one problem. Raises AssertionError where what was in memory matters."""
    first: list[bytes] | None = None
    for value in (0xFF, 0x3F) if fill else (None,):  # NaN, and a number near 1
        with filled(value):
            out, vjp = cuflash.attention_vjp(*arrays, **options)
            found = [x.get().tobytes() for x in (out, *vjp(dout, dlse))]
        assert first is None or found == first, (
            "memory is read before it is written, or not written"
        )
        first = found


def recorded(case: GoldenCase, dtype: str, fill: bool) -> None:
    """A problem whose bits are recorded."""
    *arrays, dout = (cupy.asarray(x) for x in case._replace(dtype=dtype).inputs())
    run(arrays, dout, fill=fill, numerics=case.numerics, **case.options)


def strided(
    dtype: str, n_q: int, n_k: int, d: int, d_v: int, options: dict[str, Any], fill: bool
) -> None:
    """Batches of grouped heads, (B, N, H, D) in memory, with a gradient of LSE."""
    lengths = {"q": (n_q, d, 6), "k": (n_k, d, 2), "v": (n_k, d_v, 2), "dout": (n_q, d_v, 6)}
    given = {}
    for name, (n, width, heads) in lengths.items():
        x = sample("normal", n=n, d=width, heads=2 * heads, dtype=dtype)[0]
        x = x.reshape(2, heads, n, width).swapaxes(1, 2)
        given[name] = cupy.asarray(np.ascontiguousarray(x)).swapaxes(1, 2)
    dlse = cupy.ones((2, 6, n_q), np.float32)
    dout = given.pop("dout")
    run(given.values(), dout, dlse, fill=fill, **options)


def rare(dtype: str, d: int, d_v: int, small: bool, options: dict[str, Any], fill: bool) -> None:
    """Six heads on two, three steps or more of every tile of keys."""
    q = sample("normal", n=150, d=d, heads=6, dtype=dtype)[0]
    k = sample("normal", n=170, d=d, heads=2, dtype=dtype, seed=1)[1]
    v = sample("normal", n=170, d=d_v, heads=2, dtype=dtype, seed=1)[2]
    dout = sample("normal", n=150, d=d_v, heads=6, dtype=dtype, seed=2)[2]
    if small:  # of every third row: subnormal in bfloat16 and in float32, or nearly
        dout[:, ::3] = (dout[:, ::3].astype(np.float32) * np.float32(2.0**-112)).astype(dout.dtype)
    else:
        q[:, 3, 1], k[:, 90, 0], v[:, 60, 2], dout[:, 41, 3] = np.nan, -np.inf, np.nan, np.inf
    run([cupy.asarray(x) for x in (q, k, v)], cupy.asarray(dout), fill=fill, **options)


def centered(dtype: str, d: int, d_v: int, options: dict[str, Any], fill: bool) -> None:
    """Keys with a large mean, which dQ is centred for; the first ones without, so that not all
    rows are.
    """
    q = sample("normal", n=200, d=d, heads=4, dtype=dtype)[0]
    k = sample("normal", n=260, d=d, heads=2, dtype=dtype, seed=1)[1]
    v = sample("normal", n=260, d=d_v, heads=2, dtype=dtype, seed=1)[2]
    dout = sample("normal", n=200, d=d_v, heads=4, dtype=dtype, seed=2)[2]
    k[:, 140:] += np.asarray(3, k.dtype)
    run([cupy.asarray(x) for x in (q, k, v)], cupy.asarray(dout), fill=fill, **options)


def problems() -> Iterator[Callable[[bool], None]]:
    """Each draws its inputs and runs all kernels; True: in memory that is filled first."""
    for case in CASES.values():
        yield partial(recorded, case, case.dtype)
        yield partial(recorded, case, "float32")
    masks: tuple[dict[str, Any], ...] = ({"causal": True}, {"window": (40, 9)})
    for dtype in ("float16", "bfloat16", "float32"):
        for shape in SHAPES:
            yield partial(strided, dtype, *shape)
        for (d, d_v), small, options in itertools.product(RARE, (False, True), masks):
            yield partial(rare, dtype, d, d_v, small, options)
        if dtype != "float32":
            for (d, d_v), options in itertools.product(RARE, masks):
                yield partial(centered, dtype, d, d_v, options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th problem, from the I-th on")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    chosen = list(problems())[first::step]
    for problem in chosen:
        problem(given.fill)
    cupy.cuda.Device().synchronize()
    print(f"{len(chosen)} problems, forward and backward")


if __name__ == "__main__":
    main()
