"""The results of a study: a table, a figure like the paper's, and the HTML report with both."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plots.panel import Panel
from ..report.figure_files import write_page
from ..report.pages import study_html
from .study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AVERAGED = ("accuracy", "steps", "epochs", "seconds", "tflop")
Rows = Sequence[dict[str, Any]]


def write_study(study: Study, rows: Rows, out: Path, machine: str) -> None:
    """report.html, and the figure as PNG, SVG and arrays."""
    exhibit = study_exhibit(study, rows)
    page = study_html(study.title, facts(study, rows, machine), exhibit, study.limits)
    write_page(out, page, [exhibit], [study.name])


def facts(study: Study, rows: Rows, machine: str) -> list[tuple[str, str]]:
    seeds = len({row["seed"] for row in rows})
    noise = f"{seeds} seeds; bars are one standard deviation" if seeds > 1 else "one seed: small gaps may be noise"
    lines = [("Question", study.question), ("Runs", f"{len(rows)}, {noise}")]
    measured = [row for row in rows if row["accuracy"] is not None]
    if measured:
        n, split = measured[0]["n"], measured[0]["split"]
        unsure = f"sampling error at most ±{1.96 * np.sqrt(0.25 / n):.1%}"
        lines.append(("Accuracy", f"of the final weights on {n:,} images of the {split} split; {unsure}"))
        if min(row["epochs"] for row in measured) < 1:
            lines.append(("Short runs", "some runs had less than one epoch: they show only the start of training"))
    equal = "the number of steps" if study.equal == "steps" else "the training time"
    lines.append(("Held constant", "nothing: the training time is varied" if study.by_cost else equal))
    return [*lines, ("Machine", machine)]


def study_exhibit(study: Study, rows: Rows) -> Panel:
    means = averaged(study, rows)
    good = [each for each in means if each["accuracy"] is not None]
    seen = "No run finished."
    if good:
        ends = (max(good, key=lambda e: e["accuracy"]), min(good, key=lambda e: e["accuracy"]))
        said = [f"{e['series']}, {e['x']}, {e['accuracy']:.1%}" for e in ends]
        seen = f"Best: {said[0]}. Worst: {said[1]}."
    head = ("series", study.axis, "accuracy, %", "std", "steps", "epochs", "minutes", "TFLOP")
    arrays = {"accuracy": np.array([np.nan if row["accuracy"] is None else row["accuracy"] for row in rows])}
    arrays |= {"seed": np.array([row["seed"] for row in rows]), "cell": np.array([row["cell"] for row in rows])}
    draw = partial(study_figure, study, good)
    listed = tuple(line(each) for each in means)
    return Panel(study.name, "Results", seen, f"The paper: {study.paper}", draw, arrays, (head, *listed))


def line(each: dict[str, Any]) -> tuple[str, ...]:
    if each["accuracy"] is None:
        return (each["series"], str(each["x"]), "diverged", "", "", "", "", "")
    spread = "" if each["spread"] is None else f"{100 * each['spread']:.2f}"
    numbers = (f"{each['steps']:,.0f}", f"{each['epochs']:.1f}", f"{each['seconds'] / 60:.1f}", f"{each['tflop']:.3g}")
    return (each["series"], str(each["x"]), f"{100 * each['accuracy']:.2f}", spread, *numbers)


def averaged(study: Study, rows: Rows) -> list[dict[str, Any]]:
    """A row for each cell that was run: means over its seeds, and their standard deviation. None: all diverged."""
    found = []
    for cell in study.cells:
        mine = [row for row in rows if row["cell"] == cell.name]
        good = [row for row in mine if row["accuracy"] is not None]
        about = {"series": cell.series, "x": cell.x}
        if good:
            spread = statistics.stdev(r["accuracy"] for r in good) if len(good) > 1 else None
            means = {key: statistics.mean(r[key] for r in good) for key in AVERAGED}
            found.append({**about, "spread": spread, **means})
        elif mine:
            found.append({**about, "accuracy": None})
    return found


def study_figure(study: Study, means: list[dict[str, Any]]) -> "Figure":
    from matplotlib.ticker import MaxNLocator

    from ..plots.theme import new_figure, style_axes

    figure = new_figure(7.6, 4.6)
    axes = style_axes(figure.subplots(), study.title, study.axis, "accuracy")
    series: dict[str, list[dict[str, Any]]] = {}
    for each in means:
        series.setdefault(each["series"], []).append(each)
    if study.by_cost or not any(isinstance(each["x"], str) for each in means):
        draw_lines(axes, study, series)
    else:
        draw_bars(axes, series)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


def draw_lines(axes: "Axes", study: Study, series: dict[str, list[dict[str, Any]]]) -> None:
    from ..plots.theme import current_theme

    for colour, (name, mine) in zip(current_theme().series, series.items(), strict=False):
        places = [each["tflop"] if study.by_cost else each["x"] for each in mine]
        heights, errors = [each["accuracy"] for each in mine], [each["spread"] or 0.0 for each in mine]
        axes.errorbar(places, heights, yerr=errors, color=colour, marker="o", linewidth=1.8, capsize=3, label=name)
    if study.logarithmic:
        axes.set_xscale("log")
    if not study.by_cost:
        axes.set_xticks(sorted({float(each["x"]) for mine in series.values() for each in mine}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")


def draw_bars(axes: "Axes", series: dict[str, list[dict[str, Any]]]) -> None:
    from ..plots.theme import current_theme

    names = list(dict.fromkeys(each["x"] for mine in series.values() for each in mine))
    width = 0.8 / max(1, len(series))
    for number, (colour, (name, mine)) in enumerate(zip(current_theme().series, series.items(), strict=False)):
        places = [names.index(each["x"]) + (number - (len(series) - 1) / 2) * width for each in mine]
        errors = [each["spread"] or 0.0 for each in mine]
        heights = [each["accuracy"] for each in mine]
        axes.bar(places, heights, width * 0.92, yerr=errors if any(errors) else None, color=colour, label=name)
    axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
