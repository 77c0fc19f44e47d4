"""Perdure on the peers' work. usage: sys_perdure.py seq|once|conc|start|effect|effect_resume [--n N] [--w W] [--dir D] [--file F]

seq: N durable steps one after another in one run. once: N effects of class once, one after another. conc: W runs of 5
steps at once. start: process start to the first settlement. effect: a run whose middle effect touches FILE and is then
held, to be killed; effect_resume: the same store again, in a new process.
"""
import time
T_PROC = time.perf_counter()
import argparse, asyncio, os, sys
from benchlib import DATA, SMALL, dir_mb, emit, fresh_dir, self_usage
import perdure as p
from perdure.providers.scripted import Scripted, call, calls, say

ap = argparse.ArgumentParser()
ap.add_argument("bench")
ap.add_argument("--n", type=int, default=1000)
ap.add_argument("--w", type=int, default=1000)
ap.add_argument("--steps", type=int, default=5)
ap.add_argument("--dir", default="perdure")
ap.add_argument("--file", default="")
A = ap.parse_args()
KEEP = A.bench == "effect_resume"
d = os.path.join(DATA, A.dir) if KEEP else fresh_dir(A.dir)
U0 = self_usage()


async def one(i: int) -> dict:
    return {**SMALL, "n": i}


@p.tool(steps=True)
async def steps(ctx: p.ToolContext, n: int) -> int:
    for i in range(n):
        await ctx.step(f"step{i}", one, i)
    return n


@p.tool
async def touch(i: int) -> dict:
    return {**SMALL, "n": i}


@p.tool
async def effect(path: str) -> str:
    with open(path, "a") as f:
        f.write(f"effect pid={os.getpid()}\n")
        f.flush()
        os.fsync(f.fileno())
    while not os.path.exists(path + ".go"):
        await asyncio.sleep(0.05)
    return "done"


SCRIPTS = {
    "seq": [call("steps", n=A.n), say("done")],
    "once": [calls(*[call("touch", i=i) for i in range(A.n)]), say("done")],
    "conc": [call("steps", n=A.steps), say("done")],
    "start": [say("done")],
    "effect": [call("effect", path=A.file), say("done")],
}
SCRIPTS["effect_resume"] = SCRIPTS["effect"]
policy = p.Policy(max_turns=10, max_tool_calls=100_000, concurrency=1)
agent = p.Agent(A.bench.split("_")[0], tools=[steps, touch, effect], policy=policy, model=Scripted(SCRIPTS[A.bench]))


async def main():
    runs = A.w if A.bench == "conc" else 1
    async with p.open(os.path.join(d, "work.db"), agents=[agent], lease="1s" if "effect" in A.bench else "10s") as app:
        t0 = time.perf_counter()
        key = "k" if "effect" in A.bench else None
        receipts = await asyncio.gather(*[app.submit(agent, "go", key=key) for _ in range(runs)])
        if KEEP:
            while not (unknown := await app.effects(status="unknown")):
                await asyncio.sleep(0.05)
            print("unknown:", unknown[0].operation, unknown[0].reason, file=sys.stderr)
            return time.perf_counter() - t0
        await asyncio.gather(*[app.settlement(r) for r in receipts])
        return time.perf_counter() - t0


t = asyncio.run(main())
u = self_usage()
ops = {"seq": A.n, "once": A.n, "conc": A.w}.get(A.bench, 1)
more = {"steps_per_s": round(A.w * A.steps / t, 1), "w": A.w} if A.bench == "conc" else {}
if A.bench == "start":
    more["first_result_s"] = round(time.perf_counter() - T_PROC, 4)
emit(system="perdure", bench=A.bench, s=round(t, 4), ops=ops, per_s=round(ops / t, 1), cpu_s=round(u["cpu_s"] - U0["cpu_s"], 3),
     rss_mb=round(u["rss_mb"], 1), db_mb=round(dir_mb(d), 2), **more)
sys.stdout.flush()
os._exit(0)
