"""Faults of a place, not of a step: elements, rows, heads wrong while the rest is rounding; zeros
never written; rows, heads or columns that hold what belongs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from emulation.explain.exact import Index, Mask
from emulation.explain.fit import FITS, Observed, chi_square

#: Of all elements, the share up to which wrong rows or columns are a place (heads count whole).
PLACE = 0.25
#: Elements that are named one by one.
FEW = 3


def fault(seen: Observed, rows: Index, hidden: Mask, name: str = "out") -> str | None:
    """A sentence on where the error is, if that is all there is to say; None otherwise.

    hidden (R,): rows that see no key. The rest must be rounding.
    """
    bad: Mask = seen.outside
    if not bad.any():
        return None
    unwritten = _unwritten(seen)
    said, covered = [], np.zeros(bad.shape, bool)
    if unwritten.any():
        if not seen.out.any():
            return f"All of {name} is zero (never written)."
        said.append(f"{place(unwritten, rows, unwritten.shape)} zero (never written)")
        covered |= unwritten
    if np.isnan(seen.out).all():
        return f"All of {name} is NaN."
    for word, part in _parts(seen, bad & ~covered, hidden):
        # NaN, and what no key is seen for, are a finding of their own however many they are.
        apart = not np.isfinite(seen.out[part]).any() or not part[:, ~hidden].any()
        cover = part if apart else _cover(part)
        if cover is None:
            return None
        said.append(f"{place(part, rows, bad.shape)} {word}")
        covered |= cover
    if not _rounding(seen, ~covered):
        return None
    text = "; ".join(said)
    rest = "; the rest is rounding." if (~covered).any() else "."
    return f"{text[0].upper()}{text[1:]} in {name}{rest}"


def _parts(seen: Observed, bad: Mask, hidden: Mask) -> Iterator[tuple[str, Mask]]:
    """What is wrong in which way: (predicate, elements)."""
    unseen = np.broadcast_to(hidden[None, :, None], bad.shape)
    lost = bad & ~np.isfinite(seen.out)
    for word, kind in (("NaN", np.isnan(seen.out)), ("infinite", np.isinf(seen.out))):
        if (lost & kind & unseen).any():
            yield f"{word}, where no key is seen and 0 is right,", lost & kind & unseen
        if (lost & kind & ~unseen).any():
            yield f"{word}", lost & kind & ~unseen
    bad = bad & ~lost
    if (bad & unseen).any():
        yield "not zero, where no key is seen,", bad & unseen
    bad = bad & ~unseen
    for h in range(len(bad)):
        if not bad[h].any():
            continue
        other = _head_held(seen, h)
        if other is not None:
            one = np.zeros_like(bad)
            one[h] = bad[h]
            yield f"not its own but what head {other} must be", one
            bad = bad & ~one
    if bad.any():
        yield "wrong", bad


def _head_held(seen: Observed, h: int) -> int | None:
    """The other head whose result head h holds."""
    for other in range(len(seen.out)):
        if other != h and chi_square(seen.out[h] - seen.exact[other], seen.sigma[other]) <= FITS:
            return other
    return None


def _unwritten(seen: Observed) -> Mask:
    """Elements of heads, or rows, that are zero throughout though some of them must not be."""
    zero = seen.out == 0
    wrong = zero & (np.abs(seen.exact) > seen.bound)
    found = np.zeros(zero.shape, bool)
    for axes in ((1, 2), (2,)):
        whole = zero.all(axis=axes, keepdims=True) & wrong.any(axis=axes, keepdims=True)
        found |= np.broadcast_to(whole, zero.shape)
    # A column counts if it is more than the one number that rounds to 0.
    column = zero.all(axis=1, keepdims=True) & (wrong.sum(axis=1, keepdims=True) > 8)
    return np.asarray(found | column)


def _cover(bad: Mask) -> Mask | None:
    """The elements, rows, columns or heads they fill; None if they are everywhere."""
    if bad.sum() <= FEW:
        return bad
    best = None
    for axis in (2, 1):
        cover = np.broadcast_to(bad.any(axis=axis, keepdims=True), bad.shape)
        if best is None or cover.sum() < best.sum():
            best = cover
    assert best is not None
    if bad.sum() <= 0.1 * best.sum():
        best = bad
    if best.mean() <= PLACE:
        return np.asarray(best)
    heads = np.broadcast_to(bad.any(axis=(1, 2), keepdims=True), bad.shape)
    return None if heads.all() else np.asarray(heads)


def _rounding(seen: Observed, use: Mask) -> bool:
    """Whether these elements hold no more than rounding."""
    if not use.any():
        return True
    error = (seen.out - seen.exact)[use]
    inside = bool((np.abs(error) <= seen.bound[use]).all())
    return inside and chi_square(error, seen.sigma[use]) <= FITS


def place(bad: Mask, rows: Index, shape: tuple[int, ...]) -> str:
    """Where: "1 element (h, row, column)", "row 3 of head 1", "head 2"; with "is" or "are".

    >>> bad = np.zeros((2, 4, 8), bool)
    >>> bad[1, 2] = True
    >>> place(bad, np.arange(4), bad.shape)
    'row 2 of head 1 is'
    """
    count = int(bad.sum())
    if count <= FEW:
        at = [_at(h, rows[r], c, shape) for h, r, c in np.argwhere(bad)]
        return f"1 element {at[0]} is" if count == 1 else f"{count} elements {', '.join(at)} are"
    heads: Index = np.flatnonzero(bad.any(axis=(1, 2)))
    of = "every head" if len(heads) == shape[0] > 1 else _listed("head", heads)
    of_heads: Mask = bad[heads]
    by_row, by_column = np.any(of_heads, axis=2), np.any(of_heads, axis=1)
    if by_row.mean() > 0.9 and by_column.mean() > 0.9:
        return f"{of} {'is' if of.startswith(('head ', 'every')) else 'are'}"
    across = by_row.sum() * shape[2] <= by_column.sum() * shape[1]
    lines, names = (by_row, rows) if across else (by_column, np.arange(shape[2]))
    word = "row" if across else "column"
    if count <= 0.1 * lines.sum() * (shape[2] if across else shape[1]):
        h, r, c = np.argwhere(bad)[0]
        return f"{count} elements, the first {_at(h, rows[r], c, shape)}, are"
    if (lines == lines[0]).all():
        which = np.asarray(names)[np.flatnonzero(lines[0])]
        return f"{_listed(word, which)} of {of} {'is' if len(which) == 1 else 'are'}"
    return f"{int(lines.sum())} {word}s of {of} are"


def _at(h: int, row: int, column: int, shape: tuple[int, ...]) -> str:
    """An element; of an LSE, a row of a head."""
    return f"({h}, {row})" if shape[2] == 1 else f"({h}, {row}, {column})"


def _listed(word: str, which: Index) -> str:
    """ "row 3", "rows 3 to 7", "rows 1, 4 and 9"."""
    if len(which) == 1:
        return f"{word} {which[0]}"
    if (np.diff(which) == 1).all():
        return f"{word}s {which[0]} to {which[-1]}"
    if len(which) <= 4:
        return f"{word}s {', '.join(map(str, which[:-1]))} and {which[-1]}"
    return f"{len(which)} {word}s from {which[0]} to {which[-1]}"


def moved(seen: Observed) -> str | None:
    """Heads that hold other heads, columns in another order, rows times a number of their own: what
    looks like random errors and is none.
    """
    usable = np.isfinite(seen.out).all()
    if not usable or seen.out.size < 64:
        return None
    held = [
        h if chi_square(seen.out[h] - seen.exact[h], seen.sigma[h]) <= FITS else _head_held(seen, h)
        for h in range(len(seen.out))
    ]
    wrong = [(h, g) for h, g in enumerate(held) if g is not None and g != h]
    if wrong and None not in held:
        pairs = ", ".join(f"head {h} holds head {g}" for h, g in wrong[:6])
        return f"Heads in the wrong place: {pairs}; the rest is rounding."
    d = seen.out.shape[2]
    orders = {"reversed": np.arange(d)[::-1]}
    orders |= {f"rolled by {n:+d}": np.roll(np.arange(d), n) for n in (1, -1, 8, -8)}
    orders |= {"with their halves swapped": np.roll(np.arange(d), d // 2)} if d % 2 == 0 else {}
    orders |= {"interleaved": np.arange(d).reshape(2, -1).T.ravel()} if d % 2 == 0 else {}
    orders |= {"deinterleaved": np.arange(d).reshape(-1, 2).T.ravel()} if d % 2 == 0 else {}
    for word, order in orders.items():
        if chi_square(seen.out - seen.exact[..., order], seen.sigma[..., order]) <= FITS:
            return f"The columns of out are {word}; beyond that it is rounding."
    return _row_factors(seen)


def _row_factors(seen: Observed) -> str | None:
    """Rows that are right but for a number each: O not divided, or divided by something else."""
    sigma = np.maximum(seen.sigma, 1e-300)
    x, y = seen.exact / sigma, seen.out / sigma
    size = np.sum(x * x, axis=2, keepdims=True)
    factor = np.sum(x * y, axis=2, keepdims=True) / np.maximum(size, 1e-300)
    rest, error = y - factor * x, y - x
    if seen.out.shape[2] < 8 or np.sum(rest * rest) > 0.01 * np.sum(error * error):
        return None
    lo, hi = float(factor.min()), float(factor.max())
    return (
        f"Each row is the right one times a number of its own, from {lo:.3g} to {hi:.3g}: not "
        "divided by its row sum, or by another."
    )
