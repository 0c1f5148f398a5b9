"""Temporary: correctness and speed of variants of cuda/sm90/forward.cu on an H200.

    python tune_sm90.py correct [group ...]     cases dealt to 14 processes; $LIMIT (150) s in all
    python tune_sm90.py time [d ... n ...]      variants beside cuDNN and, from folder $FA3, FA3; $LIMIT (118) s in all
    python tune_sm90.py probe                   issue and end of products in clocks
    python tune_sm90.py list                    how many cases and kernels
"""

import dataclasses, hashlib, os, pickle, statistics, subprocess, sys, tempfile, threading, time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from cuflash import sm90_forward as F
from cuflash.compiler import compile_kernel
from emulation.plan import Numerics, Plan, TILE_N

T0 = time.time()
S = F.Schedule


def tile_n(w):
    return next(t for x, t in TILE_N.items() if w <= x)


def base(d, dv=None, masked=False, cl=1, **kw):
    w = max(F.width_of(d), F.width_of(dv or d))
    return dataclasses.replace(S(3 if w == 64 else 2, cl, 2, 1, masked, w < 192), **kw)


# -- Correctness -------------------------------------------------------------------------
def case(name, n=300, n_k=None, d=128, dv=None, dtype="bfloat16", heads=2, kv=None, batch=1, kind="normal",
         numerics=None, schedule=None, special=None, repeat=1, tile=None, **options):
    return dict(name=name, n=n, n_k=n_k or n, d=d, dv=dv or d, dtype=dtype, heads=heads, kv=kv or heads, batch=batch,
                kind=kind, numerics=numerics or {}, schedule=schedule, special=special, repeat=repeat, tile=tile,
                options=options)


def schedules(d):
    for cl in (1, 2):
        for dyn in (False, True):
            for pp in (True, False):
                yield base(d, masked=dyn, cl=cl, ping_pong=pp)


