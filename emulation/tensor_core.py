"""The tensor core's arithmetic, by the rules of `emulation.rules`.

NVIDIA's "truncated fused dot-add": all products of a step and the accumulator are aligned to the
largest exponent, truncated there, summed exactly and rounded once. Found by Fasi et al. (PeerJ CS
7:e330), Khattak and Mikaitis (arXiv 2512.07004), MMA-Sim (arXiv 2511.10909) and Hawkeye (arXiv
2603.20421).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from emulation import rounding
from emulation.arguments import check_plain, one_of
from emulation.formats import FLOAT16, FLOAT32, TF32, Format, format_of
from emulation.rounding import Backend, fast_path, namespace, narrow, widen
from emulation.rules import RULES, Output, Rule, Step

NAN_BITS = 0x7FFFFFFF  #: the one NaN that tensor cores return


# --- one output element, to be read ---------------------------------------------------------------


def _split(x: float, fmt: Format) -> tuple[Fraction, int]:
    """x = s * 2^e with 1 <= |s| < 2; a subnormal of fmt keeps e = emin and has |s| < 1."""
    e = max(math.frexp(x)[1] - 1, fmt.emin)
    return Fraction(x) / Fraction(2) ** e, e


def dot_step(a: Sequence[float], b: Sequence[float], c: float, step: Step) -> float:
    """One step of the rule in exact integers: c + sum a[k] * b[k], up to `step.length` products.

    NaN, an infinity times zero and infinities of both signs give NaN; one infinity wins. A zero
    result is +0, an overflow is an infinity (although rounding is toward zero).
    """
    special = sum((x * y for x, y in zip(a, b, strict=True)), c)
    if not all(map(math.isfinite, (*a, *b, c))):
        # No product of finite operands leaves the float64 range, so these are the infinities and
        # NaNs of the terms.
        return special
    terms = []
    for x, y in zip(a, b, strict=True):
        if x and y:
            (sx, ex), (sy, ey) = _split(x, step.fmt), _split(y, step.fmt)
            terms.append((sx * sy, ex + ey))  # not renormalised: |s| may reach 4
    if c:
        terms.append(_split(c, FLOAT32 if step.out is not FLOAT16 else FLOAT16))
    largest = max([step.zero_exponent, *(e for _, e in terms)])
    total = sum(int(s * Fraction(2) ** (step.fraction_bits + e - largest)) for s, e in terms)
    value = Fraction(total) * Fraction(2) ** (largest - step.fraction_bits)
    if step.nearest:
        return rounding.round_scalar(value, step.out) + 0.0
    if abs(value) >= Fraction(2) ** (step.out.emax + 1):
        return math.copysign(math.inf, value)
    return rounding.round_scalar(value, step.out, "toward-zero") + 0.0  # + 0.0 makes -0 positive


def dot_scalar(
    a: Sequence[float],
    b: Sequence[float],
    c: float = 0.0,
    *,
    fmt: Any,
    arch: str = "sm90",
    step: int | None = None,
    out: Output = "float32",
) -> float:
    """c + sum a[k] * b[k] in ascending steps: the readable twin of `mma` for one output.

    a and b hold values of fmt (see `mma` for NaN, infinities, zeros and errors). NaN payloads do
    not show here.

    >>> x = [1.0] + [2.0**-13] * 15  # fifteen products of 2^-26, each cut behind 25 bits
    >>> dot_scalar(x, x, fmt="float16"), dot_scalar(x[1:], x[1:], fmt="float16") == 15 * 2.0**-26
    (1.0, True)
    """
    f = format_of(fmt)
    s = Step.of(_lookup(arch), f, step, out)
    d = float(c)
    for k in range(0, len(a), s.length):
        x, y = (list(map(float, v[k : k + s.length])) for v in (a, b))
        if f == TF32:
            x, y = ([_truncate_tf32_scalar(v) for v in w] for w in (x, y))
        d = dot_step(x, y, d, s)
    return d


def _truncate_tf32_scalar(x: float) -> float:
    return rounding.round_scalar(x, TF32, "toward-zero")


# --- arrays ---------------------------------------------------------------------------------------


def mma(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    arch: str = "sm90",
    fmt: Any = None,
    step: int | None = None,
    out: Output = "float32",
    backend: Backend = None,
) -> Any:
    """d = a b^T + c as the tensor core computes it, bit for bit.

    a (..., M, K) and b (..., N, K) are float16 or bfloat16, or float32 arrays that hold values of
    `fmt` (the format decides the exponent of subnormals; that the values fit it is not checked).
    c is (..., M, N) float32, or None for zeros; for out="float16" it must hold float16 values.
    Leading axes broadcast as in matmul. Returns a float32 array (..., M, N), which for
    out="float16" holds float16 values.

    K goes in ascending steps of `step` products (default: the architecture's; 8 is that of
    mma.m16n8k8), each result being the accumulator of the next; the last step is padded with zeros,
    which changes nothing. tf32 operands are truncated first. NaN, Inf * 0 and opposite infinities
    give the NaN 0x7fffffff; otherwise infinity wins; overflow gives infinity; a zero result is +0.
    Subnormal operands and results are kept.

    Raises TypeError for float32 operands without fmt, ValueError for an unknown arch, a format or
    an output that the architecture lacks, shapes that do not fit, and step < 1. `backend` "numpy"
    or "numba" forces one. Source: the rule and its constants as in the module docstring.

    >>> a = np.array([[1.0] + [2.0**-13] * 15], np.float16)  # fifteen products of 2^-26, all cut
    >>> float(mma(a, a)[0, 0]), float((a.astype(float) @ a.T.astype(float))[0, 0])
    (1.0, 1.000000223517418)
    """
    for name, x in (("a", a), ("b", b), ("c", c)):
        if x is not None or name != "c":
            check_plain(name, x)
    f = _operand_format(a, b, fmt)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise TypeError(f"step: got {step!r}, must be an integer or None")
    s = Step.of(_lookup(arch), f, step, out)
    xp = namespace(a)
    m, n, k = _check_shapes(a, b, c)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], () if c is None else c.shape[:-2])
    if c is not None and c.dtype != np.float32:
        raise TypeError(f"c: dtype {c.dtype}, must be float32")
    if f == TF32:
        a, b = _truncate_tf32(a), _truncate_tf32(b)
    if c is None or k == 0:
        start = xp.zeros((*lead, m, n), np.float32)
        c = start if c is None else xp.broadcast_to(c, start.shape)
    fast = fast_path(xp, backend)
    if fast and k:
        out_array = fast.mma(widen(a), widen(b), c, lead, s, _mma_steps)
    else:
        out_array = _mma_steps(widen(a), widen(b), c, s)
    full = (*lead, m, n)  # without any step, c alone decided the shape
    return out_array if out_array.shape == full else xp.array(xp.broadcast_to(out_array, full))


def _lookup(arch: str) -> Rule:
    one_of("arch", arch, RULES)
    return RULES[arch]


def _operand_format(a: Any, b: Any, fmt: Any) -> Format:
    """The common format of the operands."""
    found = []
    for name, x in (("a", a), ("b", b)):
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name}: got {type(x).__name__}, must be an array")
        dtype = format_of(x.dtype)
        if dtype == FLOAT32:
            if fmt is None:
                raise TypeError(
                    f"{name}: float32 array without fmt, must name the format of its values"
                )
            dtype = format_of(fmt)
        found.append(dtype)
    if found[0] != found[1]:
        raise TypeError(f"b: {found[1].name}, must be {found[0].name} like a")
    if fmt is not None and format_of(fmt) != found[0]:
        raise TypeError(f"fmt: {format_of(fmt).name}, but a and b are {found[0].name}")
    return found[0]


def _check_shapes(a: Any, b: Any, c: Any) -> tuple[int, int, int]:
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, must have at least 2 axes")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"b: {b.shape[-1]} columns, must be {a.shape[-1]} like a")
    m, n, k = int(a.shape[-2]), int(b.shape[-2]), int(a.shape[-1])
    if c is not None and tuple(c.shape[-2:]) != (m, n):
        raise ValueError(f"c: shape {tuple(c.shape)}, must end in {(m, n)}")
    return m, n, k


def _truncate_tf32(x: Any) -> Any:
    """Drop the low 13 bits; a NaN stays one."""
    bits = x.view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    xp = namespace(x)
    return xp.where(nan, np.uint32(NAN_BITS), bits & np.uint32(0xFFFFE000)).view(np.float32)


def powers(x: Any, fmt: Format) -> Any:
    """float64 2^e of the rule's exponent e of x; 0 for zeros: they never count in a maximum."""
    xp = namespace(x)
    power = (x.view(np.int64) & (0x7FF << 52)).view(np.float64)
    return xp.where(x == 0, 0.0, xp.maximum(power, 2.0**fmt.emin))


