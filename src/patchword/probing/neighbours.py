"""k nearest neighbours by the cosine, each voting with exp(cosine / 0.07): the usual k-NN of self-supervised work."""

import torch
from torch import Tensor
from torch.nn import functional as F

TEMPERATURE = 0.07
CHUNK = 1024  # rows that are compared with all others at once


def neighbour_scores(x: Tensor, y: Tensor, asked: Tensor, classes: int, k: int) -> Tensor:
    """Votes (N, K) for the rows of `asked`, from the labelled rows x, y."""
    known, votes = F.normalize(x.float(), dim=1), []
    k = min(k, len(known))
    for rows in F.normalize(asked.float(), dim=1).split(CHUNK):
        near, places = (rows @ known.T).topk(k, dim=1)
        weights = ((near - near[:, :1]) / TEMPERATURE).exp()  # the nearest counts one
        votes.append(torch.zeros(len(rows), classes).scatter_add_(1, y[places], weights))
    return torch.cat(votes)


def neighbour_accuracy(x: Tensor, y: Tensor, asked: Tensor, truth: Tensor, classes: int, k: int) -> float:
    return float((neighbour_scores(x, y, asked, classes, k).argmax(dim=1) == truth).double().mean())
