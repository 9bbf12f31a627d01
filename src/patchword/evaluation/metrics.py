"""Figures of merit from what a model said and what was true. Plain arrays; no models, no files."""

import numpy as np
from torch import Tensor

ECE_BINS = 15


class Tally:
    """Collects what the figures need, one picture at a time, so that logits need not be kept."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.predicted: list[int] = []
        self.ranks: list[int] = []  # how many classes were given more than the true one
        self.confidences: list[float] = []
        self.losses: list[float] = []

    def add(self, logits: Tensor, target: int) -> None:
        """One picture: logits (K) and the true class."""
        log_probabilities = logits.double().log_softmax(dim=-1)
        best = int(log_probabilities.argmax())
        self.targets.append(target)
        self.predicted.append(best)
        self.ranks.append(int((log_probabilities > log_probabilities[target]).sum()))
        self.confidences.append(float(log_probabilities[best].exp()))
        self.losses.append(-float(log_probabilities[target]))

    def figures(self) -> dict[str, float | int]:
        """top1, top5, ece, nll as fractions, and n."""
        ranks, right = np.array(self.ranks), np.array(self.targets) == np.array(self.predicted)
        return {
            "top1": float(right.mean()),
            "top5": float((ranks < 5).mean()),
            "ece": expected_calibration_error(np.array(self.confidences), right),
            "nll": float(np.mean(self.losses)),
            "n": len(self.targets),
        }

    def per_class(self) -> dict[int, tuple[int, float]]:
        """For each class that occurred: how many pictures, and the fraction recognised."""
        targets, right = np.array(self.targets), np.array(self.targets) == np.array(self.predicted)
        return {int(c): (int((targets == c).sum()), float(right[targets == c].mean())) for c in np.unique(targets)}


def expected_calibration_error(confidences: np.ndarray, right: np.ndarray, bins: int = ECE_BINS) -> float:
    """The mean gap between confidence and accuracy over equally wide bins of confidence, weighted by their size."""
    places = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)  # bins (a, b], as usual
    sums = np.bincount(places, weights=confidences - right, minlength=bins)
    return float(np.abs(sums).sum() / len(confidences))
