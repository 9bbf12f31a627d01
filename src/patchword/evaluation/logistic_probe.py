"""Logistic regression on features, its penalty chosen on pictures held out."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PENALTIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # on the squares of the weights, for features of variance one
ITERATIONS = 60
ROWS = 512  # whose scores by an old head are held at once: it may know 21,843 classes


@dataclass(frozen=True)
class LogisticModel:
    """A linear classifier of raw features: x @ weight + bias, of shapes (D, K) and (K,)."""

    weight: Tensor
    bias: Tensor
    penalty: float = 0.0
    recalls: bool = False  # held near what an old head knows, not near zero

    def scores(self, x: Tensor) -> Tensor:
        return x.double() @ self.weight + self.bias


def logistic_probe(
    x: Tensor,
    y: Tensor,
    held_x: Tensor,
    held_y: Tensor,
    classes: int,
    old: LogisticModel | None = None,
    seconds: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> LogisticModel:
    """The one with the least loss on the pictures held out. Targets are classes, or rows of zeros and ones.

    Args:
        old: a head for other classes that reads the same features. Those held near what it knows are tried as well.
        seconds: after which no other is fitted. With a thousand classes one may take minutes.
        now: The clock, in seconds.
    """
    deadline = now() + seconds
    centres = [recalled(x, y, classes, old)] if old is not None and y.ndim == 1 else []
    found: list[tuple[float, LogisticModel]] = []
    for near in (*centres, None):
        lowest = math.inf
        for each in path(x, y, classes, PENALTIES, near) if not found or now() < deadline else ():
            held = float(loss(each.scores(held_x), held_y))
            found.append((held, each))
            if held > lowest or now() > deadline:  # once it rises along the path, it goes on rising
                break
            lowest = held
    return min(found, key=lambda pair: pair[0])[1]


def recalled(x: Tensor, y: Tensor, classes: int, old: LogisticModel) -> LogisticModel:
    """Each class as the mixture of old ones that its pictures are taken for, so that no names need to be matched."""
    shares = torch.zeros(classes, len(old.bias), dtype=torch.double)
    for some, targets in zip(x.split(ROWS), y.split(ROWS), strict=True):
        shares.index_add_(0, targets, old.scores(some).softmax(1))
    shares /= torch.bincount(y, minlength=classes).clamp_min(1)[:, None]
    return LogisticModel(old.weight @ shares.T, shares @ old.bias)


def refitted(x: Tensor, y: Tensor, classes: int, penalty: float) -> LogisticModel:
    """With a penalty that is known already."""
    *_, last = path(x, y, classes, [p for p in PENALTIES if p >= penalty])
    return last


def path(
    x: Tensor, y: Tensor, classes: int, penalties: Sequence[float], near: LogisticModel | None = None
) -> Iterator[LogisticModel]:
    """A solution for each penalty on what lies away from `near`, or else from zero: from the strongest on, each
    starting where the one before has ended.
    """
    x = x.double()
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / std
    if near is None:
        centre, bias = torch.zeros(x.shape[1], classes, dtype=x.dtype), torch.zeros(classes, dtype=x.dtype)
    else:
        centre, bias = near.weight * std[:, None], near.bias + mean @ near.weight
    weight = centre
    for penalty in penalties:
        weight, bias = fitted(x, y, weight, bias, centre, penalty)
        raw = weight / std[:, None]
        yield LogisticModel(raw, bias - mean @ raw, penalty, recalls=near is not None)


def fitted(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, centre: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight and bias with the least loss, from the given ones on; the penalty is on the way from `centre`."""
    weight, bias = (t.clone().requires_grad_() for t in (weight, bias))
    optimiser = torch.optim.LBFGS(
        [weight, bias], max_iter=ITERATIONS, history_size=20, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimiser.zero_grad()
        value = loss(x @ weight + bias, y) + penalty * (weight - centre).square().sum()
        value.backward()
        return value

    optimiser.step(objective)
    return weight.detach(), bias.detach()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, targets.double())
    return F.cross_entropy(logits, targets)
