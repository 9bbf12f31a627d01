"""Runs with time budgets between 30 and 120 seconds: how close to the budget each ends, and how good its model is.

    .venv/bin/python benchmarks/budget_soak.py --runs 10         # about 13 minutes

A small ViT on digits, run as a command (startup counts). The runs alternate: alone on the machine, with busy processes
during the middle third, killed at half of the budget and resumed at once, with slow evaluations (3 ms more per image),
and with a slow disk (a save takes about a second). Fails if a run ends more than 5 seconds after its budget, the
guarantee on an otherwise idle machine.
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

MIN_BUDGET, MAX_BUDGET = 30.0, 120.0  # seconds
TOLERANCE = 5.0  # seconds
SLOW_EVALUATION = """
from patchword.training import run
evaluate_split = run.evaluate_split
def slow_evaluate_split(model, loader, *arguments, **options):
    time.sleep(0.003 * len(loader.source))
    return evaluate_split(model, loader, *arguments, **options)
run.evaluate_split = slow_evaluate_split
"""
SLOW_DISK = """
import os
sync = os.fsync
os.fsync = lambda handle: (time.sleep(0.1), sync(handle))
"""
KINDS = {"quiet": "", "throttled": "", "killed": "", "slow evaluation": SLOW_EVALUATION, "slow disk": SLOW_DISK}


def start_command(kind: str, *arguments: str) -> subprocess.Popen:
    """Start `patchword ARGUMENTS` with the slowdown of this kind of run."""
    code = (
        f"import time, patchword.cli.commands.train_command\n{KINDS[kind]}\nfrom patchword.cli.main import main; main()"
    )
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


def time_run(kind: str, budget: float, run: Path) -> float:
    """Return the wall-clock seconds of all processes of a run."""
    start = time.monotonic()
    process = start_command(kind, "train", "quickstart", "--budget", f"{budget:.1f}", "--out", str(run))
    if kind == "throttled":
        throttle(budget / 3)
    if kind == "killed":
        time.sleep(budget / 2)
        process.kill()
        process.wait()
        process = start_command(kind, "resume", str(run))
    if code := process.wait():
        sys.exit(f"The {kind} run failed with code {code}; its output is above.")
    return time.monotonic() - start


def throttle(third: float) -> None:
    """Keep all cores busy for the second of three periods."""
    time.sleep(third)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    time.sleep(third)
    for process in busy:
        process.kill()
        process.wait()


def measure(kind: str, budget: float, run: Path) -> dict[str, Any]:
    seconds = time_run(kind, budget, run)
    pw.Classifier.load(str(run))
    top1 = read_json(run / "model.json")["provenance"]["metrics"]["test"]["top1"]
    print(f"{kind:>15} {budget:8.1f} {seconds:8.1f} {seconds - budget:+8.1f} {top1:8.1%}", flush=True)
    return {"kind": kind, "budget": budget, "seconds": round(seconds, 2), "top1": top1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    print(f"{'run':>15} {'budget':>8} {'seconds':>8} {'off':>8} {'top-1':>8}")
    with tempfile.TemporaryDirectory() as name:
        rows = [
            measure(list(KINDS)[i % len(KINDS)], round(rng.uniform(MIN_BUDGET, MAX_BUDGET), 1), Path(name) / f"run{i}")
            for i in range(args.runs)
        ]
    worst = max(abs(row["seconds"] - row["budget"]) for row in rows)
    print(f"{len(rows)} runs; the largest deviation from a budget is {worst:.1f} s")
    print(write_result("budget_soak", {"runs": rows, "worst": round(worst, 2), "seed": args.seed}))
    late = [row for row in rows if row["seconds"] > row["budget"] + TOLERANCE]
    sys.exit(f"{len(late)} of {len(rows)} runs ended more than {TOLERANCE:g} s late" if late else 0)


if __name__ == "__main__":
    main()
