"""The backward of kernels that are not FlashAttention: every field of a `BackwardPlan` by hand, its
bounds, attribution and refusals, and the counts of equal elements that were measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulation import (
    BackwardPlan,
    Numerics,
    Plan,
    Problem,
    attribute,
    default_plan,
    flash,
    flash_vjp,
    plan_of,
    rounding,
    sfu,
)
from emulation.bounds import backward_bound
from emulation.cuda_math import expf
from emulation.explain.whose import neighbours
from emulation.peers import key_ranges
from emulation.problem import Array
from emulation.samples import sample
from emulation.tensor_core import mma
from tests.cases import assert_bounded, same_bits

F = np.float32
GOLDEN = Path(__file__).parent / "golden" / "peers_gradients_h200.json"
COUNTS: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["counts"]

#: One choice each, and the two kernels' own.
FIELDS: dict[str, dict[str, Any]] = {
    "ours": {},
    "unfused": {"score": "unfused"},
    "natural": {"score": "natural"},
    "natural fused": {"score": "natural fused"},
    "expf": {"score": "natural", "exponential": "expf"},
    "expf fused": {"score": "natural fused", "exponential": "expf"},
    "rounded P": {"ds_p": "rounded"},
    "scale in dS": {"scale": "dS"},
    "starts": {"tile_m": 32, "tile_n": 32, "starts": 3},
    "many starts": {"tile_m": 32, "tile_n": 16, "starts": 50},
    "descending": {"tile_m": 32, "queries": "descending"},
    "two threads": {"delta_threads": 2},
    "columns": {"delta_threads": 16, "delta_columns": 2},
    "neighbours": {"delta_join": "neighbours"},
    "pairs": {"delta_sum": "pairs"},
    "warp": {"delta_threads": 32, "delta_columns": 1, "delta_join": "neighbours"},
    "cudnn": {"score": "natural fused", "scale": "dS", "delta_sum": "pairs"},
    "efficient": {
        "tile_m": 32, "tile_n": 32, "starts": 3, "score": "natural", "exponential": "expf",
        "ds_p": "rounded", "scale": "dS", "delta_threads": 2, "delta_join": "neighbours",
    },
}  # fmt: skip


def inputs(dtype: str = "bfloat16", d: int = 40, n: int = 70) -> tuple[Array, Array, Array, Array]:
    q, k, v = sample("normal", n=n, n_k=100, d=d, dtype=dtype, seed=d)
    return q, k, v, sample("normal", n=n, d=d, dtype=dtype, seed=d + 1)[0]


def plan_with(fields: dict[str, Any], dtype: Any = "bfloat16", **numerics: Any) -> Plan:
    chosen = Numerics(**{"delta": "rounded", "out": "float32"} | numerics)
    return Plan(numerics=chosen, format=dtype, backward=BackwardPlan(**fields))


# -- exact bits ------------------------------------------------------------------------


def delta_by_hand(do: Array, o: Array, order: BackwardPlan) -> np.float32:
    """Of one row."""
    size = order.delta_columns
    groups = [range(i, min(i + size, len(do))) for i in range(0, len(do), size)]
    threads = order.delta_threads or 1 << (len(groups) - 1).bit_length()
    sums = []
    for thread in range(threads):
        total = F(0)
        for group in groups[thread::threads]:
            if order.delta_sum == "chain":
                for c in group:
                    total = rounding.fma(do[c], o[c], total)
            else:
                for c in group[::2]:
                    pair = rounding.fma(do[c + 1], o[c + 1], rounding.mul(do[c], o[c]))
                    total = F(total + pair)
        sums.append(F(total))
    while len(sums) > 1:
        half = len(sums) // 2
        if order.delta_join == "halves":
            sums = [F(a + b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        else:
            sums = [F(a + b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def argument_by_hand(s: Array, lse: Array, scale: np.float32, c: np.float32, score: str) -> Array:
    """In the score's own units; lse (R, 1)."""
    log2e = F(np.log2(np.e))
    if score == "fused":
        found = rounding.fma(s, c, -rounding.mul(lse, log2e))
    elif score == "unfused":
        found = rounding.sub(rounding.mul(s, c), rounding.mul(lse, log2e))
    elif score == "natural":
        found = rounding.sub(rounding.mul(s, scale), lse)
    else:
        found = rounding.fma(s, scale, -lse)
    return np.asarray(found)


