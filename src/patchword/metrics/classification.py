"""Accuracy, calibration and likelihood of single-label classifiers."""

from collections.abc import Sequence
from typing import Self, TypedDict

import numpy as np
import torch
from torch import Tensor

from .calibration import calibration_error, equal_mass_bins, expected_calibration_error
from .intervals import bootstrap_mean, bootstrap_statistics, wilson
from .per_class import ClassRow, class_intervals, class_rows, per_class_metrics

SLOW_ROUNDS = 500  # bootstrap rounds of metrics that are not means
MIN_CALIBRATION_IMAGES = 100  # below this, a calibration error is mostly noise

Metrics = dict[str, float | int]
"""Metrics by name."""
Intervals = dict[str, tuple[float, float]]
"""95% confidence intervals, (low, high), by the name of the metric."""


class PredictionRow(TypedDict):
    """What a model predicted for one labeled image; labels of multi-label models are joined by "; ".

    Attributes:
        name: The path of the image, or its name in a dataset.
        true: The true label.
        predicted: The predicted label.
        probability: The highest probability of a class, which is that of the predicted one.
        loss: The cross-entropy loss.
    """

    name: str
    true: str
    predicted: str
    probability: float
    loss: float


class ClassificationMetrics:
    """Accumulates batch by batch what the metrics need, without keeping the logits."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.predicted: list[int] = []
        self.ranks: list[int] = []  # how many classes scored higher than the true one
        self.confidences: list[float] = []
        self.losses: list[float] = []
        self.briers: list[float] = []

    @classmethod
    def from_arrays(cls, logits: np.ndarray, targets: np.ndarray) -> Self:
        """Of logits (N, K) and true classes (N,)."""
        metrics = cls()
        metrics.update(torch.from_numpy(logits), targets.tolist())
        return metrics

    def update(self, logits: Tensor, targets: Sequence[int]) -> None:
        """Add a batch: logits (B, K) and the true classes (B,)."""
        log_probabilities = logits.double().log_softmax(dim=-1)
        true = log_probabilities.gather(1, torch.as_tensor(targets)[:, None])
        best = log_probabilities.max(dim=1)
        self.targets += [int(t) for t in targets]
        self.predicted += best.indices.tolist()
        self.ranks += (log_probabilities > true).sum(dim=1).tolist()
        self.confidences += best.values.exp().tolist()
        self.losses += (-true[:, 0]).tolist()
        squares = log_probabilities.exp().square().sum(dim=1)
        self.briers += (squares - 2 * true[:, 0].exp() + 1).tolist()

    @property
    def correct(self) -> np.ndarray:
        """Whether each image was classified correctly, bool (N,)."""
        return np.equal(self.targets, self.predicted)

    def compute(self) -> Metrics:
        """top1, top5, ece, nll and n."""
        return {
            "top1": float(self.correct.mean()),
            "top5": float((np.array(self.ranks) < 5).mean()),
            "ece": expected_calibration_error(np.array(self.confidences), self.correct),
            "nll": float(np.mean(self.losses)),
            "n": len(self.targets),
        }

    def compute_with_intervals(self, num_classes: int) -> tuple[Metrics, Intervals]:
        """All metrics, and the 95% confidence interval of each except n."""
        targets, predicted, correct = np.array(self.targets), np.array(self.predicted), self.correct
        columns = {"top1": correct, "top5": np.array(self.ranks) < 5, "nll": self.losses, "brier": self.briers}
        values = {name: np.asarray(column, np.float64) for name, column in columns.items()}
        metrics: Metrics = {name: float(column.mean()) for name, column in values.items()}
        intervals = {name: bootstrap_mean(values[name]) for name in ("nll", "brier")}
        # At 0 and 100% a bootstrap interval has no width; Wilson's has.
        intervals |= {name: wilson(float(metrics[name]), len(correct)) for name in ("top1", "top5")}
        per_class = per_class_metrics(targets, predicted, num_classes)
        metrics |= {"balanced_accuracy": per_class.balanced_accuracy, "macro_f1": per_class.macro_f1}
        intervals |= class_intervals(targets, predicted, num_classes)
        errors, error_intervals = calibration_intervals(np.array(self.confidences), correct)
        return {**metrics, **errors, "n": len(correct)}, intervals | error_intervals

    def class_rows(self, labels: Sequence[str]) -> list[ClassRow]:
        """The per-class table: a row for each class that occurs."""
        return class_rows(np.array(self.targets), np.array(self.predicted), labels)

    def prediction_rows(self, names: Sequence[str], labels: Sequence[str]) -> list[PredictionRow]:
        """A row for each image, in the order in which they were added."""
        columns = zip(names, self.targets, self.predicted, self.confidences, self.losses, strict=True)
        return [
            PredictionRow(
                name=name, true=labels[t], predicted=labels[p], probability=round(c, 6), loss=round(loss, 6)
            )
            for name, t, p, c, loss in columns
        ]  # fmt: skip


def calibration_intervals(confidences: np.ndarray, correct: np.ndarray) -> tuple[Metrics, Intervals]:
    """The expected and the adaptive calibration error with their intervals.

    Resampling can only increase a sum of absolute gaps, so the percentile interval is reflected at the measured value
    (the basic bootstrap).
    """

    def compute_errors(rows: np.ndarray) -> np.ndarray:
        fixed = expected_calibration_error(confidences[rows], correct[rows])
        return np.array([fixed, calibration_error(equal_mass_bins(confidences[rows], correct[rows]))])

    values = compute_errors(np.arange(len(correct)))
    percentiles = bootstrap_statistics(compute_errors, len(correct), rounds=SLOW_ROUNDS)
    metrics: Metrics = {}
    intervals: Intervals = {}
    for name, value, (low, high) in zip(("ece", "ece_adaptive"), values, percentiles, strict=True):
        metrics[name] = float(value)
        reflected = (max(0.0, 2 * value - high), max(value, 2 * value - low))
        intervals[name] = reflected if len(correct) >= MIN_CALIBRATION_IMAGES else (0.0, 1.0)
    return metrics, intervals