def groups():
    G = {}
    # What hung: many blocks of rows a CTA, every schedule, masks; 50 launches one after the other. Checked
    # against the emulator (some heads) and against each other.
    L = []
    for d in (128, 64, 256):
        for o in ({"causal": True}, {"window": (300, 100)}, {"window": (130, 0), "causal": True}, {}):
            for i, s in enumerate(schedules(d)):
                if not o and i % 2: continue
                L.append(case(f"d{d} {o} cl{s.cluster} dyn={s.dynamic} pp={s.ping_pong}", n=1024, d=d, heads=16, batch=8 if d != 256 else 4,
                              schedule=s, repeat=50, **o))
    L.append(case("d128 one key tile", n=100, d=128, heads=64, batch=16, repeat=50, schedule=base(128, masked=True), causal=True))
    L.append(case("d128 static one key tile", n=250, d=128, heads=64, batch=16, repeat=50, schedule=base(128, masked=False, cl=2), causal=True))
    G["many"] = L
    # Blocks joined and alone, stages, places of Q, warpgroups: many blocks a CTA, tiles that a warpgroup skips on
    # either side, blocks that see nothing.
    L = []
    other = {64: [dict(), dict(tries=3), dict(tries=11), dict(tries=19), dict(tries=27), dict(tries=19, stages=4), dict(tries=1, ping_pong=False), dict(joined=False), dict(stages=4), dict(stages=3, ping_pong=False), dict(warpgroups=2, stages=4), dict(warpgroups=2, q_stages=2),
                  dict(warpgroups=2, stages=4, ping_pong=False), dict(cl=2, stages=3)],
             128: [dict(), dict(tries=3), dict(tries=7), dict(tries=27), dict(tries=16), dict(tries=23, stages=3), dict(tries=11, q_stages=2), dict(tries=23, cl=2), dict(tries=19, cl=2), dict(joined=False), dict(stages=3), dict(stages=3, ping_pong=False), dict(q_stages=2), dict(cl=2, stages=3), dict(cl=2, joined=False)],
             256: [dict(), dict(tries=3), dict(tries=3, cl=2), dict(tries=19, ping_pong=True), dict(joined=False), dict(ping_pong=True), dict(cl=2)]}
    for d, kws in other.items():
        for j, kw in enumerate(kws):
            for i, (ln, o) in enumerate((((1000, 1000), {"causal": True}), ((1000, 700), {"causal": True}), ((900, 1000), {"window": (200, 60)}),
                                         ((700, 900), {"window": (130, 0), "causal": True}), ((700, 1000), {}), ((1000, 60), {}), ((1000, 300), {"causal": "top-left", "window": (40, 0)}))):
                L.append(case(f"d{d} {kw} {ln} {o}", n=ln[0], n_k=ln[1], d=d, heads=16, batch=8 if d != 256 else 4, repeat=12,
                              schedule=base(d, masked=bool(o) or (i + j) % 2 == 0, **kw), **o))
    G["joined"] = L
    # Last blocks in halves: more and fewer than half a round left, less than a round in all, rows that lack, one key tile.
    L = []
    for d in (128, 256):
        for i, (n, nk, h, b) in enumerate(((1000, 700, 16, 8), (900, 300, 16, 8), (960, 1000, 14, 6), (1024, 900, 16, 10), (1000, 60, 20, 7), (700, 600, 4, 2), (130, 500, 2, 2), (65, 300, 16, 16))):
            for kw in (dict(), dict(masked=True), dict(masked=True, sets=False, tries=19), dict(tries=27)) if d == 128 else (dict(tries=3), dict(masked=True, sets=False, tries=3)):
                if i % 2 and kw == dict(): continue
                L.append(case(f"d{d} {kw} {n}x{nk} {h * b} heads", n=n, n_k=nk, d=d, heads=h, batch=b, repeat=8, schedule=base(d, **kw, halves=True, q_stages=2 if d == 128 else 1)))
    L += [case(f"d{d} {nm} {sp}", n=300, n_k=400, d=d, heads=3, numerics=nm, special=sp, schedule=base(d, halves=True, tries=3)) for d in (128, 256) for nm, sp in (({}, None), ({"out": "float32"}, None), ({}, np.nan), ({}, -np.inf))]
    G["half"] = L
    # Wider tiles of keys at D 128.
    G["tiles"] = [case(f"n{t} {kw} {n}x{nk} {kind} {o}", n=n, n_k=nk, d=128, heads=h, batch=b, kind=kind, repeat=r, tile=t, schedule=base(128, masked=bool(o), tries=tries, **kw), **o)
                  for t in (176, 160) for tries, kw in ((3, {}), (19, {}), (27, dict(halves=True)))
                  for n, nk, h, b, r, kind, o in ((1000, 1000, 16, 8, 12, "normal", {}), (700, 300, 16, 8, 8, "rising", {}), (300, 100, 2, 1, 1, "outlier", {}), (500, 900, 2, 1, 1, "huge", {}),
                                                  (1000, 1000, 16, 8, 8, "normal", {"causal": True}), (300, 500, 2, 1, 1, "peaked", {"window": (90, 30)}))]
    # References that move seldom, always, late; scores all negative; wide ones; every new schedule. Blocks that begin before row 0.
    G["moves"] = [case(f"d{d} {kind} {dt} tries={t} {nm} {o}", n=700, n_k=900, d=d, heads=2, kind=kind, dtype=dt, numerics=nm, schedule=base(d, masked=bool(o), tries=t), **o)
                  for d in (64, 128, 256) for t in ((3, 27) if d != 128 else (7, 19)) for kind, dt in (("normal", "bfloat16"), ("rising", "float16"), ("outlier", "bfloat16"), ("huge", "bfloat16"), ("tied-max", "float16"), ("peaked", "bfloat16"))
                  for nm, o in (({}, {}), ({"reference": "power-of-two", "row_sum": "rounded"}, {"causal": True}), ({}, {"scale": 0.002}), ({}, {"scale": 3.0, "causal": True}))]
    G["moves"] += [case(f"negative scores d{d} {o}", n=500, n_k=1000, d=d, kind="normal", special="negative", schedule=base(d, masked=bool(o), tries=3), **o) for d in (64, 128, 256) for o in ({}, {"causal": True})]
    G["short"] = [case(f"{n}x{nk} {o} cl{cl} {nm}", n=n, n_k=nk, d=64, heads=16, batch=4, schedule=base(64, masked=True, tries=3, cl=cl, stages=3), repeat=8, numerics=nm, **o)
                  for n, nk in ((1, 300), (63, 63), (65, 200), (192, 192), (193, 193), (257, 500), (1000, 1000), (1024, 700), (700, 1100)) for cl in (1, 2)
                  for o, nm in (({"causal": True}, {}), ({"causal": True, "window": (90, 0)}, {"out": "float32"}), ({"causal": "top-left"}, {}))]
    # Stores: columns that end early, rows that end early, one row, float32, what rounding lost.
    G["stores"] = [case(f"{n} {d}/{dv} {dt} {nm}", n=n, n_k=150, d=d, dv=dv, dtype=dt, numerics=nm, causal=c, heads=3, batch=2)
                   for n in (1, 63, 200) for d, dv in ((64, 8), (64, 40), (96, 88), (128, 72), (128, 128), (256, 200), (192, 168))
                   for dt, nm, c in (("bfloat16", {}, False), ("float16", {"row_sum": "rounded"}, True), ("float16", {"out": "float32"}, False))]
    L = []  # four warpgroups, 64 keys
    for nm in ({}, {"row_sum": "rounded"}, {"reference": "stale", "row_sum": "rounded"}):
        for o in ({}, {"causal": True}, {"window": (100, 30)}):
            s = base(64, masked=bool(o), warpgroups=4, stages=3)
            L.append(case(f"{nm} {o}", n=700, d=64, heads=3, tile=64, schedule=s, numerics=nm, **o))
            L.append(case(f"{nm} {o} many", n=1000, d=64, heads=32, batch=8, tile=64, schedule=s, numerics=nm, repeat=20, **o))
    G["nwg4"] = L
    for d in (128, 64, 256):
        L = []
        for cl in (1, 2):
            for dyn in (False, True):
                for ones in ("kNone", "kApart", "kJoined"):
                    for causal in (False, True):
                        s = base(d, masked=dyn, cl=cl, ones=ones)
                        L.append(case(f"cl={cl} dyn={dyn} {ones} causal={causal}", n=500, d=d, schedule=s, causal=causal, heads=3,
                                      numerics={"row_sum": "unrounded" if ones == "kNone" else "rounded"}))
        G[f"sched{d}"] = L
    G["small"] = [case(f"d={d} dv={dv} causal={c}", n=200, d=d, dv=dv, causal=c) for c in (False, True)
                  for d, dv in ((8, 8), (80, 80), (40, 72), (64, 128), (192, 128), (16, 256), (96, 96), (192, 192))]
    L = []
    for d in (64, 128, 256):
        for nm in ({"reference": "power-of-two", "row_sum": "rounded"}, {"reference": "stale"}, {"reference": "stale", "row_sum": "rounded"}, {"out": "float32"}):
            for kind in ("normal", "outlier", "rising", "peaked", "huge", "tied-max"):
                for dt in ("bfloat16", "float16"):
                    L.append(case(f"{nm} {kind} {dt} d{d}", n=200, n_k=333, d=d, heads=1, kind=kind, dtype=dt, numerics=nm, causal=kind != "normal"))
    G["numerics"] = L
    opts = [{"causal": "top-left"}, {"window": (17, 5)}, {"window": (100, None), "causal": True}, {"window": (None, 0)},
            {"softcap": 3.0}, {"softcap": 50.0, "causal": True}, {"scale": 1.7}, {"causal": "top-left", "window": (3, 0)}]
    G["masks64"] = [case(f"{o} {ln}", n=ln[0], n_k=ln[1], d=64, dtype="float16", **o) for o in opts
                    for ln in [(1, 1), (1, 200), (65, 64), (70, 257), (400, 128), (500, 900)]]
    G["masks128"] = [case(f"{o} {ln} cl={cl} dyn={dyn}", n=ln[0], n_k=ln[1], d=128, schedule=base(128, masked=dyn, cl=cl), **o)
                     for o in opts for ln in [(1, 200), (70, 257), (500, 900), (900, 300)] for cl in (1, 2) for dyn in (False, True)
                     if "softcap" not in o or not dyn]
    G["gqa"] = [case(f"{h}", n=70, n_k=90, d=64, heads=h[0], kv=h[1], batch=2, causal=True) for h in ((6, 6), (6, 2), (7, 1), (71, 1))]
    L = []
    for d in (64, 128, 256):
        for sp in (np.nan, -np.inf):
            for o in ({"causal": True}, {"window": (10, 10)}, {"causal": "top-left", "window": (200, 0)}, {}):
                for nm, cl in (({}, 1), ({}, 2), ({"out": "float32"}, 1)):
                    if sp == np.nan and nm: continue
                    L.append(case(f"{sp} {o} {nm} d{d} cl{cl}", n=260, d=d, special=sp, numerics=nm, heads=1 if d != 128 else 3,
                                  schedule=base(d, masked=bool(o), cl=cl), **o))
    L.append(case("nan window many", n=1500, d=128, special=np.nan, heads=16, batch=4, repeat=20, schedule=base(128, masked=True, cl=2), window=(900, 40)))
    G["specials"] = L
    G["big"] = [case(f"n=4096 d={d} {kind} causal={c}", n=4096, d=d, heads=1, kind=kind, causal=c) for d in (128, 64, 256)
                for kind in ("rising", "outlier") for c in (False, True)]
    return G


