"""Whose arithmetic: which kernel's Plan reproduces an output, and a search for an unknown one.

Rows are independent, so some rows tell of all. O alone finds direction and tile; LSE, which is not
rounded to the half format, the order of the row sum, the form of the exponent and the reciprocal.
Gradients tell the backward: `neighbours` lists what they are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.explain.exact import Index
from emulation.peers import plan_of
from emulation.plan import C, Numerics, Plan, default_plan
from emulation.problem import Array, Problem, numpy_dtype
from emulation.standard import standard_machine, standard_rows
from emulation.tiled import c_rules, constants, machine_of
from emulation.walks import walk_of

#: Scores a candidate may take: about 0.1 s.
CELLS = 1 << 17
KERNELS = ("fa3", "fa2", "fa2-split", "cudnn", "efficient", "math")
#: Queries and keys per tile that Triton's tutorial chooses from, keys not above D.
TRITON = tuple((m, n) for n in (32, 64, 128) for m in (64, 128))
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)


@dataclass(frozen=True)
class Share:
    """How much of an output a Plan reproduces: equal elements of O and of LSE (None: not given),
    of so many.
    """

    name: str
    plan: Plan | None
    out: float
    lse: float | None
    elements: int

    @property
    def all_bits(self) -> bool:
        return self.out == 1.0 and self.lse in (None, 1.0)

    @property
    def score(self) -> float:
        return self.out + (0.0 if self.lse is None else self.lse)


@dataclass(frozen=True, eq=False)
class Bits:
    """Rows of an output whose bits are compared: out (H, R, D_v), lse (H, R) or None."""

    problem: Problem
    rows: Index
    out: Array
    lse: Array | None

    def of(self, name: str, plan: Plan | None) -> Share:
        """The share that a Plan (None: the unfused algorithm) reproduces."""
        out, lse = emulated(self.problem, plan, self.rows)
        same = same_bits(self.out, out)
        same_lse = None if self.lse is None else same_bits(self.lse, lse)
        return Share(name, plan, same, same_lse, int(self.out.size))


def same_bits(a: Array, b: Array) -> float:
    """Share of elements with equal values (0 equals -0)."""
    if not a.size:
        return 1.0
    return float(np.mean(a.astype(np.float32) == b.astype(np.float32)))


def emulated(problem: Problem, plan: Plan | None, rows: Index) -> tuple[Array, Array]:
    """Out (H, R, D_v) in the problem's format and LSE (H, R) of some rows."""
    lo, hi = (x[rows] for x in problem.band())
    out = np.zeros((problem.heads, len(rows), problem.d_v), numpy_dtype(problem.dtype))
    lse = np.full(out.shape[:2], -np.inf, np.float32)
    with np.errstate(all="ignore"):
        for h in range(problem.heads):
            k, v = problem.k[problem.kv_head(h)], problem.v[problem.kv_head(h)]
            found: Any
            if plan is None:
                m = standard_machine(problem, "float32")
                found = standard_rows(m, problem, m.input(problem.q[h, rows]), k, v, lo, hi)
            else:
                m = machine_of(plan)
                q = m.input(problem.q[h, rows])
                found = walk_of(plan)(m, plan, constants(m, problem, plan), q, k, v, lo, hi)
            out[h] = found.out.astype(out.dtype)
            lse[h] = np.where(hi > lo, found.lse, np.float32(-np.inf))
    return out, lse


def known(problem: Problem) -> Iterator[tuple[str, Plan | None]]:
    """The kernels whose arithmetic is known, for this problem, short of Triton's."""
    if problem.dtype != "float32" and max(problem.d, problem.d_v) <= 256:
        for kernel in KERNELS:
            if kernel != "math" or problem.softcap is None:
                plan = _plan(kernel, problem)
                if kernel != "fa2-split" or plan.splits > 1:
                    yield kernel, plan
    yield "cuflash", default_plan(problem)
    yield "unfused, fp32", None


def tutorials(problem: Problem) -> Iterator[tuple[str, Plan]]:
    """The tiles that Triton's tutorial may choose; it takes equal lengths and these widths only."""
    fits = problem.n_q == problem.n_k and problem.d == problem.d_v and problem.softcap is None
    if not fits or problem.dtype == "float32" or problem.d not in (16, 32, 64, 128, 256):
        return
    plan = _plan("triton", problem)
    for tile_m, tile_n in TRITON:
        if tile_n <= problem.d and (problem.causal or tile_m == TRITON[0][0]):
            name = f"triton, {tile_m} x {tile_n}" if problem.causal else f"triton, {tile_n}"
            block = tile_m if problem.causal else 0
            yield name, dataclasses.replace(plan, tile_n=tile_n, diagonal=block)


def _plan(kernel: str, problem: Problem) -> Plan:
    leads = (problem.lead, problem.kv_lead, problem.kv_lead)
    arrays = (problem.q, problem.k, problem.v)
    shaped = (x.reshape(*lead, *x.shape[1:]) for x, lead in zip(arrays, leads, strict=True))
    return plan_of(kernel, *shaped, causal=problem.causal, scale=problem.scale)


def whose(bits: Bits) -> list[Share]:
    """Every known kernel's share, the best first; Triton's if no other has all bits."""
    found = [bits.of(name, plan) for name, plan in known(bits.problem)]
    if not any(share.all_bits for share in found):
        found += [bits.of(name, plan) for name, plan in tutorials(bits.problem)]
    return sorted(found, key=lambda s: -s.score)


