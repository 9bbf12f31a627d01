"""Logistic regression on features, its penalty chosen on pictures held out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PENALTIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # on the squares of the weights, for features of variance one
ITERATIONS = 60


@dataclass(frozen=True)
class Logistic:
    """A linear classifier of raw features: x @ weight + bias, of shapes (D, K) and (K,)."""

    weight: Tensor
    bias: Tensor
    penalty: float

    def scores(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight + self.bias


def logistic_probe(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, classes: int) -> Logistic:
    """The one with the least loss on the pictures held out. Targets are classes, or rows of zeros and ones."""
    return min(path(x, y, classes, PENALTIES), key=lambda found: float(loss(found.scores(held_x), held_y)))


def refitted(x: Tensor, y: Tensor, classes: int, penalty: float) -> Logistic:
    """With a penalty that is known already."""
    *_, last = path(x, y, classes, [p for p in PENALTIES if p >= penalty])
    return last


def path(x: Tensor, y: Tensor, classes: int, penalties: Sequence[float]) -> list[Logistic]:
    """A solution for each penalty: from the strongest on, each starting where the one before has ended."""
    x = x.double()
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / std
    weight, bias = torch.zeros(x.shape[1], classes, dtype=x.dtype), torch.zeros(classes, dtype=x.dtype)
    found = []
    for penalty in penalties:
        weight, bias = fitted(x, y, weight, bias, penalty)
        raw = weight / std[:, None]
        found.append(Logistic(raw, bias - mean @ raw, penalty))
    return found


def fitted(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    weight, bias = (t.clone().requires_grad_() for t in (weight, bias))
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, history_size=20, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        value = loss(x @ weight + bias, y) + penalty * weight.square().sum()
        value.backward()
        return value

    optimiser.step(objective)
    return weight.detach(), bias.detach()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, targets.double())
    return F.cross_entropy(logits, targets)
