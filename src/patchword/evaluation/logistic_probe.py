"""Logistic regression on frozen features; the penalty is chosen on a validation set."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PENALTIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # on the squared weights, for features of unit variance
MAX_ITERATIONS = 60
HEAD_BATCH_SIZE = 512  # a pretrained head can have 21,843 classes, so its outputs are computed in batches


@dataclass(frozen=True)
class LogisticModel:
    """A linear classifier of raw features: x @ weight + bias, of shapes (D, K) and (K,)."""

    weight: Tensor
    bias: Tensor
    penalty: float = 0.0
    from_head: bool = False  # regularized toward a pretrained head instead of toward zero

    def scores(self, x: Tensor) -> Tensor:
        """Logits (N, K)."""
        return x.double() @ self.weight + self.bias


def fit_best_logistic(
    x: Tensor,
    y: Tensor,
    val_x: Tensor,
    val_y: Tensor,
    num_classes: int,
    head: LogisticModel | None = None,
    seconds: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> LogisticModel:
    """The regression with the lowest validation loss over `PENALTIES`.

    Args:
        x: training features (N, D).
        y: classes (N,), or zeros and ones (N, K).
        val_x: validation features.
        val_y: validation targets.
        num_classes: K.
        head: a pretrained head for other classes that reads the same features. Solutions regularized toward it are
            tried as well.
        seconds: no other fit is started after this time. With a thousand classes a fit can take minutes.
        now: the clock, in seconds.
    """
    deadline = now() + seconds
    centers = [init_from_head(x, y, num_classes, head)] if head is not None and y.ndim == 1 else []
    candidates: list[tuple[float, LogisticModel]] = []
    for center in (*centers, None):
        if candidates and now() >= deadline:
            break
        lowest = math.inf
        for model in regularization_path(x, y, num_classes, PENALTIES, center):
            val_loss = float(compute_loss(model.scores(val_x), val_y))
            candidates.append((val_loss, model))
            if val_loss > lowest or now() > deadline:  # once it rises along the path, it keeps rising
                break
            lowest = val_loss
    return min(candidates, key=lambda pair: pair[0])[1]


def init_from_head(x: Tensor, y: Tensor, num_classes: int, head: LogisticModel) -> LogisticModel:
    """Each new class as the mixture of pretrained classes that its images are classified as; needs no class names."""
    mixture = torch.zeros(num_classes, len(head.bias), dtype=torch.double)
    for features, targets in zip(x.split(HEAD_BATCH_SIZE), y.split(HEAD_BATCH_SIZE), strict=True):
        mixture.index_add_(0, targets, head.scores(features).softmax(1))
    mixture /= torch.bincount(y, minlength=num_classes).clamp_min(1)[:, None]
    return LogisticModel(head.weight @ mixture.T, mixture @ head.bias)


def refit_logistic(x: Tensor, y: Tensor, num_classes: int, penalty: float) -> LogisticModel:
    """Fit with a known penalty, along the same path."""
    *_, last = regularization_path(x, y, num_classes, [p for p in PENALTIES if p >= penalty])
    return last


def regularization_path(
    x: Tensor, y: Tensor, num_classes: int, penalties: Sequence[float], center: LogisticModel | None = None
) -> Iterator[LogisticModel]:
    """A solution for each penalty, strongest first, each initialized from the one before.

    The penalty is on the squared distance from `center`, by default from zero.
    """
    x = x.double()
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - mean) / std
    if center is None:
        origin, bias = torch.zeros(x.shape[1], num_classes, dtype=x.dtype), torch.zeros(num_classes, dtype=x.dtype)
    else:
        origin, bias = center.weight * std[:, None], center.bias + mean @ center.weight
    weight = origin
    for penalty in penalties:
        weight, bias = fit_logistic(x, y, weight, bias, origin, penalty)
        raw = weight / std[:, None]
        yield LogisticModel(raw, bias - mean @ raw, penalty, from_head=center is not None)


def fit_logistic(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, origin: Tensor, penalty: float
) -> tuple[Tensor, Tensor]:
    """Minimize the penalized loss with L-BFGS, from the given weight and bias."""
    weight, bias = (t.clone().requires_grad_() for t in (weight, bias))
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_ITERATIONS, history_size=20, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = compute_loss(x @ weight + bias, y) + penalty * (weight - origin).square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes (N,), or binary cross-entropy of zeros and ones (N, K)."""
    if targets.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, targets.double())
    return F.cross_entropy(logits, targets)
