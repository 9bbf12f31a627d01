"""Metrics of multi-label classifiers: every label is a binary decision of its own."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from torch import Tensor

from .classification import Intervals, Metrics, PredictionRow
from .intervals import bootstrap_statistics
from .per_class import MultiLabelClassRow, average_precision, multi_label_class_rows

ROUNDS = 200  # of bootstrap; each one sorts every class


class MultiLabelMetrics:
    """Accumulates logits and labels image by image."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    @classmethod
    def from_arrays(cls, logits: np.ndarray, targets: np.ndarray) -> Self:
        """Of logits (N, K) and zeros and ones (N, K)."""
        metrics = cls()
        metrics.logits, metrics.targets = list(logits), list(targets)
        return metrics

    def update(self, logits: Tensor, labels: Sequence[int]) -> None:
        """Add one image: its logits (1, K), and the indices of its labels."""
        target = np.zeros(logits.shape[1], dtype=np.float32)
        target[list(labels)] = 1
        self.logits.append(logits[0].float().cpu().numpy())
        self.targets.append(target)

    def compute_with_intervals(self, num_classes: int) -> tuple[Metrics, Intervals]:
        """map, f1, nll and n, and the 95% bootstrap interval of each except n."""
        logits, targets = np.stack(self.logits), np.stack(self.targets)
        metrics = multi_label_metrics(logits, targets)
        names = [name for name in metrics if name != "n"]

        def resampled(rows: np.ndarray) -> np.ndarray:
            values = multi_label_metrics(logits[rows], targets[rows])
            return np.array([values[name] for name in names])

        intervals = bootstrap_statistics(resampled, len(logits), rounds=ROUNDS)
        return metrics, dict(zip(names, intervals, strict=True))

    def class_rows(self, labels: Sequence[str]) -> list[MultiLabelClassRow]:
        """The per-class table: a row for each label that occurs."""
        return multi_label_class_rows(np.stack(self.logits), np.stack(self.targets), labels)

    def prediction_rows(self, names: Sequence[str], labels: Sequence[str]) -> list[PredictionRow]:
        """A row for each image; labels with a probability above 0.5 are predicted."""
        rows = []
        for name, logits, target in zip(names, self.logits, self.targets, strict=True):
            signed = np.where(target > 0.5, -logits, logits)
            rows.append(
                PredictionRow(
                    name=name,
                    true="; ".join(labels[k] for k in np.flatnonzero(target).tolist()),
                    predicted="; ".join(labels[k] for k in np.flatnonzero(logits > 0).tolist()),
                    probability=round(float(1 / (1 + np.exp(-logits.max()))), 6),
                    loss=round(float(np.logaddexp(0, signed).mean()), 6),
                )
            )
        return rows


def multi_label_metrics(logits: np.ndarray, targets: np.ndarray) -> Metrics:
    """Metrics of logits (N, K) and targets of zeros and ones (N, K).

    Returns:
        map: mean average precision over the classes that occur. f1: micro-averaged, at a probability of 0.5.
        nll: mean binary cross-entropy of a decision. n: number of images.
    """
    occurring = np.flatnonzero(targets.any(axis=0))
    precisions = [average_precision(logits[:, k], targets[:, k]) for k in occurring]
    predicted = logits > 0
    hits = float((predicted & (targets > 0.5)).sum())
    signed = np.where(targets > 0.5, -logits, logits).astype(np.float64)
    return {
        "map": float(np.mean(precisions)) if precisions else 0.0,
        "f1": 2 * hits / max(1.0, float(predicted.sum() + targets.sum())),
        "nll": float(np.logaddexp(0, signed).mean()),
        "n": len(targets),
    }
