"""Draws the figures of the documentation from the measurements in results/.

    python docs/make_figures.py [NAME ...]

Every image in the repository is made here. Drawing is deterministic: the same inputs give the same bytes.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchword.plots.theme import LIGHT, new_figure, style_axes, use_theme
from patchword.studies import make_study
from patchword.studies.study_report import average_over_seeds, study_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"

RUNS = {
    "cifar10_scratch_100m": ("100 minutes", "#0b3d91"),
    "cifar10_scratch_30m_seed0": ("30 minutes, seed 0", "#0b62c4"),
    "cifar10_scratch_30m_seed1": ("30 minutes, seed 1", "#6aa7e8"),
    "cifar10_scratch_32px_30m_seed0": ("30 minutes, no progressive resizing, seed 0", "#1a8a5a"),
    "cifar10_scratch_32px_30m_seed1": ("30 minutes, no progressive resizing, seed 1", "#8cc9aa"),
    "six_convolutions_100m": ("six-convolution stem, 100 minutes", "#c4540b"),
}
SERIES = {
    "our ViT": ("cifar10_scratch", "#0b62c4"),
    "six convolutions first": ("six-convolution stem", "#6aa7e8"),
    "ResNet": ("ResNet", "#c4540b"),
    "ResNet at one size": ("ResNet, no progressive resizing", "#e8a878"),
    "our hybrid": ("hybrid", "#1a8a5a"),
    "usual ViT": ("standard ViT", "#777777"),
}
STUDIES = ("positions", "head", "inductive-bias", "data-size")


def load_result(name: str) -> dict[str, Any]:
    """Read the JSON of a measurement."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def draw_curves() -> "Figure":
    """Validation accuracy over minutes of the runs from scratch."""
    figure = new_figure(7.5, 4.5)
    axes = style_axes(figure.subplots(), "CIFAR-10 from scratch, two cores", "minutes", "validation accuracy")
    for name, (label, color) in RUNS.items():
        run = load_result(name)
        minutes = [point["seconds"] / 60 for point in run["val_curve"]]
        accuracy = [point["top1"] for point in run["val_curve"]]
        legend = f"{label}: {run['test']['top1']:.2%} on test"
        axes.plot(minutes, accuracy, "o-", color=color, linewidth=2, markersize=3, label=legend)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0.5, 0.95)
    axes.set_xlim(0, None)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_crossing() -> "Figure":
    """Test accuracy over the minutes of a run's budget, averaged over seeds."""
    points = load_result("crossing")["points"]
    figure = new_figure(7.5, 4.5)
    axes = style_axes(figure.subplots(), "CIFAR-10 from scratch, one core per run", "minutes", "test accuracy")
    for name, (label, color) in SERIES.items():
        by_minutes: dict[int, list[float]] = {}
        for point in points:
            if point["name"] == name:
                by_minutes.setdefault(point["minutes"], []).append(point["test"])
        minutes = sorted(by_minutes)
        means = [statistics.mean(by_minutes[m]) for m in minutes]
        axes.plot(minutes, means, "o-", color=color, linewidth=2, label=f"{label}: {means[-1]:.2%}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(0, None)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_study(name: str) -> "Figure":
    """The figure of a study, from the rows that `benchmarks/studied.py` has stored."""
    study = make_study(name)
    rows = load_result(f"study_{name.replace('-', '_')}")["rows"]
    means = [mean for mean in average_over_seeds(study, rows) if mean["accuracy"] is not None]
    assert len(means) == len({row["cell"] for row in rows}), f"{name}: stored cells differ from the study's"
    return study_figure(study, means)


FIGURES: dict[str, Callable[[], "Figure"]] = {
    "curves": draw_curves,
    "crossing": draw_crossing,
    **{f"study_{name.replace('-', '_')}": partial(draw_study, name) for name in STUDIES},
}


def main() -> None:
    """Draw all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--out", type=Path, default=DOCS, help="another directory, for comparison")
    args = parser.parse_args()
    for name in args.names or FIGURES:
        with use_theme(LIGHT):
            FIGURES[name]().savefig(args.out / f"{name}.svg", metadata={"Date": None})
        print(args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
