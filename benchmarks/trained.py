"""Train with the command that users type; keep the metrics in results/.

    python benchmarks/trained.py NAME [--keep RUN] -- cifar10_scratch --budget 10m
    python benchmarks/trained.py pets_finetune_5m -- pets/ --init WEIGHTS --budget 5m

Runs `patchword train ARGUMENTS --json`, one seed, in a temporary directory or in RUN, which is kept, and writes
results/NAME.json. The validation set selects the step; the test set is measured once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import write_result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--keep")
    parser.add_argument("arguments", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        content = measure(args.arguments, Path(args.keep or f"{folder}/run"))
    print(write_result(args.name, content))


def measure(arguments: list[str], run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "patchword", "train", *arguments, "--out", str(run), "--json"]
    start = time.perf_counter()
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    summary = json.loads(process.stdout)
    config = json.loads((run / "config.json").read_text())["config"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(row["images_per_second"] for row in rows if row["kind"] == "train")
    public = [a if not Path(a).is_absolute() else Path(a).name for a in arguments]
    content = {"command": f"patchword train {' '.join(public)}", "seeds": 1, "command_seconds": round(seconds, 1)}
    content |= {split: summary[split] for split in ("val", "test") if split in summary}
    content |= {"steps": summary["steps"], "images_per_second": speeds[len(speeds) // 2], "config": config}
    content["config"]["data"]["source"] = Path(config["data"]["source"]).name
    content["config"]["init"] = Path(config["init"]).name if config["init"] else None
    keys = ("seconds", "epoch", "top1")
    content["val_curve"] = [{key: row[key] for key in keys} for row in rows if row["kind"] == "val"]
    return content


if __name__ == "__main__":
    main()
