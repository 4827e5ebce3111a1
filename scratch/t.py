import sys; sys.path.insert(0,"benchmarks"); import as_script, torch
from sageattention3.kernels.launch import sm120_fp4 as s, int8_quantise as i8
from sageattention3.kernels.launch.fp4_quantise import smoothed_away
from torch.profiler import profile, ProfilerActivity as A
B=lambda k: torch.empty(k,dtype=torch.uint8,device="cuda")
src,z=B(1<<30),B(1<<28)
for d in (128,64):
  for n in (4096,16384):
    q,k,v=(torch.randn(2,24,n,d,device="cuda",dtype=torch.bfloat16) for _ in range(3))
    dl=B(64<<20); lay=i8.readable(q,k,v)
    def go():
        z.zero_(); i8.quantise(*lay,live_keys=None,scale=.1)
        for p in ("fp4","int8_fp4"):
            z.zero_(); x=s.pack(q,k,v,p,None,.1,masked=False,smooth_q=p=="fp4")
            if p=="fp4": smoothed_away(x,24,k,None,dl,heads=range(1),q_blocks=range(x.layout.q_blocks),causal=False)
        B(1<<30).copy_(src)
    go(); torch.cuda.synchronize()
    with profile(activities=[A.CUDA]) as p:
        for _ in range(10): go()
        torch.cuda.synchronize()
    print(d,n,*[(e.key[-60:],e.count,round(e.device_time_total/e.count,1)) for e in p.key_averages()],sep="\n")
