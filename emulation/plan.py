"""Numerics and Plan: which arithmetic is done, in which order. Kernel, emulator and report obey it.

`Numerics` is what a user may choose. `Plan` is everything that changes a bit, and nothing else:
number of warps, stages, grid order and batch are not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from emulation.arguments import echo, one_of
from emulation.problem import Problem, check_problem
from emulation.rules import RULES

#: How c = scale log2 e is rounded: see `Plan.c`.
C = Literal["once", "float scale", "floats"]
#: Of every tile: far beyond any kernel's, and a tile of scores still fits in memory.
LARGEST_TILE = 2**16


def _check_fields(what: str, kind: Any, given: Iterable[Any]) -> None:
    """ValueError for a name that is no field of the dataclass."""
    known = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(
                f"{what}: unknown field {echo(name)}, must be one of {', '.join(known)}"
            )


@functools.cache
def _choices(kind: Any) -> dict[str, tuple[Any, ...]]:
    """The values of every field of a dataclass that is a Literal."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _check_choices(obj: Any, what: str) -> None:
    kind: Any = type(obj)
    for name, allowed in _choices(kind).items():
        one_of(f"{what}.{name}", getattr(obj, name), allowed)


@dataclass(frozen=True)
class Numerics:
    """The choices of arithmetic that are the user's; every value has an emulator branch and report
    rows.

    Raises ValueError naming field, value and choices.

    >>> Numerics(reference="stale", row_sum="rounded").p
    'input'
    """

    #: What is subtracted from a score before exp2, and so what every rescale multiplies by.
    #: "row-max": the running max (FlashAttention). "power-of-two": that, rounded up to an integer
    #: in log2 units, so that rescaling rounds nothing (short of underflow). "stale": that of the
    #: row's first visible tile, moved up by an integer only when a tile's sum shows the need.
    #: "lazy": the running max, followed only when it grew by more than 8 in log2. "tie-safe":
    #: lifted to the next integer in log2 when several scores tie at the max, so that no P is
    #: exactly 1. "final": the exact max, found in a first pass.
    reference: Literal["row-max", "power-of-two", "stale", "lazy", "tie-safe", "final"] = "row-max"
    #: "rounded": l sums P as the P V product sees it. "unrounded": l sums P before it is rounded.
    row_sum: Literal["rounded", "unrounded"] = "unrounded"
    #: Backward: delta = rowsum(dO * O) with O as it was before rounding, or with the rounded O.
    delta: Literal["full", "rounded"] = "full"
    #: P (and dS in the backward) rounded to the input format, or carried as a high and a low half.
    #: Of float32 inputs nothing is rounded either way.
    p: Literal["input", "split"] = "input"
    #: The special function unit, a degree-5 polynomial in FMAs, or a fixed pattern of columns on
    #: each.
    exp2: Literal["hardware", "polynomial", "mixed"] = "hardware"
    #: Sums carried through the tensor core (which truncates), or each tile from zero and added in
    #: fp32.
    accumulate: Literal["tensor-core", "promoted"] = "tensor-core"
    #: Format of O and of the gradients.
    out: Literal["input", "float32"] = "input"

    def __post_init__(self) -> None:
        _check_choices(self, "numerics")

    @staticmethod
    def of(value: Numerics | dict[str, Any] | None) -> Numerics:
        """None is the default; a mapping gives fields by name.

        >>> Numerics.of({"p": "split"}).p
        'split'
        """
        if value is None:
            return Numerics()
        if isinstance(value, Numerics):
            return value
        if not isinstance(value, dict):
            raise TypeError(
                f"numerics: got {type(value).__name__}, must be Numerics, a dict or None"
            )
        _check_fields("numerics", Numerics, value)
        return Numerics(**value)


