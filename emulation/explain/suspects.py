"""The usual suspects: what attention kernels and those who call them get wrong.

One entry is a name and the changes it may stand for, each under a word that tells it from the
others; `suspects(problem)` leaves out what would change nothing in this problem. A new suspect is
one more entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.explain import slopes
from emulation.explain.exact import F64, Change, Index, Mask, Sight, coarser
from emulation.formats import FORMATS
from emulation.oracle.result import numbers
from emulation.problem import Array, Problem
from emulation.rounding import round_to

Changes = dict[str, Change]
TILES = (16, 32, 64, 128, 256)
OFFSETS = (-3, -2, -1, 1, 2, 3)


@dataclass(frozen=True)
class Suspect:
    """A name, and what it can stand for in a problem. of: "forward", "lse" (seen only there) or
    "backward" (the forward is right).
    """

    name: str
    changes: Callable[[Problem], Changes]
    of: str = "forward"


def _inputs(f: Callable[[Problem], Problem]) -> Change:
    return Change(inputs=f)


def _with(**fields: Any) -> Change:
    return _inputs(lambda problem: dataclasses.replace(problem, **fields))


def _scale(f: Callable[[Problem], float]) -> Change:
    return _inputs(lambda problem: dataclasses.replace(problem, scale=f(problem)))


# -- masks -----------------------------------------------------------------------------


def _band(left: int, right: int) -> Change:
    """The band's ends moved outward by so many keys."""

    def sight(x: Sight) -> Mask:
        lo, hi = (side[x.rows] for side in x.problem.band())
        lo, hi = np.maximum(lo - left, 0), np.minimum(hi + right, x.problem.n_k)
        return np.asarray((x.columns >= lo[:, None]) & (x.columns < hi[:, None]))

    return Change(sight=sight)


def _edges(problem: Problem) -> tuple[bool, bool]:
    """Whether some row has hidden keys left, or right, of its band."""
    lo, hi = problem.band()
    return bool((lo > 0).any()), bool((hi < problem.n_k).any())


def _diagonal(problem: Problem) -> Changes:
    """The right end of the band, where a causal mask (or a window's right side) puts it."""
    if not _edges(problem)[1]:
        return {}
    return {f"{n:+d}": _band(0, n) for n in OFFSETS}


def _window(problem: Problem) -> Changes:
    if not _edges(problem)[0]:
        return {}
    return {f"left {n:+d}": _band(n, 0) for n in OFFSETS}


def _hide(keys: Mask) -> Change:
    """Keys (N_k,) that nobody sees."""
    return Change(sight=lambda x: x.seen & ~keys[None, :])


def _dropped(problem: Problem) -> Changes:
    """The last keys: one, or the rest that no tile fills."""
    n = problem.n_k
    counts = {1, *(n % tile for tile in TILES)} - {0, n}
    j = np.arange(n)
    return {f"{c} keys": _hide(j >= n - c) for c in sorted(counts)}


def _first(problem: Problem) -> Changes:
    j = np.arange(problem.n_k)
    return {f"{c} keys": _hide(j < c) for c in (1, *TILES) if c < problem.n_k}