def by_hand(q: Array, k: Array, v: Array, dout: Array, plan: Plan, causal: bool) -> Any:
    """dq, dk, dv in float32 of one head, from the forward's O and LSE."""
    order, fmt = plan.backward, plan.format
    out, lse = flash(q, k, v, plan=plan, causal=causal)
    o = out[0].astype(F)  # not rounded under out="float32": products with it are not exact
    wide_q, wide_k, wide_v, do = (x[0].astype(F) for x in (q, k, v, dout))
    n_q, n_k = len(wide_q), len(wide_k)
    scale, c = F(q.shape[2] ** -0.5), F(q.shape[2] ** -0.5 * np.log2(np.e))
    delta = np.array([delta_by_hand(do[i], o[i], order) for i in range(n_q)])[:, None]

    def product(a: Array, b: Array, acc: Array | None) -> Array:
        return np.asarray(mma(a, b, acc, arch=plan.arch, fmt=fmt))

    dq, dk, dv = (np.zeros(x.shape, F) for x in (wide_q, wide_k, wide_v))
    for start in range(0, n_k, order.tile_n):
        keys = slice(start, min(start + order.tile_n, n_k))
        columns = np.arange(n_k)[keys]
        seen = columns <= np.arange(n_q)[:, None] + n_k - n_q if causal else np.ones((n_q, 1), bool)
        s = product(wide_q, wide_k[keys], None)
        x = argument_by_hand(s, lse[0][:, None], scale, c, order.score)
        if order.exponential == "expf":
            p = expf(x)
        else:
            natural = order.score.startswith("natural")
            p = sfu.ex2(rounding.mul(x, F(np.log2(np.e))) if natural else x)
        p = np.where(seen, p, F(0)).astype(F)
        p_half = rounding.cast(p, fmt)
        gap = rounding.sub(product(do, wide_v[keys], None), delta)
        ds = rounding.mul(p_half if order.ds_p == "rounded" else p, gap)
        if order.scale == "dS":
            ds = rounding.mul(ds, scale)
        ds = rounding.cast(np.where(seen, ds, F(0)), fmt)
        tiles = list(range(0, n_q, order.tile_m))
        first = start // order.tile_n % order.starts % len(tiles)
        tiles = tiles[first:] + tiles[:first]
        if order.queries == "descending":
            tiles.reverse()
        for i in tiles:
            rows = slice(i, i + order.tile_m)
            dv[keys] = product(p_half[rows].T, do[rows].T, dv[keys])
            dk[keys] = product(ds[rows].T, wide_q[rows].T, dk[keys])
        dq = rounding.add(dq, product(ds, wide_k[keys].T, None))
    if order.scale == "after":
        dq, dk = rounding.mul(dq, scale), rounding.mul(dk, scale)
    return dq, dk, dv


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("causal", [False, True])
def test_by_hand(name: str, causal: bool) -> None:
    """D = 40: no power of two for a scale, and five groups of eight columns."""
    dtype = ("bfloat16", "float16")[len(name) % 2]
    q, k, v, dout = inputs(dtype)
    plan = plan_with(FIELDS[name], dtype)
    got = flash_vjp(q, k, v, dout, plan=plan, causal=causal)
    wanted = by_hand(q, k, v, dout, plan, causal)
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a[0], b)


