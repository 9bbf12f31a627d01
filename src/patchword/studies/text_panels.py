"""The figures of the text studies: accuracy by length, alignments, and the grid of warm-up."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plots.alignment_plot import AlignmentMap, alignment_svg
from ..plots.panel import Panel
from .study import ResultRow, Study
from .study_report import average_over_seeds, make_study_panel, result_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[ResultRow]
LINE_STYLES = {"fixed context": "--", "attention": "-"}
TASKS = {"numerals": "Numbers", "dates": "Dates"}  # named above an alignment, because one figure shows both


def seq2seq_panels(study: Study, rows: Rows) -> list[Panel]:
    """Accuracy by length of the input, and what the models with attention attended to."""
    strings = [row for row in rows if row["series"] in LINE_STYLES]
    longest = {
        (cell.series, cell.x): f"{mean:.0%}"
        for cell in study.cells
        if cell.series in LINE_STYLES and (mean := mean_at_longest(cell.name, rows)) is not None
    }
    summary = "At the longest input: " + ", ".join(f"{x} with {series} {rate}" for (series, x), rate in longest.items())
    bands = " Bands show the range over seeds." if len({row["seed"] for row in rows}) > 1 else ""
    lengths = Panel(
        study.name, "Accuracy by length of the input", f"{summary}.{bands}",
        f"The papers: {study.paper}",
        partial(length_figure, study, strings), {"lengths": np.array(sorted(lengths_of(strings)))},
        result_table(study, average_over_seeds(study, rows)),
    )  # fmt: skip
    reversed_letters = alignment_panel(
        "alignment_reverse", "What the decoder attends to: letters reversed",
        "Each row is a letter that was written, each column one that was read. The decoder turns to the one it needs.",
        strings,
    )  # fmt: skip
    korean = alignment_panel(
        "alignment_korean", "What the decoder attends to: English to Korean",
        "Dates are written from the year to the day. Numbers are counted in ten thousands (만) instead of thousands. "
        "Nobody gave the models these alignments.",
        [row for row in rows if row["series"] not in LINE_STYLES],
    )  # fmt: skip
    return [lengths, *reversed_letters, *korean]


def lengths_of(rows: Rows) -> set[int]:
    """All lengths that were tested."""
    return {int(n) for row in rows if "details" in row for n in row["details"]["by_length"]}


def mean_at_longest(cell: str, rows: Rows) -> float | None:
    """The accuracy of a cell at the longest input, a mean over seeds."""
    tables = [row["details"]["by_length"] for row in rows if row["cell"] == cell and "details" in row]
    rates = [table[max(table, key=int)] for table in tables]
    return statistics.mean(rates) if rates else None


def length_figure(study: Study, rows: Rows) -> "Figure":
    """Accuracy over length: a line for each model, with the range over seeds."""
    from matplotlib.ticker import MaxNLocator

    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(8.2, 4.8)
    axes = style_axes(figure.subplots(), study.title, "letters of the input", "strings without a mistake")
    networks = list(dict.fromkeys(cell.x for cell in study.cells))
    for cell in study.cells:
        tables = [row["details"]["by_length"] for row in rows if row["cell"] == cell.name and "details" in row]
        if not tables:
            continue
        lengths = sorted(tables[0], key=int)
        rates = np.array([[table[n] for n in lengths] for table in tables])
        color, x = current_theme().series[networks.index(cell.x)], [int(n) for n in lengths]
        label = str(cell.x) if cell.x == "Transformer" else f"{cell.x}, {cell.series}"
        axes.plot(x, rates.mean(axis=0), color=color, linestyle=LINE_STYLES[cell.series], linewidth=2, label=label)
        axes.fill_between(x, rates.min(axis=0), rates.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def alignment_panel(name: str, title: str, caption: str, rows: Rows) -> list[Panel]:
    """A panel with the alignments that the rows contain; no panel without any."""
    maps = [
        draw_end(alignment_title(row), **alignment)
        for row in rows
        for alignment in row.get("details", {}).get("alignments", ())
        if row["x"] in ("LSTM", "Transformer", "attention") and alignment["output"]
    ]
    return [Panel(name, title, caption, svg=partial(alignment_svg, maps))] if maps else []


def alignment_title(row: ResultRow) -> str:
    """Name the model of an alignment, and its task if that is a translation."""
    model = "Transformer" if row["x"] == "Transformer" else f"{row['x']} with attention"
    return f"{TASKS[row['series']]}: {model}" if row["series"] in TASKS else model


def draw_end(
    title: str, source: Sequence[str], output: Sequence[str], weights: Sequence[Sequence[float]]
) -> AlignmentMap:
    """A map with a column for the end of the source, which has the rest of each row's weight."""
    rows = [[*row, max(0.0, 1 - sum(row))] for row in weights]
    return AlignmentMap(title, (*source, "<eos>"), output, rows)


