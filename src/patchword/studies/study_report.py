"""The report of a study: figures like the paper's, with tables, captions and how to read them."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plots.panel import Panel
from ..report.figure_files import write_page
from ..report.pages import study_html
from .study import Means, ResultRow, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Columns of the table after the accuracy: name, key of a row, and its text. A column without any value is left out.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "steps", "{:,.0f}".format),
    ("epochs", "epochs", "{:.1f}".format),
    ("minutes", "seconds", lambda seconds: f"{seconds / 60:.1f}"),
    ("TFLOP", "tflop", "{:.3g}".format),
    ("parameters", "parameters", "{:,.0f}".format),
)
Rows = Sequence[ResultRow]


def write_study(study: Study, rows: Rows, out: Path, machine: str) -> None:
    """Write report.html, and the figures as PNG, SVG and arrays."""
    panels = make_panels(study, rows)
    page = study_html(study.title, describe_study(study, rows, machine), panels, study.limits)
    write_page(out, page, panels, [panel.name for panel in panels])


def make_panels(study: Study, rows: Rows) -> list[Panel]:
    """Make the figures of a study: its own, or one of the accuracy."""
    return study.panels(study, rows) if study.panels else [make_study_panel(study, rows)]


def describe_study(study: Study, rows: Rows, machine: str) -> list[tuple[str, str]]:
    """Return names and values for the top of the report."""
    seeds = len({row["seed"] for row in rows})
    noise = f"{seeds} seeds; bars are one standard deviation" if seeds > 1 else "one seed: small gaps may be noise"
    lines = [("Question", study.question)]
    if study.equal == "nothing":
        return [*lines, ("Runs", "nothing is trained"), ("Machine", machine)]
    lines.append(("Runs", f"{len(rows)}, {noise}"))
    measured = [row for row in rows if row["accuracy"] is not None]
    if measured:
        fewest, most = (choose(row["n"] for row in measured) for choose in (min, max))
        count = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        subject = study.measured or f"images of the {measured[0]['split']} split whose class is right"
        sampling = f"sampling error at most ±{1.96 * np.sqrt(0.25 / fewest):.1%}"
        lines.append(("Accuracy", f"fraction of the {count} {subject}, with the final weights; {sampling}"))
        if min(row.get("epochs", 1.0) for row in measured) < 1:
            lines.append(("Short runs", "some runs had less than one epoch: they show only the start of training"))
    equal = "the number of steps" if study.equal == "steps" else "the training time"
    lines.append(("Held constant", "nothing: the training time is varied" if study.by_cost else equal))
    return [*lines, ("Machine", machine)]


def make_study_panel(study: Study, rows: Rows) -> Panel:
    """Make the figure, its table and its caption."""
    means = average_over_seeds(study, rows)
    finished = [mean for mean in means if mean["accuracy"] is not None]
    summary = (study.summarize or name_extremes)(means)
    arrays = {"accuracy": np.array([np.nan if row["accuracy"] is None else row["accuracy"] for row in rows])}
    arrays |= {"seed": np.array([row["seed"] for row in rows]), "cell": np.array([row["cell"] for row in rows])}
    draw = partial(study_figure, study, finished)
    return Panel(study.name, "Results", summary, f"The paper: {study.paper}", draw, arrays, result_table(study, means))


def name_extremes(means: Means) -> str:
    """Name the best and the worst cell: the caption of studies that have no other."""
    finished = [mean for mean in means if mean["accuracy"] is not None]
    if not finished:
        return "No run finished."
    extremes = (max(finished, key=lambda m: m["accuracy"]), min(finished, key=lambda m: m["accuracy"]))
    best, worst = (f"{m['series']}, {m['x']}, {m['accuracy']:.1%}" for m in extremes)
    return f"Best: {best}. Worst: {worst}."


def show_accuracy(means: Means, series: str, x: float | str) -> str:
    """Format the accuracy of a cell for a caption."""
    found = [mean["accuracy"] for mean in means if (mean["series"], mean["x"]) == (series, x)]
    if not found:
        return "(not run)"
    return "(diverged)" if found[0] is None else f"{found[0]:.1%}"


def result_table(study: Study, means: Means) -> tuple[tuple[str, ...], ...]:
    """Make the table of all cells; the first row is the header."""
    columns = [(title, key, show) for title, key, show in COLUMNS if any(mean.get(key) is not None for mean in means)]
    rows = [("series", study.axis, "accuracy, %", "std", *(title for title, _, _ in columns))]
    for mean in means:
        accuracy = "diverged" if mean["accuracy"] is None else f"{100 * mean['accuracy']:.2f}"
        spread = "" if mean.get("spread") is None else f"{100 * mean['spread']:.2f}"
        numbers = ("" if mean.get(key) is None else show(mean[key]) for _, key, show in columns)
        rows.append((mean["series"], str(mean["x"]), accuracy, spread, *numbers))
    return tuple(rows)


def average_over_seeds(study: Study, rows: Rows) -> Means:
    """Return means and standard deviation over the seeds of each cell; an accuracy of None if all diverged."""
    averages: Means = []
    for cell in study.cells:
        cell_rows: list[Any] = [row for row in rows if row["cell"] == cell.name]
        finished = [row for row in cell_rows if row["accuracy"] is not None]
        position = {"series": cell.series, "x": cell.x}
        if finished:
            spread = statistics.stdev(row["accuracy"] for row in finished) if len(finished) > 1 else None
            keys = ["accuracy", *(key for _, key, _ in COLUMNS if key in finished[0])]
            means = {key: statistics.mean(row[key] for row in finished) for key in keys}
            averages.append({**position, "spread": spread, **means})
        elif cell_rows:
            averages.append({**position, "accuracy": None})
    return averages


def study_figure(study: Study, means: Means) -> "Figure":
    """Draw accuracy over the x axis: lines for numbers, bars for names."""
    from matplotlib.ticker import MaxNLocator

    from ..plots.theme import new_figure, style_axes

    figure = new_figure(7.6, 4.6)
    axes = style_axes(figure.subplots(), study.title, study.axis, "accuracy")
    series: dict[str, Means] = {}
    for mean in means:
        series.setdefault(mean["series"], []).append(mean)
    legend_place: dict[str, Any] = {}
    if study.by_cost or not any(isinstance(mean["x"], str) for mean in means):
        draw_lines(axes, study, series)
    else:
        draw_bars(axes, series)
        legend_place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}  # high bars leave no room inside
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    if len(series) > 1:
        axes.legend(frameon=False, **legend_place)
    return figure


def draw_lines(axes: "Axes", study: Study, series: dict[str, Means]) -> None:
    """Draw a line with error bars for each series."""
    from ..plots.theme import current_theme

    for color, (name, cells) in zip(current_theme().series, series.items(), strict=False):
        positions = [mean["tflop"] if study.by_cost else mean["x"] for mean in cells]
        accuracies, errors = [mean["accuracy"] for mean in cells], [mean["spread"] or 0.0 for mean in cells]
        axes.errorbar(positions, accuracies, yerr=errors, color=color, marker="o", linewidth=1.8, capsize=3, label=name)
    if study.logarithmic:
        axes.set_xscale("log")
    if not study.by_cost:
        axes.set_xticks(sorted({float(mean["x"]) for cells in series.values() for mean in cells}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")


def draw_bars(axes: "Axes", series: dict[str, Means]) -> None:
    """Draw grouped bars."""
    from ..plots.theme import current_theme

    names = list(dict.fromkeys(mean["x"] for cells in series.values() for mean in cells))
    width = 0.8 / max(1, len(series))
    for number, (color, (name, cells)) in enumerate(zip(current_theme().series, series.items(), strict=False)):
        positions = [names.index(mean["x"]) + (number - (len(series) - 1) / 2) * width for mean in cells]
        errors = [mean["spread"] or 0.0 for mean in cells]
        accuracies = [mean["accuracy"] for mean in cells]
        error = errors if any(errors) else None
        bars = axes.bar(positions, accuracies, width * 0.92, yerr=error, color=color, label=name)
        axes.bar_label(bars, [f"{100 * accuracy:.1f}" for accuracy in accuracies], padding=2, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
