"""`explain`: the verdict on an attention output, from the inputs and the output alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from emulation.attribution import attribute, explainable
from emulation.backward import check_dout
from emulation.explain import fit
from emulation.explain.case import CLOSE, Case
from emulation.explain.exact import NOTHING, F64, Index
from emulation.explain.fit import Match, Observed
from emulation.explain.verdict import KINDS, Judgement, Verdict, blocks
from emulation.explain.whose import Bits, Share, rows_for, search, whose
from emulation.formats import FORMATS
from emulation.plan import Plan
from emulation.problem import Array, Problem, dtype_name

Progress = Callable[[str, float], None]

#: Odds that one of the elements of a correct output is called unlikely.
ODDS = 1e-12
#: Of the suspects that look best on some rows, so many are compared on all close rows.
KEPT = 8
#: Scores of the rows whose rounding sources are attributed.
ATTRIBUTED = 1 << 18
DROPOUT, HALF = "dropout left on", "all state in half precision"
COARSE = "P rounded to another format before normalisation"
NAMES = ("dq", "dk", "dv")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def explain(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    lse: Any = None,
    grads: Any = None,
    dout: Any = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    plan: Plan | None = None,
    arithmetic: bool = True,
    unknown: bool = False,
    sources: bool = True,
    rows: int | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Rounding, biased rounding, or another computation: what is to be said of an attention output.

    q (..., N_q, D), k, v and masks as in `flash`; out (..., N_q, D_v), lse (..., N_q) natural
    logarithm, grads: (dq, dk, dv) or a mapping of some of these names, for dout. Formats float16,
    bfloat16, float32 (outputs may be float64). plan: whose bounds are claimed; None is any correct
    kernel that keeps fp32 between its steps. arithmetic: say whose arithmetic it is; unknown: also
    search for an unknown kernel's (a minute). sources: attribute the rounding. rows: how many
    queries get derived bounds (None: all, or as many as are soon done). NaN and Inf in outputs are
    findings; in what a query sees they raise ValueError, like whatever is wrong with arguments.

    An element is outside if it is farther from the exact value than any correct kernel can be. A
    suspect (see `suspects`) is named when what it leaves is rounding, or when the error holds its
    difference whole, eight standard errors beyond rounding.

    >>> from emulation import flash
    >>> from emulation.samples import sample
    >>> q, k, v = sample("normal", n=48, d=16, dtype="bfloat16")
    >>> out, lse = flash(q, k, v, causal=True)
    >>> explain(q, k, v, out, lse=lse, causal=True).kind
    'rounding'
    >>> explain(q, k, v, out, lse=lse).named
    'mask not asked for'
    """
    problem = explainable(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    case = Case(problem, plan, CLOSE if rows is None else _cells(rows, problem))
    return verdict(
        case,
        out,
        lse=lse,
        grads=grads,
        dout=dout,
        arithmetic=arithmetic,
        unknown=unknown,
        sources=sources,
        progress=progress,
    )


def _cells(rows: Any, problem: Problem) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
        raise TypeError(f"rows: got {rows!r}, must be an integer >= 1 or None")
    if rows < 1:
        raise ValueError(f"rows: got {rows}, must be an integer >= 1 or None")
    return int(rows) * problem.heads * problem.n_k


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
    flat_dout, flat_grads = _gradients(case, grads, dout)
    report = progress or (lambda step, fraction: None)
    report("exact values", 0.0)
    whole = case.whole
    report("bounds", 0.4)
    close = case.close_rows(flat_out)
    judgements, seen = _judge_forward(case, flat_out, flat_lse, close)
    report("suspects", 0.6)
    best, same, others = _forward_suspects(case, seen, flat_out, close, judgements["out"])
    place = "out"
    wrong = judgements["out"].wrong
    found = best is not None and (wrong or best.significant or best.fits)
    if flat_lse is not None and not found and not wrong:
        best, same, others = _lse_suspects(case, flat_lse, close, judgements["lse"])
        place = "lse"
        wrong = judgements["lse"].wrong
        found = best is not None and (wrong or best.significant)
    if flat_grads and flat_dout is not None and not found:
        graded, gradient = _judge_gradients(case, flat_grads, flat_dout)
        judgements |= graded
        bad = [n for n in graded if graded[n].wrong]
        if not wrong:
            best, same, others = _gradient_suspects(case, gradient, flat_dout, bool(bad))
            place = "the gradients" if best is not None else "out"
            wrong = bool(bad)
            found = best is not None and (wrong or best.significant)
    drop = None
    if judgements["out"].wrong and (best is None or not (best.fits or best.significant)):
        drop = _noise(case, _finite(seen), close)
        best = None if drop is not None else best
    kind = KINDS[2] if wrong or found else KINDS[0]
    facts = {
        "rows": len(case.rows), "close": len(close), "dtype": problem.dtype,
        "out_dtype": dtype_name(flat_out.dtype), "certified": case.certified(close),
    }  # fmt: skip
    result = Verdict(
        kind, judgements, best if kind == KINDS[2] else None, place, same, others, drop,
        notes=_notes(case, judgements, flat_out, close), facts=facts,
    )  # fmt: skip
    if kind == KINDS[2]:
        return result
    if arithmetic:
        report("whose arithmetic", 0.8)
        result = dataclasses.replace(result, kernels=_kernels(case, flat_out, flat_lse, unknown))
    biased = fit.bias(seen)
    if sources:
        result = _with_sources(case, result, biased)
    if biased is not None:
        result = dataclasses.replace(
            result, kind=KINDS[1], bias=biased, notes=(*result.notes, *_bias_notes(case, close))
        )
    report("done", 1.0)
    return result


def _noise(case: Case, seen: Observed, close: Index) -> fit.Noise | None:
    """Random errors that are not rounding in the claimed formats: dropout, or half precision kept
    between all steps.
    """
    whole = case.whole
    found = [fit.noise(seen, DROPOUT, whole.spread[:, close] / _unit(case.problem))]
    found += [fit.noise(seen, HALF, whole.half[:, close])]
    for fmt, sigma in whole.coarse.items():
        found.append(fit.noise(seen, COARSE, sigma[:, close], fmt))
    limits = {DROPOUT: (0.09, 3.0), HALF: (0.3, 4.0), COARSE: (0.6, 1.7)}
    good = [n for n in found if n is not None and limits[n.name][0] < n.size < limits[n.name][1]]
    return max(good, key=lambda n: n.score, default=None)


def _unit(problem: Problem) -> float:
    fmt = FORMATS[problem.dtype]
    return fmt.unit_roundoff if fmt.bits == 16 else 1.0


def _checked(name: str, x: Any, shape: tuple[int, ...]) -> Array:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: got {type(x).__name__}, must be an array")
    if dtype_name(x.dtype) not in FLOATS:
        raise TypeError(f"{name}: dtype {x.dtype}, must be one of {', '.join(FLOATS)}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, must be {shape}")
    return np.asarray(x)


def _gradients(case: Case, grads: Any, dout: Any) -> tuple[Array | None, dict[str, Array]]:
    """dout and the gradients, heads flattened."""
    problem = case.problem
    if grads is None:
        return None, {}
    if dout is None:
        raise ValueError("grads: given without dout, must come with it")
    if case.scores > (limit := _gradient_limit()):
        raise ValueError(f"grads: {case.scores} scores, must be at most {limit} to be judged")
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


def _gradient_limit() -> int:
    from emulation.explain.case import GRADIENTS

    return GRADIENTS


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
    bad = rows[outside.any(axis=(0, 2))]
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
        nonfinite=nonfinite,
        blocks=blocks(np.minimum(ratio, 1e6)),
    )


