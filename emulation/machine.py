"""Machine: executes the steps of an algorithm on arrays, each step rounded as the hardware rounds
it.

The algorithms are written once, against these methods. Every method that rounds takes the name of
its source (see sources.py) first; this machine ignores it, and `tracking.TrackingMachine` runs the
same steps with errors attached. A value is a float32 array holding numbers of the state's format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from emulation import cuda_math, rounding, sfu, tensor_core, wide
from emulation.problem import Array

Node = Any  # an array here, a Tracked in the tracking machine


class Machine:
    """One architecture's arithmetic with one format for everything kept between steps.

    arch and step choose the tensor-core rule, fmt the format of matrix operands, wide how "float32"
    ones are multiplied, since no tensor core takes them whole ("fma": correctly rounded fp32 FMA
    chains; "split": see `wide`), state the format that vector operations round to, exp2 the unit
    ("hardware", "polynomial", "mixed").
    """

    def __init__(
        self,
        *,
        arch: str = "sm90",
        step: int | None = None,
        fmt: str = "bfloat16",
        wide: str = "fma",
        state: str = "float32",
        exp2: str = "hardware",
    ) -> None:
        self.arch, self.step, self.fmt, self.state, self.unit = arch, step, fmt, state, exp2
        self.wide = wide

    # -- structure: nothing is rounded ------------------------------------------------------------

    def input(self, x: Array) -> Node:
        """An exact input (values of a format of at most 24 bits)."""
        return x.astype(np.float32)

    def value(self, x: Node) -> Array:
        """The computed value, for decisions (max, comparisons)."""
        return cast(Array, x)

    def map(self, x: Node, f: Callable[[Array], Array]) -> Node:
        """A step that only moves values: slicing, reshaping, transposing, broadcasting."""
        return f(x)

    def transpose(self, x: Node) -> Node:
        """x^T of a matrix."""
        return self.map(x, lambda y: y.T)

    def take(self, x: Node, index: Any) -> Node:
        """x[index], for any NumPy index."""
        return self.map(x, lambda y: y[index])

    def select(self, condition: Array, a: Node, b: Node) -> Node:
        """a where condition, else b."""
        return rounding.namespace(condition).where(condition, a, b)

    def differ(self, a: Node, b: Node) -> Array:
        """Where two computed values are not equal."""
        return cast(Array, self.value(a) != self.value(b))

    def top(self, x: Node, seen: Array) -> Node:
        """The largest seen entry of each row (R, T) -> (R,); any entry where a row sees nothing."""
        xp = rounding.namespace(seen)
        v = self.value(x)
        # NaN counts as the smallest, as in fmaxf.
        at = xp.argmax(xp.where(seen & ~xp.isnan(v), v, xp.float32(-np.inf)), axis=1)
        return self.map(x, lambda y: xp.take_along_axis(y, at[:, None], axis=1)[:, 0])

    def shifted(self, x: Node, value: Array) -> Node:
        """x moved to `value` by an amount that is exact by definition (a reference that jumps)."""
        return value

    def zeros(self, like: Array, shape: tuple[int, ...]) -> Node:
        """Exact zeros on the device of `like`."""
        return rounding.namespace(like).zeros(shape, np.float32)

    def replace(self, x: Node, rows: slice, part: Node) -> Node:
        """x with x[rows] replaced by part; x itself may be reused."""
        x[rows] = part
        return x

    def concatenate(self, parts: list[Node]) -> Node:
        """Parts stacked along the rows."""
        return rounding.namespace(parts[0]).concatenate(parts, axis=0)

    # -- steps that round -------------------------------------------------------------------------

    def constant(self, name: str, exact: float, given: float | None = None) -> Node:
        """A real constant as a number of the state's format; `given` is rounded in its place where
        its factors were rounded before.
        """
        value = exact if given is None else given
        return np.float32(rounding.round_to(np.float64(value), self.state))

    def keep(self, name: str, x: Node) -> Node:
        """x in the state's format: nothing to do in fp32."""
        return x if self.state == "float32" else rounding.cast(x, self.state)

    def cast(self, name: str, x: Node, fmt: str) -> Node:
        """x rounded to a format, nearest even."""
        return rounding.cast(x, fmt)

    def dot(self, name: str, a: Node, b: Node, c: Node | None = None) -> Node:
        """c + a b^T, a (M, K), b (N, K), c (M, N) or None: on the tensor core, or for fp32 by an
        FMA chain.
        """
        if self.fmt == "float32" and self.wide == "split":
            d = wide.dot(a, b, c, arch=self.arch, step=self.step)
        elif self.fmt == "float32":
            d = tensor_core.fma_chain(a, b, c)
        else:
            d = tensor_core.mma(a, b, c, arch=self.arch, fmt=self.fmt, step=self.step)
        return self.keep(name, d)

    def dot_seen(self, name: str, a: Node, b: Node, c: Node | None, seen: Array) -> Node:
        """`dot` in which row i of a multiplies only the rows j of b with seen[i, j] (elsewhere a is
        0).

        Differs from `dot` only where b holds NaN or Inf: what a row does not see must not reach it
        as 0 * NaN.
        """
        xp = rounding.namespace(seen)
        bad = ~xp.isfinite(self.value(b)).all(axis=0)
        if not bool(bad.any()):
            return self.dot(name, a, b, c)
        d = self.dot(name, a, xp.where(bad[None, :], xp.float32(0), b), c)
        for i in np.flatnonzero(np.asarray((seen & bad[None, :]).any(axis=1).tolist())):
            row = slice(int(i), int(i) + 1)
            keys = xp.where((bad & ~seen[i])[None, :], xp.float32(0), b)
            d[row] = self.dot(name, a[row], keys, None if c is None else c[row])
        return d

    def add(self, name: str, a: Node, b: Node) -> Node:
        """a + b."""
        return rounding.add(a, b, self.state)

    def sub(self, name: str, a: Node, b: Node) -> Node:
        """a - b."""
        return rounding.sub(a, b, self.state)

    def mul(self, name: str, a: Node, b: Node) -> Node:
        """a * b."""
        return rounding.mul(a, b, self.state)

    def div(self, name: str, a: Node, b: Node) -> Node:
        """a / b."""
        return rounding.div(a, b, self.state)

    def fma(self, name: str, a: Node, b: Node, c: Node, product: str | None = None) -> Node:
        """a * b + c, rounded once. `product` names the source where a * b alone would already have
        rounded.
        """
        return rounding.fma(a, b, c, self.state)

    def exp2(self, name: str, x: Node, seen: Array | None = None) -> Node:
        """2^x where seen, +0 elsewhere: P of a tile; without `seen` a factor per row (alpha).

        "mixed" sends one group of eight columns in four of a tile to the polynomial, so that each
        lane of a quad has its share; factors go to the hardware.
        """
        xp = rounding.namespace(x)
        if self.unit == "hardware" or (self.unit == "mixed" and seen is None):
            y = sfu.ex2(x)
        elif self.unit == "polynomial":
            y = sfu.ex2_polynomial(x)
        else:
            pattern = xp.arange(x.shape[-1]) // 8 % 4 == 0
            y = xp.where(pattern, sfu.ex2_polynomial(x), sfu.ex2(x))
        y = y if seen is None else xp.where(seen, y, xp.float32(0))
        return self.keep(name, y)

    def exp(self, name: str, x: Node, seen: Array) -> Node:
        """e^x by CUDA's expf where seen, +0 elsewhere."""
        xp = rounding.namespace(seen)
        return self.keep(name, xp.where(seen, cuda_math.expf(x), xp.float32(0)))

    def log2(self, name: str, x: Node, how: str = "hardware") -> Node:
        """log2(x) by the special function unit, or by "cuda"'s log2f."""
        return self.keep(name, sfu.lg2(x) if how == "hardware" else cuda_math.log2f(x))

    def log(self, name: str, x: Node) -> Node:
        """ln(x) by CUDA's logf."""
        return self.keep(name, cuda_math.logf(x))

    def reciprocal(self, name: str, x: Node, how: str) -> Node:
        """1 / x: "ieee" or "hardware" (rcp.approx)."""
        if how == "hardware":
            return self.keep(name, sfu.rcp(x))
        return rounding.div(np.float32(1), x, self.state)

    def tanh(self, name: str, x: Node) -> Node:
        """tanh(x / (2 log2 e)) for x in log2 units: 1 - 2 / (1 + 2^x), x clamped to [-30, 30] where
        it is flat.
        """
        xp = rounding.namespace(x)
        x = xp.minimum(xp.maximum(x, xp.float32(-30)), xp.float32(30))
        r = sfu.rcp(rounding.add(sfu.ex2(x), np.float32(1), "float32"))
        return self.keep(name, rounding.fma(np.float32(-2), r, np.float32(1), "float32"))

    def linear(self, name: str, value: Array, *terms: tuple[float, Node]) -> Node:
        """A value that stands for the real sum of weight * term; whatever it misses is this
        source's.
        """
        return value
