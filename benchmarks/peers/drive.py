"""Runs every system of one bench in interleaved, shuffled rounds; a raw-SQLite and a CPU calibration before and after each run.
usage: drive.py B|C|D|E|F [--rounds 5] [--only SUBSTR,SUBSTR] [--out FILE]      (source env.sh first; pg.sh start for the pg systems)"""
import argparse, json, os, random, subprocess, sys, time
from benchlib import *

ap = argparse.ArgumentParser()
ap.add_argument("bench")
ap.add_argument("--rounds", type=int, default=5)
ap.add_argument("--only", default="")
ap.add_argument("--skip", default="")
ap.add_argument("--out", default="")
A = ap.parse_args()
OUT = A.out or os.path.join(RESULTS, A.bench.lower() + ".jsonl")
P, PT, PS = (os.environ[k] for k in ("PY", "PY_TEMPORAL", "PY_SMALL"))
PO = os.environ.get("PY_PERDURE", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".venv", "bin", "python"))
HERE = os.path.dirname(os.path.abspath(__file__))

# label: (python, argv, timeout) ; a "prep" entry runs first, is killed with SIGKILL when it has printed RESULT, then argv runs
B = {
    "raw-stdlib": (P, "sys_raw.py seq", 60), "raw-apsw": (P, "sys_raw.py seq --lib apsw", 60),
    "raw-intent-two-commits": (P, "sys_raw.py seq --intent two", 60), "raw-intent-merged": (P, "sys_raw.py seq --intent merged", 60),
    "dbos-sqlite": (P, "sys_dbos.py seq", 120), "dbos-sqlite-async": (P, "sys_dbos.py seqa", 120),
    "dbos-sqlite-walfile": (P, "sys_dbos.py seq --journal WAL", 120), "dbos-pg": (P, "sys_dbos.py seq --db pg", 120),
    "langgraph-sqlite-sync": (P, "sys_langgraph.py seq --dur sync", 120), "langgraph-sqlite-async": (P, "sys_langgraph.py seq --dur async", 120),
    "langgraph-sqlite-exit": (P, "sys_langgraph.py seq --dur exit", 120), "langgraph-memory": (P, "sys_langgraph.py seq --cp memory", 120),
    "langgraph-none": (P, "sys_langgraph.py seq --cp none", 120),
    "langgraph-func-sqlite-sync": (P, "sys_langgraph.py func --dur sync", 120), "langgraph-func-sqlite-async": (P, "sys_langgraph.py func --dur async", 120),
    "langgraph-pg-sync": (P, "sys_langgraph.py seq --dur sync --cp pg", 120),
    "restate": (P, "sys_restate.py seq", 120), "absurd-pg": (P, "sys_absurd.py seq", 120),
    "temporal-file-activity(200)": (PT, "sys_temporal.py seq --n 200", 120), "temporal-mem-activity": (PT, "sys_temporal.py seq --mem", 120),
    "temporal-file-local": (PT, "sys_temporal.py seqlocal", 120),
    "perdure": (PO, "sys_perdure.py seq", 60), "perdure-once": (PO, "sys_perdure.py once", 60),
    "unhinged": (PS, "sys_small.py seq", 60), "mundane": (PS, "sys_small.py seq --lib mundane", 60),
}
C = {
    "raw-stdlib": (P, "sys_raw.py conc", 60), "raw-apsw": (P, "sys_raw.py conc --lib apsw", 60),
    "dbos-sqlite": (P, "sys_dbos.py conc", 240), "dbos-sqlite-queue": (P, "sys_dbos.py queue", 240),
    "dbos-sqlite-walfile": (P, "sys_dbos.py conc --journal WAL", 240),
    "dbos-pg": (P, "sys_dbos.py conc --db pg", 240), "dbos-pg-queue": (P, "sys_dbos.py queue --db pg", 240),
    "langgraph-sqlite-sync": (P, "sys_langgraph.py conc --dur sync", 240), "langgraph-sqlite-async": (P, "sys_langgraph.py conc --dur async", 240),
    "langgraph-memory": (P, "sys_langgraph.py conc --cp memory", 240), "langgraph-pg-sync": (P, "sys_langgraph.py conc --cp pg", 240),
    "restate": (P, "sys_restate.py conc", 240), "absurd-pg": (P, "sys_absurd.py conc", 240),
    "temporal-file(100)": (PT, "sys_temporal.py conc --w 100", 240), "temporal-mem": (PT, "sys_temporal.py conc --mem", 240),
    "perdure": (PO, "sys_perdure.py conc", 60), "unhinged": (PS, "sys_small.py conc", 120),
}
D = {}
for n in (1000, 10000):
    D[f"raw-stdlib/{n}"] = (P, f"sys_raw.py resume --n {n}", 60)
    for db in ("sqlite", "pg"):
        D[f"dbos-{db}/{n}"] = (P, f"sys_dbos.py resume --db {db} --n {n} --dir dr_dbos", 300, f"sys_dbos.py hist --db {db} --n {n} --dir dr_dbos")
    D[f"langgraph-graph/{n}"] = (P, f"sys_langgraph.py resume --n {n} --dir dr_lg", 300, f"sys_langgraph.py hist --n {n} --dir dr_lg")
    D[f"langgraph-func/{n}"] = (P, f"sys_langgraph.py fresume --n {n} --dir dr_lg", 120, f"sys_langgraph.py fhist --n {n} --dir dr_lg")
    D[f"restate/{n}"] = (P, f"sys_restate.py resume --n {n}", 300)
    D[f"restate-server-too/{n}"] = (P, f"sys_restate.py resume_server --n {n}", 300)
    D[f"absurd/{n}"] = (P, f"sys_absurd.py resume --n {n}", 300, f"sys_absurd.py hist --n {n} --claim 600")