DEFAULT = ("half", "tiles", "many", "joined", "moves", "short", "stores", "nwg4", "numerics", "masks64", "masks128", "gqa", "specials", "big", "sched128", "sched64", "sched256", "small")


def plan_of(c):
    return Plan(numerics=Numerics(**c["numerics"]), format=c["dtype"], tile_n=c["tile"] or tile_n(max(c["d"], c["dv"])))


def schedule_of_case(c):
    if c["schedule"] is not None: return c["schedule"]
    from emulation.problem import Problem
    import ml_dtypes
    dt = np.float16 if c["dtype"] == "float16" else ml_dtypes.bfloat16
    z = [np.zeros((h, n, d), dt) for h, n, d in ((c["heads"], c["n"], c["d"]), (c["kv"], c["n_k"], c["d"]), (c["kv"], c["n_k"], c["dv"]))]
    return F.schedule_of(Problem.of(*z, **c["options"]), plan_of(c))


def few_heads(c, heads):
    """Heads that differ: others repeat them."""
    return min(c["batch"] * c[heads], 2) if c["repeat"] > 1 else c["batch"] * c[heads]


def key_of(c):
    """Of what the emulator says: schedules of one problem share it."""
    return repr([c[x] for x in ("n", "n_k", "d", "dv", "dtype", "kind", "numerics", "special", "tile", "options", "heads", "kv", "batch")] + [c["repeat"] > 1])


def cost_of(c):
    """Seconds of the emulator, roughly."""
    return c["n"] * c["n_k"] * (c["d"] + c["dv"]) * few_heads(c, "heads") / (3e9 if c["options"] else 1.5e9) + 0.1


def deal(cases, workers):
    """Cases of one problem to one worker; what takes longest first."""
    together = {}
    for x in cases: together.setdefault(key_of(x[1][1]), []).append(x)
    shards, loads = [[] for _ in range(workers)], [0.0] * workers
    for mine in sorted(together.values(), key=lambda xs: -cost_of(xs[0][1][1]) - 0.15 * len(xs)):
        w = loads.index(min(loads))
        shards[w] += mine
        loads[w] += cost_of(mine[0][1][1]) + 0.15 * len(mine)
    return shards, loads


def instantiation(c):
    return tuple(F.forward_instantiation(plan_of(c), c["d"], c["dv"], c["options"].get("softcap") is not None, schedule_of_case(c)))