def _skipped(problem: Problem) -> Changes:
    """A tile in the middle, or the first or the last key of every tile."""
    found, j = {}, np.arange(problem.n_k)
    for tile in (t for t in TILES if 2 * t < problem.n_k):
        for at in (1, 2):
            if (at + 1) * tile < problem.n_k:
                found[f"tile {at} of {tile}"] = _hide(j // tile == at)
        found[f"first key of each tile of {tile}"] = _hide(j % tile == 0)
        found[f"last key of each tile of {tile}"] = _hide(j % tile == tile - 1)
    return found


def _twice(problem: Problem) -> Changes:
    """A tile of keys that is visited twice: its weights count double."""
    n, found = problem.n_k, {}
    for tile in (t for t in TILES if t < n):
        for at in sorted({0, (n - 1) // tile}):
            found[f"tile {at} of {tile}"] = _lifted(np.arange(n) // tile == at)
    return found


def _lifted(keys: Mask) -> Change:
    """Keys whose weight is doubled."""
    lift = np.where(keys, np.log(2.0), 0.0)
    return Change(score=lambda s, p: s + lift)


def _padded(problem: Problem) -> Changes:
    counts = {-problem.n_k % tile for tile in TILES} | {1}
    return {f"{c} keys": Change(pad=c, pad_all=not problem.causal) for c in sorted(counts - {0})}


def _hidden(problem: Problem) -> bool:
    lo, hi = problem.band()
    return bool(((lo > 0) | (hi < problem.n_k)).any())


def _alignment(problem: Problem) -> Changes:
    if not problem.causal or problem.n_q == problem.n_k:
        return {}
    other = "top-left" if problem.causal == "bottom-right" else "bottom-right"
    return {other: _with(causal=other)}


def _masked_otherwise(change: Change) -> Change:
    """In the backward alone, which takes P from the LSE of the right mask."""
    return dataclasses.replace(change, backward=frozenset({"mask"}))


# -- heads and layouts -----------------------------------------------------------------


def _interleaved(problem: Problem) -> Changes:
    kv = problem.k.shape[0]
    batch = problem.lead[0] if len(problem.lead) == 2 else 1
    per, per_kv = problem.heads // batch, kv // batch
    if problem.group == 1 or per_kv == 1:
        return {}
    h = np.arange(problem.heads)
    return {"h % H_kv": Change(heads=lambda p: h // per * per_kv + h % per % per_kv)}


def _moved(order: Index, names: str) -> Change:
    """The first axis of some of q, k, v in another order."""

    def inputs(problem: Problem) -> Problem:
        moved: dict[str, Any] = {n: getattr(problem, n)[order] for n in names}
        return dataclasses.replace(problem, **moved)

    return _inputs(inputs)


def _orders(count: int) -> dict[str, Index]:
    h = np.arange(count)
    found = {"reversed": h[::-1].copy(), "rolled": np.roll(h, 1)}
    swapped = h.copy()
    swapped[:2] = swapped[:2][::-1]
    return {"first two swapped": swapped, **found} if count > 1 else {}


def _heads(problem: Problem) -> Changes:
    found: Changes = {}
    kv, heads = _orders(problem.k.shape[0]), _orders(problem.heads)
    for word, order in kv.items():
        found[f"k, {word}"] = _moved(order, "k")
        found[f"v, {word}"] = _moved(order, "v")
        found[f"k and v, {word}"] = _moved(order, "kv")
    for word, order in heads.items():
        found[f"q, {word}"] = _moved(order, "q")
        found[f"out, {word}"] = _reordered(order)
    if len(problem.lead) == 2 and problem.lead[0] > 1 and problem.lead[1] > 1:
        b = np.arange(problem.lead[0])[::-1]
        every = np.arange(problem.heads).reshape(problem.lead)[b].ravel()
        found["out, batches reversed"] = _reordered(every)
    return found


def _reordered(order: Index) -> Change:
    """Heads of the output in another order."""
    return Change(out=lambda o, p: o[order])


def _read_as_other(x: Array, lead: tuple[int, ...]) -> Array:
    """(B, H, N, D) in memory, read as (B, N, H, D) and seen as (H, N) again."""
    batch = lead[0] if len(lead) == 2 else 1
    flat, n, d = x.shape
    heads = flat // batch
    return x.reshape(batch, n, heads, d).swapaxes(1, 2).reshape(flat, n, d)


def _layout(problem: Problem) -> Changes:
    if problem.heads == 1:
        return {}

    def of_inputs(names: str) -> Change:
        def inputs(p: Problem) -> Problem:
            leads = {"q": p.lead, "k": p.kv_lead, "v": p.kv_lead}
            moved: dict[str, Any] = {n: _read_as_other(getattr(p, n), leads[n]) for n in names}
            return dataclasses.replace(p, **moved)

        return _inputs(inputs)

    def of_out(o: F64, p: Problem) -> F64:
        return _read_as_other(o, p.lead)

    def back(o: F64, p: Problem) -> F64:
        batch = p.lead[0] if len(p.lead) == 2 else 1
        return o.reshape(batch, -1, *o.shape[1:]).swapaxes(1, 2).reshape(o.shape)

    return {
        "q": of_inputs("q"),
        "q, k and v": of_inputs("qkv"),
        "out": Change(out=of_out),
        "out, the other way": Change(out=back),
    }


def _rows(problem: Problem) -> Changes:
    """Rows of an array out of step with the others."""

    def shift(name: str, by: int) -> Change:
        return _inputs(
            lambda p: dataclasses.replace(p, **{name: np.roll(getattr(p, name), by, axis=1)})
        )

    found = {f"{name}, {by:+d}": shift(name, by) for name in "kv" for by in (1, -1)}
    found["out, +1"] = Change(out=lambda o, p: np.roll(o, 1, axis=1))
    found["out, -1"] = Change(out=lambda o, p: np.roll(o, -1, axis=1))
    found["out, reversed"] = Change(out=lambda o, p: o[:, ::-1])
    return found


def _channels(problem: Problem) -> Changes:
    """Only the first channels of q and k are multiplied."""
    widths = {problem.d - problem.d % step for step in (16, 32, 64)} | {problem.d // 2}
    found = {}
    for width in sorted(widths - {0, problem.d}):

        def inputs(p: Problem, w: int = width) -> Problem:
            return dataclasses.replace(p, q=p.q[..., :w], k=p.k[..., :w])

        found[f"first {width}"] = _inputs(inputs)
    return found


# -- formats ---------------------------------------------------------------------------


def rounded(fmt: str) -> Callable[[F64], F64]:
    """Float64 rounded to a format, saturated at its largest number."""
    top = FORMATS[fmt].max
    return lambda x: np.asarray(round_to(np.clip(x, -top, top), fmt)).astype(np.float64)


def _formats_of_inputs(problem: Problem) -> Changes:
    found = {}
    for fmt in coarser(problem.dtype):
        for names in ("qk", "v", "qkv"):

            def inputs(p: Problem, fmt: str = fmt, names: str = names) -> Problem:
                # As float32, which holds every value of the narrower formats.
                cut: dict[str, Any] = {n: getattr(p, n).astype(np.float32) for n in "qkv"}
                for n in names:
                    cut[n] = rounded(fmt)(numbers(cut[n])).astype(np.float32)
                return dataclasses.replace(p, **cut)

            found[f"{', '.join(names)} to {fmt}"] = _inputs(inputs)
    return found


def _before(problem: Problem) -> Changes:
    return {fmt: Change(weights=rounded(fmt)) for fmt in coarser(problem.dtype)}


def _after(problem: Problem) -> Changes:
    return {fmt: Change(prob=rounded(fmt)) for fmt in coarser(problem.dtype)}


def _state(problem: Problem) -> Changes:
    if problem.dtype == "float32":
        return {"bfloat16": Change(state="bfloat16"), "float16": Change(state="float16")}
    return {problem.dtype: Change(state=problem.dtype)}


def _rescale(problem: Problem) -> Changes:
    found = {}
    for tile in (t for t in TILES if t < problem.n_k):
        for ascending in (True, False):
            for missing in ("O", "l", "both"):
                way = "ascending" if ascending else "descending"
                word = f"{missing if missing != 'both' else 'O and l'}, tiles of {tile}, {way}"
                found[word] = Change(tiles=(tile, ascending, missing))
    return found


def _softcap(problem: Problem) -> Changes:
    if problem.softcap is None:
        return {}
    return {
        "missing": _with(softcap=None),
    }


def _softcap_order(problem: Problem) -> Changes:
    if problem.softcap is None or not _hidden(problem):
        return {}
    return {"-cap": Change(bias=-problem.softcap)}


def _softcap_scale(problem: Problem) -> Changes:
    if problem.softcap is None:
        return {}
    cap, scale = problem.softcap, problem.scale
    return {"raw scores": _with(softcap=cap, scale=1.0), "cap * scale": _with(softcap=cap * scale)}


#: Every suspect. Of two that give the same, the earlier one's name comes first.
SUSPECTS: tuple[Suspect, ...] = (
    Suspect("scale missing", lambda p: {"1": _scale(lambda x: 1.0)}),
    Suspect("scale applied twice", lambda p: {"scale^2": _scale(lambda x: x.scale**2)}),
    Suspect("1/D for 1/sqrt(D)", lambda p: {"1/D": _scale(lambda x: 1.0 / x.d)}),
    Suspect(
        "scale of another head dimension",
        lambda p: {
            f"D = {d}": _with(scale=d**-0.5)
            for d in sorted({16, 32, 64, 96, 128, 192, 256, p.d_v} - {p.d})
        },
    ),
    Suspect("square root of the scale", lambda p: {"sqrt": _scale(lambda x: x.scale**0.5)}),
    Suspect(
        "base of the exponential",
        lambda p: {
            "2^s": _scale(lambda x: x.scale * float(np.log(2.0))),
            "exp(s log2 e)": _scale(lambda x: x.scale / float(np.log(2.0))),
        },
    ),
    Suspect(
        "mask dropped",
        lambda p: (
            {"all of it": _with(causal=False, window=None)}
            | ({"the window": _with(window=None)} if p.window and p.causal else {})
            | ({"causal": _with(causal=False)} if p.window and p.causal else {})
            if _hidden(p)
            else {}
        ),
    ),
    Suspect(
        "mask not asked for",
        lambda p: {} if p.causal else {c: _with(causal=c) for c in ("bottom-right", "top-left")},
    ),
    Suspect(
        "mask inverted", lambda p: {"": Change(sight=lambda x: ~x.seen)} if _hidden(p) else {}
    ),
    Suspect("causal alignment", _alignment),
    Suspect("diagonal off by some", _diagonal),
    Suspect("window off by some", _window),
    Suspect(
        "window sides swapped",
        lambda p: {"": _with(window=p.window[::-1])} if p.window is not None else {},
    ),
    Suspect("last keys dropped", _dropped),
    Suspect("first keys dropped", _first),
    Suspect("keys skipped", _skipped),
    Suspect("tile visited twice", _twice),
    Suspect("padded keys counted", _padded),
    Suspect("GQA heads interleaved", _interleaved),
    Suspect(
        "K and V swapped",
        lambda p: (
            {"": _inputs(lambda x: dataclasses.replace(x, k=x.v, v=x.k))} if p.d == p.d_v else {}
        ),
    ),
    Suspect(
        "V where K belongs",
        lambda p: (
            {
                "v for k": _inputs(lambda x: dataclasses.replace(x, k=x.v)),
                "k for v": _inputs(lambda x: dataclasses.replace(x, v=x.k)),
            }
            if p.d == p.d_v
            else {}
        ),
    ),
    Suspect("layout mixed (bhnd, bnhd)", _layout),
    Suspect("heads or batches permuted", _heads),
    Suspect("rows out of step", _rows),
    Suspect("channels left out", _channels),
    Suspect("softcap missing", _softcap),
    Suspect("softcap after the mask", _softcap_order),
    Suspect("softcap of the wrong scores", _softcap_scale),
    Suspect("not divided by the row sum", lambda p: {"": Change(divided=0)}),
    Suspect("divided twice by the row sum", lambda p: {"": Change(divided=2)}),
    Suspect("not rescaled", _rescale),
    Suspect("inputs rounded to another format", _formats_of_inputs),
    Suspect("P rounded to another format before normalisation", _before),
    Suspect("P rounded to another format after normalisation", _after),
    Suspect("all state in half precision", _state),
    Suspect(
        "LSE in log2", lambda p: {"log2": Change(lse=lambda x, m: x / np.log(2.0))}, of="lse"
    ),
    Suspect(
        "LSE without a part",
        lambda p: {
            "no max": Change(lse=lambda x, m: x - m),
            "no log l": Change(lse=lambda x, m: m),
            "max in log2 units": Change(lse=lambda x, m: x - m + m / np.log(2.0)),
            "log2 l": Change(lse=lambda x, m: m + (x - m) / np.log(2.0)),
        },
        of="lse",
    ),
    Suspect("LSE of unscaled scores", lambda p: {"": Change(lse=_unscaled(p))}, of="lse"),
    *(
        Suspect(f"backward: {name}", changes, of="backward")
        for name, changes in {
            "delta missing": lambda p: {"": Change(backward=frozenset({"delta missing"}))},
            "delta with the wrong sign": lambda p: {"": Change(backward=frozenset({"delta sign"}))},
            "scale missing": lambda p: {"": Change(backward=frozenset({"scale missing"}))},
            "scale applied twice": lambda p: {"": Change(backward=frozenset({"scale twice"}))},
            "mask dropped": lambda p: (
                {"": _masked_otherwise(Change(sight=lambda x: np.ones_like(x.seen)))}
                if _hidden(p)
                else {}
            ),
            "diagonal off by some": lambda p: {
                word: _masked_otherwise(change) for word, change in _diagonal(p).items()
            },
            "one head of a group": lambda p: (
                {"": Change(backward=frozenset({"one head"}))} if p.group > 1 else {}
            ),
            "slope of the softcap missing": lambda p: (
                {"": Change(backward=frozenset({"softcap slope missing"}))}
                if p.softcap is not None
                else {}
            ),
            "dV from dS": lambda p: (
                {"": Change(backward=frozenset({"dv from dS"}))}
            ),
            **slopes.MOVED,
        }.items()
    ),
)  # fmt: skip


def _unscaled(problem: Problem) -> Callable[[F64, F64], F64]:
    return lambda lse, top: lse - top + top / problem.scale


def suspects(problem: Problem, of: str = "forward") -> Iterator[tuple[str, str, Change]]:
    """(name, variant, change) of all that can happen in this problem."""
    for suspect in SUSPECTS:
        if suspect.of == of:
            for word, change in suspect.changes(problem).items():
                yield suspect.name, word, change
