"""What no call takes, by kind: every argument of every public call given what it cannot be, and
every array as a subclass or in another byte order. The answer is always argument, value and rule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import emulation
from emulation import (
    BackwardPlan,
    Numerics,
    Plan,
    Problem,
    attribute,
    flash,
    oracle,
    sfu,
    shapley,
    tensor_core,
)
from emulation.arguments import echo
from emulation.bounds import backward_bound, forward_bound, standard_bound
from emulation.oracle.large import float64_attention, float64_gradients
from emulation.plan import default_plan
from emulation.samples import capture, sample

X = np.ones((4, 8), np.float16)
ROW = np.zeros(4, np.float32)
PROBLEM = Problem.of(X, X, X)
PLAN = default_plan(PROBLEM)
QKV: dict[str, Any] = {"q": X, "k": X, "v": X}

#: What is no option of any kind: unhashable, ambiguous as a truth value, or of another type.
JUNK: tuple[Any, ...] = (
    ["flash"], {"flash": 1}, np.array(["flash", "standard"]), np.zeros(2), object(), 3.5, b"flash",
    float("nan"), ("flash",), 1 + 2j, frozenset(), X,
)  # fmt: skip

Call = Callable[..., Any]
#: Calls with what they need, and the options that take only some strings.
CHOICES: list[tuple[Call, dict[str, Any], tuple[str, ...]]] = [
    (attribute, QKV, ("algorithm", "against", "state")),
    (shapley, QKV, ("algorithm", "state")),
    (emulation.standard, QKV, ("state",)),
    (emulation.standard_vjp, QKV | {"dout": X}, ("state",)),
    (emulation.plan_of, {"kernel": "fa2", **QKV}, ("kernel",)),
    (oracle.attention, QKV, ("tier",)),
    (oracle.attention_vjp, QKV | {"dout": X}, ("tier",)),
    (sample, {"kind": "normal", "n": 4}, ("kind", "dtype")),
    (capture, {}, ("dtype",)),
    (cuflash.attention, QKV, ("layout",)),
    (tensor_core.mma, {"a": X, "b": X}, ("arch",)),
]
#: Calls and their array arguments.
ARRAYS: list[tuple[Call, dict[str, Any]]] = [
    (Problem.of, QKV),
    (flash, QKV),
    (emulation.standard, QKV),
    (emulation.flash_vjp, QKV | {"dout": X, "dlse": ROW}),
    (emulation.standard_vjp, QKV | {"dout": X, "dlse": ROW}),
    (attribute, QKV | {"dout": X, "dlse": ROW, "observed": X}),
    (shapley, QKV),
    (oracle.attention, QKV),
    (oracle.attention, QKV | {"rows": np.arange(4)}),
    (oracle.attention_vjp, QKV | {"dout": X, "dlse": ROW}),
    (lambda **x: emulation.plan_of("fa2", **x), QKV),
    (lambda **x: backward_bound(PROBLEM, PLAN, **x), {"dout": X, "dlse": ROW}),
    (cuflash.attention, QKV | {"out": np.zeros_like(X)}),
    (cuflash.plan, QKV),
    (lambda **x: cuflash.attention_vjp(X, X, X)[1](**x), {"dout": X, "dlse": ROW}),
    (lambda **x: tensor_core.mma(**x), {"a": X, "b": X, "c": np.zeros((4, 4), np.float32)}),
    (sfu.ex2, {"x": ROW}),
    (sfu.rcp, {"x": ROW}),
    (sfu.lg2, {"x": ROW}),
    (sfu.ex2_polynomial, {"x": ROW}),
]


class Subclass(np.ndarray[Any, Any]):
    """An array of somebody's library."""


def other_order(x: Any) -> Any:
    return x.astype(x.dtype.newbyteorder("S"))


DISGUISES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "masked": (lambda x: np.ma.array(x, mask=x > 9), "numpy.ma.*MaskedArray, must be a plain"),
    "matrix": (lambda x: np.matrix(x), "numpy.matrix, must be a plain"),
    "subclass": (lambda x: x.view(Subclass), ".*Subclass, must be a plain"),
    "other byte order": (other_order, "dtype [<>][fi][248], must be"),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("entry", range(len(ARRAYS)))
def test_arrays_are_plain(entry: int, disguise: str) -> None:
    call, arrays = ARRAYS[entry]
    call(**arrays)
    make, message = DISGUISES[disguise]
    for name, x in arrays.items():
        with pytest.raises(TypeError, match=f"^{name}: (got )?{message}"):
            call(**arrays | {name: make(x)})


