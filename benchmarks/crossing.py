"""Accuracy against minutes: our ViT, the hybrid, a ResNet of equal cost and the usual ViT recipe, on the same machine.

Two more series show the previous recipe, whose convolutions did the work, and the ResNet with that recipe's
augmentation and without progressive resizing.

    python benchmarks/crossing.py [--minutes 5 10 20 30] [--seed 0]

Each point is a separate run, `patchword train RECIPE --budget Nm`, so that its schedule fits exactly that budget. Every
run has its own core, and as many run in parallel as there are cores. First the ResNet is selected, by validation after
five minutes, among four whose steps cost about as much as ours: 10 minutes on two cores; then the points are measured:
195. Points that are already in results/crossing.json are skipped, so the benchmark can be interrupted, but all points
must come from one machine type. Writes results/crossing.json; docs/make_figures.py
draws it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from harness import COMMIT, RESULTS, machine, write_result

HERE = Path(__file__).parent
RESNET = str(HERE / "recipes/resnet.py")
RESNETS = {
    "6, 6, 6 units, 16 channels": ["--model.layers", "6", "6", "6"],
    "2, 2, 2 units, 32 channels": ["--model.layers", "2", "2", "2", "--model.width-factor", "2"],
    "1, 1, 1 units, 48 channels": ["--model.layers", "1", "1", "1", "--model.width-factor", "3"],
    "1, 1, 1, 1 units, 48 channels": ["--model.layers", "1", "1", "1", "1", "--model.width-factor", "3"],
}
# As in six_convolutions.py.
PREVIOUS_SETTINGS = ["--progressive-resize.scale", "1", "--augment.cutout", "0.25", "--eval-every", "1"]
SERIES = {
    "our ViT": ["cifar10_scratch"],
    "six convolutions first": [str(HERE / "recipes/six_convolutions.py")],
    "ResNet": [RESNET],  # with the selected layers and width
    "ResNet at one size": [RESNET, *RESNETS["2, 2, 2 units, 32 channels"], *PREVIOUS_SETTINGS],
    "our hybrid": [str(HERE / "recipes/hybrid.py")],
    "usual ViT": [str(HERE / "recipes/usual_vit.py")],
}
SELECTION_MINUTES = 5
RUNNING: list[subprocess.Popen] = []  # every run that was started, to be killed if one fails

RunKey = tuple[str, int, int]  # name, minutes, seed


def measure(arguments: list[str], minutes: int, seed: int) -> dict[str, Any]:
    """Validation and test accuracy of a run; the test set is measured once, at its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "train", *arguments, "--budget", f"{minutes}m"]
        command += ["--seed", str(seed), "--num-threads", "1", "--out", f"{folder}/run", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            RUNNING.append(process)
            output, log = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(command[1:])} failed with code {process.returncode}.\n{log[-5000:]}")
        config = json.loads(Path(folder, "run/config.json").read_text())["config"]
    summary = json.loads(output)
    accuracy = {"val": summary["val"]["top1"], "test": summary["test"]["top1"]}
    return {**accuracy, "steps": summary["steps"], "seconds": summary["seconds"], "precision": config["precision"]}


def run_in_parallel(jobs: dict[RunKey, list[str]], record: Callable[[RunKey, dict[str, Any]], None]) -> None:
    """Run each job on its own core, as many in parallel as there are cores; record results as they finish."""
    free_cores = SimpleQueue[int]()
    for core in os.sched_getaffinity(0):
        free_cores.put(core)

    def pin_to_core() -> None:
        os.sched_setaffinity(0, {free_cores.get()})  # this thread and the processes it starts

    with ThreadPoolExecutor(free_cores.qsize(), initializer=pin_to_core) as executor:
        pending = {executor.submit(measure, arguments, *key[1:]): key for key, arguments in jobs.items()}
        try:
            for future in as_completed(pending):
                record(pending[future], future.result())
        except BaseException:  # the others would run for hours
            executor.shutdown(wait=False, cancel_futures=True)
            for process in RUNNING:
                process.kill()
            raise


class Record:
    """results/crossing.json: everything measured so far."""

    def __init__(self) -> None:
        path, self.machine = RESULTS / "crossing.json", machine()
        stored = json.loads(path.read_text()) if path.exists() else {"choice": [], "points": []}
        self.choice, self.points = stored["choice"], stored["points"]
        same_machine = all(p["machine"] == self.machine for p in (*self.choice, *self.points))
        assert same_machine, "results/crossing.json has points from another machine"

    def missing(self, rows: list[dict[str, Any]], jobs: dict[RunKey, list[str]]) -> dict[RunKey, list[str]]:
        finished = {(r["name"], r["minutes"], r["seed"]) for r in rows}
        return {key: arguments for key, arguments in jobs.items() if key not in finished}

    def recorder(self, rows: list[dict[str, Any]], *, test: bool) -> Callable[[RunKey, dict[str, Any]], None]:
        """Return a function that adds a row; with `test=False`, its test accuracy is neither printed nor stored."""

        def add(key: RunKey, result: dict[str, Any]) -> None:
            name, minutes, seed = key
            kept = result if test else {k: v for k, v in result.items() if k != "test"}
            run = {"name": name, "minutes": minutes, "seed": seed}
            rows.append({**run, **kept, "commit": COMMIT, "machine": self.machine})
            shown = "  ".join(f"{split} {kept[split]:.2%}" for split in ("val", "test") if split in kept)
            print(f"{name:30} {minutes:3} min  {result['steps']:6} steps  {shown}", flush=True)
            write_result("crossing", {"choice": self.choice, "points": self.points})

        return add

    def best_resnet(self) -> list[str]:
        """Return the flags of the ResNet with the best validation accuracy."""
        return RESNETS[max(self.choice, key=lambda row: row["val"])["name"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    record = Record()
    candidates = {(name, SELECTION_MINUTES, 0): [RESNET, *more] for name, more in RESNETS.items()}
    run_in_parallel(record.missing(record.choice, candidates), record.recorder(record.choice, test=False))
    series = {**SERIES, "ResNet": [RESNET, *record.best_resnet()]}
    for minutes in args.minutes:
        jobs = {(name, minutes, args.seed): arguments for name, arguments in series.items()}
        run_in_parallel(record.missing(record.points, jobs), record.recorder(record.points, test=True))


if __name__ == "__main__":
    main()
