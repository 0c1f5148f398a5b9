"""Temporary: correctness and speed of variants of cuda/sm90/forward.cu on an H200.

    python tune_sm90.py correct [group ...]     each group in its own process with a time limit
    python tune_sm90.py time [d ...]            variants beside cuDNN and FA3
"""

import dataclasses, os, statistics, subprocess, sys, time, traceback
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from cuflash import sm90_forward as F
from cuflash.compiler import compile_kernel
from emulation.plan import Numerics, Plan, TILE_N

S = F.Schedule


def base(d, dv=None, masked=False, cl=1, **kw):
    w = max(F.width_of(d), F.width_of(dv or d))
    s = S(3 if w == 64 else 2, cl, 2, 2, masked, w < 192)
    if w >= 192:
        s = dataclasses.replace(s, q_stages=1)
    return dataclasses.replace(s, **kw)


# -- Correctness -------------------------------------------------------------------------
def case(name, n=300, n_k=None, d=128, dv=None, dtype="bfloat16", heads=2, kv=None, batch=1, kind="normal",
         numerics=None, schedule=None, special=None, big=False, **options):
    return dict(name=name, n=n, n_k=n_k or n, d=d, dv=dv or d, dtype=dtype, heads=heads, kv=kv or heads, batch=batch,
                kind=kind, numerics=numerics or {}, schedule=schedule, special=special, options=options)


def groups():
    G = {}
    for d in (128, 64, 256, 96, 192):
        L = []
        for rs in ("unrounded", "rounded"):
            for causal in (False, True):
                for dt in ("bfloat16", "float16"):
                    L.append(case(f"{rs} causal={causal} {dt}", d=d, dtype=dt, numerics={"row_sum": rs}, causal=causal))
        L.append(case("n=1024 full", n=1024, d=d))
        L.append(case("n=1024 causal", n=1024, d=d, causal=True))
        G[f"d{d}"] = L
    for d in (128, 64, 256):
        L = []
        for cl in (1, 2):
            for dyn in (False, True):
                for pp in (True, False):
                    for ones in ("kNone", "kApart", "kJoined"):
                        if cl == 1 and dyn and not pp and ones == "kApart": continue
                        s = base(d, masked=dyn, cl=cl, ping_pong=pp, ones=ones)
                        L.append(case(f"cl={cl} dyn={dyn} pp={pp} {ones}", n=700, d=d, schedule=s, causal=dyn, heads=3,
                                      numerics={"row_sum": "unrounded" if ones == "kNone" else "rounded"}))
        G[f"sched{d}"] = L
    G["sched64b"] = [case(f"nwg2 cl={cl} causal={c}", n=700, d=64, schedule=base(64, masked=c, cl=cl, warpgroups=2), causal=c)
                     for cl in (1, 2) for c in (False, True)]
    G["small"] = [case(f"d={d} dv={dv} causal={c}", n=200, d=d, dv=dv, causal=c) for c in (False, True)
                  for d, dv in ((8, 8), (32, 32), (80, 80), (40, 72), (64, 128), (128, 64), (192, 128), (16, 256), (160, 96))]
    L = []
    for d in (64, 128, 256):
        for nm in ({"reference": "power-of-two"}, {"reference": "stale"}, {"reference": "stale", "row_sum": "unrounded"}, {"out": "float32"}):
            for kind in ("normal", "outlier", "rising", "peaked", "huge", "tied-max"):
                for dt in ("bfloat16", "float16"):
                    L.append(case(f"{nm} {kind} {dt} d{d}", n=200, n_k=333, d=d, heads=1, kind=kind, dtype=dt, numerics=nm, causal=kind != "normal"))
    G["numerics"] = L
    opts = [{"causal": "top-left"}, {"window": (17, 5)}, {"window": (100, None), "causal": True}, {"window": (None, 0)},
            {"softcap": 3.0}, {"softcap": 50.0, "causal": True}, {"scale": 1.7}, {"causal": "top-left", "window": (3, 0)}]
    G["masks64"] = [case(f"{o} {ln}", n=ln[0], n_k=ln[1], d=64, dtype="float16", **o) for o in opts
                    for ln in [(1, 1), (1, 200), (65, 64), (130, 70), (70, 257), (400, 128), (500, 900)]]
    G["masks128"] = [case(f"{o} {ln} cl={cl}", n=ln[0], n_k=ln[1], d=128, schedule=base(128, masked=("causal" in o or "window" in o), cl=cl), **o)
                     for o in opts for ln in [(1, 1), (1, 200), (130, 70), (70, 257), (500, 900), (900, 300)] for cl in (1, 2)]
    G["gqa"] = [case(f"{h}", n=70, n_k=90, d=64, heads=h[0], kv=h[1], batch=2, causal=True) for h in ((6, 6), (6, 2), (7, 1), (71, 1))]
    L = []
    for d in (64, 128, 256):
        for sp in (np.nan, -np.inf):
            for o in ({"causal": True}, {"window": (10, 10)}, {"causal": "top-left", "window": (200, 0)}, {}):
                for nm, cl in (({}, 1), ({}, 2), ({"out": "float32"}, 1)):
                    if sp == np.nan and nm: continue
                    L.append(case(f"{sp} {o} {nm} d{d} cl{cl}", n=260, d=d, special=sp, numerics=nm, heads=1 if d != 128 else 3,
                                  schedule=base(d, masked=bool(o), cl=cl), **o))
    G["specials"] = L
    G["big"] = [case(f"n=4096 d={d} {kind} causal={c}", n=4096, d=d, heads=2, kind=kind, causal=c) for d in (128, 64, 256)
                for kind in ("normal", "rising", "outlier") for c in (False, True)]
    return G