def build(i):
    try:
        k = compile_kernel(i[0], i[1], "sm_90a", i[2])
        return i[1], k.log.registers, k.log.spill_stores, k.log.notes
    except Exception as e:
        return i[1], -1, -1, (str(e)[-1500:],)


def prebuild(instantiations):
    todo = list(dict.fromkeys(instantiations))
    t = time.time()
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 4))) as pool:
        for name, regs, spill, notes in pool.map(build, todo):
            if regs < 0 or spill or notes:
                print("BUILD", name[16:], regs, "spill", spill, notes, flush=True)
    print(f"built {len(todo)} in {time.time() - t:.0f} s", flush=True)


def run_case(c):
    import cupy as cp
    import emulation
    from cuflash.problem import GpuProblem
    from emulation.samples import sample
    import cuflash
    h, hk, b = c["heads"], c["kv"], c["batch"]
    w = max(c["d"], c["dv"])
    few, fewk = few_heads(c, "heads"), few_heads(c, "kv")
    q = sample(c["kind"], n=c["n"], n_k=c["n_k"], d=w, heads=few, dtype=c["dtype"])[0][..., :c["d"]]
    k, v = sample(c["kind"], n=c["n"], n_k=c["n_k"], d=w, heads=fewk, dtype=c["dtype"], seed=1)[1:]
    k, v = k[..., :c["d"]], v[..., :c["dv"]]
    q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
    if c["special"] == "negative":
        q, k = np.abs(q), -np.abs(k)
    elif c["special"] is not None:
        rows = [i for i in (50, 130, 131, c["n_k"] - 1) if i < c["n_k"]]
        v[0, rows, [3, 7, 20, 21][: len(rows)]] = c["special"]
        k[-1, min(160, c["n_k"] - 1), 5] = c["special"]
    if c["repeat"] > 1:
        path = os.path.join(tempfile.gettempdir(), "want-" + hashlib.sha1(key_of(c).encode()).hexdigest())
        try:
            want, want_lse = pickle.load(open(path, "rb"))  # schedules of one problem share it
        except (OSError, EOFError, pickle.UnpicklingError):
            want, want_lse = emulation.flash(q, k, v, plan=plan_of(c), **c["options"])
            with open(f"{path}.{os.getpid()}", "wb") as file: pickle.dump((want, want_lse), file)
            os.replace(f"{path}.{os.getpid()}", path)
        want, want_lse = (np.tile(x, (b * h // few, *(1,) * (x.ndim - 1))) for x in (want, want_lse))
        q, k, v = (np.tile(x, (n // m, 1, 1)) for x, n, m in ((q, b * h, few), (k, b * hk, fewk), (v, b * hk, fewk)))
    q = q.reshape(b, h, c["n"], -1); k = k.reshape(b, hk, c["n_k"], -1); v = v.reshape(b, hk, c["n_k"], -1)
    g = [cp.asarray(x) for x in (q, k, v)]
    masks = dict(scale=None, causal=False, window=None, softcap=None) | c["options"]
    p = GpuProblem.of(*g, **masks)
    plan = cuflash.plan(*g, numerics=c["numerics"], **c["options"])
    mine = plan_of(c)
    assert (plan.tile_n, plan.numerics) == (c["tile"] and plan.tile_n or mine.tile_n, mine.numerics), plan
    plan = dataclasses.replace(plan, tile_n=mine.tile_n)
    full = np.float32 if plan.numerics.out == "float32" else q.dtype
    room = cp.full((*q.shape[:2], c["n"] + 2, v.shape[-1] + 8), 7, full)  # out lies in it, with a border
    out = room[:, :, : c["n"], : v.shape[-1]]
    out.fill(np.nan)
    lse = cp.full(q.shape[:-1], np.nan, np.float32)
    rest = cp.full(out.shape, np.nan, q.dtype) if full != np.float32 else None
    F.forward(p, plan, out, lse, rest, schedule=c["schedule"])
    cp.cuda.Device().synchronize()
    u = {2: cp.uint16, 4: cp.uint32}[room.dtype.itemsize]
    seven = cp.full(1, 7, full).view(u)
    border = int((room.view(u) != seven).sum()) - int((room.view(u)[:, :, : c["n"], : v.shape[-1]] != seven).sum())
    out = cp.ascontiguousarray(room.view(u)[:, :, : c["n"], : v.shape[-1]]).view(full)
    f = None
    if c["repeat"] == 1:
        from emulation.flash import flash_forward
        from emulation.problem import Problem
        want, want_lse = emulation.flash(q, k, v, plan=plan, **c["options"])
        if rest is not None and c["special"] is None and c["n"] < 400:
            f = flash_forward(Problem.of(q, k, v, **c["options"]), plan)
    want, want_lse = want.reshape(out.shape), want_lse.reshape(lse.shape)
    bad = [f"{border} elements beyond out written"] if border else []
    for name, got, exp in (("lse", cp.asnumpy(lse), want_lse), ("out", cp.asnumpy(out), want)):
        gw, ew = got.astype(np.float32), exp.astype(np.float32)
        u = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
        differ = (got.view(u) != exp.view(u)) & ~(np.isnan(gw) & np.isnan(ew))
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            rows = sorted({int(i[2]) for i in np.argwhere(differ)})
            bad.append(f"{name} {int(differ.sum())}/{differ.size} first {at}: {gw[at]!r} want {ew[at]!r} rows {rows[:6]}..{rows[-1]} ({len(rows)})")
    u = {2: cp.uint16, 4: cp.uint32}[out.dtype.itemsize]
    pairs = [(cp.full_like(out, 7), cp.full_like(lse, 7)) for _ in range(min(c["repeat"], 4))]
    wrong = cp.zeros((), cp.int64)
    for r in range(0, c["repeat"], len(pairs)):
        for o2, l2 in pairs: F.forward(p, plan, o2, l2, None, schedule=c["schedule"])  # back to back
        for o2, l2 in pairs:
            wrong += (o2.view(u) != out.view(u)).sum() + (l2.view(cp.uint32) != lse.view(cp.uint32)).sum()
            o2.fill(7); l2.fill(7)
    if int(wrong): bad.append(f"reruns differ in {int(wrong)} elements")
    if f is not None:
        exp = (cp.asnumpy(f.o).reshape(out.shape) - cp.asnumpy(out).astype(np.float32)).astype(q.dtype)
        n = int((cp.asnumpy(rest).view(np.uint16) != exp.view(np.uint16)).sum())
        if n: bad.append(f"rest {n} differ")
    return bad


def streams():
    """Counters of work: streams that overlap, threads, streams that come and go, graphs beside calls."""
    import cupy as cp
    import cuflash
    from cuflash import counters
    from cuflash.problem import GpuProblem
    rng, bad = cp.random.default_rng(0), []
    def setup(n, d, b, h, **o):
        q, k, v = (rng.standard_normal((b, h, n, d), dtype=np.float32).astype(np.float16) for _ in range(3))
        return GpuProblem.of(q, k, v, **(dict(scale=None, window=None, softcap=None) | o)), cuflash.plan(q, k, v, **o), base(d, masked=True, tries=3)
    setups = [setup(1000, 128, 2, 16, causal=True), setup(700, 64, 2, 24, causal=True), setup(520, 256, 2, 20, causal=False), setup(100, 128, 1, 3, causal=True)]
    def room(s):
        return cp.empty(s[0].q.shape, np.float16), cp.empty(s[0].q.shape[:3], np.float32)
    def call(s, out): F.forward(s[0], s[1], *out, None, schedule=s[2])
    kept, F.counter = F.counter, lambda device: cp.zeros(1, np.uint32)
    want = []
    for s in setups:
        want.append(room(s)); call(s, want[-1])
    F.counter = kept
    cp.cuda.Device().synchronize()
    def same(what, i, out):
        for a, b in zip(out, want[i]):
            wrong = int((a.view(np.uint8) != b.view(np.uint8)).sum())
            if wrong: bad.append(f"{what}: problem {i} differs in {wrong} bytes")
    def burst(what, stream, first, count=120):
        with stream:
            outs = [room(s) for s in setups]
            for o, l in outs: o.fill(7); l.fill(7)
            for r in range(count): call(setups[(first + r) % len(setups)], outs[(first + r) % len(setups)])
        stream.synchronize()
        for i, out in enumerate(outs): same(what, i, out)
    def threads(what, of, n=4):
        def go(i):
            with cp.cuda.Device(0):
                try: burst(what, of(i), i)
                except Exception as e: bad.append(f"{what} {e!r}"[:300])
        found = [threading.Thread(target=go, args=(i,)) for i in range(n)]
        for t in found: t.start()
        for t in found: t.join()
    many = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    burst("null stream", cp.cuda.Stream.null, 0); print("AT null", flush=True)
    threads("streams", lambda i: many[i]); print("AT streams", flush=True)
    threads("one stream, four threads", lambda i: many[0]); print("AT one stream", flush=True)
    threads("default stream of each thread", lambda i: cp.cuda.Stream.ptds); print("AT ptds", flush=True)
    for r in range(40): burst("come and go", cp.cuda.Stream(non_blocking=True), r, 5)
    print("AT graphs", flush=True)
    with many[0]:
        outs = [[room(s) for s in setups] for _ in range(2)]
        spare = [cp.zeros(1, np.uint32) for _ in range(40)]; del spare
    cp.cuda.Device().synchronize()
    graphs = []
    for group in outs:
        with many[0]:
            many[0].begin_capture()
            for _ in range(3):
                for s, out in zip(setups, group): call(s, out)
            graphs.append(many[0].end_capture())
    for group in outs:
        for o, l in group: o.fill(7); l.fill(7)
    extra = [room(s) for s in setups]
    cp.cuda.Device().synchronize()
    for r in range(30):
        graphs[0].launch(many[1 + r % 2])
        graphs[1].launch(many[3])
        with many[0]:
            for s, out in zip(setups, extra): call(s, out)
        many[1 + r % 2].synchronize()  # a graph is not launched beside itself
    cp.cuda.Device().synchronize()
    for what, group in (("graph", outs[0]), ("graph", outs[1]), ("call beside graphs", extra)):
        for i, out in enumerate(group): same(what, i, out)
    left = [int(x[0]) for x in counters._counters.values()]
    if any(left): bad.append(f"counters left {left}")
    print(f"STREAMS {'right' if not bad else bad[:6]}, {len(left)} counters", flush=True)


def worker(path):
    for i, (group, c) in pickle.load(open(path, "rb")):
        print(f"START {i}", flush=True)
        try:
            bad = run_case(c)
        except Exception as e:
            bad = [f"{type(e).__name__} {str(e)[:300]}"]
            if "CUDA" in repr(e) or "cuda" in repr(e).lower():
                print(f"DONE {i} FAULT {bad}", flush=True); os._exit(3)
        print(f"DONE {i} " + "; ".join(bad), flush=True)


def warm():
    """The emulator's compiled parts, onto the disk."""
    import emulation
    from emulation.samples import sample
    for dt in ("bfloat16", "float16"):
        for nm in ({}, {"row_sum": "rounded"}, {"reference": "stale"}, {"out": "float32"}, {"reference": "power-of-two", "row_sum": "rounded"}):
            for o in ({}, {"causal": True}, {"softcap": 3.0}):
                q, k, v = sample("normal", n=150, d=64, heads=1, dtype=dt)
                emulation.flash(q, k, v, plan=Plan(format=dt, tile_n=128, numerics=Numerics(**nm)), **o)


def correct(names, limit=float(os.environ.get("LIMIT", 150)), workers=14, stuck=25.0):
    G = groups()
    cases = [(i, x) for i, x in enumerate((n, c) for n in (names or DEFAULT) for c in G[n])]
    warm = subprocess.Popen([sys.executable, __file__, "warm"])
    prebuild([instantiation(c) for _, (_, c) in cases])
    warm.wait()
    shards, _ = deal(cases, workers)
    for shard in shards: shard.sort(key=lambda x: x[0])  # groups in the order asked for
    state, lock = {}, threading.Lock()

    def drive(shard):
        while shard and time.time() - T0 < limit:
            path = tempfile.mktemp()
            pickle.dump(shard, open(path, "wb"))
            p = subprocess.Popen([sys.executable, __file__, "worker", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 env=os.environ | {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
            last = [time.time() + 15]; now = [None]; tail = []
            def watch():
                while p.poll() is None:
                    if time.time() > last[0] + stuck or time.time() - T0 > limit: p.kill()
                    time.sleep(0.2)
            threading.Thread(target=watch, daemon=True).start()
            done = set()
            for line in p.stdout:
                last[0] = time.time()
                word, _, rest = line.rstrip().partition(" ")
                if word == "START": now[0] = int(rest)
                elif word == "DONE":
                    i, _, text = rest.partition(" ")
                    done.add(int(i)); state[int(i)] = text
                else: tail = (tail + [line.rstrip()])[-4:]
            p.wait()
            if p.returncode and now[0] is not None and now[0] not in done:
                late = time.time() - T0 > limit
                state[now[0]] = None if late and time.time() - last[0] < stuck / 2 else f"HUNG OR DIED rc {p.returncode} {tail}"
                done.add(now[0])
            elif p.returncode and not done:
                state[shard[0][0]] = f"DIED {tail}"; done.add(shard[0][0])
            shard = [x for x in shard if x[0] not in done]

    def drive_streams():
        try: p = subprocess.run([sys.executable, __file__, "streams"], capture_output=True, text=True, timeout=max(5, limit - (time.time() - T0)))
        except subprocess.TimeoutExpired as e: print("streams: HUNG or out of time", str(e.stdout)[-200:], flush=True); return
        told = [x for x in p.stdout.splitlines() if x.startswith("STREAMS")]
        print(*(told or [f"streams: died rc {p.returncode} {p.stdout[-200:]} {p.stderr[-600:]}"]), flush=True)
    threads = [threading.Thread(target=drive, args=(s,)) for s in shards] + ([threading.Thread(target=drive_streams)] if not names or "half" in names else [])
    for t in threads: t.start()
    for t in threads: t.join()
    for n in names or DEFAULT:
        mine = [(i, c) for i, (g, c) in cases if g == n]
        right = sum(state.get(i) == "" for i, _ in mine)
        notrun = sum(state.get(i) is None for i, _ in mine)
        print(f"{n}: {right} of {len(mine)} right" + (f", {notrun} NOT RUN" if notrun else ""), flush=True)
        shown = 0
        for i, c in mine:
            if state.get(i) and shown < 8: print(f"    {c['name']}: {state[i][:400]}"); shown += 1
    print(f"{time.time() - T0:.0f} s", flush=True)


# -- Speed -------------------------------------------------------------------------------
def variants(d, n, causal, heads=0):
    """name -> schedule. "memset": a counter made anew for each call, as before. n176: keys of a tile. half: last blocks in
    halves; dyn1: work as CTAs become free, one head after the other. s1: tiles that move no reference; s3: and
    barriers asked early; s7: and Q in registers; +8: turn passed before the last product, +16: when S is done, +24: when
    O is done."""
    dyn = causal
    if d == 64:
        k = dict(masked=True)
        found = {
            "old": base(64, short_first=False, **k), "s0": base(64, **k), "s1": base(64, tries=1, **k), "s3": base(64, tries=3, **k),
            "s3 memset": base(64, tries=3, **k), "s11": base(64, tries=11, **k), "s19": base(64, tries=19, **k), "s27": base(64, tries=27, **k),
            "s19 st4": base(64, tries=19, stages=4, **k), "t16": base(64, tries=16, **k), "s3 nopp": base(64, tries=3, ping_pong=False, **k),
        }
        if not causal:
            found["s3 static"] = base(64, tries=3); del found["s0"]
            found["s3 dyn1"] = base(64, tries=3, sets=False, **k); found["s19 dyn1"] = base(64, tries=19, sets=False, **k)
    elif d == 128:
        k = dict(masked=dyn, q_stages=2)
        found = {
            "old": base(128, **k), "s1": base(128, tries=1, **k), "s3": base(128, tries=3, **k), "s11": base(128, tries=11, **k),
            "s19": base(128, tries=19, **k), "s27": base(128, tries=27, **k), "t16": base(128, tries=16, **k),
            "s7": base(128, tries=7, masked=dyn), "s23": base(128, tries=23, masked=dyn), "s23 st3": base(128, tries=23, masked=dyn, stages=3),
        }
        if causal: found["s3 memset"] = found["s3"]
        else:
            w = dict(masked=True, sets=False)
            found |= {"s19 cl2": base(128, tries=19, cl=2), "s23 cl2": base(128, tries=23, cl=2), "s3 half": base(128, tries=3, halves=True, **k), "s3 dyn1": base(128, tries=3, q_stages=2, **w),
                      "s3 dyn1 half": base(128, tries=3, q_stages=2, halves=True, **w), "s3 n176": base(128, tries=3), "s11 n176": base(128, tries=11), "s19 n176": base(128, tries=19), "s27 n176": base(128, tries=27),
                      "s19 n176 half": base(128, tries=19, halves=True), "s19 n176 dyn1 half": base(128, tries=19, halves=True, **w), "s3 n160": base(128, tries=3, q_stages=2), "s19 n160": base(128, tries=19, q_stages=2)}
            if n == 1024: found = {x: s for x, s in found.items() if "n1" not in x or x == "s19 n176"}  # 3 and 9 % of the keys of a tile are none
    else:
        k = dict(masked=dyn)
        found = {
            "old": base(256, **k), "s1": base(256, tries=1, **k), "s3": base(256, tries=3, **k), "s3 pp": base(256, tries=3, ping_pong=True, **k),
            "s3 alone": base(256, tries=3, joined=False, **k), "s19 pp": base(256, tries=19, ping_pong=True, **k),
        }
        if causal: found["s3 memset"] = found["s3"]
        else:
            w = dict(masked=True, sets=False)
            found |= {"s3 cl2": base(256, tries=3, cl=2), "s3 half": base(256, tries=3, halves=True), "s3 dyn1": base(256, tries=3, **w), "s3 dyn1 half": base(256, tries=3, halves=True, **w)}
    if heads:  # a cell for the last round alone
        found = {x: s for x, s in found.items() if x in ("s3", "s3 half", "s3 dyn1", "s3 dyn1 half")}
    return found


def tile_in(name, d):
    return next((int(x[1:]) for x in name.split() if x[0] == "n" and x[1:].isdigit()), tile_n(d))


PROBES = ((128, 128, 0), (128, 128, 1), (64, 128, 0), (256, 80, 0))


def probe():
    """When each product of a step is issued and done, one to three warpgroups on one SM."""
    import cupy as cp
    from cuflash.compiler import load
    for d, n, held in PROBES:
        k = compile_kernel("sm90/probe.cu", f"cuflash::sm90::probe<cuflash::sm90::Shape<cuflash::Bf16,{d},{d},{n}>,{'true' if held else 'false'}>", "sm_90a")
        f = load(k)
        f.max_dynamic_shared_size_bytes = 220 * 1024
        for groups in (1, 2, 3) if d == 64 else (1, 2):
            out = cp.zeros(192, np.uint32)
            f((1,), (128 * groups,), (out, np.int32(50)), shared_mem=220 * 1024)
            x = cp.asnumpy(out).reshape(3, 64)
            s, o = d // 16, n // 16
            for g in range(groups):
                a = x[g, : s + o + 3].astype(int)
                print(f"PROBE D{d} n{n} held{held} wg {g}/{groups}: S issued {' '.join(map(str, a[1 : 1 + s]))} | O issued {' '.join(map(str, a[1 + s : 1 + s + o]))} | S done {a[-2]} O done {a[-1]}", flush=True)


def cells(ds, ns):
    found = [(n, d, c, 0) for n in ns for d in ds for c in (False, True)]
    return found + ([(4096, 128, False, 20)] if 4096 in ns and 128 in ds else [])  # 19.39 rounds: halves give 19.6 for 20


def timing(todo):
    """One process: the cells "n:d:causal"; lines on stdout are results."""
    import cupy as cp, torch
    import torch.nn.functional as TF
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import cuflash
    from cuflash.problem import GpuProblem
    fa3 = None
    try:
        if os.environ.get("FA3"): sys.path.insert(0, os.environ["FA3"])
        import fa3_fwd_interface as fa3
    except Exception as e:
        print("NOTE no FA3:", repr(e)[:200], flush=True)
    counter = F.counter
    mhz = cp.RawKernel(r"""extern "C" __global__ void mhz(float* out) {
        unsigned long long t0, t1; const long long c0 = clock64();
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
        long long c1; do { c1 = clock64(); } while (c1 - c0 < 150000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
        *out = 1000.0f * (c1 - c0) / (t1 - t0); }""", "mhz")
    clock = cp.zeros(1, np.float32)
    rng = np.random.default_rng(0)
    SETTLE, WINDOW, ROUNDS = (float(x) for x in os.environ.get("TIMES", "0.03 0.014 5").split())
    stream = cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    for n, d, causal, heads in ((int(n), int(d), c == "True", int(h)) for n, d, c, h in (x.split(":") for x in todo)):
        b, h = 16384 // n, heads or 2048 // d
        torch.manual_seed(0)
        q, k, v = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        g = [cp.from_dlpack(x) for x in (q, k, v)]
        out, lse = cp.empty(q.shape, g[0].dtype), cp.empty(q.shape[:3], np.float32)
        p = GpuProblem.of(*g, causal=causal, scale=None, window=None, softcap=None)
        flop = 4 * b * h * n * n * d / (2 if causal else 1)
        fns = {}
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): TF.scaled_dot_product_attention(q, k, v, is_causal=causal)
        fns["cudnn"] = cudnn
        if fa3 is not None:
            q3, k3, v3 = (z.transpose(1, 2).contiguous() for z in (q, k, v))
            fns["FA3"] = lambda: fa3.flash_attn_func(q3, k3, v3, causal=causal)
        plan = cuflash.plan(*g, causal=causal)
        for name, s in variants(d, n, causal, heads).items():
            def ours(s=s, name=name, plan=dataclasses.replace(plan, tile_n=tile_in(name, d))):
                F.counter = (lambda device: cp.zeros(1, np.uint32)) if name.endswith("memset") else counter
                F.forward(p, plan, out, lse, None, schedule=s)
            fns[name] = ours
        if "FA3" in fns and n >= 4096: fns["FA3 after cuDNN"] = fns["FA3"]  # what a kernel gains by following a cool one
        reps = max(4, int(WINDOW / (flop / 600e12)))
        settle = max(2, int(SETTLE / (flop / 600e12)))
        times, clocks = {x: [] for x in fns}, {x: [] for x in fns}
        host = {}
        with stream:
            for r in range(int(ROUNDS) + 1):
                for name in rng.permutation(list(fns)):
                    f = fns[name]
                    before = fns["cudnn"] if name.endswith("cuDNN") else f
                    a, z = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    print(f"AT D{d} N{n} {'causal' if causal else 'full'} {name}", flush=True)
                    for _ in range(settle if r else 1): before()  # the card's power settles at what this kernel draws
                    torch.cuda._sleep(2_000_000)  # the queue fills while the device sleeps: no call waits for the host
                    t = time.perf_counter()
                    a.record()
                    for _ in range(reps): f()
                    z.record()
                    host[name] = (time.perf_counter() - t) / reps * 1e6
                    mhz((1,), (1,), (clock,))
                    torch.cuda.synchronize()
                    if r:
                        times[name].append(flop * reps / a.elapsed_time(z) / 1e9)
                        clocks[name].append(float(clock[0]))
        med = {x: statistics.median(t) for x, t in times.items()}
        peer = max(med.get("FA3", 0), med["cudnn"])
        us = flop / peer / 1e6
        print(f"RESULT D{d} N{n} {'causal' if causal else 'full'}{f' {heads} heads' if heads else ''} ({us:.0f} us, host {max(v for x, v in host.items() if x[:3] not in ('cud', 'FA3')):.0f}): " + "  ".join(
            f"{x} {m:.0f}@{statistics.median(clocks[x]):.0f}" + ("" if x[:3] in ("FA3", "cud") else f" ({m / peer:.3f})") for x, m in med.items()), flush=True)


def speed(ds, ns, limit=float(os.environ.get("LIMIT", 118))):
    left = cells(ds, ns)
    prebuild([tuple(F.forward_instantiation(Plan(format="bfloat16", tile_n=tile_in(name, d)), d, d, False, s)) for n, d, c, h in left for name, s in variants(d, n, c, h).items()])
    while left and time.time() - T0 < limit:
        # One process for what is left; a cell in which a variant hangs (20 s without a word) is named and skipped.
        p = subprocess.Popen([sys.executable, __file__, "timing", *(":".join(map(str, cell)) for cell in left)], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
        last, at = [time.time() + 25], ["start"]
        def watch():
            while p.poll() is None:
                if time.time() > last[0] + 20 or time.time() - T0 > limit: p.kill()
                time.sleep(0.2)
        threading.Thread(target=watch, daemon=True).start()
        tail = []
        for line in p.stdout:
            last[0] = time.time()
            if line.startswith("AT "): at[0] = line[3:].rstrip()
            elif line.startswith("NOTE "): print(line, end="", flush=True)
            elif line.startswith("RESULT "):
                print(line[7:], end="", flush=True); left.pop(0)
            else: tail = (tail + [line.rstrip()])[-6:]
        p.wait()
        if p.returncode and left:
            late = time.time() - T0 > limit
            print(f"{'out of time' if late else 'HUNG or died'} at {at[0]} rc {p.returncode} {'' if late else tail}", flush=True)
            left.pop(0)
    print(f"{time.time() - T0:.0f} s", flush=True)


if __name__ == "__main__":
    what, rest = sys.argv[1], sys.argv[2:]
    if what == "correct": correct(rest)
    elif what == "worker": worker(rest[0])
    elif what == "warm": warm()
    elif what == "streams": streams()
    elif what == "time":
        given = [int(x) for x in rest]
        speed([x for x in given if x <= 256] or [64, 256, 128], [x for x in given if x > 256] or [4096, 1024, 16384])
    elif what == "timing": timing(rest)
    elif what == "probe": probe()
    elif what == "list":
        G = groups(); print({n: len(G[n]) for n in DEFAULT}, len({instantiation(c) for n in DEFAULT for c in G[n]}))
