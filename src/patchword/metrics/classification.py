"""Figures of merit from what a model said and what was true. Plain arrays; no models, no files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .calibration import BINS, calibration_error, equal_mass, equal_width
from .intervals import bootstrap_all, bootstrap_mean, wilson
from .per_class import class_intervals, per_class_metrics

SLOW_ROUNDS = 500  # of bootstrap, for figures that are no means
FEW = 100  # pictures, below which calibration cannot be told


class ClassificationMetrics:
    """Collects what the figures need, a few pictures at a time, so that logits need not be kept."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.predicted: list[int] = []
        self.ranks: list[int] = []  # how many classes were given more than the true one
        self.confidences: list[float] = []
        self.losses: list[float] = []
        self.briers: list[float] = []

    def add(self, logits: Tensor, targets: Sequence[int]) -> None:
        """Logits (B, K) and the true classes (B)."""
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
    def right(self) -> np.ndarray:
        """Whether each picture was recognised."""
        return np.array(self.targets) == np.array(self.predicted)

    def figures(self) -> dict[str, float | int]:
        """top1, top5, ece, nll as fractions, and n."""
        return {
            "top1": float(self.right.mean()),
            "top5": float((np.array(self.ranks) < 5).mean()),
            "ece": expected_calibration_error(np.array(self.confidences), self.right),
            "nll": float(np.mean(self.losses)),
            "n": len(self.targets),
        }

    def detailed(self, classes: int) -> tuple[dict[str, float | int], dict[str, tuple[float, float]]]:
        """Every figure, and of each its 95 % interval by bootstrap over the pictures."""
        targets, predicted, right = np.array(self.targets), np.array(self.predicted), self.right
        confidences = np.array(self.confidences)
        columns = {"top1": right, "top5": np.array(self.ranks) < 5, "nll": self.losses, "brier": self.briers}
        means = {name: np.asarray(values, np.float64) for name, values in columns.items()}
        figures: dict[str, float | int] = {name: float(values.mean()) for name, values in means.items()}
        intervals = {name: bootstrap_mean(means[name]) for name in ("nll", "brier")}
        # At 0 and 100 % a bootstrap knows no doubt; Wilson's interval does.
        intervals |= {name: wilson(float(figures[name]), len(right)) for name in ("top1", "top5")}

        def gaps(rows: np.ndarray) -> np.ndarray:
            wide = expected_calibration_error(confidences[rows], right[rows])
            return np.array([wide, calibration_error(equal_mass(confidences[rows], right[rows]))])

        found = per_class_metrics(targets, predicted, classes)
        figures |= {"balanced_accuracy": found.balanced_accuracy, "macro_f1": found.macro_f1}
        intervals |= class_intervals(targets, predicted, classes)
        tails = bootstrap_all(gaps, len(right), rounds=SLOW_ROUNDS)
        for name, value, (low, high) in zip(("ece", "ece_adaptive"), gaps(np.arange(len(right))), tails, strict=True):
            figures[name] = float(value)
            # Drawing anew only adds to a sum of absolute gaps: turned round, that is undone. Of few pictures each is a
            # bin of its own, and its gap says nothing.
            turned = (max(0.0, 2 * value - high), max(value, 2 * value - low))
            intervals[name] = turned if len(right) >= FEW else (0.0, 1.0)
        return {**figures, "n": len(right)}, intervals

    def per_class(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """For each class that occurred: how many pictures, the fraction recognised, precision and F1."""
        found = per_class_metrics(np.array(self.targets), np.array(self.predicted), len(labels))
        columns = zip(labels, found.support, found.recall, found.precision, found.f1, strict=True)
        return [
            {"label": label, "index": index, "n": int(n), "top1": float(recall), "f1": float(f1)}
            | {"precision": None if np.isnan(precision) else float(precision)}
            for index, (label, n, recall, precision, f1) in enumerate(columns)
            if n
        ]

    def rows(self, names: Sequence[str], labels: Sequence[str]) -> list[dict[str, Any]]:
        """What was said of each picture, in the order in which they came."""
        said = zip(names, self.targets, self.predicted, self.confidences, self.losses, strict=True)
        return [
            {
                "name": name,
                "true": labels[t],
                "predicted": labels[p],
                "probability": round(c, 6),
                "loss": round(loss, 6),
            }
            for name, t, p, c, loss in said
        ]


def expected_calibration_error(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """The mean gap between confidence and accuracy over equally wide bins of confidence, weighted by their size."""
    return calibration_error(equal_width(confidences, right, bins))


def multi_label_metrics(logits: np.ndarray, targets: np.ndarray) -> dict[str, float | int]:
    """Logits (N, K) against zeros and ones (N, K).

    map: average precision, mean over the classes that occur; f1: of all decisions at probability 0.5; nll: of one
    decision; n: pictures.
    """
    occurring = np.flatnonzero(targets.any(axis=0))
    precisions = [average_precision(logits[:, k], targets[:, k]) for k in occurring]
    decided = logits > 0
    hits = float((decided & (targets > 0.5)).sum())
    signed = np.where(targets > 0.5, -logits, logits).astype(np.float64)
    return {
        "map": float(np.mean(precisions)) if precisions else 0.0,
        "f1": 2 * hits / max(1.0, float(decided.sum() + targets.sum())),
        "nll": float(np.logaddexp(0, signed).mean()),
        "n": len(targets),
    }


def average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """Mean, over the images of the class, of the precision at the score of each; equal scores count together."""
    from sklearn.metrics import average_precision_score  # late: it takes a second

    return float(average_precision_score(targets > 0.5, scores))
