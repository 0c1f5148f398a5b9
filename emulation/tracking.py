"""TrackingMachine: the same steps, each value with its exact companion and with the error of every
source.

A Tracked value carries: what the machine computed; what real arithmetic gives (float64); and, per
source, a signed error, with value - exact = sum of errors, always. A step's own rounding joins its
source. Errors pass through a step by secants instead of derivatives (for a product the mean of
both, for a function the slope between computed and exact), so that sums stay exact at any error
size: there is no second-order remainder to hide. To first order this is CENA (Langlois 2001),
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulation.machine import Machine
from emulation.problem import Array
from emulation.sources import SOURCES

F64 = NDArray[np.float64]
_LN2 = float(np.log(2.0))


def _wide(x: Any) -> F64:
    return np.asarray(x, np.float64)


@dataclass(frozen=True, eq=False)
class Tracked:
    """value (float32, as computed), exact (float64), errors by source."""

    value: Array
    exact: F64
    errors: dict[str, F64]


def _merge(*parts: tuple[Tracked, Callable[[F64], F64]]) -> dict[str, F64]:
    """Errors of several operands, each passed through its weight, added source by source."""
    merged: dict[str, F64] = {}
    for node, weigh in parts:
        for name, e in node.errors.items():
            passed = weigh(e)
            merged[name] = merged[name] + passed if name in merged else passed
    return merged


def _put(errors: dict[str, F64], name: str, local: F64) -> dict[str, F64]:
    """Adds a step's own rounding to its source, and gives every error the shape of the result."""
    if name not in SOURCES:
        raise KeyError(f"step {name!r} is no source; add it to emulation/sources.py")
    if np.any(local):
        errors[name] = errors[name] + local if name in errors else local
    return {source: np.broadcast_to(e, local.shape) for source, e in errors.items()}


def _node(x: Any) -> Tracked:
    return x if isinstance(x, Tracked) else Tracked(np.float32(x), _wide(x), {})  # type: ignore[arg-type]


def _mean(x: Tracked) -> F64:
    return 0.5 * (_wide(x.value) + x.exact)


def _secant(
    f: Callable[[F64], F64], slope: Callable[[F64], F64], near: F64, exact: F64, gap: F64
) -> F64:
    """(f(near) - f(exact)) / gap, and the derivative where the gap is too small for the quotient to
    be exact.
    """
    small = np.abs(gap) <= 1e-5 * np.maximum(1.0, np.abs(exact))
    return np.where(
        small,
        slope(0.5 * (near + exact)),
        (f(near) - f(exact)) / np.where(small, 1.0, gap),
    )


