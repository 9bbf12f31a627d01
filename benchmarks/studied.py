"""Run a study with the command that users type; keep its rows in results/.

    python benchmarks/studied.py NAME OUT [--budget 20m] [--seeds 1] [--recipe RECIPE]

Runs `patchword study NAME` in the directory OUT, resumes it if it was stopped, and writes results/study_NAME.json,
which docs/make_figures.py draws: the rows of all runs, and a summary of each cell over its seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import write_result

MEANS = ("value", "steps", "seconds", "parameters", "tflop")


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize each cell over its seeds: mean, minimum and maximum of the accuracy, means of the rest."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(row)
    summaries = []
    for runs in cells.values():
        summary = {key: runs[0][key] for key in ("cell", "series", "x")} | {"diverged": 0}
        accuracies = [run["accuracy"] for run in runs if run["accuracy"] is not None]
        summary["diverged"] = sum("diverged" in run for run in runs)
        if accuracies:
            summary |= {"accuracy": statistics.mean(accuracies), "min": min(accuracies), "max": max(accuracies)}
        summary |= {key: statistics.mean(run[key] for run in runs) for key in MEANS if all(key in run for run in runs)}
        tables = [run["details"]["by_length"] for run in runs if "by_length" in run.get("details", {})]
        if tables:
            summary["by_length"] = {n: statistics.mean(table[n] for table in tables) for n in tables[0]}
        summaries.append(summary)
    return summaries


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", default="20m")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--recipe")
    args = parser.parse_args()
    command = ["study", args.name, "--budget", args.budget, "--seeds", str(args.seeds)]
    if args.recipe:
        command += ["--recipe", args.recipe]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "patchword", *command, "--out", str(args.out)], check=True)
    results = json.loads((args.out / "results.json").read_text())
    content = {"command": f"patchword {' '.join(command)}", "seconds": time.monotonic() - started, "seeds": args.seeds}
    if "chapters" in results:  # several studies: their rows are stored when each is run by itself
        content["chapters"] = {name: summarize(rows) for name, rows in results["chapters"].items()}
    else:
        plan, rows = json.loads((args.out / "plan.json").read_text()), results["rows"]
        content |= {"steps": plan["steps"], "cells": summarize(rows), "rows": rows}
    print(write_result(f"study_{args.name.replace('-', '_')}", content))


if __name__ == "__main__":
    main()
