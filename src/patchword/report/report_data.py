"""What a report shows, as plain data, and what can be computed from it. No HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import Config

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Mistake:
    """An image that the model misclassified."""

    name: str
    image: np.ndarray  # uint8 (h, w, c), with 1 or 3 channels
    true: str
    predicted: str
    probability: float  # of the predicted class
    loss: float


@dataclass(frozen=True, kw_only=True)
class ClassificationResults:
    """How a model did on a labeled set."""

    labels: Sequence[str]
    metrics: Mapping[str, float]  # top1, top5, nll, ece, n; multi-label: map, f1, n
    confusion: np.ndarray | None = None  # (K, K) counts: rows are true, columns predicted; None for multi-label
    per_class: Sequence[Row] = ()  # label, n and top1 (or ap) of each class; empty: computed from the confusion matrix
    mistakes: Sequence[Mistake] = ()  # by decreasing loss

    @property
    def main_metric(self) -> str:
        """The name of the metric that heads the report."""
        return "map" if "map" in self.metrics else "top1"

    def class_scores(self) -> list[tuple[str, int, float]]:
        """(label, number of images, score) of each class that occurs, worst first."""
        rows = self.per_class or self._scores_from_confusion()
        key = "ap" if self.main_metric == "map" else "top1"
        scores = [(str(row["label"]), int(row["n"]), finite(row.get(key))) for row in rows if row.get("n")]
        known = [(label, n, score) for label, n, score in scores if score is not None]
        return sorted(known, key=lambda each: (each[2], -each[1], each[0]))

    def _scores_from_confusion(self) -> list[Row]:
        if self.confusion is None:
            return []
        counts, correct = self.confusion.sum(axis=1), self.confusion.diagonal()
        rows = zip(self.labels, counts.tolist(), correct.tolist(), strict=True)
        return [{"label": label, "n": n, "top1": hits / n} for label, n, hits in rows if n]

    def confused_pairs(self, limit: int) -> list[tuple[str, str, int, int]]:
        """(true, predicted, count, images of the true class), most frequent first."""
        if self.confusion is None:
            return []
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        counts = self.confusion.sum(axis=1)
        rows, columns = np.nonzero(wrong)
        times = wrong[rows, columns]
        order = np.lexsort((columns, rows, -times / counts[rows], -times))[:limit]
        found = zip(rows[order].tolist(), columns[order].tolist(), times[order].tolist(), strict=True)
        return [(self.labels[r], self.labels[c], n, int(counts[r])) for r, c, n in found]

    def majority_baseline(self) -> float | None:
        """The accuracy of always predicting the most frequent class."""
        if self.confusion is None or not self.confusion.sum():
            return None
        return float(self.confusion.sum(axis=1).max() / self.confusion.sum())


@dataclass(frozen=True, kw_only=True)
class TrainingReport(ClassificationResults):
    """Everything that the report of a training run shows."""

    title: str
    config: Config | Mapping[str, Any]  # or its JSON
    history: Sequence[Row]  # the rows of metrics.jsonl
    split: str  # "val" or "test": what `metrics` were measured on
    parameters: int | None = None
    samples: Mapping[str, int] = field(default_factory=dict)  # number of images in each split
    notes: Sequence[str] = ()  # unreadable files, the origin of the data
    machine: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as JSON."""
        return self.config.to_json() if isinstance(self.config, Config) else dict(self.config)

    def rows(self, kind: str) -> list[Row]:
        """The rows of one kind: train, val or test."""
        return [row for row in self.history if row.get("kind") == kind]


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite number: metrics may be null, or NaN where a run diverged."""
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return float(value) if fits and math.isfinite(value) else None
