"""Cases for the property tests: problems of every kind, Plans with every field, and the comparison
with the oracle that no NaN can pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from emulation import oracle
from emulation.bounds import backward_bound, forward_bound
from emulation.plan import BackwardPlan, Numerics, Plan
from emulation.problem import DTYPES, Array, Problem, numpy_dtype
from emulation.samples import KINDS, sample

NUMERICS: dict[str, tuple[str, ...]] = {
    "reference": ("row-max", "power-of-two", "stale", "lazy", "tie-safe", "final"),
    "row_sum": ("rounded", "unrounded"),
    "delta": ("full", "rounded"),
    "p": ("input", "split"),
    "exp2": ("hardware", "polynomial", "mixed"),
    "accumulate": ("tensor-core", "promoted"),
    "out": ("input", "float32"),
}
FIELDS: dict[str, tuple[Any, ...]] = {
    "arch": ("sm80", "sm90", "sm100"),
    "step": (None, 4, 8, 12),
    "wide": ("split", "fma"),
    "tile_n": (16, 32, 48),
    "direction": ("right-to-left", "left-to-right"),
    "c": ("once", "float scale", "floats"),
    "score": ("guarded", "fused", "unfused"),
    "alpha": ("references", "maxima"),
    "row_sum_order": ("tile", "running"),
    "rounded_sum": ("matrix", "lanes"),
    "join": ("01+23", "02+13"),
    "inverse": ("ieee", "hardware"),
    "lse": ("sum", "scale", "c ln2", "reference"),
    "stale_limit": (4, 8, 14),
}
#: Of the backward: fields that go together, one of each group.
BACKWARD: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"queries": "descending"}, {"starts": 2}, {"starts": 3}),
    (
        {}, {"score": "unfused"}, {"score": "natural"}, {"score": "natural fused"},
        {"score": "natural", "exponential": "expf"},
    ),
    ({}, {"ds_p": "rounded"}),
    ({}, {"scale": "dS"}),
    ({}, {"accumulate": "tensor-core"}),
    (
        {}, {"delta_sum": "pairs"}, {"delta_threads": 2, "delta_join": "neighbours"},
        {"delta_threads": 32, "delta_columns": 1},
    ),
)  # fmt: skip
#: These references are rn(m c) of a score m, which alpha="maxima" and two forms of LSE suppose.
PLAIN = ("row-max", "lazy", "final")
#: Added to every score: through a dimension of ones in q.
OFFSETS = (0.0, 0.0, 0.0, 1e2, -1e2, -1e3, -6e4)


@dataclass(frozen=True)
class Case:
    """A problem's arguments, cotangents and a Plan."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    options: dict[str, Any]
    plan: Plan

    @property
    def problem(self) -> Problem:
        return Problem.of(self.q, self.k, self.v, **self.options)

    def __repr__(self) -> str:
        shapes = [x.shape for x in (self.q, self.k, self.v)]
        return f"Case({shapes}, {self.plan.format}, {self.options},\n{self.plan})"


def consistent(fields: dict[str, Any], reference: str) -> dict[str, Any]:
    """Fields of a Plan with forms of alpha and LSE that the reference allows."""
    if reference in PLAIN:
        return fields
    lse = fields["lse"] if fields["lse"] in ("sum", "reference") else "sum"
    return fields | {"alpha": "references", "lse": lse}


@st.composite
def plans(draw: st.DrawFn, /, fmt: str | None = None, **fixed: Any) -> Plan:
    """Plans of small tiles with every value of every field."""
    choices: dict[str, Any] = {n: draw(st.sampled_from(c)) for n, c in NUMERICS.items()}
    fields = {name: draw(st.sampled_from(c)) for name, c in FIELDS.items()} | fixed
    numerics = fields.pop("numerics", None) or Numerics(**choices)
    fields = consistent(fields, numerics.reference)
    rest: dict[str, Any] = {}
    for group in BACKWARD:
        rest |= draw(st.sampled_from(group))
    if numerics.p == "split":
        rest.pop("ds_p", None)
    backward = BackwardPlan(
        **rest,
        tile_m=draw(st.sampled_from((16, 32))),
        tile_n=draw(st.sampled_from((16, 32))),
        dq_order=draw(st.sampled_from(("ascending", "descending"))),
        center=draw(st.sampled_from((0, 0, 16, 32))) if rest.get("scale") != "dS" else 0,
    )
    chosen: Any = draw(st.sampled_from(DTYPES)) if fmt is None else fmt
    return Plan(**{"numerics": numerics, "format": chosen, "backward": backward, **fields})


def masks() -> st.SearchStrategy[dict[str, Any]]:
    """Causal alignment and window."""
    side = st.none() | st.integers(0, 40)
    return st.fixed_dictionaries(
        {
            "causal": st.sampled_from((False, True, "top-left")),
            "window": st.none() | st.tuples(side, side),
        }
    )


