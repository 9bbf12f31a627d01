"""Figures of merit from what a model said and what was true. Plain arrays; no models, no files."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ECE_BINS = 15


class Tally:
    """Collects what the figures need, a few pictures at a time, so that logits need not be kept."""

    def __init__(self) -> None:
        self.targets: list[int] = []
        self.predicted: list[int] = []
        self.ranks: list[int] = []  # how many classes were given more than the true one
        self.confidences: list[float] = []
        self.losses: list[float] = []

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


def multi_label_figures(logits: np.ndarray, targets: np.ndarray) -> dict[str, float | int]:
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
    """Mean, over the pictures of the class, of the precision at the score of each; equal scores count together."""
    order = np.argsort(-scores, kind="stable")
    ordered, true = scores[order], targets[order] > 0.5
    last = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)  # the last place of each group of equals
    hits = np.cumsum(true)[last]
    precision, recalled = hits / (last + 1), np.diff(hits, prepend=0)
    return float((precision * recalled).sum() / true.sum())
