"""The table of planted bugs: each with the suspect it must be named as, in two strengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.planted import Mistakes
from emulation.problem import Array


@dataclass(frozen=True)
class Setting:
    """Shapes and masks of a problem: queries, keys, query heads, key heads, D."""

    n_q: int = 144
    n_k: int = 144
    heads: int = 4
    kv_heads: int = 2
    d: int = 64
    masks: tuple[tuple[str, Any], ...] = (("causal", True),)


CAUSAL = Setting()
NARROW = Setting(d=32)
SCALED = Setting(masks=(("causal", True), ("scale", 0.2)))
FULL = Setting(masks=())
TALL = Setting(n_q=176, masks=(("causal", "top-left"),))
WIDE = Setting(n_q=96, masks=(("causal", True),))
WINDOW = Setting(masks=(("causal", True), ("window", (48, None))))
SIDES = Setting(masks=(("window", (48, 12)),))
CAPPED = Setting(masks=(("causal", True), ("softcap", 5.0)))
TIGHT = Setting(masks=(("causal", True), ("softcap", 3.0)))


@dataclass(frozen=True)
class Bug:
    """One strength of a bug. of: "forward", "lse" or "backward". special: what no `Mistakes` says:
    "standard" and "flash" with half state.
    """

    suspect: str
    strength: str
    setting: Setting
    mistakes: Mistakes = field(default_factory=Mistakes)
    of: str = "forward"
    special: str = ""


def _others(q: Array, lead: int) -> Array:
    """(H, N, D) memory read as (N, H, D)."""
    return q.reshape(q.shape[1], q.shape[0], q.shape[2]).swapaxes(0, 1)


def _roll(names: str, by: int, axis: int = 1) -> Any:
    def before(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        x = {"q": q, "k": k, "v": v}
        for n in names:
            x[n] = np.roll(x[n], by, axis=axis)
        return x["q"], x["k"], x["v"]

    return before


def _band(left: int, right: int, setting: Setting) -> Any:
    """The right mask, its ends moved outward."""

    def see(i: Array, j: Array, mask: Array) -> Array:
        found = np.zeros_like(mask)
        for row in range(len(mask)):
            at = np.flatnonzero(mask[row])
            if len(at):
                found[row, max(0, at[0] - left) : max(0, at[-1] + 1 + right)] = True
            elif right > 0 or left > 0:
                found[row, :0] = True
        return found

    return see


def _hide(f: Any) -> Any:
    return lambda i, j, mask: mask & ~f(j)


def _causal(offset: int) -> Any:
    return lambda i, j, mask: j <= i + offset


def _lift(where: Any) -> Any:
    return lambda j: np.where(where(j), 2.0, 1.0)


def _constant(value: float) -> Any:
    return lambda scale, d: value


def _mean(dq: Array, dk: Array, dv: Array, scale: float, group: int) -> Any:
    return dq, dk / group, dv / group


def bugs() -> Iterator[Bug]:
    """All planted bugs."""
    M = Mistakes
    yield Bug("scale missing", "D = 64", CAUSAL, M(scale=lambda s, d: 1.0))
    yield Bug("scale missing", "D = 32", NARROW, M(scale=lambda s, d: 1.0))
    yield Bug("scale applied twice", "scale 1/8", CAUSAL, M(scale=lambda s, d: s * s))
    yield Bug("scale applied twice", "scale 0.2", SCALED, M(scale=lambda s, d: s * s))
    yield Bug("1/D for 1/sqrt(D)", "D = 64", CAUSAL, M(scale=lambda s, d: 1.0 / d))
    yield Bug("1/D for 1/sqrt(D)", "D = 32", NARROW, M(scale=lambda s, d: 1.0 / d))
    for d in (96, 32):
        wrong = d**-0.5
        yield Bug("scale of another head dimension", str(d), CAUSAL, M(scale=_constant(wrong)))
    yield Bug("square root of the scale", "1/8", CAUSAL, M(scale=lambda s, d: s**0.5))
    yield Bug("square root of the scale", "0.2", SCALED, M(scale=lambda s, d: s**0.5))
    yield Bug("base of the exponential", "2^s", CAUSAL, M(exp=float(np.log(2))))
    yield Bug("base of the exponential", "exp(s log2 e)", CAUSAL, M(exp=1 / float(np.log(2))))
    yield Bug("scale wrong by a factor", "1.02", CAUSAL, M(scale=lambda s, d: 1.02 * s))
    yield Bug("scale wrong by a factor", "0.97", FULL, M(scale=lambda s, d: 0.97 * s))
    yield Bug("output times a constant", "1 + 2^-7", CAUSAL, M(gain=1 + 2**-7))
    yield Bug("output times a constant", "0.98", FULL, M(gain=0.98))
    yield Bug("mask dropped", "causal", CAUSAL, M(see=lambda i, j, m: np.ones_like(m)))
    yield Bug("mask dropped", "window", WINDOW, M(see=_causal(0)))
    yield Bug("mask not asked for", "bottom-right", FULL, M(see=_causal(0)))
    yield Bug("mask not asked for", "N_q < N_k", Setting(n_q=96, masks=()), M(see=_causal(0)))
    yield Bug("mask inverted", "causal", CAUSAL, M(see=lambda i, j, m: ~m))
    yield Bug("mask inverted", "window", WINDOW, M(see=lambda i, j, m: ~m))
    yield Bug("causal alignment", "N_q < N_k", WIDE, M(see=_causal(0)))
    yield Bug("causal alignment", "N_q > N_k", TALL, M(see=_causal(144 - 176)))
    yield Bug("diagonal off by some", "+1", CAUSAL, M(see=_causal(1)))
    yield Bug("diagonal off by some", "-1", CAUSAL, M(see=_causal(-1)))
    yield Bug("window off by some", "+1", WINDOW, M(see=_band(1, 0, WINDOW)))
    yield Bug("window off by some", "-1", WINDOW, M(see=_band(-1, 0, WINDOW)))
    swapped = lambda i, j, m: (j >= i - 12) & (j <= i + 48)  # noqa: E731
    yield Bug("window sides swapped", "48, 12", SIDES, M(see=swapped))
    other = Setting(masks=(("window", (24, 20)),))
    near = lambda i, j, m: (j >= i - 20) & (j <= i + 24)  # noqa: E731
    yield Bug("window sides swapped", "24, 20", other, M(see=near))
    yield Bug("last keys dropped", "1", FULL, M(see=_hide(lambda j: j >= 143)))
    yield Bug("last keys dropped", "16", FULL, M(see=_hide(lambda j: j >= 128)))
    yield Bug("first keys dropped", "1", FULL, M(see=_hide(lambda j: j < 1)))
    yield Bug("first keys dropped", "64", CAUSAL, M(see=_hide(lambda j: j < 64)))
    yield Bug("keys skipped", "a tile", CAUSAL, M(see=_hide(lambda j: j // 64 == 1)))
    yield Bug("keys skipped", "one a tile", FULL, M(see=_hide(lambda j: j % 64 == 63)))
    yield Bug("tile visited twice", "first of 64", CAUSAL, M(weight=_lift(lambda j: j < 64)))
    yield Bug("tile visited twice", "last of 64", FULL, M(weight=_lift(lambda j: j >= 128)))
    yield Bug("padded keys counted", "16", FULL, M(pad=16))
    yield Bug("padded keys counted", "112", FULL, M(pad=112))
    yield Bug("GQA heads interleaved", "causal", CAUSAL, M(group=lambda h, n, kv: h % kv))
    yield Bug("GQA heads interleaved", "full", FULL, M(group=lambda h, n, kv: h % kv))
    swap = M(before=lambda q, k, v: (q, v, k))
    yield Bug("K and V swapped", "causal", CAUSAL, swap)
    yield Bug("K and V swapped", "full", FULL, swap)
    yield Bug("V where K belongs", "v for k", CAUSAL, M(before=lambda q, k, v: (q, v, v)))
    yield Bug("V where K belongs", "k for v", CAUSAL, M(before=lambda q, k, v: (q, k, k)))
    yield Bug("layout mixed (bhnd, bnhd)", "out", CAUSAL, M(after=lambda o: _others(o, 1)))
    yield Bug(
        "layout mixed (bhnd, bnhd)", "q", CAUSAL, M(before=lambda q, k, v: (_others(q, 1), k, v))
    )
    yield Bug("heads or batches permuted", "v", CAUSAL, M(before=_roll("v", 1, 0)))
    yield Bug("heads or batches permuted", "out", FULL, M(after=lambda o: np.roll(o, 1, axis=0)))
    yield Bug("rows out of step", "v", CAUSAL, M(before=_roll("v", 1)))
    yield Bug("rows out of step", "out", FULL, M(after=lambda o: np.roll(o, -1, axis=1)))
    yield Bug("channels left out", "half", CAUSAL, M(channels=32))
    yield Bug("channels left out", "48 of 80", Setting(d=80), M(channels=64))
    uncapped = M(cap=lambda cap, scale: (None, scale))
    yield Bug("softcap missing", "5", CAPPED, uncapped)
    yield Bug("softcap missing", "3", TIGHT, uncapped)
    other_cap = M(cap=lambda cap, scale: (cap * 1.2, scale))
    yield Bug("another softcap", "6 for 5", CAPPED, other_cap)
    yield Bug("another softcap", "3.6 for 3", TIGHT, other_cap)
    yield Bug("softcap after the mask", "5", CAPPED, M(hidden=-5.0))
    yield Bug("softcap after the mask", "3", TIGHT, M(hidden=-3.0))
    yield Bug("softcap of the wrong scores", "raw", CAPPED, M(cap=lambda cap, scale: (cap, 1.0)))
    yield Bug(
        "softcap of the wrong scores", "cap scaled", CAPPED,
        M(cap=lambda cap, scale: (cap * scale, scale)),
    )  # fmt: skip
    yield Bug("not divided by the row sum", "causal", CAUSAL, M(divide=0))
    yield Bug("not divided by the row sum", "full", FULL, M(divide=0))
    yield Bug("divided twice by the row sum", "causal", CAUSAL, M(divide=2))
    yield Bug("divided twice by the row sum", "full", FULL, M(divide=2))
    yield Bug("not rescaled", "O", FULL, M(rescale="l"))
    yield Bug("not rescaled", "l", CAUSAL, M(rescale="O"))
    fp8 = {"q": "e4m3", "k": "e4m3", "v": "e4m3"}
    yield Bug("inputs rounded to another format", "e4m3", CAUSAL, M(inputs=fp8))
    yield Bug("inputs rounded to another format", "v to e5m2", FULL, M(inputs={"v": "e5m2"}))
    for fmt in ("e4m3", "e5m2"):
        yield Bug("P rounded to another format before normalisation", fmt, FULL, M(p=fmt))
        yield Bug("P rounded to another format after normalisation", fmt, FULL, M(p_after=fmt))
    yield Bug("all state in half precision", "unfused", CAUSAL, special="standard")
    yield Bug("all state in half precision", "flash", FULL, special="flash")
    yield Bug("dropout left on", "0.1", FULL, M(drop=0.1))
    yield Bug("dropout left on", "0.5", CAUSAL, M(drop=0.5))
    ln2 = float(np.log(2))
    yield Bug("LSE in log2", "causal", CAUSAL, M(lse=lambda x, t, g: x / ln2), of="lse")
    yield Bug("LSE in log2", "full", FULL, M(lse=lambda x, t, g: x / ln2), of="lse")
    yield Bug("LSE without a part", "max", CAUSAL, M(lse=lambda x, t, g: g), of="lse")
    yield Bug("LSE without a part", "log2 l", FULL, M(lse=lambda x, t, g: t + g / ln2), of="lse")
    unscaled = M(lse=lambda x, t, g: t * 8 + g)
    yield Bug("LSE of unscaled scores", "causal", CAUSAL, unscaled, of="lse")
    yield Bug("LSE of unscaled scores", "full", FULL, unscaled, of="lse")
    for name, mistakes, settings in (
        ("delta missing", M(delta=0.0), (CAUSAL, FULL)),
        ("delta with the wrong sign", M(delta=-1.0), (CAUSAL, FULL)),
        ("scale missing", M(power=0), (CAUSAL, NARROW)),
        ("scale applied twice", M(power=2), (CAUSAL, SCALED)),
        ("mask dropped", M(masked=False), (CAUSAL, WINDOW)),
        ("one head of a group", M(every=False), (CAUSAL, FULL)),
        ("slope of the softcap missing", M(slope=False), (CAPPED, TIGHT)),
        ("dV from dS", M(dv_from_ds=True), (CAUSAL, FULL)),
        ("wrong sign", M(moved=lambda q, k, v, s, n: (q, -k, v)), (CAUSAL, FULL)),
        ("one gradient's scale", M(moved=lambda q, k, v, s, n: (q / s, k, v)), (CAUSAL, NARROW)),
        ("dK and dV swapped", M(moved=lambda q, k, v, s, n: (q, v, k)), (CAUSAL, FULL)),
        ("mean over a group for its sum", M(moved=_mean), (CAUSAL, FULL)),
        ("a gradient times a constant", M(moved=lambda q, k, v, s, n: (q, k, 1.1 * v)), (FULL,)),
        ("dK and dV summed up in half precision", M(sums=16), (FULL,)),
    ):
        for setting in settings:
            word = ", ".join(f"{n}={x}" for n, x in setting.masks) or "full"
            strength = f"D = {setting.d}, {word}"
            yield Bug(f"backward: {name}", strength, setting, mistakes, of="backward")
    see = (("+1", _causal(1)), ("-1", _causal(-1)))
    for word, f in see:
        yield Bug("backward: diagonal off by some", word, CAUSAL, M(see=f), of="backward")