def plan_of(c):
    w = max(c["d"], c["dv"])
    tile = next(t for x, t in TILE_N.items() if w <= x)
    return Plan(numerics=Numerics(**c["numerics"]), format=c["dtype"], tile_n=tile)


def instantiation(c):
    p = plan_of(c)
    s = c["schedule"]
    masked = bool(c["options"].get("causal")) or c["options"].get("window") not in (None, (None, None))
    found = []
    if s is not None:
        found.append(s)
    else:
        for cl in (1, 2):
            found.append(base(c["d"], c["dv"], masked, cl))
    return [tuple(F.forward_instantiation(p, c["d"], c["dv"], c["options"].get("softcap") is not None, x)) for x in found]


def build(i):
    try:
        t = time.time(); k = compile_kernel(i[0], i[1], "sm_90a", i[2])
        return i[1], k.log.registers, k.log.spill_stores, k.log.notes, time.time() - t
    except Exception as e:
        return i[1], -1, -1, (str(e)[-1500:],), 0.0


def prebuild(instantiations):
    todo = list(dict.fromkeys(instantiations))
    t = time.time()
    with ProcessPoolExecutor(max(2, (os.cpu_count() or 4) - 2)) as pool:
        for name, regs, spill, notes, _ in pool.map(build, todo):
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
    q = sample(c["kind"], n=c["n"], n_k=c["n_k"], d=w, heads=b * h, dtype=c["dtype"])[0][..., :c["d"]]
    k, v = sample(c["kind"], n=c["n"], n_k=c["n_k"], d=w, heads=b * hk, dtype=c["dtype"], seed=1)[1:]
    k, v = k[..., :c["d"]], v[..., :c["dv"]]
    q, k, v = (np.ascontiguousarray(x) for x in (q, k, v))
    if c["special"] is not None:
        rows = [i for i in (50, 130, 131, c["n_k"] - 1) if i < c["n_k"]]
        v[0, rows, [3, 7, 20, 21][: len(rows)]] = c["special"]
        k[-1, min(160, c["n_k"] - 1), 5] = c["special"]
    q = q.reshape(b, h, c["n"], -1); k = k.reshape(b, hk, c["n_k"], -1); v = v.reshape(b, hk, c["n_k"], -1)
    g = [cp.asarray(x) for x in (q, k, v)]
    masks = dict(scale=None, causal=False, window=None, softcap=None) | c["options"]
    p = GpuProblem.of(*g, **masks)
    plan = cuflash.plan(*g, numerics=c["numerics"], **c["options"])
    mine = plan_of(c)
    assert (plan.tile_n, plan.numerics) == (mine.tile_n, mine.numerics), plan
    full = np.float32 if plan.numerics.out == "float32" else q.dtype
    out = cp.full((*q.shape[:-1], v.shape[-1]), np.nan, full)
    lse = cp.full(q.shape[:-1], np.nan, np.float32)
    rest = cp.full(out.shape, np.nan, q.dtype) if full != np.float32 else None
    F.forward(p, plan, out, lse, rest, schedule=c["schedule"])
    cp.cuda.Device().synchronize()
    try:
        if c["special"] is not None: raise ValueError("on the CPU")
        want, want_lse = (cp.asnumpy(x) for x in emulation.flash(*g, plan=plan, **c["options"]))
    except Exception as e:
        if c["n"] > 1100: raise
        if c["special"] is None: print("   emulator on CuPy:", repr(e)[:200])
        want, want_lse = emulation.flash(q, k, v, plan=plan, **c["options"])
    bad = []
    for name, got, exp in (("lse", cp.asnumpy(lse), want_lse), ("out", cp.asnumpy(out), want)):
        gw, ew = got.astype(np.float32), exp.astype(np.float32)
        u = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
        differ = (got.view(u) != exp.view(u)) & ~(np.isnan(gw) & np.isnan(ew))
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            rows = sorted({int(i[2]) for i in np.argwhere(differ)})
            bad.append(f"{name} {int(differ.sum())}/{differ.size} first {at}: {gw[at]!r} want {ew[at]!r} rows {rows[:6]}..{rows[-1]} ({len(rows)})")
    o2, l2 = cp.empty_like(out), cp.empty_like(lse)
    F.forward(p, plan, o2, l2, None, schedule=c["schedule"])
    u = {2: cp.uint16, 4: cp.uint32}[out.dtype.itemsize]
    if not (bool((o2.view(u) == out.view(u)).all()) and bool((l2.view(cp.uint32) == lse.view(cp.uint32)).all())):
        bad.append("rerun differs")
    if rest is not None and c["special"] is None:
        from emulation.flash import flash_forward
        from emulation.problem import Problem
        try:
            f = flash_forward(Problem.of(*g, **c["options"]), plan)
            o32 = cp.asnumpy(f.o).reshape(out.shape)
            exp = (o32 - cp.asnumpy(out).astype(np.float32)).astype(q.dtype)
            got = cp.asnumpy(rest)
            n = int((got.view(np.uint16) != exp.view(np.uint16)).sum())
            if n: bad.append(f"rest {n} differ")
        except Exception as e:
            bad.append(f"rest check {e!r}"[:100])
    return bad


