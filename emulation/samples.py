"""Inputs that make attention err: random, adversarial, and real activations. One seed gives one
input, always.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np

from emulation.arguments import check_count, one_of
from emulation.problem import DTYPES, Array, numpy_dtype

Triple = tuple[Array, Array, Array]


def _normal(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    return (
        rng.standard_normal((n_q, d)),
        rng.standard_normal((n_k, d)),
        rng.standard_normal((n_k, d)),
    )


def _outlier(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001): the outlier channels of trained models (arXiv
    2407.08608, sec. 4.3).
    """

    def draw(n: int) -> Array:
        x = rng.standard_normal((n, d))
        spikes = rng.standard_normal((n, d)) * 10.0 * (rng.random((n, d)) < 0.001)
        return np.asarray(x + spikes)

    return draw(n_q), draw(n_k), draw(n_k)


def _tied(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Two keys that every query likes equally and far above the rest: P is exactly 1 twice (arXiv
    2510.04212).
    """
    q, k, v = _normal(rng, n_q, n_k, d)
    direction = rng.choice([-1.0, 1.0], d)
    q = 0.25 * q + direction
    k = 0.25 * k
    k[rng.permutation(n_k)[:2]] = direction
    return q, k, -np.abs(v)


def _one_signed(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """v > 0: truncation in the tensor core cannot cancel."""
    q, k, v = _normal(rng, n_q, n_k, d)
    return q, k, np.abs(v)


def _sink(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Key 0 takes most of the weight and carries a small value, as in trained decoders."""
    q, k, v = _normal(rng, n_q, n_k, d)
    direction = rng.choice([-1.0, 1.0], d)
    q, k[:1], v[:1] = q + 0.5 * direction, direction, 0.05 * v[:1]
    return q, k, v


def _peaked(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Scores eight times those of N(0, 1) inputs: rows close to one-hot."""
    q, k, v = _normal(rng, n_q, n_k, d)
    return 8 * q, k, v


def _rising(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Scores that grow along the keys: every tile moves the running max."""
    q, k, v = _normal(rng, n_q, n_k, d)
    direction = rng.choice([-1.0, 1.0], d)
    ramp = np.linspace(0.0, 1.0, n_k)[:, None]
    return q + direction, 0.5 * k + 2 * ramp * direction, v


def _huge(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Scores in the thousands, all of one sign and far from 0."""
    q, k, v = _normal(rng, n_q, n_k, d)
    return 16 * (q - 3), 16 * (k + 3), v


def _tiny(rng: np.random.Generator, n_q: int, n_k: int, d: int) -> Triple:
    """Inputs near the smallest fp16 numbers: subnormals everywhere."""
    q, k, v = _normal(rng, n_q, n_k, d)
    return q * 2.0**-16, k * 2.0**-16, v * 2.0**-16


KINDS: dict[str, Callable[[np.random.Generator, int, int, int], Triple]] = {
    "normal": _normal,
    "outlier": _outlier,
    "tied-max": _tied,
    "one-signed": _one_signed,
    "sink": _sink,
    "peaked": _peaked,
    "rising": _rising,
    "huge": _huge,
    "tiny": _tiny,
}


def sample(
    kind: str,
    *,
    n: int,
    n_k: int | None = None,
    d: int = 64,
    heads: int = 1,
    dtype: str = "float16",
    seed: int = 0,
) -> Triple:
    """q (heads, n, d), k and v (heads, n_k, d) of one kind from `KINDS`, in a format of
    `problem.DTYPES`. Raises TypeError or ValueError naming argument, value and rule.

    Each head has its own stream, so head 3 is the same whether 4 or 64 heads are asked for.

    >>> q, k, v = sample("normal", n=4, d=8)
    >>> q.shape, str(q.dtype)
    ((1, 4, 8), 'float16')
    """
    one_of("kind", kind, KINDS)
    one_of("dtype", dtype, DTYPES)
    check_count("n", n, 0)
    if n_k is not None:
        check_count("n_k", n_k, 0)
    check_count("d", d, 1)
    check_count("heads", heads, 1)
    check_count("seed", seed, 0)
    drawn = [
        KINDS[kind](np.random.default_rng([seed, h]), n, n if n_k is None else n_k, d)
        for h in range(heads)
    ]
    # Through float32: ml_dtypes rounds float64 -> bfloat16 twice, and so would disagree with a
    # direct rounding.
    q, k, v = (
        np.stack(x).astype(np.float32).astype(numpy_dtype(dtype)) for x in zip(*drawn, strict=True)
    )
    return q, k, v


def capture(dtype: str = "float16") -> tuple[Array, Array, Array, dict[str, Any]]:
    """The bundled real activations: q, k, v (1, 1024, 64) and what `attention` needs to be told
    about them.

    One head of layer 14 of SmolLM2-135M-Instruct (Apache-2.0) reading the GNU GPL: an attention
    sink, causal.

    >>> q, k, v, options = capture()
    >>> q.shape, options
    ((1, 1024, 64), {'causal': True})
    """
    one_of("dtype", dtype, DTYPES)
    with (
        resources.files("emulation").joinpath("data/capture.npz").open("rb") as file,
        np.load(file) as z,
    ):
        q, k, v = (
            z[name].astype(np.float32).astype(numpy_dtype(dtype)) for name in ("q", "k", "v")
        )
    return q, k, v, {"causal": True}
