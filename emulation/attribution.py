"""Attribution: the error of an attention output, split among the places that rounded.

The algorithm runs once on the tracking machine, which carries every source's signed error along
with every value; what arrives at the output are the contributions, and they sum to the error. The
reference is the oracle, which shares no code with the tracking: what both disagree on is the
residual, and it is always printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import oracle, rounding
from emulation.arguments import check_flag, check_plain, check_progress, one_of
from emulation.backward import (
    Gradients,
    Saved,
    check_dout,
    delta_parts,
    finite_lse,
    flash_backward,
    standard_backward,
)
from emulation.bound_terms import TANH, threshold
from emulation.contributions import EXPECTED_RESIDUAL, Attribution, assemble, with_parts
from emulation.flash import resolve_plan
from emulation.formats import FLOAT32
from emulation.plan import Numerics, Plan, default_plan
from emulation.problem import DTYPES, Array, Problem, dtype_name
from emulation.sources import SOURCES
from emulation.standard import STATES, standard_rows
from emulation.tiled import Forward, arithmetic_of, constants, row_blocks
from emulation.tracking import F64, Tracked, TrackingMachine
from emulation.walks import walk_of

Progress = Callable[[str, float], None]

ALGORITHMS = ("flash", "standard")
#: Dtypes of an observed output, besides integers.
OBSERVED = (*DTYPES, "float64")


# -- running the algorithms on the tracking machine
# ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tracks:
    """Tracked outputs of all heads, and what the backward needs of the forward."""

    out: list[Tracked]
    o: list[Tracked]
    lse: list[Tracked]
    started: Array
    p: list[Tracked]

    def forward(self) -> Forward:
        lse = np.stack([x.value for x in self.lse])
        return Forward(
            out=np.stack([x.value for x in self.out]),
            lse=np.where(self.started, lse, np.float32(-np.inf)),
            o=np.stack([x.value for x in self.o]),
        )


def track_forward(
    m: TrackingMachine, problem: Problem, plan: Plan | None, progress: Progress | None
) -> _Tracks:
    """The forward of every head, tracked: flash under a plan, standard without one."""
    lo, hi = problem.band()
    tracks = _Tracks([], [], [], hi > lo, [])
    const = constants(m, problem, plan)
    for h in range(problem.heads):
        k, v = problem.k[problem.kv_head(h)], problem.v[problem.kv_head(h)]
        blocks = []
        for block in row_blocks(problem.n_q):
            q = m.input(problem.q[h, block])
            if plan is not None:
                rows = walk_of(plan)(m, plan, const, q, k, v, lo[block], hi[block])
                blocks.append((rows.out, rows.o, rows.lse, None))
            else:
                std = standard_rows(m, problem, q, k, v, lo[block], hi[block])
                blocks.append((std.out, std.o, std.lse, std.p))
            if progress is not None:
                progress("forward", (h + block.stop / problem.n_q) / problem.heads)
        for i, into in enumerate((tracks.out, tracks.o, tracks.lse)):
            into.append(m.concatenate([b[i] for b in blocks]))
        if plan is None:
            tracks.p.append(m.concatenate([b[3] for b in blocks]))
    return tracks


def _track_backward(
    m: TrackingMachine,
    problem: Problem,
    plan: Plan | None,
    tracks: _Tracks,
    exact_out: F64,
    exact_lse: F64,
    dout: Array,
    dlse: Array | None,
    through: bool,
    progress: Progress | None,
) -> Gradients:
    """The backward; what the forward hands over arrives as known values with their whole errors
    named, or under the forward's own sources (`through`).
    """

    def known(value: Array, exact: F64, errors: dict[str, F64]) -> Tracked:
        return Tracked(value.astype(np.float32), exact, errors)

    def of_forward(node: Tracked, name: str, whole: F64) -> dict[str, F64]:
        """An error that the forward made, named; what its sources miss of it has the name too."""
        if not through:
            return {name: whole}
        rest = whole - sum(node.errors.values(), start=np.zeros(whole.shape))
        return node.errors | {name: node.errors.get(name, 0.0) + rest}

    forward = tracks.forward()
    lse_exact = np.where(tracks.started, exact_lse, 0.0)

    def lse(h: int) -> Tracked:
        value = finite_lse(forward.lse[h])
        node = m.select(tracks.started, tracks.lse[h], np.zeros(value.shape, np.float32))
        return known(value, lse_exact[h], of_forward(node, "LSE", value - lse_exact[h]))

    if plan is None:

        def p(h: int) -> Tracked:
            node = tracks.p[h]
            errors = of_forward(node, "P from forward", node.value - node.exact)
            return known(node.value, node.exact, errors)

        saved = Saved(lse=lse, o=lambda h: [], p=p)
        return standard_backward(m, problem, dout, dlse, saved, progress)

    def o(h: int) -> list[Tracked]:
        rounded, *rest = delta_parts(plan, forward, h)
        wide = forward.o[h].astype(np.float64)
        errors = of_forward(tracks.o[h], "O in delta", wide - exact_out[h])
        errors = errors | {"rounded O in delta": rounded - wide}
        parts = [known(rounded, exact_out[h], errors)]
        for r in rest:
            parts.append(
                known(r, np.zeros(wide.shape), {"rounded O in delta": r.astype(np.float64)})
            )
        return parts

    return flash_backward(m, plan, problem, dout, dlse, Saved(lse=lse, o=o), progress)


def _stack(nodes: list[Tracked], shape: tuple[int, ...]) -> tuple[F64, dict[str, F64]]:
    """Heads stacked: values and errors of every source, in the caller's shape."""
    names = [n for n in SOURCES if any(n in x.errors for x in nodes)]
    zero = np.zeros(nodes[0].exact.shape)
    errors = {n: np.stack([x.errors.get(n, zero) for x in nodes]).reshape(shape) for n in names}
    value = np.stack([x.value for x in nodes]).astype(np.float64).reshape(shape)
    return value, errors


