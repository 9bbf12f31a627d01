"""Accuracy against minutes: our ViT, the hybrid, a ResNet of equal cost and the usual ViT recipe, on the same machine.

    python benchmarks/crossing.py [--minutes 5 10 20 30] [--seed 0]

Each point is a run of its own, `patchword train RECIPE --budget Nm`, so that its schedule is laid over just those
minutes: 4 x 65 minutes in all. A point that results/crossing.json has already is not run again, so it can be made in
parts, but only on one kind of machine. Writes results/crossing.json and docs/crossing.svg.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import COMMIT, RESULTS, machine, write_result

from patchword.figures.theme import LIGHT, drawn_in, new_figure, plotted

HERE = Path(__file__).parent
SERIES = {
    "our ViT": "cifar10_scratch",
    "our hybrid": "recipes/hybrid.py",
    "ResNet-38": "recipes/resnet38.py",
    "usual ViT": "recipes/usual_vit.py",
}
COLOURS = {"our ViT": "#0b62c4", "our hybrid": "#1a8a5a", "ResNet-38": "#c4540b", "usual ViT": "#777777"}


def measure(recipe: str, minutes: int, seed: int) -> dict[str, Any]:
    """Validation and test accuracy of a run; the test part is measured once, at its end."""
    path = str(HERE / recipe) if recipe.endswith(".py") else recipe
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "train", path, "--budget", f"{minutes}m", "--seed", str(seed)]
        done = subprocess.run([*command, "--out", f"{folder}/run", "--json"], stdout=subprocess.PIPE, check=True)
        config = json.loads(Path(folder, "run/config.json").read_text())["config"]
    said = json.loads(done.stdout)
    figures = {"val": said["val"]["top1"], "test": said["test"]["top1"]}
    return {**figures, "steps": said["steps"], "seconds": said["seconds"], "precision": config["precision"]}


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Lines of test accuracy over minutes; the mean where there are several seeds."""
    with drawn_in(LIGHT):
        figure = new_figure(7.5, 4.5)
        axes = plotted(figure.subplots(), "CIFAR-10 from nothing, on two cores", "minutes", "accuracy on test")
        for name, colour in COLOURS.items():
            by_minutes: dict[int, list[float]] = {}
            for p in points:
                if p["series"] == name:
                    by_minutes.setdefault(p["minutes"], []).append(p["test"])
            if by_minutes:
                minutes = sorted(by_minutes)
                means = [statistics.mean(by_minutes[m]) for m in minutes]
                axes.plot(minutes, means, "o-", color=colour, linewidth=2, label=f"{name}: {means[-1]:.1%}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlim(0, None)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path, here = RESULTS / "crossing.json", machine()
    points = json.loads(path.read_text())["points"] if path.exists() else []
    assert all(p["machine"] == here for p in points), "results/crossing.json has points of another machine"
    done = {(p["series"], p["minutes"], p["seed"]) for p in points}
    for minutes in args.minutes:
        for name, recipe in SERIES.items():
            if (name, minutes, args.seed) in done:
                continue
            point = {"series": name, "minutes": minutes, "seed": args.seed, **measure(recipe, minutes, args.seed)}
            points.append({**point, "commit": COMMIT, "machine": here})
            print(f"{name:12} {minutes:3} min  val {point['val']:.2%}  test {point['test']:.2%}", flush=True)
            write_result("crossing", {"points": points})
            draw(points, HERE.parent / "docs/crossing.svg")


if __name__ == "__main__":
    main()
