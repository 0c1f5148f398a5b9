"""c = scale log2 e as kernels round it: `Plan.c` in values, bits, bounds, attribution, refusals."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest

from cuflash import sm80_backward, sm80_float32, sm80_forward
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
)
from emulation.bounds import backward_bound, forward_bound
from emulation.explain.envelope import envelope
from emulation.explain.whose import Bits, whose
from emulation.machine import Machine
from emulation.plan import C
from emulation.problem import Array
from emulation.samples import sample
from emulation.tiled import LOG2E, c_rules, constants
from tests.cases import assert_bounded, same_bits

#: Units in the last place between c = "once" and c = "float scale", "floats", by head dimension up
#: to 256, scale 1 / sqrt(D); where none is given, all three agree.
APART = {
    40: (0, -1), 48: (-1, -1), 72: (0, -1), 80: (-1, -1), 88: (0, -1), 112: (0, -1),
    120: (-1, -1), 136: (-1, -1), 152: (-1, -1), 160: (0, -1), 168: (1, 0), 192: (-1, -1),
    200: (1, 0), 232: (1, 1), 240: (0, -1), 248: (-1, -1),
}  # fmt: skip


def c_of(d: int, rule: C, **options: Any) -> np.float32:
    x = np.zeros((1, d), np.float16)
    c: np.float32 = constants(Machine(), Problem.of(x, x, x, **options), Plan(c=rule)).c
    return c


def nearest(x: Fraction) -> np.float32:
    """x > 0 in float32, half to even."""
    exponent = math.frexp(float(x))[1] - 24
    return np.float32(math.ldexp(round(x / Fraction(2) ** exponent), exponent))


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_values(d: int) -> None:
    once, scale, floats = (c_of(d, rule) for rule in get_args(C))
    ulps = [int(x.view(np.int32)) - int(once.view(np.int32)) for x in (scale, floats)]
    assert tuple(ulps) == APART.get(d, (0, 0))
    held, log2e = (Fraction(float(np.float32(x))) for x in (1 / math.sqrt(d), LOG2E))
    assert floats == nearest(held * log2e)
    assert scale == nearest(Fraction(float(held) * LOG2E))


def test_values_with_a_softcap() -> None:
    """c is of the softcap then; a scale's rounding is in c no more."""
    for d in (64, 192):
        for rule in get_args(C):
            assert c_of(80, rule, softcap=1 / math.sqrt(d)) == c_of(d, rule)


def test_peers() -> None:
    x = np.zeros((16, 192), np.float16)
    found = {kernel: plan_of(kernel, x, x, x).c for kernel in ("fa3", "fa2", "fa2-split", "cudnn")}
    assert found == dict.fromkeys(("fa3", "fa2", "fa2-split"), "float scale") | {"cudnn": "floats"}
    assert default_plan(Problem.of(x, x, x)).c == "once"


def inputs(d: int, n: int = 150) -> tuple[Array, Array, Array, Array]:
    q, k, v = sample("peaked", n=n, d=d, dtype="bfloat16")
    return q, k, v, sample("normal", n=n, d=d, dtype="bfloat16", seed=1)[0]


@pytest.mark.parametrize("lse", ["sum", "c ln2"])
@pytest.mark.parametrize("d", [64, 80, 192])
def test_bits(d: int, lse: Any) -> None:
    """Forward and backward have the bits of a scale whose only rounding gives this c."""
    q, k, v, dout = inputs(d)
    plan = dataclasses.replace(
        plan_of("fa2", q, k, v),
        lse=lse,
        numerics=Numerics(delta="rounded", p="split", out="float32"),
    )
    once = dataclasses.replace(plan, c="once")
    scale = float(c_of(d, "float scale")) / LOG2E
    assert c_of(d, "once", scale=scale) == c_of(d, "float scale")
    runs: list[tuple[Plan, dict[str, Any]]] = [(plan, {}), (once, {"scale": scale}), (once, {})]
    got, same, old = (
        (*flash(q, k, v, plan=p, **o), *flash_vjp(q, k, v, dout, plan=p, **o)) for p, o in runs
    )
    wanted = 5 if np.float32(scale) == np.float32(1 / math.sqrt(d)) else 2  # else dQ, dK differ
    assert all(same_bits(a, b) for a, b in zip(got[:wanted], same[:wanted], strict=True))
    assert same_bits(got[4], same[4])  # dV is not scaled
    assert all(same_bits(a, b) == (d not in APART) for a, b in zip(got, old, strict=True))


@pytest.mark.parametrize("d", [64, 192])
def test_scores_without_c(d: int) -> None:
    """The memory-efficient forward and the unfused path have scale and log2 e apart."""
    q, k, v, _ = inputs(d, 70)
    for kernel in ("efficient", "math"):
        plan = plan_of(kernel, q, k, v)
        a, b = (flash(q, k, v, plan=dataclasses.replace(plan, c=c)) for c in get_args(C)[::2])
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


@pytest.mark.parametrize("rule", get_args(C))
@pytest.mark.parametrize("d", [40, 168, 192])
@pytest.mark.parametrize("score", ["fused", "scaled"])
def test_bounds_hold(score: Any, d: int, rule: C) -> None:
    q, k, v, dout = inputs(d, 40)
    lse: Any = "reference" if score == "scaled" else "c ln2"
    plan = dataclasses.replace(plan_of("cudnn", q, k, v), c=rule, score=score, lse=lse)
    out, lse = flash(q, k, v, plan=plan)
    grads = flash_vjp(q, k, v, dout, plan=plan)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    assert_bounded(results, (q, k, v, dout), plan, {})


