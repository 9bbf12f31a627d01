"""Training curves: loss, accuracy, learning rate and gradient norm over epochs, as coordinates of an SVG."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.text import format_count
from .formatting import percent
from .report_data import Row, TrainingReport, finite

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 78, 12, 40  # room for tick labels, and for the lines' names at their ends
MAX_POINTS = 400  # of one line; more cannot be distinguished
MAX_DOTS = 40  # points of a validation line up to which each is marked
LINE_HEIGHT = 14

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One column of the history: its name as shown at its end, its points, and its CSS class."""

    name: str
    look: str
    xs: np.ndarray
    ys: np.ndarray
    steps: np.ndarray

    @property
    def raw(self) -> bool:
        """Whether this is the faint line of single steps."""
        return self.look.endswith("raw")


@dataclass(frozen=True)
class Axes:
    """Maps values to SVG coordinates."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> float:
        """The horizontal coordinate of a value."""
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        """The vertical coordinate of a value."""
        return HEIGHT - BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True)
class Path:
    """A line as SVG: `d` is empty if it is a single point."""

    look: str
    d: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Everything that the template needs to write one chart; all places are SVG coordinates."""

    title: str
    final: str  # the last value of each line
    remark: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    paths: list[Path]
    names: list[tuple[float, str, str]]  # height, text and CSS class
    hover: str  # JSON for the script: the text at each point
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def training_curves(report: TrainingReport) -> list[Chart]:
    """The charts of a run; none for a run without history."""
    train, val = report.rows("train"), report.rows("val")
    metric = report.main_metric
    title = "Accuracy" if metric == "top1" else "Mean average precision"
    loss = [*with_mean("train", train, "loss"), line("validation", "val", val, "nll")]
    accuracy = [*with_mean("train", train, "accuracy")[1:], line("validation", "val", val, metric)]
    charts = [
        chart("Loss", loss, short, remark=loss_remark(report)),
        chart(title, accuracy, percent, highest=1.0),
        chart("Learning rate", [line("", "rate", train, "lr")], short),
        chart("Gradient norm", with_mean("", train, "grad_norm", look="rate"), short),
    ]
    return [each for each in charts if each is not None]


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def loss_remark(report: TrainingReport) -> str:
    """What the faint line is, and whether the two losses can be compared."""
    settings = report.settings
    augment = settings.get("augment") or {}
    harder = [name for name in ("mixup", "cutmix") if augment.get(name)]
    harder += ["label smoothing"] if settings.get("label_smoothing") else []
    together = -(-len(report.rows("train")) // MAX_POINTS)
    faint = "each logged step" if together < 2 else f"means of {together} logged steps"
    remark = f"Faint line: {faint}. Solid line: running mean."
    if harder:
        verb = "raise" if len(harder) > 1 else "raises"
        remark += f" Training uses {' and '.join(harder)}, which {verb} the training loss: "
        remark += "it is not comparable with the validation loss."
    return remark


def line(name: str, look: str, rows: Sequence[Row], column: str) -> Line:
    """A column of the history over epochs, without the rows that lack it."""
    points = [(finite(row.get("epoch")), finite(row.get(column)), finite(row.get("step")) or 0.0) for row in rows]
    kept = [(x, y, step) for x, y, step in points if x is not None and y is not None]
    table = np.array(sorted(kept), dtype=np.float64).reshape(-1, 3)
    if len(table) > MAX_POINTS:
        table = np.stack([chunk.mean(axis=0) for chunk in np.array_split(table, MAX_POINTS)])
    return Line(name, look, table[:, 0], table[:, 1], table[:, 2])


def with_mean(name: str, rows: Sequence[Row], column: str, look: str = "train") -> list[Line]:
    """A noisy column twice: as it is, and its running mean."""
    raw = line("", f"{look} raw", rows, column)
    return [raw, replace(raw, name=name, look=look, ys=running_mean(raw.ys))]


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean over a fortieth of the run to both sides, narrower at the ends, so that it does not lag."""
    n = len(values)
    reach = np.minimum(n // 40, np.minimum(np.arange(n), np.arange(n)[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(n)
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def chart(
    title: str, lines: list[Line], show: Format, *, highest: float | None = None, remark: str = ""
) -> Chart | None:
    """Lay out a chart; None if none of its lines has a point."""
    lines = [each for each in lines if len(each.xs)]
    if not lines:
        return None
    axes = fitted(lines, highest)
    named = [each for each in lines if not each.raw]
    return Chart(
        title=title,
        final=", ".join(f"{each.name} {show(each.ys[-1])}".strip() for each in named),
        remark=remark,
        x_ticks=[(axes.across(x), f"{x:g}") for x in ticks(*axes.x, 6)],
        y_ticks=y_ticks(axes, show),
        paths=[path(each, axes) for each in lines],
        names=line_names(named, axes),
        hover=json.dumps(hover(named, axes, show)),
    )


def fitted(lines: list[Line], highest: float | None) -> Axes:
    """Axes that hold all lines; of a raw one only the bulk, because the first steps may be far away."""
    xs = np.concatenate([each.xs for each in lines])
    ys = np.concatenate([each.ys if not each.raw else np.percentile(each.ys, [1, 98]) for each in lines])
    low, high = float(ys.min()), float(ys.max())
    if low > 0 and low < 0.6 * high and highest is None:
        low = 0.0  # the zero of a loss or a learning rate has a meaning
    if high <= low:
        low, high = (0.9 * low, 1.1 * high) if low > 0 else (0.0, 1.0)
    high = high + 0.04 * (high - low)
    first, last = min(0.0, float(xs.min())), float(xs.max())
    return Axes((first, last if last > first else first + 1), (low, high if highest is None else min(high, highest)))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers between two values, about as many as wanted."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) if step > 1e-9 else k * step for k in range(first, last + 1)]


def y_ticks(axes: Axes, show: Format) -> list[tuple[float, str]]:
    """Heights and texts; percentages without decimals where all are whole."""
    marks = ticks(*axes.y, 5)
    whole = show is percent and all(abs(100 * y - round(100 * y)) < 1e-6 for y in marks)
    return [(axes.down(y), percent(y, 0) if whole else show(y)) for y in marks]


def path(each: Line, axes: Axes) -> Path:
    """A line in SVG coordinates, cut off at the edge of the chart."""
    inside = np.clip(each.ys, *axes.y)
    places = [(axes.across(x), axes.down(y)) for x, y in zip(each.xs, inside, strict=True)]
    if len(places) == 1:
        return Path(each.look, "", places)
    marked = each.look == "val" and len(places) <= MAX_DOTS
    return Path(each.look, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), places if marked else [])


def line_names(lines: list[Line], axes: Axes) -> list[tuple[float, str, str]]:
    """Each line's name at its end, moved apart where they would touch."""
    wanted = sorted((axes.down(each.ys[-1]), each.name, each.look) for each in lines if each.name)
    placed: list[tuple[float, str, str]] = []
    for at, text, look in wanted:
        at = max(at, placed[-1][0] + LINE_HEIGHT) if placed else max(at, TOP + 4)
        placed.append((at, text, look))
    over = max(0.0, placed[-1][0] - (HEIGHT - BOTTOM)) if placed else 0.0
    return [(at - over, text, look) for at, text, look in placed]


def hover(lines: list[Line], axes: Axes, show: Format) -> list[dict[str, object]]:
    """What the script shows under the pointer: for each line [horizontal coordinate, text] of its points."""
    found: list[dict[str, object]] = []
    for each in lines:
        points = [
            [round(axes.across(x), 1), f"{show(y)}  epoch {x:.3g}, step {format_count(round(step))}"]
            for x, y, step in zip(each.xs.tolist(), each.ys.tolist(), each.steps.tolist(), strict=True)
        ]
        found.append({"name": each.name, "points": points})
    return found
