"""Figures of measurements: drawn from results/ alone, so the same inputs give the same bytes."""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchword.plots.theme import current_theme, new_figure, style_axes
from patchword.studies import make_study
from patchword.studies.study_report import average_over_seeds, make_panels, study_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[2] / "results"

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


# Studies with figures of their own: the name of each figure's file, and of its panel.
STUDY_PANELS = {
    "seq2seq": ("seq2seq", "alignment_reverse", "alignment_korean"),
    "spelling": ("spelling", "alignment_spelling"),
    "order": ("order",),
    "warmup": ("warmup", "warmup_gradients"),
    "equivariance": ("equivariance",),
    "bert": ("bert", "bert_words"),
    "non-local": ("non-local",),
    "sasa": ("sasa",),
    "gan": ("gan", "gan_samples"),
}


def study_panel_file(panel: str) -> str:
    """Name the file of a panel: study_NAME.svg, or its own name for what is not the accuracy."""
    own = panel.startswith(("alignment", "gan_"))
    return f"{panel if own else f'study_{panel}'}.svg".replace("-", "_")


def draw_study_panel(study_name: str, panel_name: str) -> "Figure | str":
    """Draw a figure of a study as its report does, from the stored rows: a figure, or the text of an SVG file."""
    study = make_study(study_name)
    rows = load_result(f"study_{study_name.replace('-', '_')}")["rows"]
    panels = {panel.name: panel for panel in make_panels(study, rows)}
    panel = panels[panel_name]
    if panel.svg:
        return panel.svg(current_theme())
    assert panel.draw is not None
    return panel.draw()


# results/NAME.json, and how the figure of the README calls it
REACHED = {
    "quickstart": "handwritten digits, from scratch",
    "pets_finetune_10m": "Oxford-IIIT Pets, from Ti/16 weights",
    "cifar10_finetune_24m": "CIFAR-10, from Ti/16 weights",
    "cifar10_scratch_30m_seed0": "CIFAR-10, from scratch",
    "cifar10_scratch_100m": "CIFAR-10, from scratch",
}


def draw_results() -> "Figure":
    """Test accuracy and duration of the runs that the README names."""
    runs = [(label, load_result(name)) for name, label in REACHED.items()][::-1]
    figure = new_figure(8.4, 3.1)
    axes = style_axes(figure.subplots(), "What two CPU cores reach, end to end", "test accuracy", "")
    for row, (_, run) in enumerate(runs):
        accuracy, seconds = run["test"]["top1"], run["command_seconds"]
        duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        axes.plot([0.85, accuracy], [row, row], color=current_theme().grid_color, linewidth=3, zorder=1)
        axes.plot([accuracy], [row], "o", color=current_theme().series[0], markersize=10, zorder=2)
        axes.annotate(
            f"{accuracy:.1%} in {duration}", (accuracy, row), (10, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(runs)), [label for label, _ in runs], color=current_theme().text_color)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set(xlim=(0.85, 1.02), ylim=(-0.6, len(runs) - 0.4), xticks=[0.85, 0.9, 0.95, 1.0])
    return figure


def draw_images_per_class() -> "Figure":
    """Accuracy on Pets against training images per class: few-shot probes, and the logistic probe on all images."""
    probes = load_result("probes")
    shots = {int(count): accuracies for count, accuracies in probes["few_shot"].items()}
    means = [statistics.mean(accuracies) for accuracies in shots.values()]
    spread = [statistics.stdev(accuracies) for accuracies in shots.values()]
    per_class = probes["train"] / probes["classes"]
    blue, orange = current_theme().series[:2]
    figure = new_figure(7.5, 4.2)
    title = f"How many images per class? {probes['classes']} breeds of pets, frozen Ti/16 features"
    axes = style_axes(figure.subplots(), title, "training images per class (logarithmic)", "test accuracy")
    seeds = len(next(iter(shots.values())))
    label = f"few-shot probe, mean and standard deviation of {seeds} seeds"
    axes.errorbar(list(shots), means, spread, fmt="o-", color=blue, linewidth=2, capsize=4, label=label)
    axes.plot([per_class], [probes["logistic"]], "D", color=orange, markersize=8, label="logistic probe, all images")
    for count, accuracy in [*zip(shots, means, strict=True), (per_class, probes["logistic"])]:
        axes.annotate(f"{accuracy:.1%}", (count, accuracy), (8, -15), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    ticks = [*shots, round(per_class)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set(ylim=(0.55, 0.95), xlim=(0.85, 180))
    axes.legend(frameon=False, loc="lower right")
    return figure


def save_svg(figure: "Figure | str", path: Path) -> None:
    """Write a figure without the date, or the text of an SVG file."""
    if isinstance(figure, str):
        path.write_text(figure, encoding="utf-8")
        return
    figure.savefig(path, metadata={"Date": None})
