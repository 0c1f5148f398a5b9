"""Public bug reports as inputs: other libraries failed on them. A case is named by its reports
(repository and number); the oracle, the bound and `holds` say what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulation.problem import Array
from emulation.samples import sample
from tests.cases import shaped

Triple = tuple[Array, Array, Array]
Found = dict[str, Array]  # out, lse, dq, dk, dv

FA = "flash-attention"


@dataclass(frozen=True)
class BugCase:
    """Inputs (head dimensions are multiples of 8, for the GPU), options, and what must hold of the
    results beside the bound.
    """

    make: Callable[[], Triple]
    masks: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, str] = field(default_factory=dict)
    holds: Callable[[Found], None] | None = None
    finite: bool = True  # the bound


def normal(seed: int, *shapes: tuple[int, ...], dtype: str = "float16", by: float = 1.0) -> Any:
    """N(0, 1) times a factor, an array a shape."""
    rng = np.random.default_rng(seed)
    return [shaped(rng.standard_normal(shape) * by, dtype) for shape in shapes]


def drawn(
    n_q: int, n_k: int, d: int, d_v: int | None = None, heads: tuple[int, int] = (1, 1), **rest: Any
) -> Callable[[], Triple]:
    """`normal` q, k and v of these lengths; heads: of q, and of k and v."""
    widths = (d, d, d if d_v is None else d_v)
    counts = ((heads[0], n_q), (heads[1], n_k), (heads[1], n_k))
    shapes = [(*count, width) for count, width in zip(counts, widths, strict=True)]

    def make() -> Triple:
        q, k, v = normal(
            rest.get("seed", 352), *shapes, **{n: rest[n] for n in rest if n != "seed"}
        )
        return q, k, v

    return make


def is_finite(found: Found) -> None:
    """No NaN or Inf but an LSE of -inf."""
    for name, x in found.items():
        wide = x.astype(np.float32)
        assert (np.isfinite(wide) | ((wide == -np.inf) & (name == "lse"))).all(), name


def first_see_nothing(rows: int) -> Callable[[Found], None]:
    """So many first queries see nothing: out 0, LSE -inf (never some finite number), dQ 0."""

    def holds(found: Found) -> None:
        is_finite(found)
        assert not found["out"][..., :rows, :].any()
        assert (found["lse"][..., :rows] == -np.inf).all()
        assert not found["dq"][..., :rows, :].any()
        assert np.isfinite(found["lse"][..., rows:]).all()

    return holds


def nothing(found: Found) -> None:
    """Nobody sees anything."""
    assert (found["lse"] == -np.inf).all()
    assert not any(found[name].any() for name in found if name != "lse")


def unseen_nan() -> Triple:
    """NaN and Inf in keys and values that no query sees, two queries from the top left."""
    q, k, v = normal(0, (2, 2, 16), (2, 40, 16), (2, 40, 16))
    k[:, 2:], v[:, 2:] = np.inf, np.nan
    return q, k, v


def all_finite_nothing_from_unseen(found: Found) -> None:
    """Everything is finite and unseen keys get no gradient."""
    is_finite(found)
    assert not found["dk"][:, 2:].any()
    assert not found["dv"][:, 2:].any()


def scores_of(value: float, dtype: str) -> Callable[[], Triple]:
    """One key and one query of 64 equal elements."""

    def make() -> Triple:
        x = shaped(np.full((1, 1, 64), value), dtype)
        return x, x.copy(), x.copy()

    return make


def only_value(found: Found) -> None:
    """One key: its value is the result, exactly. (Gradients form P anew from an LSE of 10^12, whose
    rounding moves it by whole units.)
    """
    assert (found["out"] == found["out"][0, 0, 0]).all()
    assert float(found["out"][0, 0, 0]) == 133120.0
    assert np.isfinite(found["lse"]).all()


def beyond_exp() -> Triple:
    """Scores of +-1e4 under a softcap."""
    q = shaped(np.ones((1, 4, 16)), "float16")
    k = shaped(np.stack([np.full(16, s) for s in (625.0, -625.0, 625.0)])[None], "float16")
    return q, k, normal(0, (1, 3, 16))[0]


def flat_where_capped(found: Found) -> None:
    """LSE of two saturated keys at cap 50; the slope there is exactly 0."""
    is_finite(found)
    assert np.all(np.abs(found["lse"] - (50 + np.log(2))) < 1e-4)
    assert not found["dq"].any()
    assert not found["dk"].any()


def zeros(n: int, n_k: int, d: int) -> Callable[[], Triple]:
    """q and k of zeros: every weight is 1 / n_k."""

    def make() -> Triple:
        q, k = np.zeros((1, n, d), np.float16), np.zeros((1, n_k, d), np.float16)
        return q, k, normal(1, (1, n_k, d))[0]

    return make


def natural(n_k: int) -> Callable[[Found], None]:
    """LSE is the natural logarithm of the number of keys."""

    def holds(found: Found) -> None:
        assert np.all(np.abs(found["lse"] - np.log(n_k)) < 1e-6)

    return holds


def offset(value: float) -> Callable[[], Triple]:
    """All scores moved by a constant (with scale 1)."""

    def make() -> Triple:
        q, k, v = normal(0, (1, 20, 16), (1, 70, 16), (1, 70, 16), dtype="bfloat16")
        q[..., 0], k[..., 0] = 1.0, value
        return q, k, v

    return make


def tied(sign: float) -> Callable[[], Triple]:
    """P exactly 1 several times and values of one sign."""

    def make() -> Triple:
        q, k, v = sample("tied-max", n=70, d=32, dtype="bfloat16")
        return q, k, (v.astype(np.float32) * sign).astype(v.dtype)

    return make


def apart() -> Triple:
    """q, k and v in layouts of their own."""
    q, k, v = normal(8, (2, 33, 16), (2, 33, 16), (2, 33, 16))
    return np.asfortranarray(q), k, np.ascontiguousarray(v.swapaxes(0, 1)).swapaxes(0, 1)


def _lengths() -> dict[str, BugCase]:
    """NaN in dQ of short inputs times 3 (#334), causal (#1052)."""
    found = {}
    for n in (1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 70, 127, 128, 129):
        for causal in (False, True):
            name = f"{FA}#334, {FA}#1052, {n} causal" if causal else f"{FA}#334, {n}"
            d = (16, 32, 64)[n % 3]
            found[name] = BugCase(drawn(n, n, d, by=3.0), {"causal": causal}, holds=is_finite)
        found[f"{FA}#334, {n} queries, 1 key"] = BugCase(drawn(n, 1, 16, by=3.0), holds=is_finite)
    return found


def _masks() -> dict[str, BugCase]:
    """Alignments, windows, empty rows and sides."""
    causal = {"causal": True}
    found = {
        f"{FA}#1778, {FA}#2199, flashinfer#4452": BugCase(
            drawn(70, 35, 16, heads=(2, 2), by=3.0), causal, holds=first_see_nothing(35)
        ),
        f"{FA}#1778, top-left": BugCase(drawn(70, 35, 16, by=3.0), {"causal": "top-left"}),
        "pytorch#108108, tall": BugCase(drawn(5, 2, 16), causal, holds=first_see_nothing(3)),
        "pytorch#108108, tall, top-left": BugCase(drawn(5, 2, 16), {"causal": "top-left"}),
        "pytorch#108108, wide": BugCase(drawn(2, 5, 16), causal),
        "pytorch#108108, wide, top-left": BugCase(drawn(2, 5, 16), {"causal": "top-left"}),
        f"{FA}#443": BugCase(drawn(76, 1, 32, by=3.0), causal, holds=first_see_nothing(75)),
        f"{FA}#443, third": BugCase(
            drawn(146, 1, 32, by=3.0), causal, holds=first_see_nothing(145)
        ),
        f"{FA}#1133": BugCase(drawn(70, 70, 64), {"window": (69, 0)}),
        f"{FA}#2199, (32, 64)": BugCase(drawn(129, 70, 16), {"window": (32, 64), "causal": True}),
        "pytorch#103963, pytorch#41508": BugCase(
            drawn(8, 3, 8), {"causal": True}, holds=first_see_nothing(5)
        ),
        "pytorch#159247": BugCase(drawn(1, 64, 64)),
    }
    for n_q, n_k in ((0, 100), (150, 0), (0, 0)):
        for cut in (False, True):
            found[f"{FA}#1713, #2421, #2470, #978, flashinfer#4484, {n_q} {n_k} {cut}"] = BugCase(
                drawn(n_q, n_k, 16, heads=(2, 2)), {"causal": cut}, holds=nothing
            )
    unseen: list[dict[str, Any]] = [
        {"causal": "top-left"},
        {"causal": "top-left", "window": (1, 3)},
        {"causal": "top-left", "window": (None, 0)},
    ]
    for number, mask in enumerate(unseen):
        found[f"pytorch#101967, {FA}#1745, {FA}#1974, {number}"] = BugCase(
            unseen_nan, mask, holds=all_finite_nothing_from_unseen
        )
    for window in ((32, 64), (0, 0), (63, 0), (0, 63), (16, 15), (None, 3)):
        for n_q, n_k in ((70, 64), (64, 70), (64, 64)):
            name = f"TransformerEngine#1197, transformers#39408, {window} {n_q} {n_k}"
            make = drawn(n_q, n_k, 16, dtype="bfloat16", seed=5)
            found[name] = BugCase(make, {"window": window}, holds=is_finite)
    return found


def _ranges() -> dict[str, BugCase]:
    """Large scores, softcap, ties."""
    found: dict[str, BugCase] = {
        "pytorch#121558": BugCase(scores_of(133120.0, "bfloat16"), holds=only_value, finite=False),
        "vllm#56579": BugCase(beyond_exp, {"scale": 1.0, "softcap": 50.0}, holds=flat_where_capped),
        "pytorch#181645": BugCase(zeros(8, 8, 16), holds=natural(8)),
        "pytorch#719, zeros": BugCase(zeros(3, 200, 16), holds=natural(200)),
        f"{FA}#1128": BugCase(drawn(128, 128, 64, heads=(6, 6))),
    }
    for cap in (5.0, 15.0, 50.0):
        for causal in (False, True):
            found[f"{FA}#1065, {FA}#2402, {cap} {causal}"] = BugCase(
                drawn(33, 33, 24, by=3.0, seed=3), {"softcap": cap, "causal": causal}
            )
    for value in (-1e2, -1e3, -6e4, 1e2, 1e3, 6e4):
        found[f"{FA}#442, arXiv 2503.01873, {value:g}"] = BugCase(offset(value), {"scale": 1.0})
    for reference in ("row-max", "power-of-two", "stale", "lazy", "tie-safe", "final"):
        for sign in (-1.0, 1.0):
            found[f"{FA}#2151, arXiv 2510.04212, {reference} {sign:+g}"] = BugCase(
                tied(sign), numerics={"reference": reference}
            )
    return found


def _layouts() -> dict[str, BugCase]:
    """Head dimensions, groups, strides."""
    found = {
        f"pytorch#119500, {FA} transposed dO": BugCase(apart),
        f"{FA}#2528, 7": BugCase(drawn(33, 33, 16, heads=(7, 1)), {"causal": True}),
        f"{FA}#2528, 3": BugCase(drawn(33, 50, 16, heads=(6, 2)), {"causal": True}),
        f"{FA}#2528, 71": BugCase(drawn(9, 20, 16, heads=(71, 1)), {"causal": True}),
        "triton#4541": BugCase(drawn(11, 70, 64, by=2.0)),
    }
    for d, d_v in ((72, 72), (96, 96), (128, 96), (160, 200), (208, 224), (256, 8), (8, 256)):
        found[f"flashinfer#4299, {FA}#2888, {FA}#2552, {d} {d_v}"] = BugCase(
            drawn(9, 40, d, d_v, heads=(6, 2), dtype="bfloat16", seed=6), {"causal": True}
        )
    return found


BUGS: dict[str, BugCase] = _lengths() | _masks() | _ranges() | _layouts()
