"""What one report is about: arrays checked, in one format, cut to the heads and rows asked for."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import samples
from emulation.problem import DTYPES, Array, Problem, dtype_name, numpy_dtype
from emulation.report.inputs import Capture, InputError, check_finite, read, to_format

FORMATS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
FORMATS |= {name: name for name in DTYPES}

MAX_SCORES = 4096 * 4096
"""Scores up to which everything is reported by default; beyond, the last rows of one head."""

HARD_SCORES, HARD_KEYS = 300_000_000, 262_144
"""Scores and keys beyond which even an explicit request is refused."""

BLOCK_ROWS, BLOCK_KEYS = 256, 128
"""Fewer rows or keys than these cost as much as these."""


@dataclass(frozen=True)
class Work:
    """Arrays in one format, and options as `emulation.attribute` takes them (`masks`).

    notes: sentences on what was done to the input. seed: what a normal dout was drawn with.
    """

    q: Array
    k: Array
    v: Array
    dout: Array | None
    observed: Array | None
    masks: dict[str, Any]
    source: str
    notes: tuple[str, ...]
    seed: int | None = None

    @property
    def pairs(self) -> int:
        """Query-key pairs over all heads."""
        return int(math.prod(self.q.shape[:-1]) * self.k.shape[-2])

    @property
    def cost(self) -> int:
        """What the work takes, in scores: `pairs`, but for few rows or keys."""
        return _cost(math.prod(self.q.shape[:-2]), self.q.shape[-2], self.k.shape[-2])

    @property
    def bottom_right(self) -> bool:
        """Whether the last queries, taken alone, see the same keys as before."""
        return str(self.masks["causal"]) != "top-left"

    def last_rows(self, rows: int) -> Work:
        """The last queries only; see `bottom_right`."""
        q, dout, out = (
            x if x is None else x[..., -rows:, :] for x in (self.q, self.dout, self.observed)
        )
        assert q is not None
        return dataclasses.replace(self, q=q, dout=dout, observed=out)

    def first_head(self) -> Work:
        """The first head only, as 2-D arrays, without dout and observed output."""
        first = (0,) * (self.q.ndim - 2)
        return dataclasses.replace(
            self, q=self.q[first], k=self.k[first], v=self.v[first], dout=None, observed=None
        )


def _cost(heads: int, rows: int, keys: int) -> int:
    return heads * max(rows, BLOCK_ROWS) * max(keys, BLOCK_KEYS)


def said(error: Exception) -> str:
    """A library's "argument: got value, must ..." in the form "argument: value: must ..."."""
    return str(error).replace(": got ", ": ", 1).replace(", must ", ": must ", 1)


def prepare(
    path: str | None,
    *,
    fmt: str | None = None,
    masks: dict[str, Any],
    heads: list[int] | None = None,
    rows: int | None = None,
    backward: bool = False,
    seed: int | None = None,
) -> Work:
    """Read the file (None: the bundled capture) and make it ready.

    fmt: what q, k and v are rounded to; None keeps the file's format (float64 becomes float32).
    masks: scale, causal, window, softcap; None takes what the file says. backward: keep the file's
    dout, or draw a normal one (None: seed 0). heads, rows: None takes all, or what is soon done.
    Raises InputError for whatever is wrong with the input.
    """
    notes: list[str] = []
    if path is None:
        fmt = fmt or "float16"
        q, k, v, options = samples.capture(fmt)
        held = Capture(q, k, v, None, None, options.get("scale"), options["causal"], ())
        source = "bundled capture: one head of SmolLM2-135M-Instruct, layer 14"
        if fmt != "float16":
            notes.append(_converted("The bundled q, k and v are", "float16", fmt))
    else:
        held = read(path)
        source = os.path.basename(path)
        fmt, said_of = _format(held, fmt)
        notes += said_of
        if held.ignored:
            notes.append(f"Not used from the file: {', '.join(held.ignored[:8])}.")
        if held.k.shape[-2] > HARD_KEYS:
            raise InputError(f"k: {held.k.shape[-2]} keys: must be at most {HARD_KEYS}")
    for name in ("q", "k", "v"):
        check_finite(name, getattr(held, name))
    q, k, v = (to_format(name, getattr(held, name), fmt) for name in ("q", "k", "v"))
    masks = dict(masks)
    for name in ("scale", "causal"):
        if masks.get(name) is None:
            masks[name] = getattr(held, name)
    masks["causal"] = False if masks["causal"] is None else masks["causal"]
    try:
        problem = Problem.of(q, k, v, **masks)
    except (TypeError, ValueError) as error:
        raise InputError(said(error)) from None
    dout, out = (_output_shaped(n, getattr(held, n), problem) for n in ("dout", "out"))
    drawn = None
    if backward and dout is None:
        drawn = seed or 0
        dout = _normal(problem, drawn)
    elif backward and dout is not None:
        if dtype_name(dout.dtype) != fmt:
            notes.append(_converted("dout of the file is", dtype_name(dout.dtype), fmt))
        if seed is not None:
            notes.append("The file holds dout, so --seed changes nothing.")
        dout = to_format("dout", dout, fmt)
    elif dout is not None:
        notes.append("The file holds dout: --backward reports the gradients.")
        dout = None
    masks["scale"], masks["causal"] = problem.scale, problem.causal
    work = Work(q, k, v, dout, out, masks, source, tuple(notes), drawn)
    return _cut(work, problem, heads, rows)