@pytest.mark.parametrize("name", [n for n in FIELDS if n != "ours"])
def test_every_field_changes_bits(name: str) -> None:
    """dK, and dV where P or its sum is another; P is split where it may be, which shows more."""
    q, k, v, dout = inputs(n=140)
    p = "input" if "ds_p" in FIELDS[name] else "split"
    plans = (plan_with(FIELDS[n], p=p) for n in ("ours", name))
    ours, other = (flash_vjp(q, k, v, dout, plan=plan) for plan in plans)
    of_p = any(n in FIELDS[name] for n in ("score", "starts", "queries"))
    changed = [not same_bits(a, b) for a, b in zip(ours, other, strict=True)]
    assert changed[1:] == [True, of_p]


def test_a_sum_of_its_own() -> None:
    """accumulate="tensor-core" is the unpromoted backward under a promoted forward."""
    q, k, v, dout = inputs(n=140)
    promoted = plan_with({}, accumulate="promoted")
    order = BackwardPlan(accumulate="tensor-core")
    carried = dataclasses.replace(promoted, backward=order)
    a, b = (flash_vjp(q, k, v, dout, plan=p) for p in (promoted, carried))
    assert same_bits(a[0], b[0])
    assert not same_bits(a[2], b[2])
    wanted = by_hand(q, k, v, dout, carried, False)
    for got, want in zip(b, wanted, strict=True):
        assert same_bits(got[0], want)


def test_heads_of_a_group_start_alike() -> None:
    """The second query head of a group, whose dO is 0, adds nothing to what the first has left."""
    q, k, v, dout = inputs()
    plan = plan_with(FIELDS["efficient"])
    one = flash_vjp(q, k, v, dout, plan=plan)
    pair = np.concatenate([q, q]), k, v, np.concatenate([dout, np.zeros_like(dout)])
    both = flash_vjp(*pair, plan=plan)
    assert same_bits(one[1], both[1])
    assert same_bits(one[2], both[2])


# -- attribution and bounds ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_contributions_sum_to_what_is_observed(name: str, options: dict[str, Any]) -> None:
    q, k, v, dout = inputs()
    plan = plan_with(FIELDS[name])
    found = attribute(q, k, v, dout=dout, plan=plan, **options)
    grads = flash_vjp(q, k, v, dout, plan=plan, **options)
    for label, g in zip(("dq", "dk", "dv"), grads, strict=True):
        part = found.parts[label]
        assert np.array_equal(part.observed, g.astype(np.float64))
        assert part.residual_share < 1e-6, label


def test_where_errors_come_in() -> None:
    """A scale in dS rounds before dS does; a rounded P's error is in dK and dQ, too."""
    q, k, v, dout = inputs()
    ours, scaled, rounded = (
        attribute(q, k, v, dout=dout, plan=plan_with(FIELDS[n])).parts["dk"]
        for n in ("ours", "scale in dS", "rounded P")
    )
    for part in (ours, scaled):
        assert part.sources["gradient scaling"].rms > 0
        assert "P rounding" not in part.sources
    assert ours.sources["dS rounding"].rms != scaled.sources["dS rounding"].rms
    assert rounded.sources["P rounding"].rms > 0.3 * rounded.sources["dS rounding"].rms
    q, k, v, dout = inputs(d=64)  # a power of two
    for name in ("ours", "scale in dS"):
        part = attribute(q, k, v, dout=dout, plan=plan_with(FIELDS[name])).parts["dk"]
        assert "gradient scaling" not in part.sources


@pytest.mark.parametrize("kind", ["normal", "peaked", "rising"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_bounds_hold(name: str, options: dict[str, Any], kind: str) -> None:
    q, k, v = sample(kind, n=70, n_k=100, d=40, dtype="float16")
    dout = sample("normal", n=70, d=40, dtype="float16", seed=1)[0]
    plan = plan_with(FIELDS[name], "float16")
    grads = flash_vjp(q, k, v, dout, plan=plan, **options)
    out, lse = flash(q, k, v, plan=plan, **options)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    assert_bounded(results, (q, k, v, dout), plan, options)


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
@pytest.mark.parametrize("d", [64, 96, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_are_bounded(kernel: str, d: int, causal: bool) -> None:
    q, k, v, dout = inputs(d=d, n=100)
    plan = plan_of(kernel, q, k, v, causal=causal)
    grads = flash_vjp(q, k, v, dout, plan=plan, causal=causal)
    both = (*flash(q, k, v, plan=plan, causal=causal), *grads)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), both, strict=True))
    assert_bounded(results, (q, k, v, dout), plan, {"causal": causal})
    found = attribute(q, k, v, dout=dout, plan=plan, causal=causal)
    assert all(part.residual_share < 1e-6 for part in found.parts.values())


def test_bounds_know_what_rounds_more() -> None:
    """A rounded P, an unfused score and a scale in dS cost; other orders of delta hardly do."""
    q, k, v, dout = inputs(n=100)
    problem = Problem.of(q, k, v)

    def of(name: str) -> list[float]:
        plan = dataclasses.replace(plan_with(FIELDS[name]), numerics=Numerics(out="float32"))
        return [float(b.mean()) for b in backward_bound(problem, plan, dout)]

    ours = of("ours")
    assert of("rounded P")[1] > 1.1 * ours[1]
    assert of("rounded P")[2] == ours[2]
    assert of("unfused")[2] > ours[2]
    assert of("natural")[2] > of("natural fused")[2]
    assert of("scale in dS")[2] == ours[2]
    assert ours[1] < of("starts")[1] < 1.01 * ours[1]


def test_expf_is_within_the_constant_of_exp2() -> None:
    """The bounds take 2^-22 for either: every fraction of a binade, and down to where it is 0."""
    x = np.linspace(-1.5, 1.5, 1 << 21).astype(F)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(expf(x) / exact - 1.0)) < 2.0**-22
    x = np.linspace(-120.0, 80.0, 1 << 21).astype(F)
    exact = np.exp(x.astype(np.float64))
    assert np.all(np.abs(expf(x) - exact) <= 2.0**-22 * exact + 2.0**-125)


# -- peers -----------------------------------------------------------------------------


def test_plans() -> None:
    x = np.zeros((16, 128), np.float16)
    assert plan_of("cudnn", x, x, x).backward == BackwardPlan(**FIELDS["cudnn"])
    many = np.zeros((48, 384, 192), np.float16)
    full, causal = (plan_of("efficient", many, many, many, causal=c) for c in (False, True))
    assert (full.backward.starts, causal.backward.starts) == (4, 1)
    assert (full.backward.tile_m, full.backward.tile_n) == (128, 64)
    assert full.numerics.accumulate == "promoted"
    assert not full.promotes_gradients


@pytest.mark.parametrize(
    ("heads", "n_k", "d", "ranges"),
    [(1, 384, 64, 6), (48, 384, 128, 3), (48, 384, 129, 4), (300, 128, 64, 1), (300, 129, 64, 3),
     (300, 384, 256, 1), (255, 128, 64, 2), (1, 0, 64, 1)],
)  # fmt: skip
def test_ranges_of_keys(heads: int, n_k: int, d: int, ranges: int) -> None:
    q, k = np.zeros((heads, 8, d), np.float16), np.zeros((heads, n_k, d), np.float16)
    assert key_ranges(Problem.of(q, k, k)) == ranges


def equal_elements(a: Array, b: Array) -> int:
    return int(np.count_nonzero(a.view(np.uint16) == b.view(np.uint16)))


@pytest.mark.parametrize("d", [32, 64, 128, 192])
@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_measured_counts(kernel: str, d: int) -> None:
    """As many elements as a real kernel's equal those of Plans with other backwards; of the other
    choices that were thought of, another count.
    """
    lines = [x for x in COUNTS if (x["kernel"], x["d"]) == (kernel, d)]
    found = np.zeros((len(lines), 2), int)
    wrong = 0
    for dtype in ("bfloat16", "float16"):
        q, k, v = sample("normal", n=384, d=d, heads=2, dtype=dtype, seed=d)
        dout = sample("normal", n=384, d=d, heads=2, dtype=dtype, seed=d + 1)[0]
        many = [np.tile(x, (24, 1, 1)) for x in (q, k, v)]
        for causal in (False, True):
            plan = plan_of(kernel, *many, causal=causal)
            got = flash_vjp(q, k, v, dout, plan=plan, causal=causal)
            chain = dataclasses.replace(plan.backward, delta_sum="chain", ds_p="unrounded")
            other = dataclasses.replace(plan, backward=chain)
            dk = flash_vjp(q, k, v, dout, plan=other, causal=causal)[1]
            for i, line in enumerate(lines):
                old = BackwardPlan(**line["backward"])
                base = dataclasses.replace(plan, c="once", backward=old)
                theirs = flash_vjp(q, k, v, dout, plan=base, causal=causal)
                for j in (1, 2):
                    found[i, j - 1] += equal_elements(got[j], theirs[j])
                wrong += equal_elements(dk, theirs[1]) if i == 0 else 0
    assert lines
    assert found.tolist() == [[x["dk"], x["dv"]] for x in lines]
    assert wrong != lines[0]["dk"]


def test_neighbours() -> None:
    """Each differs in what it says; together they vary every field that gradients can tell."""
    x = np.zeros((16, 64), np.float16)
    varied = set()
    for plan in (default_plan(Problem.of(x, x, x)), plan_of("cudnn", x, x, x),
                 plan_of("efficient", x, x, x), plan_of("fa2", x, x, x)):  # fmt: skip
        found = dict(neighbours(plan))
        assert len(found) > 30
        assert plan not in found.values()
        assert len(set(found.values())) == len(found)
        for word, other in found.items():
            assert dataclasses.replace(other, backward=plan.backward) == plan
            fields = dataclasses.asdict(other.backward)
            own = dataclasses.asdict(plan.backward)
            changed = [n for n in fields if fields[n] != own[n]]
            assert word.split(", ") == sorted(
                (f"{n} {fields[n]}" for n in changed), key=word.split(", ").index
            )
            varied |= set(changed)
    assert varied == {f.name for f in dataclasses.fields(BackwardPlan)} - {
        "tile_n",
        "dq_order",
        "center",
    }


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponential": "expf"}, "exponential: got 'expf', must be \"exp2\" unless the score is"),
        ({"score": "scaled"}, "score: got 'scaled', must be one of 'fused', 'unfused', 'natural',"),
        ({"starts": 0}, "starts: got 0, must be >= 1, and 1 with descending queries"),
        ({"starts": 2, "queries": "descending"}, "starts: got 2, must be >= 1, and 1 with desc"),
        ({"delta_columns": 3}, "delta_columns: got 3, must be 1, 2, 4 or 8"),
        ({"delta_threads": 64}, "delta_threads: got 64, must be 0, 1, 2, 4, 8, 16 or 32"),
        ({"delta_sum": "pairs", "delta_columns": 1}, "delta_sum: got 'pairs', must be \"chain\""),
        ({"ds_p": "half"}, "ds_p: got 'half', must be one of 'unrounded', 'rounded'"),
        ({"scale": "before"}, "scale: got 'before', must be one of 'after', 'dS'"),
        ({"accumulate": "promoted"}, "accumulate: got 'promoted', must be one of 'forward', 'ten"),
    ],
    ids=str,
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"plan\.backward\." + message):
        BackwardPlan(**fields)


def test_a_split_p_has_no_rounded_one() -> None:
    with pytest.raises(ValueError, match=r"plan\.backward\.ds_p: got 'rounded', must be \"unrou"):
        plan_with(FIELDS["rounded P"], p="split")


@pytest.mark.parametrize("name", FIELDS)
def test_json(name: str) -> None:
    """Round trip; a Plan from before a field was there has its default."""
    plan = plan_with(FIELDS[name])
    assert Plan.from_json(json.dumps(plan.to_json())) == plan
    fields = plan.to_json()
    old = ("tile_m", "tile_n", "dq_order")
    fields["backward"] = {n: fields["backward"][n] for n in old}
    kept = {n: FIELDS[name][n] for n in old if n in FIELDS[name]}
    assert Plan.from_json(fields).backward == BackwardPlan(**kept)
