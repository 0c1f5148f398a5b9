"""The verdict on an attention output, from a `Case` and the output alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from emulation.backward import check_dout
from emulation.explain import accused, fit, fitted, keys, roundings
from emulation.explain import local as local_
from emulation.explain.case import Case
from emulation.explain.exact import F64, NOTHING, Index
from emulation.explain.fit import Observed
from emulation.explain.verdict import KINDS, Judgement, Verdict, blocks
from emulation.problem import Array, dtype_name

Progress = Callable[[str, float], None]

#: Odds that one of the elements of a correct output is called unlikely.
ODDS = 1e-12
NAMES = ("dq", "dk", "dv")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def verdict(
    case: Case,
    out: Any,
    *,
    lse: Any = None,
    grads: Any = None,
    dout: Any = None,
    arithmetic: bool = True,
    unknown: bool = False,
    sources: bool = True,
    progress: Progress | None = None,
) -> Verdict:
    """`explain` for a `Case`, which keeps what many outputs of one problem share."""
    problem = case.problem
    shape = (*problem.lead, problem.n_q, problem.d_v)
    flat_out = _checked("out", out, shape).reshape(problem.heads, problem.n_q, problem.d_v)
    flat_lse = None
    if lse is not None:
        flat_lse = _checked("lse", lse, shape[:-1]).reshape(problem.heads, problem.n_q)
    flat_dout, flat_grads = checked_gradients(case, grads, dout)
    report = progress or (lambda step, fraction: None)
    report("exact values", 0.0)
    close = case.close_rows(flat_out)
    report("bounds", 0.4)
    judgements, seen = _judge_forward(case, flat_out, flat_lse, close)
    report("suspects", 0.6)
    models = fitted.modelled(case, close)
    best, same, others = accused.of_forward(case, seen, flat_out, close, judgements["out"], models)
    place = "out"
    local: str | None = None
    drop: fit.Noise | None = None
    wrong = judgements["out"].wrong
    found = best is not None
    if flat_lse is not None and not found and not wrong:
        best, same, others = accused.of_lse(case, flat_lse, close, judgements["lse"])
        place = "lse"
        wrong = judgements["lse"].wrong
        found = best is not None
        if wrong and not found:
            local = _local_lse(case, flat_lse, close)
    if flat_grads and flat_dout is not None and not found:
        graded, gradient = _judge_gradients(case, flat_grads, flat_dout)
        judgements |= graded
        bad = [n for n in graded if graded[n].wrong]
        if not wrong:
            best, same, others = accused.of_gradients(case, gradient, flat_dout, bool(bad))
            place = "the gradients" if best is not None else "out"
            wrong = bool(bad)
            found = best is not None
            if best is None or not best.fits:
                drop = accused.accumulated(case, gradient, flat_dout, bad)
                local = _local_gradients(gradient, bad) if drop is None else None
                best = best if local is None and drop is None else None
    if judgements["out"].wrong and (best is None or not best.fits):
        off = flat_lse is not None and judgements["lse"].wrong
        local, drop = _not_a_step(case, seen, close, off, best)
        best = best if local is None and drop is None else None
    biased = None if wrong or found else fit.bias(seen)
    if biased is not None and fit.beyond(biased, seen, models):
        wrong, local = True, "The error leans by more than any modelled rounding does."
    kind = KINDS[2] if wrong or found else KINDS[0]
    facts = {
        "rows": len(case.rows), "close": len(close), "dtype": problem.dtype,
        "out_dtype": dtype_name(flat_out.dtype), "certified": case.certified(close),
    }  # fmt: skip
    result = Verdict(
        kind, judgements, best if kind == KINDS[2] else None, place, same, others, drop,
        local=local, bias=biased, notes=_notes(case, judgements, flat_out, close), facts=facts,
    )  # fmt: skip
    if kind == KINDS[2]:
        return result
    if arithmetic:
        report("whose arithmetic", 0.8)
        result = dataclasses.replace(
            result, kernels=roundings.kernels(case, flat_out, flat_lse, unknown)
        )
    if sources:
        result = roundings.with_sources(case, result, biased)
    if biased is not None:
        result = dataclasses.replace(
            result,
            kind=KINDS[1],
            notes=(*result.notes, *roundings.bias_notes(case, close)),
        )
    report("done", 1.0)
    return result


def _not_a_step(
    case: Case, seen: Observed, close: Index, lse_wrong: bool, best: fit.Match | None
) -> tuple[str | None, fit.Noise | None]:
    """What a wrong output is where no suspect fits: a fault of a place, or random errors."""
    lo, hi = case.problem.band()
    rows = case.rows[close]
    text = local_.fault(seen, rows, (hi <= lo)[rows])
    if text is None:
        text = local_.moved(seen)
    if text is not None:
        return text, None
    if best is not None and best.explained > 0.9:
        return None, None
    whole = accused.finite(seen)
    count = keys.counted(case, whole, close)
    if count.text is not None:
        return count.text, None
    drop = accused.random_errors(case, whole, close, lse_wrong)
    # Weights thrown away at random are not the same keys in every row.
    return None, drop if count.explained < 0.5 else None


def _local_lse(case: Case, lse: Array, close: Index) -> str | None:
    """A fault of a place in the LSE; its roundings hang together, so that the bound is the unit."""
    rows = case.rows[close]
    bound, hidden = case.bounds(close)[1], np.isneginf(case.near(close).lse)
    exact = np.where(hidden, 0.0, case.near(close).lse)
    theirs = lse[:, rows].astype(np.float64)
    theirs = np.where(hidden & np.isinf(theirs), 0.0, theirs)
    seen = Observed(*(x[..., None] for x in (theirs, exact, bound, bound)))
    return local_.fault(seen, rows, np.logical_and.reduce(hidden, axis=0), "lse")


def _local_gradients(seen: dict[str, Observed], bad: list[str]) -> str | None:
    """Faults of a place in every gradient that is wrong."""
    found = []
    for name in bad:
        x = seen[name]
        nobody = np.zeros(x.exact.shape[1], bool)
        text = local_.fault(x, np.arange(x.exact.shape[1]), nobody, name)
        if text is None:
            return None
        found.append(text)
    return " ".join(found) or None


def _checked(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: got {type(x).__name__}, must be an array")
    if dtype_name(x.dtype) not in FLOATS:
        raise TypeError(f"{name}: dtype {x.dtype}, must be one of {', '.join(FLOATS)}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, must be {shape}")
    return np.asarray(x)


def checked_gradients(case: Case, grads: Any, dout: Any) -> tuple[Array | None, dict[str, Array]]:
    """dout and the gradients, heads flattened."""
    problem = case.problem
    if grads is None:
        return None, {}
    if dout is None:
        raise ValueError("grads: given without dout, must come with it")
    flat, _ = check_dout(problem, dout)
    pairs = grads if isinstance(grads, Mapping) else dict(zip(NAMES, grads, strict=True))
    for name in pairs:
        if name not in NAMES:
            raise ValueError(f"grads: {name!r}, must be one of {', '.join(NAMES)}")
    shapes = {
        "dq": (*problem.lead, problem.n_q, problem.d),
        "dk": (*problem.kv_lead, problem.n_k, problem.d),
        "dv": (*problem.kv_lead, problem.n_k, problem.d_v),
    }
    return flat, {
        n: _checked(n, x, shapes[n]).reshape(-1, *shapes[n][-2:]) for n, x in pairs.items()
    }


# -- judging ---------------------------------------------------------------------------


def judge(
    name: str, out: F64, exact: F64, sigma: F64, bound: F64, likely: F64, size: int, rows: Index
) -> Judgement:
    """One output on the rows that have bounds: (H, R, D), or (H, R, 1)."""
    error = out - exact
    nonfinite = int((~np.isfinite(error)).sum())
    with np.errstate(all="ignore"):
        ratio = np.where(error == 0, 0.0, np.abs(error) / bound)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        outside = ~(np.abs(error) <= bound)
        unlikely = ~(np.abs(error) <= likely) & ~outside
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    where = (int(at[0]), int(rows[at[1]]), *(int(i) for i in at[2:]))
    bad, heads = rows[outside.any(axis=(0, 2))], np.flatnonzero(outside.any(axis=(1, 2)))
    return Judgement(
        output=name,
        size=size,
        checked=int(error.size),
        outside=int(outside.sum()),
        unlikely=int(unlikely.sum()),
        worst=float(ratio[at]),
        where=where if name != "lse" else where[:2],
        rms=_rms(error),
        expected=_rms(sigma),
        allowed=_rms(bound),
        chi=fit.chi_square(error, sigma),
        rows=(int(bad.min()), int(bad.max())) if len(bad) else None,
        heads=(int(heads.min()), int(heads.max())) if len(heads) else None,
        nonfinite=nonfinite,
        blocks=blocks(np.minimum(ratio, 1e6)),
    )


def _rms(x: F64) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def _judge_forward(
    case: Case, out: Array, lse: Array | None, close: Index
) -> tuple[dict[str, Judgement], Observed]:
    near, rows = case.near(close), case.rows[close]
    bound, lse_bound = case.bounds(close)
    observed = out[:, rows].astype(np.float64)
    exact, sigma = near.out, near.sigma
    size = case.problem.heads * case.problem.n_q * case.problem.d_v
    # Hoeffding: a sum of independent errors |e_j| <= c_j passes t sqrt(sum c_j^2) with odds
    # 2 exp(-t^2 / 2). P alike in a row round alike: 2 u |O|; the cast, and fp32, count whole.
    t = math.sqrt(2 * math.log(2 * size / ODDS))
    linear = np.maximum(near.worst - near.p_part, 0.0)
    likely = bound
    if case.problem.dtype != "float32":
        alike = 2 * accused.unit(case.problem.dtype) * np.abs(exact)
        likely = t * near.spread + alike + linear
    found = {
        "out": judge("out", observed, exact, sigma, bound, likely, size, rows),
    }
    seen = Observed(observed, exact, sigma, bound)
    if lse is not None:
        theirs = lse[:, rows].astype(np.float64)
        truth = near.lse
        hidden = np.isneginf(truth)
        # A row that sees nothing: -inf is right, so is +inf (FlashAttention); a number is not.
        truth = np.where(hidden, 0.0, truth)
        theirs = np.where(hidden & np.isinf(theirs), 0.0, theirs)
        found["lse"] = judge(
            "lse", theirs[..., None], truth[..., None], near.lse_sigma[..., None],
            lse_bound[..., None], np.full((*truth.shape, 1), np.inf), int(lse.size), rows,
        )  # fmt: skip
    return found, seen


# -- gradients -------------------------------------------------------------------------


def _judge_gradients(
    case: Case, grads: dict[str, Array], dout: Array
) -> tuple[dict[str, Judgement], dict[str, Observed]]:
    right = case.gradient("", "", NOTHING, dout)
    bounds = case.gradient_bounds(dout)
    judged, seen = {}, {}
    for name, x in grads.items():
        value = x.astype(np.float64)
        rows = np.arange(value.shape[1])
        exact, sigma = right.value[name], right.sigma[name]
        never = np.full(value.shape, np.inf)
        judged[name] = judge(name, value, exact, sigma, bounds[name], never, int(value.size), rows)
        seen[name] = Observed(value, exact, sigma, bounds[name])
    return judged, seen


def _notes(
    case: Case, judgements: dict[str, Judgement], out: Array, close: Index
) -> tuple[str, ...]:
    problem, said = case.problem, []
    if len(close) < problem.n_q:
        said.append(
            f"{len(close)} of {problem.n_q} rows were held against derived bounds: those where the "
            f"error is largest, the first, the last and some between; exact values of "
            f"{len(case.rows)} rows."
        )
    lo, hi = problem.band()
    empty = np.flatnonzero(hi == lo)
    if len(empty) and np.asarray(out[:, empty] != 0).any():
        said.append(f"{len(empty)} rows see no key; their output must be 0 and is not.")
    hidden = [n for n, j in judgements.items() if j.nonfinite]
    if hidden:
        bad = np.argwhere(~np.isfinite(out.astype(np.float64)))
        if len(bad):
            at = tuple(int(i) for i in bad[0])
            said.append(f"First not finite: {float(out[at])} at (head, row, column) {at}.")
    return tuple(said)