def _notes(problem: Problem, part: Attribution, foreign: int) -> tuple[str, ...]:
    """Why a residual is larger than expected, and what a softcap costs where it costs most."""
    return (*_residual_notes(problem, part, foreign), *_softcap_notes(problem, part))


def _residual_notes(problem: Problem, part: Attribution, foreign: int) -> tuple[str, ...]:
    name, size = part.output, part.error.size
    if foreign:
        return (
            f"{name}: the observed output differs from the emulated one in {foreign} of {size} "
            "elements; that difference has no source here and is in the residual.",
        )
    if part.residual_share <= EXPECTED_RESIDUAL:
        return ()
    rms = float(np.sqrt(np.mean(part.error**2)))
    largest = max((s.rms for s in part.sources.values()), default=0.0)
    text = f"{name}: the residual is {part.residual_share:.1e} of the error"
    scores = _largest_score(problem)
    if largest > 1e3 * rms:
        return (
            f"{text}: single contributions are {largest / rms:.0e} times larger than the error "
            f"and cancel. Scores reach {scores:.1e}: their rounding alone moves whole exponents.",
        )
    return (
        f"{text}: the error (rms {rms:.1e}) is near what float64 resolves here (oracle radius "
        f"{part.oracle_radius:.1e}, scores up to {scores:.1e}).",
    )


def _softcap_notes(problem: Problem, part: Attribution) -> tuple[str, ...]:
    whole = part.before_cast or part
    if problem.softcap is None or not whole.sources:
        return ()
    if max(whole.sources.values(), key=lambda s: s.rms).name != "softcap":
        return ()
    return (
        f"{part.output}: softcap is the largest source"
        f"{'' if part.before_cast is None else ' before the output cast'}. tanh errs by up to "
        f"2^-21 however small a score is, so a softcap of {problem.softcap:g} moves scores by up "
        f"to {problem.softcap * TANH:.1e}.",
    )


def _largest_score(problem: Problem) -> float:
    q, k = (np.abs(x.astype(np.float32)).astype(np.float64).sum(-1) for x in (problem.q, problem.k))
    return float(problem.scale * q.max(initial=0.0) * k.max(initial=0.0))