def _rms(x: F64) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def _judge_forward(
    case: Case, out: Array, lse: Array | None, close: Index
) -> tuple[dict[str, Judgement], Observed]:
    whole, rows = case.whole, case.rows[close]
    bound, lse_bound = case.bounds(close)
    observed = out[:, rows].astype(np.float64)
    exact, sigma = whole.out[:, close], whole.sigma[:, close]
    size = case.problem.heads * case.problem.n_q * case.problem.d_v
    # Hoeffding: a sum of independent errors |e_j| <= c_j passes t sqrt(sum c_j^2) with odds
    # 2 exp(-t^2 / 2). P alike in a row round alike: 2 u |O|; the cast, and fp32, count whole.
    t = math.sqrt(2 * math.log(2 * size / ODDS))
    fixed = whole.worst[:, close] - 0.0
    spread = whole.spread[:, close]
    linear = np.maximum(fixed - _p_part(case, close), 0.0)
    likely = t * spread + 2 * _unit_or_zero(case.problem) * np.abs(exact) + linear + 4 * sigma / t
    likely = np.minimum(likely, np.inf) if _unit_or_zero(case.problem) else bound
    found = {
        "out": judge("out", observed, exact, sigma, bound, likely, size, rows),
    }
    seen = Observed(observed, exact, sigma, bound)
    if lse is not None:
        theirs = lse[:, rows].astype(np.float64)
        truth = whole.lse[:, close]
        hidden = np.isneginf(truth)
        # A row that sees nothing: -inf is right, so is +inf (FlashAttention); a number is not.
        truth = np.where(hidden, 0.0, truth)
        theirs = np.where(hidden & np.isinf(theirs), 0.0, theirs)
        found["lse"] = judge(
            "lse", theirs[..., None], truth[..., None], whole.lse_sigma[:, close][..., None],
            lse_bound[..., None], np.full((*truth.shape, 1), np.inf), int(lse.size), rows,
        )  # fmt: skip
    return found, seen


