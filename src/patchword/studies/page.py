"""What a study found: a table, a figure in the paper's manner, and a page with both."""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..figures.exhibit import Exhibit
from ..figures.files import write_page
from ..report.document import document, section
from ..report.exhibited import shown
from ..report.text import escape, table
from .study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AVERAGED = ("accuracy", "steps", "epochs", "seconds", "tflop")
Rows = Sequence[dict[str, Any]]


def write_study(study: Study, rows: Rows, out: Path, machine: dict[str, Any]) -> None:
    """report.html, and the figure as PNG, SVG and arrays."""
    exhibit = study_exhibit(study, rows)
    seeds = len({row["seed"] for row in rows})
    noise = f"{seeds} seeds; bars are one standard deviation" if seeds > 1 else "one seed, so small gaps may be chance"
    n = rows[0]["n"]
    error = 1.96 * np.sqrt(0.25 / n)
    facts = [
        ("question", study.question),
        ("the paper", study.paper),
        (
            "runs",
            f"{len(rows)}, {noise}; accuracy on {n:,} {rows[0]['part']} pictures, +- {error:.1%} at most by itself",
        ),
        ("equal for all", "the number of steps" if study.equal == "steps" else "the time"),
        ("machine", ", ".join(f"{key} {value}" for key, value in machine.items())),
    ]
    body = table([(escape(key), escape(value)) for key, value in facts]) + shown([exhibit])
    body += section("What this cannot show", f"<p>{escape(study.limits)}</p>" if study.limits else "")
    write_page(out, document(study.title, "patchword study", body), [exhibit], [study.name])


def study_exhibit(study: Study, rows: Rows) -> Exhibit:
    means = averaged(study, rows)
    best = max(means, key=lambda each: each["accuracy"])
    worst = min(means, key=lambda each: each["accuracy"])
    seen = f"Best: {best['series']}, {best['x']}, {best['accuracy']:.1%}. Worst: {worst['series']}, {worst['x']}, "
    seen += f"{worst['accuracy']:.1%}."
    head = ("series", study.axis, "accuracy, %", "spread", "steps", "epochs", "minutes", "TFLOP")
    lines = [
        (
            each["series"], str(each["x"]), f"{100 * each['accuracy']:.2f}", f"{100 * each['spread']:.2f}",
            f"{each['steps']:,.0f}", f"{each['epochs']:.1f}", f"{each['seconds'] / 60:.1f}", f"{each['tflop']:.3g}",
        )
        for each in means
    ]  # fmt: skip
    arrays = {"accuracy": np.array([row["accuracy"] for row in rows]), "seed": np.array([row["seed"] for row in rows])}
    arrays["cell"] = np.array([row["cell"] for row in rows])
    return Exhibit(
        study.name, study.title, seen, study.paper, partial(study_figure, study, means), arrays, (head, *lines)
    )


def averaged(study: Study, rows: Rows) -> list[dict[str, Any]]:
    """A row for each cell that was run: means over its seeds, and their standard deviation."""
    found = []
    for cell in study.cells:
        mine = [row for row in rows if row["cell"] == cell.name]
        if mine:
            numbers = {
                key: statistics.mean(r[key] for r in mine)
                for key in ("accuracy", "steps", "epochs", "seconds", "tflop")
            }
            spread = statistics.stdev(r["accuracy"] for r in mine) if len(mine) > 1 else 0.0
            found.append({"series": cell.series, "x": cell.x, "spread": spread, **numbers})
    return found


def study_figure(study: Study, means: list[dict[str, Any]]) -> "Figure":
    from ..figures.theme import new_figure, plotted, theme

    figure = new_figure(7.6, 4.6)
    axes = plotted(figure.subplots(), study.title, study.axis, "accuracy")
    series = list(dict.fromkeys(each["series"] for each in means))
    names = list(dict.fromkeys(each["x"] for each in means))
    for number, name in enumerate(series):
        mine = [each for each in means if each["series"] == name]
        colour = theme().series[number % len(theme().series)]
        heights, errors = [each["accuracy"] for each in mine], [each["spread"] for each in mine]
        if isinstance(mine[0]["x"], str):
            width = 0.8 / len(series)
            places = [names.index(each["x"]) + (number - (len(series) - 1) / 2) * width for each in mine]
            axes.bar(places, heights, width * 0.92, yerr=errors if any(errors) else None, color=colour, label=name)
        else:
            places = [each["tflop"] if study.name == "compute" else each["x"] for each in mine]
            axes.errorbar(places, heights, yerr=errors, color=colour, marker="o", linewidth=1.8, capsize=3, label=name)
    if isinstance(names[0], str):
        axes.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
        low = min(each["accuracy"] for each in means)
        axes.set_ylim(max(0.0, low - 0.15), None)
    elif study.logarithmic:
        axes.set_xscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure
