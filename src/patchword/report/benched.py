"""The page of a bench: how fast each engine is, and how far its answers are the model's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..engines.bench import Measured
from ..figures.exhibit import Exhibit
from ..figures.files import write_page
from .document import document
from .exhibited import shown
from .text import escape, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "engines"
MARKERS = ("o-", "s--", "^:")  # when colours begin again


def write_bench(
    out: Path, title: str, facts: Sequence[tuple[str, str]], rows: Sequence[Measured], accuracy: dict[str, float]
) -> None:
    """report.html, and the figure as PNG, SVG and arrays. `accuracy` of each engine may be empty."""
    exhibit = bench_exhibit(rows, accuracy)
    body = table([(escape(key), escape(value)) for key, value in facts]) + shown([exhibit])
    write_page(out, document(title, "patchword bench", body), [exhibit], [NAME])


def bench_exhibit(rows: Sequence[Measured], accuracy: dict[str, float]) -> Exhibit:
    good = [row for row in rows if row.timings]
    seen = "Fastest: " + "; ".join(fastest(good, place) for place in (0, -1)) + "."
    arrays = {"speed": np.array([[t.per_second for t in row.timings] for row in good])}
    arrays |= {"engine": np.array([row.name for row in good])}
    drawn, listed = partial(draw, good, accuracy), bench_table(rows, accuracy)
    return Exhibit(NAME, "Speed of the engines", seen, "", drawn, arrays, listed)


def fastest(rows: Sequence[Measured], place: int) -> str:
    """At the batch size in that place, with what it costs."""
    row = max(rows, key=lambda each: each.timings[place].per_second)
    timing, found = row.timings[place], row.agreement
    assert found is not None
    many = "one picture at a time" if timing.batch == 1 else f"{timing.batch} at a time"
    cost = f"the class is torch's for {found.same:.0%} of {found.pictures} pictures"
    return f"{many}, {row.name} with {timing.per_second:.1f} pictures a second ({cost})"


def bench_table(rows: Sequence[Measured], accuracy: dict[str, float]) -> tuple[tuple[str, ...], ...]:
    """A line for each engine and batch size; the first is the head."""
    head = ("engine", "batch", "median, ms", "p95", "p99", "pictures/s", "same class", "divergence")
    lines = [(*head, "file, MiB", "memory, MiB", *(("accuracy",) if accuracy else ()))]
    for row in rows:
        for timing in row.timings:
            assert row.agreement is not None
            times = (f"{timing.median:.1f}", f"{timing.p95:.1f}", f"{timing.p99:.1f}", f"{timing.per_second:.1f}")
            said = (f"{row.agreement.same:.1%}", f"{row.agreement.divergence:.1g}")
            mebibytes = (f"{row.size:.0f}", f"{row.mebibytes:.0f}")
            right = (f"{accuracy[row.name]:.2%}",) if accuracy else ()
            lines.append((row.name, str(timing.batch), *times, *said, *mebibytes, *right))
        if row.error:
            lines.append((row.name, "", row.error, *("" for _ in lines[0][3:])))
    return tuple(lines)


def draw(rows: Sequence[Measured], accuracy: dict[str, float]) -> "Figure":
    """Accuracy, or agreement where there are no labels, against speed; a point for each engine and batch size."""
    from ..figures.theme import new_figure, plotted, theme

    figure = new_figure(7.6, 4.6)
    of = "accuracy" if accuracy else "pictures with the same class as torch in fp32"
    axes = plotted(figure.subplots(), "Speed and what it costs", "pictures per second", of)
    colours = theme().series
    for number, row in enumerate(rows):
        assert row.agreement is not None
        height = accuracy.get(row.name, row.agreement.same)
        speeds = [timing.per_second for timing in row.timings]
        colour, marker = colours[number % len(colours)], MARKERS[number // len(colours) % len(MARKERS)]
        axes.plot(speeds, [height] * len(speeds), marker, color=colour, label=row.name, markersize=6, linewidth=1.2)
    axes.set_xlim(0, None)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.legend(frameon=False, loc="best", fontsize=8)
    return figure