for n in (1000, 10000):
    for lib in ("unhinged", "mundane"):
        D[f"{lib}/{n}"] = (PS, f"sys_small.py resume --lib {lib} --n {n} --dir dr_small", 120, f"sys_small.py hist --lib {lib} --n {n} --dir dr_small --claim 600")
D["temporal-mem/1000"] = (PT, "sys_temporal.py resume --mem --n 1000", 300)
D["temporal-mem/5000"] = (PT, "sys_temporal.py resume --mem --n 5000", 400)
E_ = {
    "perdure": (PO, "sys_perdure.py start", 60), "raw-stdlib": (P, "sys_raw.py start", 60), "unhinged": (PS, "sys_small.py seq --n 1", 60),
    "dbos-sqlite": (P, "sys_dbos.py start", 60), "langgraph-sqlite": (P, "sys_langgraph.py start", 60), "absurd-pg": (P, "sys_absurd.py start", 60),
    "restate": (P, "sys_restate.py start", 60), "temporal": (PT, "sys_temporal.py start", 60), 
}
F = {
    "langgraph-sqlite-sync/500": (P, "sys_langgraph.py thread --n 500", 300), "langgraph-sqlite-sync/2000": (P, "sys_langgraph.py thread --n 2000", 590),
    "langgraph-sqlite-sync-delta/500": (P, "sys_langgraph.py thread --delta --n 500 --dir lg_delta", 300), "langgraph-sqlite-sync-delta/2000": (P, "sys_langgraph.py thread --delta --n 2000 --dir lg_delta", 590),
    "raw-stdlib/500": (P, "sys_raw.py thread --n 500", 60), "raw-stdlib/2000": (P, "sys_raw.py thread --n 2000", 60),
}
T = {"B": B, "C": C, "D": D, "E": E_, "F": F}[A.bench]
names = [k for k in T if (not A.only or any(s in k for s in A.only.split(","))) and not (A.skip and any(s in k for s in A.skip.split(",")))]


def run(py, argv, timeout, prep=None):
    cmd = lambda a: [py, os.path.join(HERE, a.split()[0])] + a.split()[1:]
    if prep:
        p = subprocess.Popen(cmd(prep), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = p.stdout.readline()
        while line and not line.startswith("RESULT"):
            line = p.stdout.readline()
        p.kill()
        p.wait()
    try:
        o = subprocess.run(cmd(argv), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"timeout {timeout}s"}
    for l in o.stdout.splitlines():
        if l.startswith("RESULT "):
            r = json.loads(l[7:])
            if prep and line.startswith("RESULT"):
                r["setup"] = json.loads(line[7:])
            return r
    return {"error": (o.stderr or o.stdout)[-600:]}


with open(OUT, "a") as out:
    for rnd in range(A.rounds):
        order = names[:]
        random.Random(rnd * 7 + 1).shuffle(order)
        for k in order:
            c0, u0, s0 = calibrate(0.4), calibrate_cpu(), steal()
            r = run(*T[k])
            c1, u1, s1 = calibrate(0.4), calibrate_cpu(), steal()
            r.update(label=k, round=rnd, calib=round((c0 + c1) / 2, 1), calib_before=round(c0, 1), calib_after=round(c1, 1), cpu_mips=round((u0 + u1) / 2, 2),
                     steal=round((s1[0] - s0[0]) / max(1, s1[1] - s0[1]), 3), at=time.strftime("%H:%M:%S"))
            out.write(json.dumps(r, sort_keys=True) + "\n")
            out.flush()
            print(rnd, k, r.get("per_s") or r.get("from_process_start_s") or r.get("first_result_s") or r.get("error"), "calib", r["calib"], flush=True)