def test_files_mapped_into_memory_are_arrays(tmp_path: Path) -> None:
    q, k, v = sample("normal", n=20, d=16)
    for name, x in {"q": q, "k": k, "v": v}.items():
        np.save(tmp_path / f"{name}.npy", x)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv"]
    assert cuflash.attention(*mapped).tobytes() == cuflash.attention(q, k, v).tobytes()
    assert emulation.attribute(*mapped).verdict() == emulation.attribute(q, k, v).verdict()


@pytest.mark.parametrize("entry", range(len(ARRAYS)))
def test_lists_are_no_arrays(entry: int) -> None:
    call, arrays = ARRAYS[entry]
    for name, x in arrays.items():
        if name != "rows":
            with pytest.raises(TypeError, match=f"^{name}: got list, must be "):
                call(**arrays | {name: x.tolist()})


@pytest.mark.parametrize("junk", range(len(JUNK)))
@pytest.mark.parametrize("entry", range(len(CHOICES)))
def test_choices_are_named_whatever_is_given(entry: int, junk: int) -> None:
    call, needed, names = CHOICES[entry]
    for name in names:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got .*, must be "):
            call(**needed | {name: JUNK[junk]})


@pytest.mark.parametrize("junk", range(len(JUNK)))
def test_fields_of_plans_are_named_whatever_is_given(junk: int) -> None:
    for kind, what in ((Numerics, "numerics"), (Plan, "plan"), (BackwardPlan, r"plan\.backward")):
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            assert get_args(hints[field.name]) or hints[field.name] in (
                int, str, Numerics, BackwardPlan,
            )  # fmt: skip
            message = rf"^{what}\.{field.name}: got .*, must be "
            with pytest.raises((TypeError, ValueError), match=message):
                kind(**{field.name: JUNK[junk]})


@pytest.mark.parametrize("junk", range(len(JUNK)))
def test_plans_problems_and_numerics_are_what_they_say(junk: int) -> None:
    wrong = JUNK[junk]
    for problem_call in (
        lambda: forward_bound(wrong, PLAN),
        lambda: backward_bound(wrong, PLAN, X),
        lambda: standard_bound(wrong),
        lambda: default_plan(wrong),
        lambda: float64_attention(wrong),
        lambda: float64_gradients(wrong, X.astype(np.float64)),
    ):
        with pytest.raises(TypeError, match=r"^problem: got .*, must be a Problem"):
            problem_call()
    for plan_call in (
        lambda: forward_bound(PROBLEM, wrong),
        lambda: backward_bound(PROBLEM, wrong, X),
        lambda: flash(X, X, X, plan=wrong),
        lambda: attribute(X, X, X, plan=wrong),
    ):
        with pytest.raises(TypeError, match=r"^plan: got .*, must be a Plan"):
            plan_call()
    for call in (flash, attribute, shapley, cuflash.attention, cuflash.attention_vjp, cuflash.plan):
        with pytest.raises((TypeError, ValueError), match=r"^numerics: "):
            call(X, X, X, numerics=wrong)
    with pytest.raises(ValueError, match=r"^plan: unknown field 'warps', must be one of"):
        default_plan(PROBLEM, warps=4)


@pytest.mark.parametrize("wrong", [3, "yes", np.zeros(2), {}], ids=echo)
def test_progress_and_flags(wrong: Any) -> None:
    with_progress = (flash, emulation.standard, attribute)
    with_gradients = (emulation.flash_vjp, emulation.standard_vjp)
    for call, more in (*((c, ()) for c in with_progress), *((c, (X,)) for c in with_gradients)):
        with pytest.raises(
            TypeError, match=r"^progress: got .*, must be None or a function of two"
        ):
            call(X, X, X, *more, progress=wrong)
    with pytest.raises(TypeError, match=r"^through: got .*, must be True or False"):
        attribute(X, X, X, dout=X, through=wrong)
    with pytest.raises(TypeError, match=r"^return_lse: got .*, must be True or False"):
        cuflash.attention(X, X, X, return_lse=wrong)