def _p_part(case: Case, close: Index) -> F64:
    """What rounding P can do at its worst: u sum P |V|."""
    return case.whole.p_part[:, close]


def _unit_or_zero(problem: Problem) -> float:
    return _unit(problem) if problem.dtype != "float32" else 0.0


def _finite(seen: Observed, top: float = math.inf) -> Observed:
    """With NaN where nothing is known set right, and infinities as the largest number."""
    out = np.where(np.isnan(seen.out), seen.exact, np.clip(seen.out, -top, top))
    return dataclasses.replace(seen, out=np.where(np.isfinite(out), out, seen.exact))


def _fields(seen: Observed) -> tuple[F64, F64, F64, F64]:
    return seen.out, seen.exact, seen.sigma, seen.bound


def _forward_suspects(
    case: Case, seen: Observed, out: Array, close: Index, judged: Judgement
) -> tuple[Match | None, tuple[str, ...], tuple[Match, ...]]:
    """The suspect that fits best, others that are the same computation here, and the runners-up."""
    first = case.first_rows(close)
    keep = np.isfinite(out[:, case.rows[first]].astype(np.float64)).all(axis=(0, 2))
    if not keep.any():
        return None, (), ()
    at = np.searchsorted(close, first)
    part = Observed(*(x[:, at][:, keep] for x in _fields(seen)))
    matches: dict[tuple[str, str], Match] = {}
    for name, word, change in case.suspects("forward"):
        theirs = case.theirs(name, word, change, first)
        if theirs is not None:
            m = fit.match(part, name, word, theirs.out[:, keep], theirs.sigma[:, keep])
            if m is not None:
                matches[name, word] = m
    best = fit.ranked(matches.values())[:KEPT]
    best += [m for m in matches.values() if m.significant and m not in best][:KEPT]
    if len(first) < len(close):
        best = _on_close(case, best, seen, out, close)
    return _chosen(best, judged.wrong)


def _on_close(
    case: Case, best: list[Match], seen: Observed, out: Array, close: Index
) -> list[Match]:
    """The same suspects on all close rows."""
    keep = np.isfinite(out[:, case.rows[close]].astype(np.float64)).all(axis=(0, 2))
    whole = Observed(*(x[:, keep] for x in _fields(seen)))
    changes = {(n, w): c for n, w, c in case.suspects("forward")}
    found = []
    for m in best:
        theirs = case.theirs(m.name, m.variant, changes[m.name, m.variant], close)
        if theirs is not None:
            found.append(
                fit.match(whole, m.name, m.variant, theirs.out[:, keep], theirs.sigma[:, keep])
            )
    return fit.ranked(found)


