"""What a report says, as plain data, and what follows from it. No HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import Config

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A picture that the model got wrong."""

    name: str
    image: np.ndarray  # uint8 (h, w, c), with 1 or 3 channels
    true: str
    predicted: str
    probability: float  # which the model gave to `predicted`
    loss: float


@dataclass(frozen=True, kw_only=True)
class Graded:
    """How a model did on labelled pictures."""

    labels: Sequence[str]
    figures: Mapping[str, float]  # top1, top5, nll, ece, n; multi-label: map, f1, n
    confusion: np.ndarray | None = None  # (K, K) counts: rows are true, columns predicted; None for multi-label
    per_class: Sequence[Row] = ()  # label, n and top1 (or ap) of each class; empty: from the confusion
    mistakes: Sequence[Mistake] = ()  # the hardest first

    @property
    def headline(self) -> str:
        """The name of the one number that matters."""
        return "map" if "map" in self.figures else "top1"

    def class_scores(self) -> list[tuple[str, int, float]]:
        """(label, pictures, score) of each class that occurred, the worst first."""
        rows = self.per_class or self._scores_from_confusion()
        score = "ap" if self.headline == "map" else "top1"
        scores = [(str(row["label"]), int(row["n"]), number(row.get(score))) for row in rows if row.get("n")]
        known = [(label, n, value) for label, n, value in scores if value is not None]
        return sorted(known, key=lambda each: (each[2], -each[1], each[0]))

    def _scores_from_confusion(self) -> list[Row]:
        if self.confusion is None:
            return []
        counts, right = self.confusion.sum(axis=1), self.confusion.diagonal()
        pairs = zip(self.labels, counts.tolist(), right.tolist(), strict=True)
        return [{"label": label, "n": n, "top1": hits / n} for label, n, hits in pairs if n]

    def confused_pairs(self, most: int) -> list[tuple[str, str, int, int]]:
        """(true, predicted, how often, pictures of the true class), the most frequent first."""
        if self.confusion is None:
            return []
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        counts = self.confusion.sum(axis=1)
        rows, columns = np.nonzero(wrong)
        times = wrong[rows, columns]
        order = np.lexsort((columns, rows, -times / counts[rows], -times))[:most]
        found = zip(rows[order].tolist(), columns[order].tolist(), times[order].tolist(), strict=True)
        return [(self.labels[r], self.labels[c], n, int(counts[r])) for r, c, n in found]

    def guessing(self) -> float | None:
        """The accuracy of always naming the most frequent class."""
        if self.confusion is None or not self.confusion.sum():
            return None
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())


@dataclass(frozen=True, kw_only=True)
class Report(Graded):
    """Everything that the page of a training run is made of."""

    title: str
    config: Config | Mapping[str, Any]  # or its JSON
    metrics: Sequence[Row]  # the rows of metrics.jsonl
    part: str  # "val" or "test": what was graded
    parameters: int | None = None
    samples: Mapping[str, int] = field(default_factory=dict)  # pictures in each part
    notes: Sequence[str] = ()  # what was skipped, where the data came from
    machine: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.config.to_json() if isinstance(self.config, Config) else dict(self.config)

    def rows(self, kind: str) -> list[Row]:
        return [row for row in self.metrics if row.get("kind") == kind]


def number(value: Any) -> float | None:
    """The value as a float if it is a finite number: metrics may hold null, and NaN where a run went wrong."""
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return float(value) if fits and math.isfinite(value) else None
