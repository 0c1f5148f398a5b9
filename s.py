"""static schedule: python tune_tmp.py D tile_n [m]"""
import sys,re,subprocess,dataclasses,os,collections
from cuflash import sm80_forward as f, planner
from cuflash.compiler import compile_kernel
from emulation.plan import Plan, Numerics
D,n,m=int(sys.argv[1]),int(sys.argv[2]),int(sys.argv[3]) if len(sys.argv)>3 else 0
w=int(sys.argv[4]) if m else 0
if m: f.BLOCK_M={64:(m,w),256:(m,w)}
inst=f.forward_instantiation(Plan(format="bfloat16",tile_n=n),D,D,softcap=False)
path=compile_kernel(inst[0],inst[1],"sm_90",inst[2])
path=getattr(path,"path",path)
nv=[p for p in __import__("glob").glob("/work/main/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvdisasm")][0]
t=subprocess.run([nv,"-hex","-c",str(path)],capture_output=True,text=True).stdout
rows=[];lines=t.splitlines()
i=0
labels={}
for k,l in enumerate(lines):
    mm=re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*/\* (0x[0-9a-f]{16}) \*/",l)
    lab=re.match(r"(\.L_x_\d+):",l)
    if lab: labels[lab.group(1)]=len(rows)
    if mm:
        hi=re.search(r"/\* (0x[0-9a-f]{16}) \*/",lines[k+1]).group(1)
        h=int(hi,16); c=h>>41
        stall=c&15; yld=c>>4&1; wr=c>>5&7; rd=c>>8&7; wait=c>>11&63
        rows.append((int(mm.group(1),16),mm.group(2),stall,yld,wr,rd,wait))
open(f"/tmp/sass_{D}_{n}.txt","w").write("\n".join(f"{a:05x} st{s:2d} y{y} w{w if w<7 else '-'} r{r if r<7 else '-'} q{q:06b}  {x}" for a,x,s,y,w,r,q in rows))
# find loops: backward branches
for idx,(a,x,*_) in enumerate(rows):
    b=re.search(r"BRA.*?`\((\.L_x_\d+)\)",x)
    if b and labels.get(b.group(1),1e9)<=idx:
        lo=labels[b.group(1)]; body=rows[lo:idx+1]
        c=collections.Counter(re.sub(r"^@!?U?P\w+ ","",r[1]).split()[0].split(".")[0] for r in body)
        if sum(v for k2,v in c.items() if k2=="HMMA")>50:
            print("loop",hex(rows[lo][0]),hex(a),"instr",len(body),"stallsum",sum(r[2] for r in body),c.most_common(24))
            by=collections.Counter()
            for r in body: by[re.sub(r"^@!?U?P\w+ ","",r[1]).split()[0].split(".")[0]]+=r[2]
            print("   stalls",by.most_common(12))