def _chosen(
    best: list[Match], wrong: bool
) -> tuple[Match | None, tuple[str, ...], tuple[Match, ...]]:
    """A suspect counts if it leaves only rounding and explains most of what is wrong, if its
    difference stands whole in the error, or (where rounding is excluded) if it explains half.
    """

    def counts(m: Match) -> bool:
        if m.significant and m.explained > 0:
            return True
        return wrong and (m.fits or m.explained >= 0.5)

    good = [m for m in best if counts(m)]
    sure = [m for m in good if m.significant or m.fits] or good
    if not sure:
        return None, (), tuple(best[:5])
    fitting = [m for m in sure if m.fits]
    top = max(fitting, key=lambda m: m.score) if fitting else sure[0]
    alike = [m for m in best if m is not top and fit.same_result(top, m)]
    same = tuple(dict.fromkeys(f"{m.name} ({m.variant})" if m.variant else m.name for m in alike))
    return top, same, tuple(m for m in best if m is not top and m not in alike)[:5]


def _lse_suspects(
    case: Case, lse: Array, close: Index, judged: Judgement
) -> tuple[Match | None, tuple[str, ...], tuple[Match, ...]]:
    whole, rows = case.whole, case.rows[close]
    exact, sigma = whole.lse[:, close], whole.lse_sigma[:, close]
    keep = np.isfinite(exact).all(axis=0) & np.isfinite(lse[:, rows]).all(axis=0)
    if not keep.any():
        return None, (), ()
    bound = case.bounds(close)[1]
    seen = Observed(
        *(x[:, keep][..., None] for x in (lse[:, rows].astype(np.float64), exact, sigma, bound))
    )
    found = []
    for of in ("lse", "forward"):
        for name, word, change in case.suspects(of):
            if of == "forward" and not judged.wrong:
                continue
            theirs = case.theirs(name, word, change, close)
            if theirs is not None:
                found.append(
                    fit.match(
                        seen, name, word, theirs.lse[:, keep][..., None],
                        np.maximum(sigma[:, keep][..., None], 2.0**-24),
                    )
                )  # fmt: skip
    return _chosen(fit.ranked(found)[:KEPT], judged.wrong) if judged.wrong else (None, (), ())


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


def _gradient_suspects(
    case: Case, seen: dict[str, Observed], dout: Array, wrong: bool
) -> tuple[Match | None, tuple[str, ...], tuple[Match, ...]]:
    """Suspects of the backward, and (where a gradient is wrong) those of the forward in it."""
    top = FORMATS[case.problem.dtype].max
    seen = {n: _finite(x, top) for n, x in seen.items()}
    found = []
    for of in ("backward", "forward"):
        if of == "forward" and (not wrong or any(m.fits for m in found)):
            break
        for name, word, change in case.suspects(of):
            if change.out is not None or change.tiles is not None or change.state is not None:
                continue
            theirs = case.gradient(name, word, change, dout)
            if any(theirs.value[n].shape != x.exact.shape for n, x in seen.items()):
                continue
            called = name if of == "backward" else f"backward: {name}"
            value = {n: np.clip(theirs.value[n], -top, top) for n in seen}
            matches = [
                fit.match(x, called, word, value[n], theirs.sigma[n]) for n, x in seen.items()
            ]
            m = _joint(matches, seen, value, theirs.sigma)
            if m is not None:
                found.append(m)
    return _chosen(fit.ranked(found)[: 2 * KEPT], wrong)