#: What the search varies after direction and tile, one field at a time, best kept.
_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("score", ("fused", "unfused", "scaled")),
    ("row_sum_order", ("running", "tile", "joined", "groups")),
    ("alpha", ("maxima", "references")),
    ("join", ("01+23", "02+13")),
    ("inverse", ("ieee", "hardware")),
    ("step", (None, 8)),
    ("accumulate", ("tensor-core", "promoted")),
    ("row_sum", ("unrounded", "rounded")),
    ("lse", ("sum", "scale", "c ln2", "reference", "natural")),
)


def _with(plan: Plan, field: str, value: Any) -> Plan | None:
    """The Plan with another value, None where they do not go together."""
    try:
        if field in ("accumulate", "row_sum"):
            numerics: Numerics = dataclasses.replace(plan.numerics, **{field: value})
            return dataclasses.replace(plan, numerics=numerics)
        more: dict[str, Any] = {field: value}
        if field == "score" and value == "scaled":
            more["alpha"] = "references"
            if plan.lse in ("scale", "c ln2"):
                more["lse"] = "reference"
        return dataclasses.replace(plan, **more)
    except ValueError:
        return None


def search(bits: Bits, progress: Callable[[str, float], None] | None = None) -> Share:
    """The Plan that reproduces most bits of an unknown kernel's output.

    First every direction and tile, with FlashAttention-2's other choices; then one field after the
    other, twice round, keeping what fits best. All of it again with c rounded otherwise, where that
    makes another c and bits are still missing.
    """
    found: list[Share] = []
    for rule in c_rules(bits.problem):
        found.append(_search(bits, rule, progress))
        if found[-1].all_bits:
            break
    return max(found, key=lambda s: s.score)


def _search(bits: Bits, rule: C, progress: Callable[[str, float], None] | None) -> Share:
    """`search` under one rule of c."""
    start = Plan(
        numerics=Numerics(reference="row-max", row_sum="unrounded", delta="rounded"),
        format=bits.problem.dtype,  # type: ignore[arg-type]  # checked by Problem
        c=rule,
        score="unfused",
        alpha="maxima",
        row_sum_order="running",
        join="02+13",
        lse="scale",
        rounded_sum="lanes",
    )
    tried: dict[str, Share] = {}

    def of(plan: Plan) -> Share:
        key = str(plan)
        if key not in tried:
            tried[key] = bits.of("search", plan)
        return tried[key]

    grid = [
        dataclasses.replace(start, tile_n=tile, direction=way)
        for tile in TILES
        for way in ("right-to-left", "left-to-right")
        if tile <= max(16, -(-bits.problem.n_k // 16) * 16)
    ]
    best = of(grid[0])
    for i, plan in enumerate(grid):
        best = max(best, of(plan), key=lambda s: s.score)
        if progress is not None:
            progress("tiles", (i + 1) / len(grid))
    for turn in range(2):
        before = best
        for i, (field, values) in enumerate(_FIELDS):
            assert best.plan is not None
            for value in values:
                other = _with(best.plan, field, value)
                if other is not None:
                    best = max(best, of(other), key=lambda s: s.score)
            if progress is not None:
                progress("orders", (turn + (i + 1) / len(_FIELDS)) / 2)
        if best is before:
            break
    return best


#: What gradients can tell: values of the fields of a `BackwardPlan`, those together that go
#: together.
_BACKWARD: tuple[dict[str, Any], ...] = (
    {"queries": "ascending", "starts": 1},
    *({"queries": "descending", "starts": 1, "tile_m": m} for m in (64, 128)),
    *({"queries": "ascending", "starts": n} for n in (2, 3, 4, 6)),
    *(
        {"score": score, "exponential": function}
        for score, function in (
            ("fused", "exp2"), ("unfused", "exp2"), ("natural", "exp2"),
            ("natural fused", "exp2"), ("natural", "expf"), ("natural fused", "expf"),
        )
    ),
    *({"accumulate": x} for x in ("forward", "tensor-core")),
    *({"ds_p": x} for x in ("unrounded", "rounded")),
    *({"scale": x} for x in ("after", "dS")),
    *({"delta_sum": x} for x in ("chain", "pairs")),
    *(
        {"delta_threads": n, "delta_columns": 8, "delta_join": join}
        for join in ("halves", "neighbours")
        for n in (0, 1, 2, 4, 8, 16)
    ),
    *(
        {"delta_threads": n, "delta_columns": columns, "delta_join": join, "delta_sum": "chain"}
        for join in ("halves", "neighbours")
        for n, columns in ((32, 1), (16, 2), (32, 2), (16, 4), (32, 4), (32, 8))
    ),
)  # fmt: skip


def neighbours(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans whose backward differs from this one's in one choice, and what it is: what gradients
    are compared with to tell a kernel's backward.
    """
    seen = {plan.backward}
    for fields in _BACKWARD:
        try:
            backward = dataclasses.replace(plan.backward, **fields)
            other = dataclasses.replace(plan, backward=backward)
        except ValueError:
            continue
        if backward not in seen:
            seen.add(backward)
            changed = (n for n, x in fields.items() if getattr(plan.backward, n) != x)
            yield ", ".join(f"{n} {fields[n]}" for n in changed), other


def rows_for(problem: Problem, cells: int = CELLS) -> Index:
    """Rows whose bits are compared: as many as are soon emulated, spread evenly."""
    count = max(1, cells // max(1, problem.heads * problem.n_k))
    count = min(problem.n_q, max(count, 16))
    return np.unique(np.linspace(0, problem.n_q - 1, count, dtype=np.int64))