def test_bounds_grow_with_the_error_of_c() -> None:
    """At D = 200 two values of c are an ulp apart."""
    q, k, v, dout = inputs(200, 40)
    problem, exact = Problem.of(q, k, v), LOG2E / math.sqrt(200)
    plan = dataclasses.replace(plan_of("cudnn", q, k, v), numerics=Numerics(out="float32"))
    bounds = []
    for rule in sorted(get_args(C)[:2], key=lambda r: abs(float(c_of(200, r)) - exact)):
        other = dataclasses.replace(plan, c=rule)
        bounds.append([*forward_bound(problem, other), *backward_bound(problem, other, dout)])
    assert all((near < far).all() for near, far in zip(*bounds, strict=True))


@pytest.mark.parametrize("d", [40, 64, 168, 192])
def test_the_envelope_knows_every_rule(d: int) -> None:
    q, k, v, _ = inputs(d, 60)
    problem = Problem.of(q, k, v)
    assert len(c_rules(problem)) == len({0, *APART.get(d, (0, 0))})
    whole = envelope(problem, np.arange(60))
    for kernel in ("fa3", "fa2", "cudnn"):
        for rule in get_args(C):
            plan = dataclasses.replace(plan_of(kernel, q, k, v), c=rule)
            for bound, most in zip(forward_bound(problem, plan), whole, strict=True):
                assert (bound.reshape(most.shape) <= most * (1 + 1e-3)).all()


@pytest.mark.parametrize("kernel", ["fa3", "cudnn"])
def test_attribution(kernel: str) -> None:
    """The error of c is the scale's, and its sources still add up."""
    q, k, v, _ = inputs(192, 60)
    plan = plan_of(kernel, q, k, v)
    found = attribute(q, k, v, plan=plan)
    out = flash(q, k, v, plan=plan)[0]
    assert np.array_equal(found.observed, out.astype(np.float64))
    assert found.residual_share < 1e-6
    other = attribute(q, k, v, plan=dataclasses.replace(plan, c="once"))
    of_c = [x.sources["score scaling"].rms for x in (found, other)]
    errors = [abs(float(c_of(192, c)) * math.sqrt(192) / LOG2E - 1) for c in (plan.c, "once")]
    assert of_c[0] / of_c[1] == pytest.approx(errors[0] / errors[1], rel=0.02)


def test_whose() -> None:
    """An output of D = 192 is told, which it is not by c rounded once."""
    q, k, v, _ = inputs(192, 60)
    problem, plan = Problem.of(q, k, v), plan_of("fa2", q, k, v)
    for c, told in (("float scale", True), ("once", False)):
        out, lse = flash(q, k, v, plan=dataclasses.replace(plan, c=c))  # type: ignore[arg-type]
        bits = Bits(problem, np.arange(60), out[None], lse[None])
        assert any(x.name == "fa2" and x.all_bits for x in whose(bits)) == told


OTHERS: dict[str, Any] = {
    "algorithm": "unfused", "c": "float scale", "diagonal": 64, "finish": "fold", "splits": 2,
}  # fmt: skip


@pytest.mark.parametrize("kernels", ["sm80", "sm90", "float32"])
@pytest.mark.parametrize("field", OTHERS)
def test_no_kernel_of_ours_has_what_only_peers_have(field: str, kernels: str) -> None:
    fixed = sm80_float32.FIXED_FLOAT32 if kernels == "float32" else sm80_forward.FIXED
    plan = Plan(rounded_sum="lanes") if kernels == "float32" else Plan()
    sm80_forward.check_plan(plan, fixed, kernels)
    object.__setattr__(plan, field, OTHERS[field])  # past the rules of which fields go together
    message = rf"plan\.{field}: got {OTHERS[field]!r}, must be .* on the {kernels} kernels"
    with pytest.raises(ValueError, match=message):
        sm80_forward.check_plan(plan, fixed, kernels)


@pytest.mark.parametrize(
    "field",
    [
        {"queries": "descending"}, {"score": "unfused"}, {"delta_threads": 8}, {"starts": 2},
        {"accumulate": "tensor-core"}, {"score": "natural"}, {"ds_p": "rounded"}, {"scale": "dS"},
        {"delta_columns": 4}, {"delta_sum": "pairs"}, {"delta_join": "neighbours"},
        {"exponential": "expf", "score": "natural fused"},
    ],
    ids=str,
)  # fmt: skip
def test_no_kernel_of_ours_has_other_orders_of_a_backward(field: dict[str, Any]) -> None:
    plan = Plan(backward=BackwardPlan(**field))
    name, value = next((n, field[n]) for n in sm80_backward.FIXED_BACKWARD if n in field)
    sm80_forward.check_plan(plan)
    with pytest.raises(ValueError, match=rf"plan\.backward\.{name}: got {value!r}, must be .*sm90"):
        sm80_backward.check_orders(plan, "sm90")
    sm80_backward.check_orders(Plan())


def test_every_field_of_a_backward_is_fixed_or_compiled() -> None:
    fields = {f.name for f in dataclasses.fields(BackwardPlan)}
    ran = {"tile_m", "tile_n", "dq_order", "center"}
    assert fields - set(sm80_backward.FIXED_BACKWARD) == ran
    ours = BackwardPlan()
    assert all(getattr(ours, n) == x for n, x in sm80_backward.FIXED_BACKWARD.items())
