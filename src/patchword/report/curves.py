"""Curves of a run as inline SVG: loss, accuracy and learning rate over epochs."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.text import count
from .content import Report, Row, number
from .text import escape, percent

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 78, 12, 40  # room for tick labels, and for the lines' names at their ends
MOST_POINTS = 400  # of one line; more cannot be told apart
LINE_HEIGHT = 14

Format = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One curve: its name as it is shown at its end, its points, and its look (a CSS class)."""

    name: str
    look: str
    xs: np.ndarray
    ys: np.ndarray
    steps: np.ndarray

    @property
    def faint(self) -> bool:
        return self.look.endswith("raw")


@dataclass(frozen=True)
class Axes:
    """From values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)


def curves(report: Report) -> str:
    """The section's figures; nothing for a run without rows."""
    train, val = report.rows("train"), report.rows("val")
    score = report.headline
    title = "Accuracy" if score == "top1" else "Mean average precision"
    loss = [*with_mean("train", train, "loss"), line("validation", "val", val, "nll")]
    accuracy = [*with_mean("train", train, "accuracy")[1:], line("validation", "val", val, score)]
    figures = [
        figure("Loss", loss, short, remark=_loss_remark(report)),
        figure(title, accuracy, percent, most=1.0),
        figure("Learning rate", [line("", "rate", train, "lr")], short),
        figure("Norm of the gradient", with_mean("", train, "grad_norm", look="rate"), short),
    ]
    return "".join(figures)


def short(value: float) -> str:
    return f"{value:.3g}"


def with_mean(name: str, rows: Sequence[Row], field: str, look: str = "train") -> list[Line]:
    """A noisy column twice: as it is, faintly, and its running mean."""
    raw = line("", f"{look} raw", rows, field)
    return [raw, replace(raw, name=name, look=look, ys=smoothed(raw.ys))]


def _loss_remark(report: Report) -> str:
    settings = report.settings
    augment = settings.get("augment") or {}
    harder = [name for name in ("mixup", "cutmix") if augment.get(name)]
    harder += ["label smoothing"] if settings.get("label_smoothing") else []
    together = -(-len(report.rows("train")) // MOST_POINTS)
    faint = "each logged step" if together < 2 else f"means of {together} logged steps"
    said = f"Faint: {faint}; strong: a running mean."
    if harder:
        said += f" Training uses {' and '.join(harder)}, which raise its loss, so the two lines are not comparable."
    return said


def line(name: str, look: str, rows: Sequence[Row], field: str) -> Line:
    """A column of the metrics over epochs, without the rows that lack it."""
    points = [(number(row.get("epoch")), number(row.get(field)), number(row.get("step")) or 0.0) for row in rows]
    kept = [(x, y, step) for x, y, step in points if x is not None and y is not None]
    table = np.array(sorted(kept), dtype=np.float64).reshape(-1, 3)
    if len(table) > MOST_POINTS:
        table = np.stack([part.mean(axis=0) for part in np.array_split(table, MOST_POINTS)])
    return Line(name, look, table[:, 0], table[:, 1], table[:, 2])


def smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean over a fortieth of the run to both sides, narrower at the ends, so that it does not lag."""
    n = len(values)
    reach = np.minimum(n // 40, np.minimum(np.arange(n), np.arange(n)[::-1]))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(n)
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def figure(title: str, lines: list[Line], show: Format, *, most: float | None = None, remark: str = "") -> str:
    lines = [each for each in lines if len(each.xs)]
    if not lines:
        return ""
    axes = fitted(lines, most)
    named = [each for each in lines if not each.faint]
    said = ", ".join(f"{each.name} {show(each.ys[-1])}".strip() for each in named)
    caption = f"<p>{escape(remark)}</p>" if remark else ""
    return f"""<figure class="curve"><h3>{title} <small>at the end: {escape(said)}</small></h3>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title} over epochs; at the end: {said}")}"
 data-lines="{escape(json.dumps(hover(named, axes, show)))}">
{grid(axes, show)}{"".join(path(each, axes) for each in lines)}{names(named, axes)}<line class="cursor"/></svg>
<div class="tip"></div>{caption}</figure>
"""


def fitted(lines: list[Line], most: float | None) -> Axes:
    """Axes that hold all lines; of the raw one only what most of it needs: the first steps may be far away."""
    xs = np.concatenate([each.xs for each in lines])
    ys = np.concatenate([each.ys if not each.faint else np.percentile(each.ys, [1, 98]) for each in lines])
    low, high = float(ys.min()), float(ys.max())
    if low > 0 and low < 0.6 * high and most is None:
        low = 0.0  # a loss or a rate has a zero that means something
    if high <= low:
        low, high = (0.9 * low, 1.1 * high) if low > 0 else (0.0, 1.0)
    high = high + 0.04 * (high - low)
    first, last = min(0.0, float(xs.min())), float(xs.max())
    return Axes((first, last if last > first else first + 1), (low, high if most is None else min(high, most)))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers between two values, about as many as wanted."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = min((unit * m for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - rough))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) if step > 1e-9 else k * step for k in range(first, last + 1)]


def grid(axes: Axes, show: Format) -> str:
    parts = []
    marks = ticks(*axes.y, 5)
    whole = show(0.5).endswith("%") and all(abs(100 * y - round(100 * y)) < 1e-6 for y in marks)
    for y in marks:
        at, text = axes.down(y), percent(y, 0) if whole else show(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for x in ticks(*axes.x, 6):
        parts.append(f'<text x="{axes.across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    return "".join(parts) + f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">epoch</text>'


def path(each: Line, axes: Axes) -> str:
    inside = np.clip(each.ys, *axes.y)
    places = [(axes.across(x), axes.down(y)) for x, y in zip(each.xs, inside, strict=True)]
    if len(places) == 1:
        return f'<circle class="{each.look} dot" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3.5"/>'
    drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = "".join(f'<circle class="{each.look} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places)
    few = each.look == "val" and len(places) <= 40
    return f'<path class="{each.look}" d="M{drawn}"/>{dots if few else ""}'


def names(lines: list[Line], axes: Axes) -> str:
    """Each line's name at its end, moved apart where they would touch."""
    wanted = sorted((axes.down(each.ys[-1]), each.name, each.look) for each in lines if each.name)
    placed: list[tuple[float, str, str]] = []
    for at, text, look in wanted:
        at = max(at, placed[-1][0] + LINE_HEIGHT) if placed else max(at, TOP + 4)
        placed.append((at, text, look))
    over = max(0.0, placed[-1][0] - (HEIGHT - BOTTOM)) if placed else 0.0
    return "".join(
        f'<text class="{look} name" x="{WIDTH - RIGHT + 8}" y="{at - over + 4:.1f}">{escape(text)}</text>'
        for at, text, look in placed
    )


def hover(lines: list[Line], axes: Axes, show: Format) -> list[dict[str, object]]:
    """What the page's script shows under the pointer: for each line [place across, text] of its points."""
    found: list[dict[str, object]] = []
    for each in lines:
        points = [
            [round(axes.across(x), 1), f"{show(y)}  epoch {x:.3g}, step {count(round(step))}"]
            for x, y, step in zip(each.xs.tolist(), each.ys.tolist(), each.steps.tolist(), strict=True)
        ]
        found.append({"name": each.name, "points": points})
    return found