def spelling_panels(study: Study, rows: Rows) -> list[Panel]:
    """Accuracy of whole words, and what the model with attention attended to."""
    caption = "Each row is a sound, each column a letter: silent letters and pairs such as th are found without help."
    attending = [{**row, "x": "LSTM"} for row in rows if row["x"] == "attention"]
    aligned = alignment_panel("alignment_spelling", "Which letters make a sound", caption, attending)  # type: ignore[arg-type]
    return [make_study_panel(study, rows), *aligned]


def warmup_panels(study: Study, rows: Rows) -> list[Panel]:
    """The grid of norms, warm-up and learning rates, and the gradients of new models."""
    means = average_over_seeds(study, rows)
    failed = [f"{mean['series']} at {mean['x']:g}" for mean in means if (mean["accuracy"] or 0.0) < 0.1]
    summary = f"Failed (below 10%): {'; '.join(failed)}." if failed else "No combination failed."
    grid = Panel(
        study.name, "Norms, warm-up and learning rate", summary, f"The paper: {study.paper}",
        partial(grid_figure, study, rows), {"accuracy": np.array([row["accuracy"] or 0.0 for row in rows])},
        result_table(study, means),
    )  # fmt: skip
    gradients = Panel(
        f"{study.name}_gradients", "Gradients of a new model, by layer",
        "Norm of the gradient of each layer before the first step, mean over seeds.",
        "The paper (Xiong et al., 2020): with post-norm, the gradient near the output is large whatever the depth.",
        partial(gradient_figure, rows), {},
    )  # fmt: skip
    return [grid, gradients]


def grid_figure(study: Study, rows: Rows) -> "Figure":
    """A square for each combination, with the mean accuracy and the range over seeds."""
    from ..plots.theme import COLORMAP, current_theme, new_figure

    kinds = list(dict.fromkeys(cell.series for cell in study.cells))
    rates = list(dict.fromkeys(cell.x for cell in study.cells))
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    table = np.zeros((len(kinds), len(rates)))
    for i, kind in enumerate(kinds):
        for j, rate in enumerate(rates):
            values = [row["accuracy"] or 0.0 for row in rows if row["series"] == kind and row["x"] == rate]
            table[i, j] = np.mean(values)
            spread = f"\n{min(values):.0%} to {max(values):.0%}" if len(values) > 1 else ""
            color = "black" if table[i, j] > 0.55 else "white"
            axes.text(j, i, f"{table[i, j]:.0%}{spread}", ha="center", va="center", color=color, fontsize=10)
    axes.imshow(table, cmap=COLORMAP, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("learning rate")
    axes.set_title("strings without a mistake", loc="left", fontweight="bold", color=current_theme().text_color)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def gradient_figure(rows: Rows) -> "Figure":
    """Gradient norm over the layers, a line for post-norm and one for pre-norm."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(7.6, 3.8)
    axes = style_axes(figure.subplots(), "", "layers of the encoder, then of the decoder", "gradient norm")
    by_kind: dict[str, list[Any]] = {}
    for row in rows:
        if gradients := row.get("details", {}).get("initial_gradients"):
            by_kind.setdefault(row["series"].split(",")[0], []).append(gradients)
    for color, (kind, gradients) in zip(current_theme().series, by_kind.items(), strict=False):
        mean = np.mean(gradients, axis=0)
        axes.plot(range(1, len(mean) + 1), mean, color=color, marker="o", linewidth=2, label=kind)
        axes.set_xticks(range(1, len(mean) + 1), 2 * [str(n) for n in range(1, len(mean) // 2 + 1)])
        axes.axvline(len(mean) / 2 + 0.5, color=current_theme().muted, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
