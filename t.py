import sys,os,cupy,torch,json
from bench import sm80_forward as b
from cuflash import sm80_forward as f, planner
V=json.loads(sys.argv[2]) # {"64":[[96,256,2],...]}
def setv(n,m,w):
    f.BLOCK_M={64:(m,w),256:(m,w)}; planner.TILE_N={"sm80":{64:n,128:n,192:n,256:n}}
if sys.argv[1]=="time":
    Ns=json.loads(sys.argv[3])
    for D in V:
        for N in Ns:
            for causal in (False,True):
                r={}
                for n,m,w in V[D]:
                    setv(n,m,w)
                    try:
                        x=b.measure(int(D),N,causal,3); r[f"{n}/{m}/{w}"]=round(x["cuflash"]["median"],1); fa=x["fa2"]["median"]
                    except Exception as e: r[f"{n}/{m}/{w}"]=str(e)[:80]
                print(D,N,causal,r,"fa2",round(fa,1),flush=True)
elif sys.argv[1]=="ncu":
    import cuflash
    for D in V:
        for n,m,w in V[D]:
            setv(n,m,w)
            q,k,v=(cupy.from_dlpack(torch.randn((4,2048//int(D),4096,int(D)),device="cuda",dtype=torch.bfloat16)) for _ in range(3))
            cuflash.attention(q,k,v)
    cupy.cuda.Device().synchronize()
elif sys.argv[1]=="check":
    from emulation.flash import flash
    import numpy as np, ml_dtypes, cuflash
    rng=np.random.default_rng(1)
    bad=0
    for D in V:
        for n,m,w in V[D]:
            setv(n,m,w); D=int(D)
            for (nq,nk,causal,win,nan) in ((300,300,False,None,0),(300,300,True,None,0),(700,450,True,None,1),(513,1000,False,(100,30),1),(65,200,True,None,0),(1,333,False,None,0)):
                x=[rng.standard_normal((1,2,s,D)).astype(ml_dtypes.bfloat16) for s in (nq,nk,nk)]
                if nan: x[2][0,0,37,3]=np.nan; x[2][0,1,200,5]=np.inf
                c=[cupy.asarray(t.view(np.uint16)).view(ml_dtypes.bfloat16) if 0 else cupy.asarray(t) for t in x]
                p=cuflash.plan(*c,causal=causal,window=win)
                o,l=cuflash.attention(*c,causal=causal,window=win,return_lse=True)
                eo,el=flash(*x,plan=p,causal=causal,window=win)
                o=cupy.asnumpy(o); l=cupy.asnumpy(l)
                same=((o.view(np.uint16)==eo.view(np.uint16))|(np.isnan(o.astype(np.float32))&np.isnan(eo.astype(np.float32)))).all() and ((l==el)).all()
                if not same: bad+=1; print("DIFF",D,n,m,w,nq,nk,causal,win, (o.view(np.uint16)!=eo.view(np.uint16)).sum(), (l!=el).sum(),flush=True)
    print("check done, bad",bad)