def run_group(name):
    n = wrong = 0
    for c in groups()[name]:
        try:
            bad = run_case(c)
        except Exception as e:
            bad = [f"{type(e).__name__} {str(e)[:300]}"]
            if "CUDA" in repr(e) or "cuda" in repr(e).lower():
                print(f"  {name}: {c['name']}: {bad}", flush=True); break
        n += 1
        if bad:
            wrong += 1
            print(f"  {name}: {c['name']}: " + "; ".join(bad), flush=True)
    print(f"{name}: {n - wrong} of {len(groups()[name])} right", flush=True)


def correct(names):
    names = names or list(groups())
    prebuild([i for n in names for c in groups()[n] for i in instantiation(c)])
    from concurrent.futures import ThreadPoolExecutor
    def one(n):
        t = time.time()
        p = subprocess.Popen([sys.executable, __file__, "group", n], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            text, _ = p.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            p.kill()
            text, _ = p.communicate()
            text += f"{n}: TIMEOUT\n"
        if p.returncode: text = text[:3000] + f"{n}: rc {p.returncode}\n"
        print(f"{text[:6000]}   ({n} {time.time() - t:.0f} s)", flush=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, names))


# -- Speed -------------------------------------------------------------------------------
def variants(d, n, causal):
    """name -> (numerics, schedule)."""
    out = {}
    def add(name, nm, **kw):
        s = base(d, masked=causal, **kw)
        if F.shared_bytes(Plan(numerics=Numerics(**nm), tile_n=next(t for x, t in TILE_N.items() if d <= x)), d, d, s) <= F.SHARED_BYTES:
            out[name] = (nm, s)
    un, ro = {"row_sum": "unrounded"}, {}
    if d == 64:
        for cl in (1, 2): add(f"un cl{cl}", un, cl=cl)
        add("apart", ro, ones="kApart"); add("joined", ro, ones="kJoined")
        add("un nopp", un, ping_pong=False); add("un nwg2", un, warpgroups=2); add("apart nwg2", ro, warpgroups=2)
        add("un st4", un, stages=4); add("stale un", {"reference": "stale", "row_sum": "unrounded"}); add("stale", {"reference": "stale"})
        add("un " + ("static" if causal else "dynamic"), un, dynamic=not causal)
    else:
        for cl in (1, 2): add(f"un cl{cl}", un, cl=cl)
        for cl in (1, 2):
            add(f"apart cl{cl}", ro, cl=cl, ones="kApart"); add(f"joined cl{cl}", ro, cl=cl, ones="kJoined")
        add("un cl2 " + ("nopp" if d == 128 else "pp"), un, cl=2, ping_pong=d != 128)
        add("stale cl2", {"reference": "stale"}, cl=2); add("stale un cl2", {"reference": "stale", "row_sum": "unrounded"}, cl=2)
        add("un cl2 " + ("static" if causal else "dynamic"), un, cl=2, dynamic=not causal)
        if d == 128: add("un cl2 q1", un, cl=2, q_stages=1)
    return out