def _tiles(problem: Problem, plan: Plan | None) -> Array | None:
    if plan is None or plan.algorithm != "tiled":
        return None
    lo, hi = problem.band()
    return np.where(hi > lo, -(-hi // plan.tile_n) - lo // plan.tile_n, 0)


def attribute(
    q: Any,
    k: Any,
    v: Any,
    *,
    dout: Any = None,
    dlse: Any = None,
    algorithm: str = "flash",
    against: str | None = None,
    plan: Plan | None = None,
    numerics: Numerics | dict[str, Any] | None = None,
    state: str | None = None,
    scale: float | None = None,
    causal: Any = False,
    window: Any = None,
    softcap: float | None = None,
    observed: Any = None,
    through: bool = False,
    progress: Progress | None = None,
) -> Attribution:
    """Split the error of attention among the places that rounded.

    q, k, v and options as in `flash`; NumPy arrays, finite, not empty. algorithm: "flash" (under
    plan or numerics) or "standard". state: the format kept between steps ("float32", the default,
    "bfloat16", "float16"); a plan brings its own. against: the other algorithm, under the same
    state, subtracted source by source. dout (and dlse): also attribute the gradients. observed:
    somebody else's out, to be explained in place of the emulated one, in a float or integer dtype
    and within float32's range; what the emulation does not reproduce stays in the residual.
    through: in the gradients, errors that the forward left in LSE, O and a stored P count under the
    forward's sources rather than as "LSE", "O in delta" and "P from forward".
    progress(step, fraction) is called now and then. Returns the `Attribution` of out, with `parts`.
    Its notes say where a residual is large and why, and where a softcap's tanh is the largest
    source (it moves scores by up to softcap 2^-21, see `Problem.of`). Raises TypeError or
    ValueError naming argument, value and rule, and OverflowError where the algorithm leaves the
    range of its formats (half-precision state, or huge scores).

    Source: signed first-order attribution is CENA (Langlois 2001); the weights here are secants, so
    that the contributions close exactly (see `tracking`).

    >>> from emulation.samples import sample
    >>> a = attribute(*sample("normal", n=32, d=16))
    >>> bool(a.residual_share < 1e-6), max(a.groups, key=lambda g: a.groups[g].share)
    (True, 'output cast')
    """
    check_algorithm(algorithm)
    if against is not None:
        one_of("against", against, ALGORITHMS)
        if against == algorithm:
            raise ValueError(f"against: got {against!r}, must differ from algorithm")
    check_flag("through", through)
    check_progress(progress)
    check_tiled(plan, numerics, "flash" in (algorithm, against))
    problem = explainable(q, k, v, scale=scale, causal=causal, window=window, softcap=softcap)
    gradients = None if dout is None else check_dout(problem, dout, dlse)
    if dout is None and dlse is not None:
        raise ValueError("dlse: given without dout, must come with it")
    shape = (*problem.lead, problem.n_q, problem.d_v)
    if observed is not None:
        observed = _checked_observed(observed, shape)
    flash_plan = flash_plan_of(problem, plan, numerics, state)
    kept = flash_plan.state
    exact = _Exact.of(problem, gradients)

    def run(which: str, seen: Any) -> Attribution:
        used = flash_plan if which == "flash" else None
        return _attribute_one(problem, used, kept, gradients, exact, seen, through, progress)

    result = run(algorithm, observed)
    return result if against is None else result - run(against, None)


def check_algorithm(algorithm: Any) -> None:
    """ValueError unless it is one of the two."""
    one_of("algorithm", algorithm, ALGORITHMS)


def check_tiled(plan: Any, numerics: Any, flash: bool) -> None:
    """ValueError for a plan or numerics that nothing would follow."""
    for name, given in (("plan", plan), ("numerics", numerics)):
        if given is not None and not flash:
            raise ValueError(f"{name}: given for standard attention, must go with flash")


def explainable(q: Any, k: Any, v: Any, **options: Any) -> Problem:
    """A problem whose error can be explained: not empty, and finite wherever a query looks."""
    problem = Problem.of(q, k, v, **options)
    if not problem.heads or not problem.n_q or not problem.n_k:
        raise ValueError(f"q: shape {tuple(q.shape)}, k: {tuple(k.shape)}, must not be empty")
    where = problem.nonfinite()
    if where is not None:
        raise ValueError(where)
    unseen = ~problem.seen_keys()[:, None]
    if not unseen.any():
        return problem
    # What nobody sees may be NaN, and must not meet a 0 in a product.
    k0, v0 = (np.where(unseen, np.zeros((), x.dtype), x) for x in (problem.k, problem.v))
    return dataclasses.replace(problem, k=k0, v=v0)


def _checked_observed(observed: Any, shape: tuple[int, ...]) -> F64:
    """Somebody's output as float64: numbers of any dtype that float64 holds, and that float32 could
    hold without overflow.
    """
    rule = f"must be an array of {', '.join(OBSERVED)} or integers, like out"
    check_plain("observed", observed, rule.removeprefix("must be "))
    if dtype_name(observed.dtype) not in OBSERVED and observed.dtype.kind not in "iu":
        raise TypeError(f"observed: dtype {observed.dtype}, {rule}")
    if rounding.namespace(observed) is not np:
        raise TypeError(f"observed: got {type(observed).__module__} array, must be NumPy's")
    # What is NaN or infinite stays so, with no warning; ml_dtypes go to float32 without one.
    half = dtype_name(observed.dtype) in DTYPES
    wide: F64 = (observed.astype(np.float32) if half else observed).astype(np.float64)
    if wide.shape != shape:
        raise ValueError(f"observed: shape {wide.shape}, must be {shape}")
    bad = np.argwhere(~(np.abs(wide) < threshold(FLOAT32)))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise ValueError(f"observed: {wide[at]} at {at}, must be finite in float32")
    return wide


def flash_plan_of(
    problem: Problem, plan: Plan | None, numerics: Numerics | dict[str, Any] | None, state: Any
) -> Plan:
    """The Plan of a flash run: the given one, or the default with this state."""
    if state is not None:
        one_of("state", state, STATES)
    if plan is None:
        return default_plan(problem, numerics, state=state or "float32")
    plan = resolve_plan(problem, plan, numerics)
    if plan.splits > 1:
        raise ValueError(f"plan.splits: got {plan.splits}, must be 1 to be attributed")
    if state not in (None, plan.state):
        raise ValueError(f"state: got {state!r}, must be {plan.state!r} like plan.state, or None")
    return plan


@dataclass(frozen=True, eq=False)
class _Exact:
    """The oracle's answers, heads flattened."""

    out: F64
    lse: F64
    radius: float
    gradients: tuple[F64, F64, F64] | None
    gradient_radius: float

    @staticmethod
    def of(problem: Problem, gradients: tuple[Array, Array | None] | None) -> _Exact:
        options: dict[str, Any] = {
            "scale": problem.scale,
            "causal": problem.causal,
            "window": problem.window,
            "softcap": problem.softcap,
        }
        qkv = _batched(problem)
        exact = oracle.attention(*qkv, **options)
        if gradients is None:
            return _Exact(_flat(exact.out), _flat(exact.lse, 1), exact.radius, None, 0.0)
        dout, dlse = gradients
        lead = qkv[0].shape[:2]
        g = oracle.attention_vjp(
            *qkv,
            dout.reshape(*lead, *dout.shape[1:]),
            dlse=None if dlse is None else dlse.reshape(*lead, dlse.shape[1]),
            **options,
        )
        return _Exact(
            _flat(exact.out),
            _flat(exact.lse, 1),
            exact.radius,
            (_flat(g.dq), _flat(g.dk), _flat(g.dv)),
            g.radius,
        )


def _batched(problem: Problem) -> tuple[Array, Array, Array]:
    """(1, H, N, D): one batch whose GQA groups are those of the flattened heads."""
    return problem.q[None], problem.k[None], problem.v[None]


def _flat(x: F64, trailing: int = 2) -> F64:
    return x.reshape(-1, *x.shape[x.ndim - trailing :])


def _require_finite(m: TrackingMachine, algorithm: str, nodes: Iterable[Tracked]) -> None:
    if all(np.all(np.isfinite(e)) for x in nodes for e in (x.exact, *x.errors.values())):
        return
    raise OverflowError(
        f"{algorithm}: left the range of its formats at {', '.join(m.overflows)}; must stay finite "
        "(a wider state, or smaller scores)"
    )


def _attribute_one(
    problem: Problem,
    plan: Plan | None,
    state: str,
    gradients: tuple[Array, Array | None] | None,
    exact: _Exact,
    observed: Any,
    through: bool,
    progress: Progress | None,
) -> Attribution:
    m = tracking_machine(problem, plan, state)
    name = "flash" if plan is not None else "standard"
    kept = plan.state if plan is not None else state
    algorithm = name if kept == "float32" else f"{name}[{kept}]"
    with np.errstate(all="ignore"):  # _require_finite reports what overflowed
        tracks = track_forward(m, problem, plan, progress)
    _require_finite(m, algorithm, (*tracks.out, *tracks.lse))
    started = tracks.started
    tiles = _tiles(problem, plan)

    def part(
        output: str, nodes: list[Tracked], wide: list[Tracked] | None, truth: F64, radius: float
    ) -> Attribution:
        shape = truth.shape
        value, errors = _stack(nodes, shape)
        foreign = 0
        if output == "out" and observed is not None:
            given = observed.reshape(shape)
            foreign = int(np.count_nonzero(given != value))
            value = given
        common: dict[str, Any] = {
            "output": output, "algorithm": algorithm, "plan": plan, "dtype": problem.dtype,
            "exact": truth, "radius": radius,
            "tiles": tiles if output in ("out", "lse", "dq") else None,
        }  # fmt: skip
        before = None
        if wide is not None:
            wide_value, wide_errors = _stack(wide, shape)
            before = assemble(observed=wide_value, errors=wide_errors, **common)
        whole = assemble(observed=value, errors=errors, before_cast=before, **common)
        return dataclasses.replace(whole, notes=_notes(problem, whole, foreign))

    out_shape = (*problem.lead, problem.n_q, problem.d_v)
    lse_truth = np.where(started, exact.lse, 0.0).reshape(out_shape[:-1])
    lse_nodes = [m.select(started, x, np.zeros(started.shape, np.float32)) for x in tracks.lse]
    out = part("out", tracks.out, tracks.o, exact.out.reshape(out_shape), exact.radius)
    parts = {"lse": part("lse", lse_nodes, None, lse_truth, exact.radius)}
    if gradients is not None and exact.gradients is not None:
        dout, dlse = gradients
        with np.errstate(all="ignore"):
            g = _track_backward(
                m, problem, plan, tracks, exact.out, exact.lse, dout, dlse, through, progress
            )
        _require_finite(m, algorithm, (*g.dq, *g.dk, *g.dv))
        kv = (*problem.kv_lead, problem.n_k)
        shapes = ((*problem.lead, problem.n_q, problem.d), (*kv, problem.d), (*kv, problem.d_v))
        nodes = ((g.dq, g.dq_wide), (g.dk, g.dk_wide), (g.dv, g.dv_wide))
        for label, (narrow, wide), truth, shape in zip(
            ("dq", "dk", "dv"), nodes, exact.gradients, shapes, strict=True
        ):
            parts[label] = part(label, narrow, wide, truth.reshape(shape), exact.gradient_radius)
    return with_parts(out, parts)


def tracking_machine(
    problem: Problem, plan: Plan | None, state: str, fold: Iterable[str] = ()
) -> TrackingMachine:
    """The tracking machine of a plan, or of a standard attention in a state."""
    if plan is None:
        return TrackingMachine(fmt=problem.dtype, state=state, fold=fold)
    return TrackingMachine(fold=fold, **arithmetic_of(plan))
