"""The held-out table: the suspects of `bench.bugs` at strengths, shapes, formats and inputs that
the judge was not tuned on. Two strengths a suspect, six inputs, two of them of no kind in
`emulation.samples`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.bugs import Bug, Setting, _causal, _constant, _hide, _lift, _others, _roll
from bench.common import captures
from bench.planted import Mistakes
from emulation.problem import Array, numpy_dtype
from emulation.samples import sample

INPUTS = (
    ("peaked", "float16"), ("laplace", "bfloat16"), ("shifted", "float16"),
    ("tied-max", "bfloat16"), ("capture", "bfloat16"), ("normal", "float16"),
)  # fmt: skip

CAUSAL = Setting(n_q=173, n_k=173, heads=6, kv_heads=3, d=96)
DEEP = Setting(n_q=130, n_k=210, heads=4, kv_heads=1, d=128)
FULL = Setting(n_q=99, n_k=205, heads=4, kv_heads=2, d=48, masks=())
SHORT = Setting(n_q=187, n_k=150, heads=2, kv_heads=2, d=64, masks=(("causal", "top-left"),))
WINDOW = Setting(n_q=160, n_k=160, heads=2, kv_heads=2, masks=(("window", (70, 20)),))
LEFT = Setting(n_q=150, n_k=190, heads=2, kv_heads=1, masks=(("causal", True), ("window", (33, 0))))
SCALED = Setting(n_q=120, n_k=120, heads=4, kv_heads=2, d=80, masks=(("scale", 0.25),))
CAPPED = Setting(n_q=140, n_k=140, heads=4, kv_heads=2, d=96, masks=(("softcap", 8.0),))
TIGHT = Setting(
    n_q=140, n_k=180, heads=2, kv_heads=1, d=128, masks=(("causal", True), ("softcap", 2.0))
)
CORRECT = (CAUSAL, DEEP, FULL, SHORT, WINDOW, CAPPED)
PAIR = Setting(n_q=150, n_k=150, heads=8, kv_heads=2, d=32)


def inputs(
    kind: str, dtype: str, s: Setting, folder: Path | None = None
) -> tuple[Array, Array, Array, Array]:
    """q, k, v and dout of a setting. "laplace": heavier tails; "shifted": keys and values with a
    mean; "capture": heads of real activations, one a head, the channels repeated or cut.
    """
    dout = sample("normal", n=s.n_q, n_k=2, d=s.d, heads=s.heads, dtype=dtype, seed=41)[0]
    if kind in ("laplace", "shifted"):
        rng = np.random.default_rng(1234)
        shapes = [(s.heads, s.n_q, s.d), *[(s.kv_heads, s.n_k, s.d)] * 2]
        if kind == "laplace":
            arrays = [rng.laplace(scale=0.9, size=shape) for shape in shapes]
        else:
            arrays = [rng.standard_normal(shape) for shape in shapes]
            for x, size in zip(arrays, (0.3, 1.5, 2.0), strict=True):
                x += size * rng.standard_normal((1, 1, s.d))
        q, k, v = (x.astype(np.float32).astype(numpy_dtype(dtype)) for x in arrays)
        return q, k, v, dout
    if kind == "capture":
        heads = list(captures(folder, dtype))
        picks = [heads[(7 * h + 3) % len(heads)][2:5] for h in range(s.heads)]

        def cut(x: Array, n: int) -> Array:
            wide = np.concatenate([x[0]] * -(-s.d // x.shape[2]), axis=1)[:, : s.d]
            start = (len(wide) - n) // 3
            return np.asarray(wide[start : start + n])

        q = np.stack([cut(x[0], s.n_q) for x in picks])
        k, v = (np.stack([cut(x[i], s.n_k) for x in picks[: s.kv_heads]]) for i in (1, 2))
        return q, k, v, dout
    q = sample(kind, n=s.n_q, n_k=s.n_k, d=s.d, heads=s.heads, dtype=dtype, seed=43)[0]
    _, k, v = sample(kind, n=s.n_q, n_k=s.n_k, d=s.d, heads=s.kv_heads, dtype=dtype, seed=43)
    return q, k, v, dout


def _moved(s: Setting, left: int, right: int) -> Any:
    """The mask with its two ends moved outward, of queries aligned with the last key."""
    low, high = dict(s.masks)["window"]

    def see(i: Array, j: Array, mask: Array) -> Array:
        at = i + s.n_k - s.n_q
        seen: Array = (j >= at - low - left) & (j <= at + high + right)
        return seen

    return see


def bugs() -> Iterator[Bug]:
    """All planted bugs."""
    M = Mistakes
    one = M(scale=lambda s, d: 1.0)
    twice = M(scale=lambda s, d: s * s)
    whole = M(scale=lambda s, d: 1.0 / d)
    root = M(scale=lambda s, d: s**0.5)
    for name, mistakes, settings in (
        ("scale missing", one, (CAUSAL, FULL)),
        ("scale applied twice", twice, (DEEP, SCALED)),
        ("1/D for 1/sqrt(D)", whole, (CAUSAL, FULL)),
        ("square root of the scale", root, (CAUSAL, SCALED)),
    ):
        for s in settings:
            yield Bug(name, f"D = {s.d}", s, mistakes)
    for s, d in ((FULL, 64), (CAUSAL, 128)):  # filled up to the next width that is built
        yield Bug("scale of another head dimension", str(d), s, M(scale=_constant(d**-0.5)))
    yield Bug("base of the exponential", "2^s", FULL, M(exp=float(np.log(2))))
    yield Bug("base of the exponential", "exp(s log2 e)", DEEP, M(exp=1 / float(np.log(2))))
    every = M(see=lambda i, j, m: np.ones_like(m))
    yield Bug("mask dropped", "top-left", SHORT, every)
    yield Bug("mask dropped", "window", WINDOW, every)
    yield Bug("mask not asked for", "N_q < N_k", FULL, M(see=_causal(205 - 99)))
    yield Bug("mask not asked for", "softcap", CAPPED, M(see=_causal(0)))
    yield Bug("mask inverted", "window", WINDOW, M(see=lambda i, j, m: ~m))
    yield Bug("mask inverted", "N_q < N_k", DEEP, M(see=lambda i, j, m: ~m))
    yield Bug("causal alignment", "N_q < N_k", DEEP, M(see=_causal(0)))
    yield Bug("causal alignment", "N_q > N_k", SHORT, M(see=_causal(150 - 187)))
    yield Bug("diagonal off by some", "+2", CAUSAL, M(see=_causal(2)))
    yield Bug("diagonal off by some", "-3", DEEP, M(see=_causal(210 - 130 - 3)))
    yield Bug("window off by some", "-2", LEFT, M(see=_moved(LEFT, -2, 0)))
    yield Bug("window off by some", "+3", LEFT, M(see=_moved(LEFT, 3, 0)))
    for s in (WINDOW, Setting(n_q=128, n_k=170, heads=2, kv_heads=1, masks=(("window", (9, 40)),))):
        left, right = dict(s.masks)["window"]
        swapped = _moved(s, right - left, left - right)
        yield Bug("window sides swapped", f"{left}, {right}", s, M(see=swapped))
    yield Bug("last keys dropped", "13", CAUSAL, M(see=_hide(lambda j: j >= 160)))
    yield Bug("last keys dropped", "77", FULL, M(see=_hide(lambda j: j >= 128)))
    yield Bug("first keys dropped", "16", DEEP, M(see=_hide(lambda j: j < 16)))
    yield Bug("first keys dropped", "48", FULL, M(see=_hide(lambda j: j < 48)))
    yield Bug("keys skipped", "third of 32", FULL, M(see=_hide(lambda j: j // 32 == 2)))
    yield Bug("keys skipped", "first of each 64", DEEP, M(see=_hide(lambda j: j % 64 == 0)))
    yield Bug("tile visited twice", "first of 32", FULL, M(weight=_lift(lambda j: j < 32)))
    yield Bug("tile visited twice", "second of 48", CAUSAL, M(weight=_lift(lambda j: j // 48 == 1)))
    yield Bug("padded keys counted", "51 to 256", FULL, M(pad=51))
    yield Bug("padded keys counted", "3 to 176", CAUSAL, M(pad=3))
    yield Bug("GQA heads interleaved", "6 on 3", CAUSAL, M(group=lambda h, n, kv: h % kv))
    yield Bug("GQA heads interleaved", "8 on 2", PAIR, M(group=lambda h, n, kv: h % kv))
    swap = M(before=lambda q, k, v: (q, v, k))
    yield Bug("K and V swapped", "N_q < N_k", DEEP, swap)
    yield Bug("K and V swapped", "window", WINDOW, swap)
    yield Bug("V where K belongs", "v for k", FULL, M(before=lambda q, k, v: (q, v, v)))
    yield Bug("V where K belongs", "k for v", WINDOW, M(before=lambda q, k, v: (q, k, k)))
    yield Bug(
        "layout mixed (bhnd, bnhd)", "q, k and v", CAUSAL,
        M(before=lambda q, k, v: (_others(q, 1), _others(k, 1), _others(v, 1))),
    )  # fmt: skip
    yield Bug("layout mixed (bhnd, bnhd)", "out", FULL, M(after=lambda o: _others(o, 1)))
    yield Bug("heads or batches permuted", "k", CAUSAL, M(before=_roll("k", 1, 0)))
    yield Bug("heads or batches permuted", "out", PAIR, M(after=lambda o: o[::-1]))
    yield Bug("rows out of step", "k", FULL, M(before=_roll("k", -1)))
    yield Bug("rows out of step", "out reversed", CAUSAL, M(after=lambda o: o[:, ::-1]))
    yield Bug("channels left out", "64 of 96", CAUSAL, M(channels=64))
    yield Bug("channels left out", "32 of 48", FULL, M(channels=32))
    uncapped = M(cap=lambda cap, scale: (None, scale))
    for s, cap in ((CAPPED, "8"), (TIGHT, "2")):
        yield Bug("softcap missing", cap, s, uncapped)
    both = (("causal", True), ("softcap", 8.0))
    masked = Setting(n_q=140, n_k=140, heads=4, kv_heads=2, d=96, masks=both)
    yield Bug("softcap after the mask", "8", masked, M(hidden=-8.0))
    yield Bug("softcap after the mask", "2", TIGHT, M(hidden=-2.0))
    yield Bug("softcap of the wrong scores", "raw", CAPPED, M(cap=lambda cap, scale: (cap, 1.0)))
    yield Bug(
        "softcap of the wrong scores", "cap scaled", TIGHT,
        M(cap=lambda cap, scale: (cap * scale, scale)),
    )  # fmt: skip
    yield Bug("not divided by the row sum", "window", WINDOW, M(divide=0))
    yield Bug("not divided by the row sum", "N_q < N_k", DEEP, M(divide=0))
    yield Bug("divided twice by the row sum", "window", WINDOW, M(divide=2))
    yield Bug("divided twice by the row sum", "top-left", SHORT, M(divide=2))
    yield Bug("not rescaled", "O, tiles of 96", DEEP, M(rescale="l", tile=96))
    yield Bug("not rescaled", "l, tiles of 32", FULL, M(rescale="O", tile=32))
    keys = {"q": "e5m2", "k": "e5m2"}
    yield Bug("inputs rounded to another format", "q, k to e5m2", DEEP, M(inputs=keys))
    yield Bug("inputs rounded to another format", "v to e4m3", CAUSAL, M(inputs={"v": "e4m3"}))
    for fmt, s, t in (("e4m3", DEEP, CAUSAL), ("e5m2", CAUSAL, WINDOW)):
        yield Bug("P rounded to another format before normalisation", fmt, s, M(p=fmt))
        yield Bug("P rounded to another format after normalisation", fmt, t, M(p_after=fmt))
    yield Bug("all state in half precision", "unfused", FULL, special="standard")
    yield Bug("all state in half precision", "flash", DEEP, special="flash")
    yield Bug("dropout left on", "0.2", CAUSAL, M(drop=0.2))
    yield Bug("dropout left on", "0.35", FULL, M(drop=0.35))
    ln2 = float(np.log(2))
    for s in (DEEP, WINDOW):
        word = f"D = {s.d}"
        yield Bug("LSE in log2", word, s, M(lse=lambda x, t, g: x / ln2), of="lse")
    yield Bug("LSE without a part", "log l", CAUSAL, M(lse=lambda x, t, g: t), of="lse")
    mixed = M(lse=lambda x, t, g: t / ln2 + g)
    yield Bug("LSE without a part", "max in log2", WINDOW, mixed, of="lse")
    for s in (CAUSAL, DEEP):
        unscaled = M(lse=lambda x, t, g, r=s.d**0.5: t * r + g)  # type: ignore[misc]
        yield Bug("LSE of unscaled scores", f"D = {s.d}", s, unscaled, of="lse")
    for name, mistakes, settings in (
        ("delta missing", M(delta=0.0), (DEEP, WINDOW)),
        ("delta with the wrong sign", M(delta=-1.0), (DEEP, SHORT)),
        ("scale missing", M(power=0), (CAUSAL, FULL)),
        ("scale applied twice", M(power=2), (DEEP, FULL)),
        ("mask dropped", M(masked=False), (DEEP, WINDOW)),
        ("one head of a group", M(every=False), (CAUSAL, PAIR)),
        ("slope of the softcap missing", M(slope=False), (CAPPED, TIGHT)),
        ("dV from dS", M(dv_from_ds=True), (DEEP, WINDOW)),
    ):
        for s in settings:
            word = ", ".join(f"{n}={x}" for n, x in s.masks) or "full"
            yield Bug(f"backward: {name}", f"D = {s.d}, {word}", s, mistakes, of="backward")
    for word, offset in (("+2", 2), ("-2", -2)):
        m = M(see=_causal(offset))
        yield Bug("backward: diagonal off by some", word, CAUSAL, m, of="backward")
