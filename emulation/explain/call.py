"""`explain`: arguments as people have them (names, formats, places) into a case for the judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from emulation.attribution import explainable
from emulation.explain.case import CLOSE, Case
from emulation.explain.exact import Index
from emulation.explain.judge import checked_gradients, verdict
from emulation.explain.tolerance import check_kind, chosen_plan, format_named, in_format
from emulation.explain.verdict import Judgement, Verdict
from emulation.plan import Plan
from emulation.problem import Array, Problem, numpy_dtype
from emulation.rounding import namespace

Progress = Callable[[str, float], None]


def explain(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    lse: Any = None,
    grads: Any = None,
    dout: Any = None,
    dtype: Any = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    plan: Plan | str | None = None,
    arithmetic: bool = True,
    unknown: bool = False,
    sources: bool = True,
    rows: int | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Rounding, biased rounding, or another computation: what is to be said of an attention output.

    q (..., N_q, D), k, v and masks as in `flash`; out (..., N_q, D_v), lse (..., N_q) natural
    logarithm, grads: (dq, dk, dv) or a mapping of some of these names, for dout. Formats float16,
    bfloat16, float32 (outputs may be float64); NumPy or CuPy arrays: of q on a GPU every row's
    exact value is computed there.

    dtype: format that the kernel took q, k, v and dout in, to which they are rounded first
    ("bfloat16" or "bf16", and so on). None is theirs; but if they are float32 and they and out hold
    nothing but values of bfloat16 (or of float16), as arrays that came from PyTorch do, they are
    judged in that format and a note says so: "float32" prevents it. plan: whose bounds are claimed,
    a `Plan` or a name of `plan_of`; None is any correct kernel that keeps fp32 between its steps.
    arithmetic: say whose arithmetic it is; unknown: also search for an unknown kernel's (a minute).
    sources: attribute the rounding. rows: how many queries get derived bounds (None: all, or as
    many as are soon done). Gradients of more than 2^22 scores are judged on some key heads, which a
    note names, and one key head's queries may have 2^24 scores (4096 x 4096).

    NaN and Inf in outputs are findings; in what a query sees they raise ValueError, like whatever
    is wrong with arguments; TypeError of what is no array.

    An element is outside if it is farther from the exact value than any correct kernel can be. A
    suspect (see `suspects`, and `fitted` for those with a free number) is named when what it leaves
    is rounding, or when the error holds its difference whole, eight standard errors beyond
    rounding; never if it leaves the elements that are outside. Where only elements, rows, columns
    or heads are wrong, or keys count otherwise, the verdict says which. A bias larger than that of
    every modelled rounding is another computation.

    >>> from emulation import flash
    >>> from emulation.samples import sample
    >>> q, k, v = sample("normal", n=48, d=16, dtype="bfloat16")
    >>> out, lse = flash(q, k, v, causal=True)
    >>> explain(q, k, v, out, lse=lse, causal=True).kind
    'rounding'
    >>> explain(q, k, v, out, lse=lse)
    <Verdict: another computation: mask not asked for; beyond: out 726 of 768, lse 47 of 48>
    """
    fmt = None if dtype is None else format_named(dtype)
    pairs = _named(grads)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **pairs}
    for name, x in given.items():
        check_kind(name, x)
    if dout is not None and grads is None:
        raise ValueError("dout: given without grads, must come with them")
    xp = namespace(q) if type(q).__module__.split(".")[0] == "cupy" else np
    given = {name: _on_host(x) for name, x in given.items()}
    notes = []
    if fmt is None:
        fmt = held([given[n] for n in ("q", "k", "v")], [given[n] for n in ("out", "dout")])
        if fmt is not None:
            notes.append(
                f"q, k, v and out are {fmt} values held in float32: judged as {fmt} (dtype float32 "
                "judges them as float32)."
            )
    if fmt is not None:
        for name in ("q", "k", "v", "dout"):
            if given[name] is not None:
                given[name] = in_format(name, given[name], fmt)
    masks = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    problem = _problem(given["q"], given["k"], given["v"], **masks)
    claimed = chosen_plan(plan, problem)
    case = Case(problem, claimed, CLOSE if rows is None else _cells(rows, problem), xp)
    found = _judged(
        case,
        given["out"],
        None if grads is None else {n: given[n] for n in pairs},
        lse=given["lse"],
        dout=given["dout"],
        arithmetic=arithmetic,
        unknown=unknown,
        sources=sources,
        progress=progress,
    )
    if problem.dtype == "float32" and not found.is_rounding:
        fmt = held([given[n] for n in ("q", "k", "v")], [])
        if fmt is not None:
            notes.append(
                f"q, k and v are {fmt} values: if the kernel took them in {fmt}, dtype {fmt} "
                "judges it so."
            )
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def _named(grads: Any) -> dict[str, Any]:
    """Gradients by name."""
    if grads is None:
        return {}
    if isinstance(grads, Mapping):
        return dict(grads)
    if not isinstance(grads, list | tuple) or len(grads) != 3:
        raise TypeError("grads: must be (dq, dk, dv), or a mapping of some of these names")
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def held(inputs: list[Any], outputs: list[Any]) -> str | None:
    """The half format whose values float32 inputs (and outputs of any format) hold, if one does.

    bfloat16 first: few of its values are none of float16, and few of float16's are of bfloat16.

    >>> x = np.array([1.0, 1.0078125], np.float32)
    >>> held([x], []), held([x], [x + np.float32(2**-9)]), held([x], [x + np.float32(2**-20)])
    ('bfloat16', 'float16', None)
    """
    if not all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in inputs):
        return None
    arrays = [x for x in (*inputs, *outputs) if isinstance(x, np.ndarray)]
    return next((f for f in ("bfloat16", "float16") if all(_holds(x, f) for x in arrays)), None)


