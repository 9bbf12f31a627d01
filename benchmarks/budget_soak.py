"""Runs with budgets between 30 and 120 seconds: how far from the budget each ends, and how good its model is.

    .venv/bin/python benchmarks/budget_soak.py --runs 10         # about 13 minutes

A small ViT on digits, as a real command (start-up counts). In turn a run has the machine for itself, shares it with
busy processes for the middle third, or is killed half-way and resumed at once.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import write_result

import patchword as pw
from patchword.core.io import read_json

KINDS = ("quiet", "throttled", "killed")
LEAST, MOST = 30.0, 120.0  # seconds


def command(*words: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "patchword", *words], stderr=subprocess.DEVNULL)


def seconds_of(kind: str, budget: float, run: Path) -> float:
    """How long the processes of a run lived."""
    begin = time.monotonic()
    process = command("train", "quickstart", "--budget", f"{budget:.1f}", "--out", str(run))
    if kind == "throttled":
        throttle(budget / 3)
    if kind == "killed":
        time.sleep(budget / 2)
        process.kill()
        process.wait()
        process = command("resume", str(run))
    assert process.wait() == 0, f"{run} failed"
    return time.monotonic() - begin


def throttle(third: float) -> None:
    time.sleep(third)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    time.sleep(third)
    for process in busy:
        process.kill()
        process.wait()


def measure(kind: str, budget: float, run: Path) -> dict[str, Any]:
    seconds = seconds_of(kind, budget, run)
    pw.Classifier.load(str(run))
    top1 = read_json(run / "model.json")["provenance"]["metrics"]["test"]["top1"]
    print(f"{kind:>10} {budget:8.1f} {seconds:8.1f} {seconds - budget:+8.1f} {top1:8.1%}", flush=True)
    return {"kind": kind, "budget": budget, "seconds": round(seconds, 2), "top1": top1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    print(f"{'run':>10} {'budget':>8} {'seconds':>8} {'off':>8} {'top-1':>8}")
    with tempfile.TemporaryDirectory() as name:
        rows = [
            measure(KINDS[i % 3], round(chance.uniform(LEAST, MOST), 1), Path(name) / f"run{i}")
            for i in range(args.runs)
        ]
    worst = max(abs(row["seconds"] - row["budget"]) for row in rows)
    print(f"{len(rows)} runs; the farthest from its budget ended {worst:.1f} s off")
    print(write_result("budget_soak", {"runs": rows, "worst": round(worst, 2), "seed": args.seed}))


if __name__ == "__main__":
    main()