class TrackingMachine(Machine):
    """A `Machine` whose values are `Tracked`. Finite inputs only.

    fold: sources whose roundings the exact companion makes, too. The companion is then what the
    algorithm gives with just these roundings switched on: the ablation that `attribution.shapley`
    averages.
    """

    def __init__(self, *, fold: Iterable[str] = (), **arithmetic: Any) -> None:
        super().__init__(**arithmetic)
        self.fold = frozenset(fold)
        self.overflows: dict[str, None] = {}  # steps that left their format's range, in order

    def _step(
        self, name: str, value: Array, exact: F64, errors: dict[str, F64], local: F64
    ) -> Tracked:
        """The result of a step: its own rounding joins its source, or the companion."""
        if not np.all(np.isfinite(local)):
            self.overflows[name] = None
        if name in self.fold:
            return Tracked(value, exact + local, _put(errors, name, 0.0 * local))
        return Tracked(value, exact, _put(errors, name, local))

    # -- structure --------------------------------------------------------------------------------

    def input(self, x: Array) -> Tracked:
        value = x.astype(np.float32)
        return Tracked(value, _wide(value), {})

    def value(self, x: Any) -> Array:
        return _node(x).value

    def map(self, x: Tracked, f: Callable[[Any], Any]) -> Tracked:
        return Tracked(f(x.value), f(x.exact), {name: f(e) for name, e in x.errors.items()})

    def select(self, condition: Array, a: Any, b: Any) -> Tracked:
        a, b = _node(a), _node(b)
        errors = {
            name: np.where(condition, a.errors.get(name, 0.0), b.errors.get(name, 0.0))
            for name in dict.fromkeys((*a.errors, *b.errors))
        }
        return Tracked(
            np.where(condition, a.value, b.value), np.where(condition, a.exact, b.exact), errors
        )

    def top(self, x: Tracked, seen: Array) -> Tracked:
        node: Tracked = super().top(x, seen)
        # Which score is subtracted cancels in real arithmetic. The companion takes its own largest
        # one, so that it does not overflow where rounding picked another; the gap joins the source
        # that is largest there.
        exact = np.max(np.where(seen, x.exact, -np.inf), axis=1)
        gap = np.where(seen.any(axis=1), node.exact - exact, 0.0)
        if not np.any(gap):
            return node
        names = list(node.errors)
        guilty = np.argmax([np.abs(node.errors[n]) for n in names], axis=0)
        errors = {n: node.errors[n] + np.where(guilty == i, gap, 0.0) for i, n in enumerate(names)}
        return Tracked(node.value, node.exact - gap, errors)

    def shifted(self, x: Tracked, value: Array) -> Tracked:
        return Tracked(value, x.exact + (_wide(value) - _wide(x.value)), x.errors)

    def zeros(self, like: Any, shape: tuple[int, ...]) -> Tracked:
        return Tracked(np.zeros(shape, np.float32), np.zeros(shape), {})

    def replace(self, x: Tracked, rows: slice, part: Tracked) -> Tracked:
        def put(whole: Array, new: Any) -> Array:
            whole = np.array(whole)
            whole[rows] = new
            return whole

        shape = x.exact.shape
        names = dict.fromkeys((*x.errors, *part.errors))
        errors = {
            name: put(x.errors.get(name, np.zeros(shape)), part.errors.get(name, 0.0))
            for name in names
        }
        return Tracked(put(x.value, part.value), put(x.exact, part.exact), errors)

    def concatenate(self, parts: list[Any]) -> Tracked:
        nodes = [_node(x) for x in parts]
        names = dict.fromkeys(name for x in nodes for name in x.errors)
        errors = {
            name: np.concatenate([x.errors.get(name, np.zeros(x.exact.shape)) for x in nodes])
            for name in names
        }
        return Tracked(
            np.concatenate([x.value for x in nodes]),
            np.concatenate([x.exact for x in nodes]),
            errors,
        )

    # -- steps ------------------------------------------------------------------------------------

    def constant(self, name: str, exact: float, given: float | None = None) -> Tracked:
        value = super().constant(name, exact, given)
        return self._step(name, value, _wide(exact), {}, _wide(value) - exact)

    def keep(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tracked):  # a result still on its way through a step of the base class
            return super().keep(name, x)
        return x if self.state == "float32" else self.cast(name, x, self.state)

    def cast(self, name: str, x: Tracked, fmt: str) -> Tracked:
        value = super().cast(name, x.value, fmt)
        local = _wide(value) - _wide(x.value)
        return self._step(name, value, x.exact, dict(x.errors), local)

    def dot(self, name: str, a: Any, b: Any, c: Any = None) -> Any:
        if not isinstance(a, Tracked):
            return super().dot(name, a, b, c)
        value = super().dot(name, a.value, b.value, None if c is None else c.value)
        ideal = _wide(a.value) @ _wide(b.value).T
        exact = a.exact @ b.exact.T
        parts: list[tuple[Tracked, Callable[[F64], F64]]] = [
            (a, lambda e: e @ _mean(b).T),
            (b, lambda e: _mean(a) @ e.T),
        ]
        if c is not None:
            ideal, exact = ideal + c.value, exact + c.exact
            parts.append((c, lambda e: e))
        return self._step(name, value, exact, _merge(*parts), _wide(value) - ideal)

    def dot_seen(self, name: str, a: Any, b: Any, c: Any, seen: Array) -> Any:
        return self.dot(name, a, b, c)

    def add(self, name: str, a: Any, b: Any) -> Tracked:
        a, b = _node(a), _node(b)
        value = super().add(name, a.value, b.value)
        local = _wide(value) - (_wide(a.value) + _wide(b.value))
        errors = _merge((a, lambda e: e), (b, lambda e: e))
        return self._step(name, value, a.exact + b.exact, errors, local)

    def sub(self, name: str, a: Any, b: Any) -> Tracked:
        a, b = _node(a), _node(b)
        value = super().sub(name, a.value, b.value)
        local = _wide(value) - (_wide(a.value) - _wide(b.value))
        errors = _merge((a, lambda e: e), (b, np.negative))
        return self._step(name, value, a.exact - b.exact, errors, local)

    def mul(self, name: str, a: Any, b: Any) -> Tracked:
        a, b = _node(a), _node(b)
        value = super().mul(name, a.value, b.value)
        local = _wide(value) - _wide(a.value) * _wide(b.value)
        return self._step(name, value, a.exact * b.exact, self._product(a, b), local)

    def div(self, name: str, a: Any, b: Any) -> Tracked:
        a, b = _node(a), _node(b)
        value = super().div(name, a.value, b.value)
        b_value = _wide(b.value)
        inverse = 0.5 * (1.0 / b_value + 1.0 / b.exact)
        weight = _mean(a) / (b_value * b.exact)
        errors = _merge((a, lambda e: e * inverse), (b, lambda e: -e * weight))
        local = _wide(value) - _wide(a.value) / b_value
        return self._step(name, value, a.exact / b.exact, errors, local)

    def fma(self, name: str, a: Any, b: Any, c: Any, product: str | None = None) -> Tracked:
        a, b, c = _node(a), _node(b), _node(c)
        value = super().fma(name, a.value, b.value, c.value)
        exact_product = _wide(a.value) * _wide(b.value)
        local = _wide(value) - (exact_product + _wide(c.value))
        errors = self._product(a, b)
        for source, e in c.errors.items():
            errors[source] = errors[source] + e if source in errors else e
        exact = a.exact * b.exact + c.exact
        if product is None:
            return self._step(name, value, exact, errors, local)
        rounds = _wide(super().mul(name, a.value, b.value)) != exact_product
        of_product = self._step(product, value, exact, errors, np.where(rounds, local, 0.0))
        rest = np.where(rounds, 0.0, local)
        return self._step(name, value, of_product.exact, of_product.errors, rest)

    @staticmethod
    def _product(a: Tracked, b: Tracked) -> dict[str, F64]:
        a_mean, b_mean = _mean(a), _mean(b)
        return _merge((a, lambda e: e * b_mean), (b, lambda e: a_mean * e))

    def _function(
        self,
        name: str,
        x: Tracked,
        value: Array,
        f: Callable[[F64], F64],
        slope: Callable[[F64], F64],
    ) -> Tracked:
        near = _wide(x.value)
        weight = _secant(f, slope, near, x.exact, near - x.exact)
        errors = _merge((x, lambda e: e * weight))
        return self._step(name, value, f(x.exact), errors, _wide(value) - f(near))

    def exp2(self, name: str, x: Any, seen: Array | None = None) -> Any:
        if not isinstance(x, Tracked):
            return super().exp2(name, x, seen)
        value = super().exp2(name, x.value, seen)
        if seen is not None:  # what a row does not see may be anything, also too large for 2^x
            x = self.map(x, lambda y: np.where(seen, y, 0))
        y = self._function(name, x, value, np.exp2, lambda t: _LN2 * np.exp2(t))
        if seen is None:
            return y
        return Tracked(
            value,
            np.where(seen, y.exact, 0.0),
            {source: np.where(seen, e, 0.0) for source, e in y.errors.items()},
        )

    def exp(self, name: str, x: Any, seen: Array) -> Tracked:
        x = self.map(_node(x), lambda y: np.where(seen, y, 0))
        value = super().exp(name, x.value, seen)
        y = self._function(name, x, np.where(seen, value, 1), np.exp, np.exp)
        return self.select(seen, y, self.zeros(seen, seen.shape))

    def log2(self, name: str, x: Any, how: str = "hardware") -> Any:
        if not isinstance(x, Tracked):
            return super().log2(name, x, how)
        value = super().log2(name, x.value, how)
        return self._function(name, x, value, np.log2, lambda t: 1.0 / (_LN2 * t))

    def log(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tracked):
            return super().log(name, x)
        value = super().log(name, x.value)
        return self._function(name, x, value, np.log, lambda t: 1.0 / t)

    def reciprocal(self, name: str, x: Any, how: str) -> Any:
        if not isinstance(x, Tracked):
            return super().reciprocal(name, x, how)
        value = super().reciprocal(name, x.value, how)
        near = _wide(x.value)
        errors = _merge((x, lambda e: -e / (near * x.exact)))
        return self._step(name, value, 1.0 / x.exact, errors, _wide(value) - 1.0 / near)

    def tanh(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tracked):
            return super().tanh(name, x)
        half = 0.5 * _LN2
        value = super().tanh(name, x.value)
        return self._function(
            name,
            x,
            value,
            lambda t: np.tanh(half * t),
            lambda t: half * (1.0 - np.tanh(half * t) ** 2),
        )

    def linear(self, name: str, value: Array, *terms: tuple[float, Any]) -> Tracked:
        nodes = [(weight, _node(x)) for weight, x in terms]
        exact = sum((w * x.exact for w, x in nodes), start=np.zeros(value.shape))
        ideal = sum((w * _wide(x.value) for w, x in nodes), start=np.zeros(value.shape))
        errors: dict[str, F64] = {}
        for w, x in nodes:
            for source, e in x.errors.items():
                errors[source] = errors[source] + w * e if source in errors else w * e
        return self._step(name, value, exact, errors, _wide(value) - ideal)


def total(errors: Iterable[F64], shape: tuple[int, ...]) -> F64:
    """The sum of errors, zeros when there are none."""
    return sum(errors, start=np.zeros(shape))
