"""Accuracy against minutes: our ViT, the hybrid, a ResNet of equal cost and the usual ViT recipe, on the same machine.

And, beside ours, what it was at first: a network whose convolutions did the work; beside the ResNet, the same with the
augmentation of that time, and no small pictures first.

    python benchmarks/crossing.py [--minutes 5 10 20 30] [--seed 0]

Each point is a run of its own, `patchword train RECIPE --budget Nm`, so that its schedule is laid over just those
minutes. Every run has one core to itself, and as many go side by side as there are cores. First the ResNet is chosen,
by validation after five minutes, among four that cost a step about as much as ours: 10 minutes on two cores; then the
points: 195. One that results/crossing.json has already is not run again, so it can be made in parts, but only on one
kind of machine. Writes results/crossing.json and docs/crossing.svg.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from harness import COMMIT, RESULTS, machine, write_result

from patchword.plots.theme import LIGHT, use_theme, new_figure, style_axes

HERE = Path(__file__).parent
RESNET = str(HERE / "recipes/resnet.py")
RESNETS = {
    "6, 6, 6 units, 16 channels": ["--model.layers", "6", "6", "6"],
    "2, 2, 2 units, 32 channels": ["--model.layers", "2", "2", "2", "--model.width-factor", "2"],
    "1, 1, 1 units, 48 channels": ["--model.layers", "1", "1", "1", "--model.width-factor", "3"],
    "1, 1, 1, 1 units, 48 channels": ["--model.layers", "1", "1", "1", "1", "--model.width-factor", "3"],
}
AT_FIRST = [
    "--progressive-resize.scale",
    "1",
    "--augment.cutout",
    "0.25",
    "--eval-every",
    "1",
]  # as six_convolutions.py has it
SERIES = {
    "our ViT": ["cifar10_scratch"],
    "six convolutions first": [str(HERE / "recipes/six_convolutions.py")],
    "ResNet": [RESNET],  # and what was chosen
    "ResNet at one size": [RESNET, *RESNETS["2, 2, 2 units, 32 channels"], *AT_FIRST],
    "our hybrid": [str(HERE / "recipes/hybrid.py")],
    "usual ViT": [str(HERE / "recipes/usual_vit.py")],
}
COLOURS = {
    "our ViT": "#0b62c4",
    "six convolutions first": "#6aa7e8",
    "ResNet": "#c4540b",
    "ResNet at one size": "#e8a878",
    "our hybrid": "#1a8a5a",
    "usual ViT": "#777777",
}
CHOICE_MINUTES = 5
RUNNING: list[subprocess.Popen] = []  # every run that was started

Key = tuple[str, int, int]  # name, minutes, seed


def measure(arguments: list[str], minutes: int, seed: int) -> dict[str, Any]:
    """Validation and test accuracy of a run; the test part is measured once, at its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "train", *arguments, "--budget", f"{minutes}m"]
        command += ["--seed", str(seed), "--num-threads", "1", "--out", f"{folder}/run", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            RUNNING.append(process)
            output, log = process.communicate()
        if process.returncode:
            sys.exit(f"{' '.join(command[1:])} failed with code {process.returncode}.\n{log[-5000:]}")
        config = json.loads(Path(folder, "run/config.json").read_text())["config"]
    said = json.loads(output)
    figures = {"val": said["val"]["top1"], "test": said["test"]["top1"]}
    return {**figures, "steps": said["steps"], "seconds": said["seconds"], "precision": config["precision"]}


def side_by_side(jobs: dict[Key, list[str]], done: Callable[[Key, dict[str, Any]], None]) -> None:
    """Measures each on a core of its own, as many at a time as there are cores; tells as they come."""
    free = SimpleQueue[int]()
    for core in os.sched_getaffinity(0):
        free.put(core)

    def settle() -> None:
        os.sched_setaffinity(0, {free.get()})  # of this thread, and of the processes it starts

    with ThreadPoolExecutor(free.qsize(), initializer=settle) as lanes:
        waiting = {lanes.submit(measure, arguments, *key[1:]): key for key, arguments in jobs.items()}
        try:
            for future in as_completed(waiting):
                done(waiting[future], future.result())
        except BaseException:  # the others would take hours yet
            lanes.shutdown(wait=False, cancel_futures=True)
            for process in RUNNING:
                process.kill()
            raise


class Record:
    """results/crossing.json: what has been measured, and the figure of it."""

    def __init__(self) -> None:
        path, self.machine = RESULTS / "crossing.json", machine()
        kept = json.loads(path.read_text()) if path.exists() else {"choice": [], "points": []}
        self.choice, self.points = kept["choice"], kept["points"]
        alike = all(p["machine"] == self.machine for p in (*self.choice, *self.points))
        assert alike, "results/crossing.json has points of another machine"

    def lacking(self, rows: list[dict[str, Any]], jobs: dict[Key, list[str]]) -> dict[Key, list[str]]:
        have = {(r["name"], r["minutes"], r["seed"]) for r in rows}
        return {key: arguments for key, arguments in jobs.items() if key not in have}

    def adding(self, rows: list[dict[str, Any]], *, test: bool) -> Callable[[Key, dict[str, Any]], None]:
        """What is done with a new row; where `test` is False, its test accuracy is neither shown nor kept."""

        def add(key: Key, found: dict[str, Any]) -> None:
            name, minutes, seed = key
            kept = found if test else {k: v for k, v in found.items() if k != "test"}
            place = {"name": name, "minutes": minutes, "seed": seed}
            rows.append({**place, **kept, "commit": COMMIT, "machine": self.machine})
            shown = "  ".join(f"{part} {kept[part]:.2%}" for part in ("val", "test") if part in kept)
            print(f"{name:30} {minutes:3} min  {found['steps']:6} steps  {shown}", flush=True)
            write_result("crossing", {"choice": self.choice, "points": self.points})
            if self.points:
                draw(self.points, HERE.parent / "docs/crossing.svg")

        return add

    def chosen(self) -> list[str]:
        """The ResNet that did best on validation."""
        return RESNETS[max(self.choice, key=lambda row: row["val"])["name"]]


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Lines of test accuracy over minutes; the mean where there are several seeds."""
    with use_theme(LIGHT):
        figure = new_figure(7.5, 4.5)
        axes = style_axes(figure.subplots(), "CIFAR-10 from nothing, one core each", "minutes", "accuracy on test")
        for name, colour in COLOURS.items():
            by_minutes: dict[int, list[float]] = {}
            for p in points:
                if p["name"] == name:
                    by_minutes.setdefault(p["minutes"], []).append(p["test"])
            if by_minutes:
                minutes = sorted(by_minutes)
                means = [statistics.mean(by_minutes[m]) for m in minutes]
                axes.plot(minutes, means, "o-", color=colour, linewidth=2, label=f"{name}: {means[-1]:.2%}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlim(0, None)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    record = Record()
    candidates = {(name, CHOICE_MINUTES, 0): [RESNET, *more] for name, more in RESNETS.items()}
    side_by_side(record.lacking(record.choice, candidates), record.adding(record.choice, test=False))
    series = {**SERIES, "ResNet": [RESNET, *record.chosen()]}
    for minutes in args.minutes:
        jobs = {(name, minutes, args.seed): arguments for name, arguments in series.items()}
        side_by_side(record.lacking(record.points, jobs), record.adding(record.points, test=True))


if __name__ == "__main__":
    main()