def timing(d, ns):
    import cupy as cp, torch
    import torch.nn.functional as TF
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import cuflash
    from cuflash.problem import GpuProblem
    try:
        import fa3_fwd_interface as fa3
    except Exception as e:
        fa3 = None; print("no FA3:", repr(e)[:100])
    for n in ns:
        for causal in (False, True):
            b, h = 16384 // n, 2048 // d
            q, k, v = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            g = [cp.from_dlpack(x) for x in (q, k, v)]
            out, lse = cp.empty(q.shape, g[0].dtype), cp.empty(q.shape[:3], np.float32)
            p = GpuProblem.of(*g, causal=causal, scale=None, window=None, softcap=None)
            fns = {}
            for name, (nm, s) in variants(d, n, causal).items():
                plan = cuflash.plan(*g, causal=causal, numerics=nm)
                fns[name] = lambda plan=plan, s=s: F.forward(p, plan, out, lse, None, schedule=s)
            def cudnn():
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): TF.scaled_dot_product_attention(q, k, v, is_causal=causal)
            fns["cudnn"] = cudnn
            if fa3 is not None:
                q3, k3, v3 = (z.transpose(1, 2).contiguous() for z in (q, k, v))
                fns["FA3"] = lambda: fa3.flash_attn_func(q3, k3, v3, causal=causal)
            flop = 4 * b * h * n * n * d / (2 if causal else 1)
            reps = max(10, int(0.04 / (flop / 600e12)))
            stream = cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
            times = {x: [] for x in fns}
            with stream:
                for r in range(4):
                    for name, f in fns.items():
                        a, z = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        try:
                            for _ in range(reps // 3): f()
                            a.record()
                            for _ in range(reps): f()
                            z.record(); torch.cuda.synchronize()
                            if r: times[name].append(flop * reps / a.elapsed_time(z) / 1e9)
                        except Exception as e:
                            print(name, repr(e)[:200]); raise
            med = {x: statistics.median(t) for x, t in times.items()}
            peer = max(med.get("FA3", 0), med["cudnn"])
            print(f"D{d} N{n} {'causal' if causal else 'full'}: " + "  ".join(
                f"{x} {m:.0f}" + ("" if x in ("FA3", "cudnn") else f" ({m / peer:.3f})") for x, m in med.items()), flush=True)


def speed(ds):
    jobs = []
    for d in ds:
        for causal in (False, True):
            for nm, s in variants(d, 4096, causal).values():
                p = Plan(numerics=Numerics(**nm), format="bfloat16", tile_n=next(t for x, t in TILE_N.items() if d <= x))
                jobs.append(tuple(F.forward_instantiation(p, d, d, False, s)))
    prebuild(jobs)
    for d in ds:
        try:
            subprocess.run([sys.executable, __file__, "timing", str(d)], timeout=170)
        except subprocess.TimeoutExpired:
            print(f"D{d}: TIMEOUT", flush=True)


if __name__ == "__main__":
    what, rest = sys.argv[1], sys.argv[2:]
    if what == "correct": correct(rest)
    elif what == "group": run_group(rest[0])
    elif what == "time": speed([int(x) for x in rest] or [128, 64, 256])
    elif what == "timing": timing(int(rest[0]), (1024, 4096, 16384))
    elif what == "build": prebuild([i for n in (rest or groups()) for c in groups()[n] for i in instantiation(c)])
