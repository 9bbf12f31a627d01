"""Accuracy against minutes: our ViT, the hybrid, a ResNet of equal cost and the usual ViT recipe, on the same machine.

    python benchmarks/crossing.py [--minutes 5 10 20 30] [--seed 0]

Each point is a run of its own, `patchword train RECIPE --budget Nm`, so that its schedule is laid over just those
minutes: 4 x 65 minutes in all. A point that results/crossing.json has already is not run again, so it can be made in
parts. Writes results/crossing.json and docs/crossing.svg.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import RESULTS, write_result

HERE = Path(__file__).parent
SERIES = {
    "our ViT": "cifar10_scratch",
    "our hybrid": "recipes/hybrid.py",
    "ResNet-38": "recipes/resnet38.py",
    "usual ViT": "recipes/usual_vit.py",
}
COLOURS = {"our ViT": "#0b62c4", "our hybrid": "#1a8a5a", "ResNet-38": "#c4540b", "usual ViT": "#777777"}
WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP = 720, 420, 60, 48, 120, 24


def measure(recipe: str, minutes: int, seed: int) -> dict[str, Any]:
    """Validation and test accuracy of a run; the test part is measured once, at its end."""
    path = str(HERE / recipe) if recipe.endswith(".py") else recipe
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "patchword", "train", path, "--budget", f"{minutes}m", "--seed", str(seed)]
        done = subprocess.run([*command, "--out", f"{folder}/run", "--json"], stdout=subprocess.PIPE, check=True)
    said = json.loads(done.stdout)
    figures = {"val": said["val"]["top1"], "test": said["test"]["top1"]}
    return {**figures, "steps": said["steps"], "seconds": said["seconds"]}


def figure(points: list[dict[str, Any]]) -> str:
    """Lines of test accuracy over minutes, as SVG."""
    most = max(p["minutes"] for p in points)
    low = 0.1 * int(10 * min(p["test"] for p in points))

    def x(minutes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * minutes / most

    def y(accuracy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (accuracy - low) / (1 - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(round(10 * low), 11):
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tenth / 10):.1f}" y2="{y(tenth / 10):.1f}"'
        parts.append(f'<line {line} stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tenth / 10) + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    for minutes in sorted({p["minutes"] for p in points}):
        parts.append(f'<text x="{x(minutes):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{minutes}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">minutes on two cores</text>')
    for name, colour in COLOURS.items():
        mine = sorted((p["minutes"], p["test"]) for p in points if p["series"] == name)
        if not mine:
            continue
        track = " ".join(f"{x(m):.1f},{y(a):.1f}" for m, a in mine)
        parts.append(f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x(m):.1f}" cy="{y(a):.1f}" r="4" fill="{colour}"/>' for m, a in mine]
        end = mine[-1]
        place = f'x="{x(end[0]) + 9:.1f}" y="{y(end[1]) + 4:.1f}"'
        parts.append(f'<text {place} fill="{colour}">{name} {end[1]:.1%}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = RESULTS / "crossing.json"
    points = json.loads(path.read_text())["points"] if path.exists() else []
    done = {(p["series"], p["minutes"], p["seed"]) for p in points}
    for minutes in args.minutes:
        for name, recipe in SERIES.items():
            if (name, minutes, args.seed) in done:
                continue
            point = {"series": name, "minutes": minutes, "seed": args.seed, **measure(recipe, minutes, args.seed)}
            points.append(point)
            print(f"{name:12} {minutes:3} min  val {point['val']:.2%}  test {point['test']:.2%}", flush=True)
            write_result("crossing", {"points": points})
            (HERE.parent / "docs/crossing.svg").write_text(figure(points))


if __name__ == "__main__":
    main()
