"""Run a study with the command that users type; keep its rows in results/.

    python benchmarks/studied.py NAME OUT [--budget 20m] [--seeds 1] [--recipe RECIPE]

Runs `patchword study NAME` in the directory OUT, resumes it if it was stopped, and writes results/study_NAME.json,
which docs/make_figures.py draws.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from harness import write_result


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
    subprocess.run([sys.executable, "-m", "patchword", *command, "--out", str(args.out)], check=True)
    plan = json.loads((args.out / "plan.json").read_text())
    rows = json.loads((args.out / "results.json").read_text())["rows"]
    content = {"command": f"patchword {' '.join(command)}", "steps": plan["steps"], "seeds": args.seeds, "rows": rows}
    print(write_result(f"study_{args.name.replace('-', '_')}", content))


if __name__ == "__main__":
    main()