def _joint(
    matches: list[Match | None], seen: dict[str, Observed], value: dict[str, F64],
    sigma: dict[str, F64],
) -> Match | None:  # fmt: skip
    """One match of several outputs: it fits if it fits all of them, those included where the
    suspect changes nothing.
    """
    real = [m for m in matches if m is not None]
    if not real:
        return None
    chi = max(fit.chi_square(x.out - value[n], sigma[n]) for n, x in seen.items())
    top = max(real, key=lambda m: m.explained)
    total = sum(
        float(-0.5 * np.sum(np.minimum(((x.out - value[n]) / np.maximum(sigma[n], 1e-300)) ** 2, 1e12)))
        for n, x in seen.items()
    )
    return dataclasses.replace(
        top,
        score=total,
        explained=min(m.explained for m in real),
        remaining=math.sqrt(chi),
        fits=chi <= fit.FITS,
        coefficient=top.coefficient if all(m.significant for m in real) else 0.0,
    )


# -- what kind of rounding -------------------------------------------------------------


def _kernels(case: Case, out: Array, lse: Array | None, unknown: bool) -> tuple[Share, ...]:
    rows = rows_for(case.problem)
    with np.errstate(all="ignore"):
        theirs = None if lse is None else lse[:, rows].astype(np.float32)
    bits = Bits(case.problem, rows, out[:, rows], theirs)
    found = whose(bits)
    if unknown and not found[0].all_bits and case.problem.dtype != "float32":
        found = sorted([*found, search(bits)], key=lambda s: -s.score)
    return tuple(found)


def _with_sources(case: Case, result: Verdict, biased: fit.Bias | None) -> Verdict:
    """The groups of roundings of the nearest arithmetic, on the last rows (the first, where these
    see what they would see alone).
    """
    problem = case.problem
    plan = next((s.plan for s in result.kernels if s.plan is not None and s.plan.splits == 1), None)
    group = problem.group
    heads = min(problem.heads, group)
    count = max(1, min(problem.n_q, ATTRIBUTED // max(1, heads * problem.n_k)))
    top = problem.causal == "top-left"
    part = slice(0, count) if top else slice(problem.n_q - count, problem.n_q)
    if top is False and problem.causal is False and problem.window is not None:
        part = slice(problem.n_q - count, problem.n_q)
    try:
        found = attribute(
            problem.q[:heads, part], problem.k[:1], problem.v[:1], plan=plan,
            scale=problem.scale, causal=problem.causal, window=problem.window,
            softcap=problem.softcap,
        )  # fmt: skip
    except OverflowError:
        return result
    shares = {name: g.share for name, g in found.groups.items()}
    if not shares or not np.any(found.error):
        return result
    source = max(shares, key=lambda n: abs(shares[n]))
    blamed = None
    if biased is not None:
        sign = np.sign(found.exact) if "sign" not in biased.towards else np.ones_like(found.exact)
        means = {n: float(np.mean(g.contribution * sign)) for n, g in found.groups.items()}
        blamed = max(means, key=lambda n: means[n] * np.sign(biased.mean))
    return dataclasses.replace(result, source=source, shares=shares, bias_source=blamed)


def _bias_notes(case: Case, close: Index) -> tuple[str, ...]:
    """Which inputs make a bias: ties at the maximum, values of one sign."""
    from emulation.explain.exact import weigh
    from emulation.oracle.result import numbers

    problem, rows = case.problem, case.rows[close[:64]]
    q, k, v = (numbers(x) for x in (problem.q[0, rows], problem.k[0], problem.v[0]))
    w = weigh(problem, NOTHING, q, k, rows, problem.band())
    seen = w.seen.any(axis=1)
    near = (np.where(w.seen, w.s, -np.inf) >= w.top[:, None] - 2.0**-9).sum(axis=1)
    tied = float(np.mean(near[seen] > 1)) if seen.any() else 0.0
    one = float(np.mean((v >= 0).all(axis=0) | (v <= 0).all(axis=0)))
    said = []
    if tied > 0.1:
        said.append(f"In {100 * tied:.0f} % of the rows several scores tie at the maximum.")
    if one > 0.1:
        said.append(f"In {100 * one:.0f} % of the columns all values have one sign.")
    return tuple(said)


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
