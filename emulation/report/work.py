"""What one report is about: arrays checked, in one format, cut to the heads and rows asked for."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation import samples
from emulation.problem import Array, Problem, dtype_name, numpy_dtype
from emulation.report.inputs import Capture, InputError, check_finite, read, to_format

FORMATS = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}

MAX_PAIRS = 4_000_000
"""Query-key pairs up to which all heads are reported by default."""


@dataclass(frozen=True)
class Work:
    """Arrays in one format, and options as `emulation.attribute` takes them (`masks`).

    notes: sentences on what was done to the input.
    """

    q: Array
    k: Array
    v: Array
    dout: Array | None
    observed: Array | None
    masks: dict[str, Any]
    source: str
    notes: tuple[str, ...]

    @property
    def pairs(self) -> int:
        """Query-key pairs over all heads."""
        return int(math.prod(self.q.shape[:-1]) * self.k.shape[-2])

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
    seed: int = 0,
) -> Work:
    """Read the file (None: the bundled capture) and make it ready.

    masks: scale, causal, window, softcap; None takes what the file says. backward: keep the file's
    dout, or draw a normal one. Raises InputError for whatever is wrong with the input.
    """
    notes: list[str] = []
    if path is None:
        fmt = fmt or "float16"
        q, k, v, options = samples.capture(fmt)
        held = Capture(q, k, v, None, None, options.get("scale"), options["causal"], ())
        source = "bundled capture: one head of SmolLM2-135M-Instruct, layer 14"
    else:
        held = read(path)
        source = os.path.basename(path)
        if held.ignored:
            notes.append(f"Not used from the file: {', '.join(held.ignored[:8])}.")
    stored = dtype_name(held.q.dtype)
    if fmt is None:
        fmt = stored if stored in FORMATS.values() else "float16"
        if fmt != stored:
            notes.append(f"The file holds {stored}, rounded here to {fmt} (--dtype chooses).")
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
    if backward:
        dout = _normal(problem, seed) if dout is None else to_format("dout", dout, fmt)
    elif dout is not None:
        notes.append("The file holds dout: --backward reports the gradients.")
        dout = None
    masks["scale"], masks["causal"] = problem.scale, problem.causal
    work = Work(q, k, v, dout, out, masks, source, tuple(notes))
    return _cut(work, problem, heads, rows)


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
    if heads is None and problem.heads > 1 and problem.heads * kept * problem.n_k > MAX_PAIRS:
        heads = [0]
        notes.append(f"Head 0 of {problem.heads} only: over 4 million scores (--head chooses).")
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


def _take(x: Array | None, heads: list[int]) -> Array | None:
    return None if x is None else x.reshape(-1, *x.shape[-2:])[heads]
