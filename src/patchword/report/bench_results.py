"""Results of a bench: a table of the engines, and accuracy (or agreement with PyTorch) against speed."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..engines.bench import EngineBench
from ..plots.panel import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "engines"
MARKERS = ("o-", "s--", "^:")  # when the colors repeat


def make_bench_panel(rows: Sequence[EngineBench], accuracy: dict[str, float]) -> Panel:
    """The figure with its table and arrays."""
    good = [row for row in rows if row.timings]
    caption = f"Highest throughput at {'; at '.join(fastest(good, place) for place in (0, -1))}."
    arrays = {"speed": np.array([[t.images_per_second for t in row.timings] for row in good])}
    arrays |= {"engine": np.array([row.name for row in good])}
    draw, table = partial(bench_figure, good, accuracy), bench_table(rows, accuracy)
    return Panel(NAME, "Engine speed", caption, "", draw, arrays, table)


def fastest(rows: Sequence[EngineBench], place: int) -> str:
    """The fastest engine at one of the batch sizes, and what its speed costs."""
    row = max(rows, key=lambda each: each.timings[place].images_per_second)
    timing, found = row.timings[place], row.parity
    assert found is not None
    speed = f"batch size {timing.batch_size}: {row.name}, {timing.images_per_second:.1f} images per second"
    return f"{speed} (same class as PyTorch for {found.top1_agreement:.0%} of {found.num_images} images)"


def bench_table(rows: Sequence[EngineBench], accuracy: dict[str, float]) -> tuple[tuple[str, ...], ...]:
    """A line for each engine and batch size; the first is the header. `accuracy` of each engine may be empty."""
    head = ("engine", "batch", "median, ms", "p95", "p99", "images/s", "same class", "KL divergence")
    lines = [(*head, "file, MiB", "memory, MiB", *(("accuracy",) if accuracy else ()))]
    for row in rows:
        for timing in row.timings:
            assert row.parity is not None
            times = (
                f"{timing.median_ms:.1f}",
                f"{timing.p95_ms:.1f}",
                f"{timing.p99_ms:.1f}",
                f"{timing.images_per_second:.1f}",
            )
            agreement = (f"{row.parity.top1_agreement:.1%}", f"{row.parity.kl_divergence:.1g}")
            mebibytes = (f"{row.file_mib:.0f}", f"{row.memory_mib:.0f}")
            measured = (f"{accuracy[row.name]:.2%}",) if accuracy else ()
            lines.append((row.name, str(timing.batch_size), *times, *agreement, *mebibytes, *measured))
        if row.error:
            lines.append((row.name, "", row.error, *("" for _ in lines[0][3:])))
    return tuple(lines)


def bench_figure(rows: Sequence[EngineBench], accuracy: dict[str, float]) -> "Figure":
    """A point for each engine and batch size."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(7.6, 4.6)
    y = "accuracy" if accuracy else "images with the same class as PyTorch fp32"
    axes = style_axes(
        figure.subplots(), "Speed and accuracy" if accuracy else "Speed and agreement", "images per second", y
    )
    colors = current_theme().series
    for number, row in enumerate(rows):
        assert row.parity is not None
        height = accuracy.get(row.name, row.parity.top1_agreement)
        speeds = [timing.images_per_second for timing in row.timings]
        color, marker = colors[number % len(colors)], MARKERS[number // len(colors) % len(MARKERS)]
        axes.plot(speeds, [height] * len(speeds), marker, color=color, label=row.name, markersize=6, linewidth=1.2)
    axes.set_xlim(0, None)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 1.005))  # a single value would be centered, with ticks above 100%
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    axes.legend(frameon=False, loc="best", fontsize=8)
    return figure
