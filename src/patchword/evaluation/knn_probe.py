"""k-nearest-neighbor classification of frozen features, weighted by exp(cosine / 0.07) (Wu et al., 2018)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.07
MAX_SIMILARITIES = 2**27  # computed at once


def knn_accuracies(
    x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, num_classes: int, ks: Sequence[int]
) -> dict[int, float]:
    """For each k, the accuracy on `test_x`, `test_y` of a vote of the k nearest rows of `x`, `y`."""
    hits = dict.fromkeys(ks, 0)
    train, rows = F.normalize(x.float(), dim=1), max(1, MAX_SIMILARITIES // max(len(x), num_classes))
    for features, targets in zip(F.normalize(test_x.float(), dim=1).split(rows), test_y.split(rows), strict=True):
        similarity, indices = (features @ train.T).topk(max(ks, default=0), dim=1)
        for k in ks:
            votes = weighted_votes(similarity[:, :k], y[indices[:, :k]], num_classes)
            hits[k] += int((votes.argmax(dim=1) == targets).sum())
    return {k: hit / len(test_y) for k, hit in hits.items()}


def weighted_votes(similarity: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Votes (B, K) from the similarities and labels of the nearest neighbors, (B, k) each; the nearest has weight 1."""
    weights = ((similarity - similarity[:, :1]) / TEMPERATURE).exp()
    return torch.zeros(len(similarity), num_classes).scatter_add_(1, labels, weights)