@dataclass(frozen=True)
class BackwardPlan:
    """Order of the backward's sums. A kernel holds a tile of keys and walks tiles of queries."""

    #: Queries per tile: where promoted sums and split products are cut.
    tile_m: int = 64
    #: Keys per tile: one product of dS and K from zero, then added to dQ in fp32.
    tile_n: int = 128
    #: Order in which the key tiles' products are added to dQ.
    dq_order: Literal["ascending", "descending"] = "ascending"
    #: Order in which the tiles of queries are added to dK and dV (of one head after the other).
    queries: Literal["ascending", "descending"] = "ascending"
    #: Key tile number j of a head takes the tiles of queries from number j mod `starts` (mod their
    #: count) on, those before it last; 1: all from the first on. Of ascending queries only.
    starts: int = 1
    #: dK and dV: "forward": as `Numerics.accumulate` says. "tensor-core": carried through the
    #: tensor core, whatever the forward does.
    accumulate: Literal["forward", "tensor-core"] = "forward"
    #: The exponent's argument. "fused": x = fma(s, c, -rn(LSE log2 e)). "unfused": rn(rn(s c) -
    #: rn(LSE log2 e)). In natural units, without c: "natural": rn(rn(s scale) - LSE). "natural
    #: fused": fma(s, scale, -LSE).
    score: Literal["fused", "unfused", "natural", "natural fused"] = "fused"
    #: P: "exp2": 2^x as `Numerics.exp2` says, of a natural argument 2^rn(x log2 e). "expf": CUDA's
    #: expf of a natural argument.
    exponential: Literal["exp2", "expf"] = "exp2"
    #: The P in dS = P (dP - delta): as it was before it is rounded, or as the dV product sees it
    #: (which a split P has no single number for).
    ds_p: Literal["unrounded", "rounded"] = "unrounded"
    #: Where the scale comes in: "after": the sums dQ and dK times scale. "dS": rn(dS scale), before
    #: dS is rounded to the input format.
    scale: Literal["after", "dS"] = "after"
    #: Threads that share a row of delta = rowsum(dO O), some columns at a time in turn, which each
    #: adds in ascending order (`delta_sum`). 0: as many as there are such groups of columns,
    #: rounded up to a power of two.
    delta_threads: int = 0
    #: Neighbouring columns that a thread takes at a time: one load's.
    delta_columns: int = 8
    #: A thread's products: "chain": one FMA after the other. "pairs": fma(dO O, rn(dO O)) of two
    #: neighbouring columns, then added to what was before.
    delta_sum: Literal["chain", "pairs"] = "chain"
    #: How these threads join: each of the first half with the one so far behind it, and so on, or
    #: neighbours first.
    delta_join: Literal["halves", "neighbours"] = "halves"
    #: dQ less what the sums of its rows of dS, 0 in real arithmetic, make of a mean key (`center`):
    #: of keys that the row sees in whole groups of so many, a multiple of 16; in rows whose keys
    #: have much in common (`emulation.center`). 0: no such step.
    center: int = 0

    def __post_init__(self) -> None:
        _check_choices(self, "plan.backward")
        for name in ("tile_m", "tile_n"):
            _hold_tile(self, name, f"plan.backward.{name}")
        if _hold_integer(self, "center", "plan.backward.center"):
            _hold_tile(self, "center", "plan.backward.center", "0 or ")
            if self.scale == "dS":
                raise ValueError(
                    f"plan.backward.center: got {echo(self.center)}, must be 0 with scale = 'dS'"
                )
        for name, allowed in (
            ("delta_threads", (0, 1, 2, 4, 8, 16, 32)), ("delta_columns", (1, 2, 4, 8))
        ):  # fmt: skip
            value = _hold_integer(self, name, f"plan.backward.{name}")
            if value not in allowed:
                *most, last = allowed
                raise ValueError(
                    f"plan.backward.{name}: got {echo(value)}, must be "
                    f"{', '.join(map(str, most))} or {last}"
                )
        starts = _hold_integer(self, "starts", "plan.backward.starts")
        if starts < 1 or (starts > 1 and self.queries == "descending"):
            raise ValueError(
                f"plan.backward.starts: got {echo(starts)}, must be >= 1, and 1 with descending "
                "queries"
            )
        if self.delta_sum == "pairs" and self.delta_columns == 1:
            raise ValueError(
                "plan.backward.delta_sum: got 'pairs', must be \"chain\" with delta_columns = 1"
            )
        if self.exponential == "expf" and not self.natural:
            raise ValueError(
                "plan.backward.exponential: got 'expf', must be \"exp2\" unless the score is "
                "natural"
            )

    @property
    def natural(self) -> bool:
        """Whether the exponent's argument is in natural units."""
        return self.score in ("natural", "natural fused")