def finish(total: Any, s: Step) -> Any:
    """The exact float64 sum rounded to the output format (values in float64)."""
    xp = namespace(total)
    power = (total.view(np.int64) & (0x7FF << 52)).view(np.float64)
    ulp = xp.maximum(power, 2.0**s.out.emin) * 2.0 ** (1 - s.out.precision)
    scaled = total / ulp
    y = (xp.rint(scaled) if s.nearest else xp.trunc(scaled)) * ulp
    return xp.where(abs(y) > s.out.max, xp.copysign(np.inf, y), y) + 0.0  # + 0.0 makes -0 positive


def _mma_steps(a: Any, b: Any, c: Any, s: Step) -> Any:
    """The rule on float64 operands (..., M, K), (..., N, K) and a float32 accumulator.

    Exact throughout: aligned terms are integers below 2^(F + 2), so sums of thousands fit float64.
    """
    xp = namespace(a)
    finite_a, finite_b = xp.isfinite(a), xp.isfinite(b)
    plain = bool(finite_a.all()) and bool(finite_b.all())
    x, y = (a, b) if plain else (xp.where(finite_a, a, 0.0), xp.where(finite_b, b, 0.0))
    px, py = powers(x, s.fmt), powers(y, s.fmt)
    d = widen(c)
    c_format = FLOAT16 if s.nearest else FLOAT32
    for lo in range(0, a.shape[-1], s.length):
        hi = min(lo + s.length, a.shape[-1])
        finite_d = xp.isfinite(d)
        tame = bool(finite_d.all())
        dd = d if tame else xp.where(finite_d, d, 0.0)
        largest = xp.maximum(powers(dd, c_format), 2.0**s.zero_exponent)
        for k in range(lo, hi):
            largest = xp.maximum(largest, px[..., :, None, k] * py[..., None, :, k])
        up = 2.0**s.fraction_bits / largest
        total = xp.trunc(dd * up)
        for k in range(lo, hi):
            total = total + xp.trunc(x[..., :, None, k] * y[..., None, :, k] * up)
        new = finish(total / up, s)
        if not (plain and tame):
            new = _overrule(new, a[..., lo:hi], b[..., lo:hi], d)
        d = new
    return _canonical_nan(narrow(d))