def _format(held: Capture, fmt: str | None) -> tuple[str, list[str]]:
    """The format to work in, and what must be said about it."""
    stored = {name: dtype_name(getattr(held, name).dtype) for name in ("q", "k", "v")}
    if fmt is None:
        for name, dtype in stored.items():
            if dtype != stored["q"]:
                rule = f"must be {stored['q']} like q (or give --dtype)"
                raise InputError(f"{name}: dtype {dtype}: {rule}")
        fmt = stored["q"] if stored["q"] in DTYPES else "float32"
        chooses = " (--dtype chooses)"
    else:
        chooses = ""
    notes = []
    for dtype in dict.fromkeys(stored.values()):
        if dtype != fmt:
            names = [name for name in stored if stored[name] == dtype]
            verb = "are" if len(names) > 1 else "is"
            told = _converted(f"{_joined(names)} of the file {verb}", dtype, fmt)
            notes.append(f"{told.removesuffix('.')}{chooses}.")
    return fmt, notes


def _joined(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _converted(what: str, old: str, new: str) -> str:
    how = "widened" if new == "float32" and old != "float64" else "rounded"
    return f"{what} {old}, {how} here to {new}."


def _output_shaped(name: str, x: Array | None, problem: Problem) -> Array | None:
    if x is None:
        return None
    shape = (*problem.lead, problem.n_q, problem.d_v)
    if x.shape != shape:
        raise InputError(f"{name}: shape {x.shape}: must be {shape} like the output")
    check_finite(name, x)
    return x


def _normal(problem: Problem, seed: int) -> Array:
    """A standard normal dout in the problem's format; the same seed gives the same one."""
    shape = (*problem.lead, problem.n_q, problem.d_v)
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return drawn.astype(np.float32).astype(numpy_dtype(problem.dtype))


def _cut(work: Work, problem: Problem, heads: list[int] | None, rows: int | None) -> Work:
    notes = list(work.notes)
    kept = problem.n_q if rows is None else min(rows, problem.n_q)
    if kept < problem.n_q and not work.bottom_right:
        rule = "must not be used with top-left, which counts from the first row"
        raise InputError(f"--rows: {rows}: {rule}")
    asked, left = heads, []
    large = _cost(problem.heads, kept, problem.n_k) > MAX_SCORES
    if heads is None and problem.heads > 1 and large:
        heads = [0]
        left.append(f"head 0 of {problem.heads}")
    count = problem.heads if heads is None else len(heads)
    if rows is None and work.bottom_right:
        kept = min(kept, max(1, MAX_SCORES // (count * max(problem.n_k, BLOCK_KEYS))))
        if kept < problem.n_q:
            left.append(f"the last {kept} of {problem.n_q} rows")
    if left:
        whole = _millions(problem.heads * problem.n_q * problem.n_k)
        notes.insert(
            0,
            f"Only {' and '.join(left)}: the input is {whole} scores "
            "(--rows and --head choose otherwise).",
        )
    if kept < problem.n_q and work.dout is not None:
        notes.append("dK and dV are the part that these rows give.")
    scores = count * kept * problem.n_k
    if scores > HARD_SCORES:
        named = f"q: shape {work.q.shape}"
        if asked is not None:
            named = f"--head: {','.join(map(str, asked))}"
        if rows is not None:
            named = f"--rows: {rows}"
        rule = f"must be at most {_millions(HARD_SCORES)} scores"
        raise InputError(f"{named}: {rule}, not {_millions(scores)}")
    if heads is not None:
        for head in heads:
            if head >= problem.heads:
                rule = f"must be less than {problem.heads}, the heads in the input"
                raise InputError(f"--head: {head}: {rule}")
        shared = [problem.kv_head(h) for h in heads]
        work = dataclasses.replace(
            work,
            q=problem.q[heads],
            k=problem.k[shared],
            v=problem.v[shared],
            dout=_take(work.dout, heads),
            observed=_take(work.observed, heads),
        )
    return dataclasses.replace(work.last_rows(kept), notes=tuple(notes))


def _millions(scores: int) -> str:
    return f"{scores / 1e6:.3g} million" if scores < 1e9 else f"{scores / 1e9:.3g} billion"


def _take(x: Array | None, heads: list[int]) -> Array | None:
    return None if x is None else x.reshape(-1, *x.shape[-2:])[heads]