def _hold_integer(plan: Any, name: str, what: str) -> int:
    """The field as an int, which it is from now on (it may have been one of NumPy's)."""
    value = getattr(plan, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{what}: got {echo(value)}, must be an integer")
    object.__setattr__(plan, name, int(value))  # as dataclasses say it of frozen ones
    return int(value)


def _hold_tile(plan: Any, name: str, what: str, other: str = "") -> None:
    tile = _hold_integer(plan, name, what)
    if not 16 <= tile <= LARGEST_TILE or tile % 16:
        raise ValueError(
            f"{what}: got {echo(tile)}, must be {other}a positive multiple of 16, at most "
            f"{LARGEST_TILE}"
        )


@dataclass(frozen=True)
class Plan:
    """The whole arithmetic of one attention, printable and JSON. Made by `default_plan` or
    `peers.plan_of`.

    Common to all plans: S starts each tile from zero; sums over k run in ascending steps; lane g of
    a quad owns columns 8 j + 2 g and 8 j + 2 g + 1 of a tile and adds them in ascending order; a
    wholly masked tile does nothing; c = scale * log2(e), or softcap * log2(e), in fp32.
    """

    numerics: Numerics = field(default_factory=Numerics)
    #: "tiled": the online softmax, tile after tile. "unfused": whole rows in fp32, as PyTorch's
    #: "math" path has them (`unfused`); of the fields below only format and splits = 1 count.
    algorithm: Literal["tiled", "unfused"] = "tiled"
    #: Format of q, k, v, and of P unless it is split.
    format: Literal["float16", "bfloat16", "float32"] = "bfloat16"
    #: Whose tensor-core rule (`rules.RULES`).
    arch: str = "sm90"
    #: Products added at once; None is the architecture's own (16 on sm90; m16n8k8 has 8).
    step: int | None = None
    #: Products of float32 operands: of their three bfloat16 terms on the tensor core (`wide`), or
    #: chains of fp32 FMAs. "split" takes an infinity for NaN (Inf - Inf among its terms).
    wide: Literal["split", "fma"] = "split"
    #: Keys per tile, and the direction over them.
    tile_n: int = 128
    direction: Literal["right-to-left", "left-to-right"] = "right-to-left"
    #: c of the scale, which some kernels take as a float: "once": rn(scale log2 e). "float scale":
    #: rn(rn(scale) log2 e). "floats": rn(rn(scale) rn(log2 e)). Forward and backward; a "scaled"
    #: score has no c in the forward, an unfused Plan none at all.
    c: C = "once"
    #: x = fma(s, c, -r), or rn(rn(s c) - r). "guarded": fused, but unfused in rows where
    #: |r| >= 2^24: rounding r = m c alone would move x by whole units, and 2^x could overflow.
    #: "scaled": y = rn(rn(s scale) log2 e) first, its max is the reference, x = rn(y - r).
    #: Of the forward only. The backward subtracts LSE, always fused, and has no such guard: LSE is
    #: as coarse, 2^x may overflow there, and gradients of such rows may be NaN.
    score: Literal["guarded", "fused", "unfused", "scaled"] = "guarded"
    #: Of a fused score: not fused in tiles that start at or behind the last key that a row sees,
    #: its number rounded down to a multiple of this (a causal kernel's masked tiles); 0: nowhere.
    diagonal: int = 0
    #: Argument of alpha: rn(r_old - r_new) of the references, or rn(rn(m_old - m_new) c) of the
    #: maxima.
    alpha: Literal["references", "maxima"] = "references"
    #: l: "tile": lane sums of the tile, then fma(l, alpha, sum). "running": fma(l, alpha, p) first,
    #: then adds. "joined": as "tile", the lanes joined in every tile. "groups": rn(l alpha), to
    #: which the sums of 32 columns each, lanes joined, are added in turn.
    row_sum_order: Literal["tile", "running", "joined", "groups"] = "tile"
    #: Who sums the rounded P: the fp32 lanes, or the tensor core (a column of ones beside V).
    rounded_sum: Literal["matrix", "lanes"] = "matrix"
    #: How the four lanes are joined at the end: (l0 + l1) + (l2 + l3), or (l0 + l2) + (l1 + l3).
    join: Literal["01+23", "02+13"] = "01+23"
    #: 1 / l: correctly rounded, or rcp.approx.
    inverse: Literal["ieee", "hardware"] = "ieee"
    #: O: "multiply": acc rn(1 / l). "fold", of promoted sums: the last tile's product is joined as
    #: fma(1 / l, product, rn(rn(1 / l alpha) acc)).
    finish: Literal["multiply", "fold"] = "multiply"
    #: LSE: "sum": rn(rn(r + lg2 l) ln2); "log2f": the same with CUDA's log2f for lg2. With w =
    #: rn(lg2(l) ln2): "scale": fma(m, scale, w);
    #: "c ln2": fma(m, rn(c ln2), w); "reference": fma(r, ln2, w). "natural": rn(rn(r / log2 e) +
    #: logf(l)), CUDA's logf.
    lse: Literal["sum", "log2f", "scale", "c ln2", "reference", "natural"] = "sum"
    #: Ranges of whole tiles of keys, each walked on its own and normalised; their fp32 results are
    #: merged by LSE (`split.merge`). 1: all keys in one walk.
    splits: int = 1
    #: "stale" moves the reference when a lane's sum of a tile exceeds 2 ** stale_limit.
    stale_limit: int = 14
    #: Format kept between steps. Kernels keep float32; the half formats show what an all-half chain
    #: would do.
    state: Literal["float32", "bfloat16", "float16"] = "float32"
    backward: BackwardPlan = field(default_factory=BackwardPlan)

    def __post_init__(self) -> None:
        for name, kind in (("numerics", Numerics), ("backward", BackwardPlan)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"plan.{name}: got {echo(getattr(self, name))}, must be a {kind.__name__}"
                )
        _check_choices(self, "plan")
        one_of("plan.arch", self.arch, RULES)
        if self.step is not None and not 1 <= _hold_integer(self, "step", "plan.step") <= 256:
            raise ValueError(f"plan.step: got {echo(self.step)}, must be 1 to 256, or None")
        _hold_tile(self, "tile_n", "plan.tile_n")
        reference = self.numerics.reference
        if reference not in ("row-max", "lazy", "final") or self.score == "scaled":
            # These forms start from the max m, and would miss what the reference adds to it.
            why = repr(self.score if self.score == "scaled" else reference)
            if self.alpha == "maxima":
                raise ValueError(f"plan.alpha: got 'maxima', must be \"references\" with {why}")
            if self.lse in ("scale", "c ln2"):
                raise ValueError(
                    f'plan.lse: got {self.lse!r}, must be "sum" or "reference" with {why}'
                )
        if self.finish == "fold" and (
            self.numerics.accumulate != "promoted" or self.numerics.row_sum != "unrounded"
        ):
            raise ValueError(
                "plan.finish: got 'fold', must be \"multiply\" unless sums are promoted and l is "
                "of the unrounded P"
            )
        if _hold_integer(self, "diagonal", "plan.diagonal") < 0 or (
            self.diagonal and (self.score, reference) != ("fused", "row-max")
        ):
            raise ValueError(
                f"plan.diagonal: got {echo(self.diagonal)}, must be 0, or positive with a fused "
                "score under the row's max"
            )
        self._check_unfused()
        if self.backward.ds_p == "rounded" and self.numerics.p == "split":
            raise ValueError(
                "plan.backward.ds_p: got 'rounded', must be \"unrounded\" with a split P"
            )
        if _hold_integer(self, "splits", "plan.splits") < 1:
            raise ValueError(f"plan.splits: got {echo(self.splits)}, must be an integer >= 1")
        _hold_integer(self, "stale_limit", "plan.stale_limit")
        most = 14 if self.format == "float16" else 60
        if reference == "stale" and not 0 < self.stale_limit <= most:
            raise ValueError(
                f"plan.stale_limit: got {self.stale_limit}, must be 1 to {most} in {self.format}"
            )

    @property
    def promotes_gradients(self) -> bool:
        """Whether dK and dV add each tile of queries in fp32."""
        return (self.numerics.accumulate, self.backward.accumulate) == ("promoted", "forward")

    def _check_unfused(self) -> None:
        """An unfused Plan walks no tiles, and keeps float32."""
        if self.algorithm == "tiled":
            return
        for name, value, wanted in (
            ("splits", self.splits, 1), ("state", self.state, "float32"), ("wide", self.wide, "fma")
        ):  # fmt: skip
            if value != wanted:
                raise ValueError(f"plan.{name}: got {value!r}, must be {wanted!r} if unfused")

    def to_json(self) -> dict[str, Any]:
        """A plain dict, the inverse of `from_json`.

        >>> Plan.from_json(Plan(tile_n=64).to_json()).tile_n
        64
        """
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Plan:
        """A Plan from the dict of `to_json`, or its JSON text. Unknown fields raise ValueError."""
        try:
            fields = json.loads(data) if isinstance(data, str) else data
        except json.JSONDecodeError as error:
            raise ValueError(f"plan: not JSON ({error}), must be the text of to_json") from None
        if not isinstance(fields, dict):
            raise TypeError(f"plan: got {type(fields).__name__}, must be a dict of fields")
        fields = dict(fields)
        _check_fields("plan", Plan, fields)
        backward = fields.pop("backward", {})
        if not isinstance(backward, dict):
            raise TypeError(f"plan.backward: got {echo(backward)}, must be a dict of fields")
        _check_fields("plan.backward", BackwardPlan, backward)
        numerics = Numerics.of(fields.pop("numerics", None))
        return Plan(numerics=numerics, backward=BackwardPlan(**backward), **fields)

    def __str__(self) -> str:
        lines = []
        for name, value in self.to_json().items():
            if isinstance(value, dict):
                value = ", ".join(f"{k}={v}" for k, v in value.items())
            lines.append(f"{name:>14}: {value}")
        return "\n".join(lines)


#: Keys per tile of our Hopper forward, by head dimension: what fits beside Q and two stages of K
#: and V in 227 kB of shared memory and in the accumulators' registers.
TILE_N = {64: 128, 128: 128, 192: 96, 256: 80}
#: `BackwardPlan.center` of our kernels: short groups, so that a causal row is centred early and of
#: nearly all keys that it sees.
CENTER = 32
#: Of float32 inputs, whose operands take 6 bytes an element: keys per tile, forward and backward,
#: and queries per tile of the backward.
TILE_FLOAT32 = {64: 64, 128: 32, 256: 32}


def default_plan(
    problem: Problem, numerics: Numerics | dict[str, Any] | None = None, **fields: Any
) -> Plan:
    """The Plan of cuflash's Hopper kernels for this problem; `fields` replaces single fields.

    >>> import numpy as np
    >>> x = np.zeros((16, 200), np.float16)
    >>> default_plan(Problem.of(x, x, x)).tile_n
    80
    """
    check_problem(problem)
    _check_fields("plan", Plan, fields)
    width = max(problem.d, problem.d_v)
    if problem.dtype == "float32":
        return dataclasses.replace(_default_float32(width, numerics), **fields)
    tile_n = next(tile for d, tile in TILE_N.items() if width <= d)
    # 2^30 keeps lg2(l), and so LSE, accurate to 1.3e-6. In fp16, P must stay below 65504, and where
    # O itself is kept in fp16, so must the sums.
    limit = 14 if problem.dtype == "float16" else 30
    if fields.get("state") == "float16":
        limit = 4
    # R of a half state would be as coarse as dS itself.
    center = default_center(problem) if fields.get("state", "float32") == "float32" else 0
    plan = Plan(
        numerics=Numerics.of(numerics),
        format=problem.dtype,  # type: ignore[arg-type]  # checked by Problem
        tile_n=tile_n,
        stale_limit=limit,
        backward=BackwardPlan(center=center),
    )
    return dataclasses.replace(plan, **fields)


def default_center(problem: Problem) -> int:
    """`BackwardPlan.center` of our kernels for this problem: 0 where dQ stays plain in any case
    (under a softcap), or no dS is rounded (float32).
    """
    return 0 if problem.dtype == "float32" or problem.softcap is not None else CENTER


def _default_float32(width: int, numerics: Numerics | dict[str, Any] | None) -> Plan:
    """The Plan of float32 inputs.

    The tensor core truncates, always toward zero: along a row that would exceed fp32's own errors,
    so that sums are promoted unless `numerics` is given. P is not rounded, so the lanes' sum of it
    is the rounded one, too.
    """
    tile = next(tile for d, tile in TILE_FLOAT32.items() if width <= d)
    if numerics is None:
        numerics = Numerics(accumulate="promoted")
    return Plan(
        numerics=Numerics.of(numerics),
        format="float32",
        tile_n=tile,
        rounded_sum="lanes",
        stale_limit=30,
        backward=BackwardPlan(tile_m=tile, tile_n=tile),
    )
