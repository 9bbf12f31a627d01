"""k nearest neighbours by the cosine, each voting with exp(cosine / 0.07): the usual k-NN of self-supervised work."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.07
MOST = 2**27  # numbers of a table of similarities that is held at once


def neighbour_accuracies(
    x: Tensor, y: Tensor, asked: Tensor, truth: Tensor, classes: int, counts: Sequence[int]
) -> dict[int, float]:
    """For each k the part of the rows of `asked` whose class wins the vote of their neighbours in x, y."""
    hits = dict.fromkeys(counts, 0)
    known, rows = F.normalize(x.float(), dim=1), max(1, MOST // max(len(x), classes))
    for some, right in zip(F.normalize(asked.float(), dim=1).split(rows), truth.split(rows), strict=True):
        near, places = (some @ known.T).topk(max(counts, default=0), dim=1)
        for k in counts:
            hits[k] += int((votes(near[:, :k], y[places[:, :k]], classes).argmax(dim=1) == right).sum())
    return {k: hit / len(truth) for k, hit in hits.items()}


def votes(near: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(B, K) from the similarities and labels of the nearest, (B, k) each; the very nearest counts one."""
    weights = ((near - near[:, :1]) / TEMPERATURE).exp()
    return torch.zeros(len(near), classes).scatter_add_(1, labels, weights)