def _overrule(new: Any, a: Any, b: Any, c: Any) -> Any:
    """`new` where all terms are finite, else the NaN or infinity that the terms force.

    Finite operands become their signs: an infinity times zero stays NaN, and nothing can overflow.
    """
    xp = namespace(a)
    with np.errstate(invalid="ignore"):
        x, y, special = (xp.where(xp.isfinite(v), xp.sign(v), v) for v in (a, b, c))
        for k in range(a.shape[-1]):
            special = special + x[..., :, None, k] * y[..., None, :, k]
        return xp.where(xp.isfinite(special), new, special)


def _canonical_nan(x: Any) -> Any:
    """float32 array with every NaN as NAN_BITS."""
    xp = namespace(x)
    bits = x.view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return xp.where(nan, np.uint32(NAN_BITS), bits).view(np.float32)


def fma_chain(a: Any, b: Any, c: Any = None, *, backend: Backend = None) -> Any:
    """d = a b^T + c by a chain of correctly rounded float32 FMAs in ascending k: no tensor core.

    a (..., M, K), b (..., N, K), c (..., M, N) or None for zeros, all float32; leading axes
    broadcast. Returns a float32 array (..., M, N). NaN, infinities, zeros and overflow as IEEE 754.
    ValueError for shapes that do not fit.

    >>> a = np.float32([[1 + 2.0**-12, 1.0]])
    >>> float(fma_chain(a, a)[0, 0] - 2) == 2.0**-11
    True
    """
    m, n, k = _check_shapes(a, b, c)
    xp = namespace(a)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2], () if c is None else c.shape[:-2])
    shape = (*lead, m, n)
    d = (
        xp.zeros(shape, np.float32)
        if c is None
        else xp.array(xp.broadcast_to(c, shape), np.float32, order="C")
    )
    fast = fast_path(xp, backend)
    if fast and k:
        return fast.fma_chain(a, b, d, lead)
    for i in range(k):
        d = rounding.fma(a[..., :, None, i], b[..., None, :, i], d, backend=backend)
    return d