@pytest.mark.parametrize("algorithm", ["flash", "standard"])
def test_attribute_refuses_what_nothing_follows(algorithm: str) -> None:
    half = dataclasses.replace(PLAN, state="bfloat16")
    with pytest.raises(ValueError, match=f"^against: got '{algorithm}', must differ from algorith"):
        attribute(X, X, X, algorithm=algorithm, against=algorithm)
    for call in (attribute, shapley):
        if algorithm == "standard":
            useless: dict[str, Any] = {"plan": PLAN, "numerics": {"p": "split"}}
            for name, given_ in useless.items():
                with pytest.raises(ValueError, match=f"^{name}: given for standard attention, mus"):
                    call(**QKV, algorithm=algorithm, **{name: given_})
        else:
            with pytest.raises(
                ValueError, match=r"^state: got 'float16', must be 'bfloat16' like p"
            ):
                call(X, X, X, plan=half, state="float16")
            call(X, X, X, plan=half, state="bfloat16")


def test_a_plan_brings_its_state_to_both_sides() -> None:
    q, k, v = sample("normal", n=20, d=16)
    plan = default_plan(Problem.of(q, k, v), state="bfloat16")
    both = attribute(q, k, v, plan=plan, against="standard")
    assert both.algorithm == "flash[bfloat16] - standard[bfloat16]"


def test_shapley_has_no_other_arguments() -> None:
    for name in ("dout", "against", "foo"):
        with pytest.raises(TypeError, match=rf"shapley\(\) got an unexpected .* '{name}'"):
            shapley(**QKV | {name: None})


def test_a_missing_part_is_named() -> None:
    found = attribute(X, X, X)
    with pytest.raises(KeyError, match=r"parts: no 'dq', must be one of 'out', 'lse' .*dout"):
        found.parts["dq"]
    assert "dq" not in found.parts
    assert (found - attribute(X, X, X, algorithm="standard")).parts.keys() == {"out", "lse"}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("n", -1, ValueError), ("n_k", -1, ValueError), ("d", 0, ValueError),
        ("heads", 0, ValueError), ("seed", -1, ValueError), ("n", 2.0, TypeError),
        ("heads", True, TypeError), ("n_k", "4", TypeError),
    ],
)  # fmt: skip
def test_sizes_of_a_sample(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name}: got {value!r}, must be an integer >= "):
        sample("normal", **{"n": 4, name: value})


# -- observed


@settings(max_examples=60, deadline=None)
@given(st.floats(width=64), st.integers(0, 31))
def test_observed_is_finite_in_float32(value: float, at: int) -> None:
    """Accepted exactly where rounding it to float32 gives a finite number."""
    seen = np.full((4, 8), 0.5)
    seen.flat[at] = value
    with np.errstate(over="ignore"):
        fits = bool(np.isfinite(np.float32(value)))
    if fits:
        assert attribute(X, X, X, observed=seen).observed.flat[at] == value
    else:
        place = tuple(int(i) for i in np.unravel_index(at, seen.shape))
        said = f"observed: {np.float64(value)} at {place}, must be finite in float32"
        with pytest.raises(ValueError, match=re.escape(said)):
            attribute(X, X, X, observed=seen)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "object", "U3", "bool", "longdouble"])
def test_observed_is_of_real_numbers(dtype: str) -> None:
    seen = np.ones((4, 8), dtype)
    with pytest.raises(
        TypeError, match=r"^observed: dtype .*, must be an array of float16, bfloat"
    ):
        attribute(X, X, X, observed=seen)


# -- scale and softcap


@given(st.integers(-1070, 1020), st.sampled_from(["scale", "softcap"]))
def test_powers_of_two_outside_their_range(exponent: int, name: str) -> None:
    most = 127 if name == "scale" else 16
    if -126 <= exponent <= most:
        made = Problem.of(**QKV | {name: 2.0**exponent})
        assert getattr(made, name) == 2.0**exponent
    else:
        rule = f"{name}: got {2.0**exponent!r}, must be 2**-126 to 2**{most}, finite and normal in"
        with pytest.raises(ValueError, match=re.escape(rule)):
            cuflash.attention(**QKV | {name: 2.0**exponent})


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("digits", [50, 400, 5000])
def test_long_numbers_are_named_in_short(name: str, digits: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}: got .*, must be ") as caught:
        Problem.of(**QKV | {name: 10**digits})
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(("scale", "softcap"), [(2.0**20, 2.0**-110), (2.0**-126, 2.0**16)])
def test_scale_over_softcap_is_a_normal_number(scale: float, softcap: float) -> None:
    rule = f"softcap: got {softcap} beside scale {scale}, must keep 2 log2(e) scale / softcap"
    with pytest.raises(ValueError, match=re.escape(rule)):
        Problem.of(X, X, X, scale=scale, softcap=softcap)