def _holds(x: Array, fmt: str) -> bool:
    """Whether every number is a value of the format; NaN and infinities are."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        narrow = x.astype(np.float32).astype(numpy_dtype(fmt)).astype(np.float64)
    return bool(((narrow == wide) | np.isnan(wide)).all())


def _on_host(x: Any) -> Any:
    """A CuPy array as a NumPy one; anything else as it is."""
    return x.get() if type(x).__module__.split(".")[0] == "cupy" else x


def _problem(q: Any, k: Any, v: Any, **options: Any) -> Problem:
    """Checked as `explainable` does, but with the keys that nobody should see as they are: a
    suspect may see them. Only what is not finite there becomes 0.
    """
    cleared = explainable(q, k, v, **options)
    problem = Problem.of(q, k, v, **options)
    if all(np.isfinite(x.astype(np.float32)).all() for x in (problem.k, problem.v)):
        return problem
    k0, v0 = (
        np.where(np.isfinite(x.astype(np.float32)), x, y)
        for x, y in ((problem.k, cleared.k), (problem.v, cleared.v))
    )
    return dataclasses.replace(problem, k=k0, v=v0)


def _cells(rows: Any, problem: Problem) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
        raise TypeError(f"rows: got {rows!r}, must be an integer >= 1 or None")
    if rows < 1:
        raise ValueError(f"rows: got {rows}, must be an integer >= 1 or None")
    return int(rows) * problem.heads * problem.n_k


# -- gradients of some heads -----------------------------------------------------------


def _judged(
    case: Case, out: Any, grads: dict[str, Any] | None, *, lse: Any, dout: Any, **options: Any
) -> Verdict:
    """The verdict; of gradients of more heads than time allows, on a part of them."""
    kv = int(case.problem.k.shape[0])
    if grads is None or dout is None or len(case.graded) == kv:
        return verdict(case, out, lse=lse, grads=grads, dout=dout, **options)
    flat, flat_grads = checked_gradients(case, grads, dout)
    whole = verdict(case, out, lse=lse, **options)
    if whole.suspect is not None or flat is None:
        return whole
    part, heads = case.part(case.graded)
    shape = (case.problem.heads, case.problem.n_q)
    seen = verdict(
        part,
        out.reshape(*shape, -1)[heads],
        lse=None if lse is None else lse.reshape(shape)[heads],
        grads={n: x[heads if n == "dq" else case.graded] for n, x in flat_grads.items()},
        dout=flat[heads],
        arithmetic=False,
        sources=False,
    )
    graded = {
        n: _placed(j, case.graded if n in ("dk", "dv") else heads)
        for n, j in seen.judgements.items()
    }
    for name, x in flat_grads.items():
        if name in graded:
            graded[name] = dataclasses.replace(graded[name], size=int(x.size))
    note = (
        f"Gradients of {len(case.graded)} of {kv} key heads, and of the queries that read them, "
        f"were judged: {', '.join(map(str, case.graded))}."
    )
    facts = {**whole.facts, "graded": case.graded.tolist()}
    if whole.is_rounding and not seen.is_rounding:
        if seen.local is not None:
            note += " The sentence on what is wrong counts heads among these."
        return dataclasses.replace(seen, judgements=graded, notes=(*seen.notes, note), facts=facts)
    only = {n: j for n, j in graded.items() if n in flat_grads}
    return dataclasses.replace(
        whole, judgements=whole.judgements | only, notes=(*whole.notes, note), facts=facts
    )


def _placed(judged: Judgement, heads: Index) -> Judgement:
    """With heads as the caller counts them."""
    first, *rest = judged.where
    span = judged.heads
    return dataclasses.replace(
        judged,
        where=(int(heads[first]), *rest),
        heads=None if span is None else (int(heads[span[0]]), int(heads[span[1]])),
    )
