"""A new head solved for in one step: ridge regression from frozen features to the classes.

Fine-tuning then starts from a linear probe's accuracy, instead of from chance with a body that the first, large
gradients of a zero head disturb.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.loader import Loader
from ..models import Model

RIDGES = tuple(10.0**e for e in range(-4, 3))  # relative to the mean variance of a feature
TEMPERATURES = tuple(2.0 ** (e / 2) for e in range(0, 17))


@torch.no_grad()
def solve_head(model: Model, train: Loader, val: Loader) -> str:
    """Sets model.head; the ridge and the scale of the logits are those with the least loss on `val`. In a sentence."""
    classes, count = len(train.source.labels), 0
    gram = moment = total = targets = torch.zeros(())
    for features, true in featured(model, train):
        y = one_hot(true, classes)
        gram, moment = gram + features.T @ features, moment + features.T @ y
        total, targets, count = total + features.sum(0), targets + y.sum(0), count + len(y)
    mean, mean_y = total / count, targets / count
    covariance = gram / count - torch.outer(mean, mean)
    cross = moment / count - torch.outer(mean, mean_y)
    held_x, held_y = (torch.cat(parts) for parts in zip(*featured(model, val), strict=True))
    best, chosen = float("inf"), (torch.zeros_like(cross), mean_y, 0.0, 1.0)
    scale = covariance.diagonal().mean()
    for ridge in RIDGES:
        weight = torch.linalg.solve(covariance + ridge * scale * torch.eye(len(covariance)), cross)
        logits = held_x @ weight + (mean_y - mean @ weight)
        for temperature in TEMPERATURES:
            loss = float(held_loss(logits * temperature, held_y))
            if loss < best:
                best, chosen = loss, (weight, mean_y - mean @ weight, ridge, temperature)
    weight, bias, ridge, temperature = chosen
    head = cast(nn.Linear, model.head)
    head.weight.copy_((weight * temperature).T)
    head.bias.copy_(bias * temperature)
    return f"the head was solved for by least squares on {count} pictures (ridge {ridge:g})"


def featured(model: Model, loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    """What the head will read of every picture, in double precision, and the targets."""
    model.eval()
    for batch in loader.evaluation(64):
        yield model.pooled(batch.images).double(), batch.targets
    model.train()


def one_hot(targets: Tensor, classes: int) -> Tensor:
    return targets.double() if targets.ndim == 2 else F.one_hot(targets, classes).double()


def held_loss(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, targets.double())
    return F.cross_entropy(logits, targets)
