"""The confusion matrix: a labeled SVG for few classes, an unlabeled image for many; and the table of classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..metrics.intervals import wilson
from .embedded_images import data_uri
from .formatting import percent, shorten, text_width
from .report_data import ClassificationResults

MAX_LABELED = 60  # classes whose names still fit beside the matrix
MAX_WRITTEN = 20  # classes up to which the counts are written into the cells
MAX_SIDE = 260  # pixels along a side of the unlabeled image: smaller dots cannot be seen
FONT = 12

BLUE, ORANGE = (47, 116, 208), (224, 106, 12)  # correct and wrong; distinguishable for nearly all color vision


@dataclass(frozen=True)
class Cell:
    """A nonzero entry of the matrix, in SVG units."""

    x: int
    y: int
    count: int
    opacity: float
    correct: bool
    title: str


@dataclass(frozen=True)
class LabeledMatrix:
    """The geometry of the SVG: class names at both sides, a square for each nonzero entry."""

    labels: list[str]  # shortened
    cells: list[Cell]
    cell: int  # side of a cell
    left: float  # room for the names of the rows
    top: float  # and of the columns
    upright: bool  # whether the columns' names fit without turning them
    counts: bool  # whether counts are written into the cells

    @property
    def side(self) -> int:
        """Of the matrix without names."""
        return self.cell * len(self.labels)


@dataclass(frozen=True)
class ConfusionMatrix:
    """What the page shows: either `matrix` or, for many classes, the image `dots`."""

    shown: int  # classes that occur as a label or a prediction
    total: int
    matrix: LabeledMatrix | None = None
    dots: str = ""
    pooled: int = 1  # classes along the side of a dot


def confusion_matrix_view(results: ClassificationResults) -> ConfusionMatrix | None:
    """The classes that occur; None where there is no matrix, as for multi-label models."""
    if results.confusion is None or not results.confusion.sum():
        return None
    occurring = np.flatnonzero(results.confusion.any(axis=1) | results.confusion.any(axis=0))
    counts, shown, total = results.confusion[np.ix_(occurring, occurring)], len(occurring), len(results.labels)
    if shown <= MAX_LABELED:
        return ConfusionMatrix(shown, total, labeled([results.labels[int(k)] for k in occurring], counts))
    return ConfusionMatrix(shown, total, dots=unlabeled(counts), pooled=pool_size(shown))


def opacity(fraction: np.ndarray) -> np.ndarray:
    """Of a cell, from its fraction of the row. The square root keeps rare mistakes visible."""
    return np.where(fraction > 0, 0.1 + 0.9 * np.sqrt(fraction), 0.0)


def labeled(names: Sequence[str], counts: np.ndarray) -> LabeledMatrix:
    """Lay out the SVG."""
    short = [shorten(name, 26) for name in names]
    cell = max(14, min(42, 620 // len(counts)))
    room = FONT * max(map(text_width, short)) + 12
    upright = room <= cell + 8
    sums = counts.sum(axis=1, keepdims=True)
    fractions = counts / np.maximum(sums, 1)
    shades = opacity(fractions)
    cells = []
    for row, column in np.argwhere(counts).tolist():
        outcome = "predicted correctly" if row == column else f"predicted as {names[column]}"
        title = f"{names[row]} {outcome}: {counts[row, column]} of {sums[row, 0]} ({percent(fractions[row, column])})"
        shade = float(shades[row, column])
        cells.append(Cell(column * cell, row * cell, int(counts[row, column]), shade, row == column, title))
    return LabeledMatrix(short, cells, cell, room, FONT + 12 if upright else room, upright, len(counts) <= MAX_WRITTEN)


def unlabeled(counts: np.ndarray) -> str:
    """A PNG of colored dots, transparent elsewhere so that it fits a light page and a dark one."""
    shades = opacity(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    diagonal, step = np.eye(len(counts), dtype=bool), pool_size(len(counts))
    correct = max_pool(np.where(diagonal, shades, 0), step)
    wrong = max_pool(np.where(diagonal, 0, shades), step)
    pixels = np.zeros((*correct.shape, 4), np.uint8)
    pixels[..., :3] = np.where((correct > 0)[..., None], BLUE, ORANGE)
    pixels[..., 3] = np.round(255 * np.where(correct > 0, correct, wrong))
    return data_uri(Image.fromarray(pixels), "PNG")


def pool_size(classes: int) -> int:
    """How many classes share a row of dots."""
    return -(-classes // MAX_SIDE)


def max_pool(values: np.ndarray, step: int) -> np.ndarray:
    """The largest value of each square of step x step cells."""
    starts = np.arange(0, len(values), step)
    return np.maximum.reduceat(np.maximum.reduceat(values, starts, axis=0), starts, axis=1)


@dataclass(frozen=True)
class ClassScore:
    """A class with its accuracy and 95% interval, or its average precision, which has no interval."""

    label: str
    n: int
    score: float
    interval: tuple[float, float] | None


def class_table(results: ClassificationResults) -> list[ClassScore]:
    """A row for each class that occurs, worst first."""
    accuracy = results.main_metric == "top1"
    return [
        ClassScore(label, n, score, wilson(score, n) if accuracy else None)
        for label, n, score in results.class_scores()
    ]