def shaped(x: Array, dtype: str) -> Array:
    """float values in a format, through float32 (one rounding)."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(numpy_dtype(dtype))


@st.composite
def cases(draw: st.DrawFn, /, longest: int = 70, **fixed: Any) -> Case:
    """Cases of every kind; `fixed` sets fields of the Plan."""
    plan = draw(plans(**fixed))
    fmt, seed = plan.format, draw(st.integers(0, 999))
    n_q, n_k = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    d = draw(st.integers(1, 72))
    d_v = draw(st.just(d) | st.integers(1, 72))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    width = max(d, d_v, 2)
    kind = draw(st.sampled_from(sorted(KINDS)))
    common: dict[str, Any] = {"n": n_q, "n_k": max(n_k, 2), "d": width, "dtype": "float32"}
    q = sample(kind, heads=kv_heads * group, seed=seed, **common)[0][..., :d].copy()
    k, v = (x[:, :n_k].copy() for x in sample(kind, heads=kv_heads, seed=seed, **common)[1:])
    k, v = k[..., :d], v[..., :d_v]
    dout = sample("normal", heads=kv_heads * group, seed=seed + 1, **common)[0][..., :d_v]
    q = q * draw(st.sampled_from((1.0, 1.0, 1.0, 64.0, 2.0**-8)))
    offset = draw(st.sampled_from(OFFSETS))
    if offset:
        q[..., 0], k[..., 0] = 1.0, offset
    if draw(st.booleans()) and n_k > 1:  # duplicates of keys: ties everywhere, the max included
        k[:, 1::2] = k[:, 0 : n_k - n_k % 2 : 2] if n_k % 2 == 0 else k[:, 0 : n_k - 1 : 2]
    options = draw(masks())
    options["softcap"] = draw(st.sampled_from((None, None, 5.0, 50.0)))
    options["scale"] = draw(st.sampled_from((None, None, 1.0, 0.013)))
    q, k, v, dout = (shaped(x, fmt) for x in (q, k, v, dout))
    if draw(st.booleans()):
        spoil(Problem.of(q, k, v, **options), k, v)
    dlse = None
    if draw(st.booleans()):
        dlse = np.random.default_rng(seed).standard_normal(q.shape[:-1]).astype(np.float32)
    return Case(q, k, v, dout, dlse, options, plan)


def spoil(problem: Problem, k: Array, v: Array) -> None:
    """NaN and Inf wherever no query looks."""
    lo, hi = problem.band()
    columns = np.arange(problem.n_k)
    unseen = ~((columns >= lo[:, None]) & (columns < hi[:, None])).any(axis=0)
    k[..., unseen, :] = np.nan
    v[..., unseen, :] = np.inf


def assert_within(name: str, got: Array, exact: Any, bound: Array) -> None:
    """|got - exact| <= bound + radius everywhere; exact is an oracle's result, name one of its
    arrays. Equal infinities are equal; a NaN, or an infinity where the bound is finite, fails.
    """
    value = np.asarray(got, np.float32).astype(np.float64)
    high, low = getattr(exact, name), getattr(exact, f"{name}_low")
    radius = getattr(exact, f"{name}_radius")
    assert value.shape == high.shape == bound.shape, name
    assert not np.isnan(bound).any(), name
    with np.errstate(invalid="ignore"):
        apart = np.abs((value - high) - low)
    error = np.where(value == high, np.abs(low), apart)
    slack = radius + 2.0**-100 * np.where(np.isfinite(high), np.abs(high), 0.0)
    ok = (error <= bound + slack) | np.isposinf(bound)
    if not ok.all():
        at = tuple(int(i) for i in np.argwhere(~ok)[0])
        raise AssertionError(
            f"{name}{at}: {value[at]}, exact {high[at]}, error {error[at]:.3e} over {bound[at]:.3e}"
        )


def assert_bounded(
    results: dict[str, Array],
    inputs: tuple[Array, Array, Array, Array],
    plan: Plan,
    masks: dict[str, Any],
    dlse: Array | None = None,
    finite: bool = True,
) -> None:
    """out, lse, dq, dk and dv of inputs q, k, v, dout within the bounds of the Plan around the
    exact result; `finite`: the bounds are, everywhere.
    """
    q, k, v, dout = inputs
    problem = Problem.of(q, k, v, **masks)
    bounds = [*forward_bound(problem, plan), *backward_bound(problem, plan, dout, dlse)]
    assert not finite or all(np.isfinite(b).all() for b in bounds)
    exact: Any = oracle.attention(q, k, v, **masks)
    gradients: Any = oracle.attention_vjp(q, k, v, dout, dlse=dlse, **masks)
    for name, bound in zip(("out", "lse", "dq", "dk", "dv"), bounds, strict=True):
        got, source = results[name], exact if name in ("out", "lse") else gradients
        assert_within(name, got, source, bound.reshape(got.shape))


def clean(x: Array) -> Array:
    """x with 0 for NaN and infinities."""
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide), wide, 0).astype(x.dtype)


def same_bits(a: Array, b: Array) -> bool:
    """Equal shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
