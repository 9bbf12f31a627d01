"""A new head that is learnt before the rest: logistic regression on frozen features.

Fine-tuning then starts from a linear probe's accuracy, instead of from chance with a body that the first, large
gradients of a zero head disturb. On Oxford Pets (ViT-Ti/16, five folds) the probe reaches 91.7 %; ridge regression,
which has a closed form, only 89.2 %.
"""

import time
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.loader import Loader
from ..data.randomness import shuffled
from ..models import Model

MOST = 50_000  # pictures: more would not make a better beginning
PENALTIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # on the squares of the weights, for features of variance one
ITERATIONS = 60
BATCH_SIZE = 64


def probe_head(model: Model, train: Loader, val: Loader, seconds: float = float("inf")) -> tuple[str, float]:
    """Sets model.head to the probe with the least loss on `val`; returns a note, and the seconds that a picture took.

    Args:
        seconds: after which no more features are computed; the probe then makes do with fewer pictures.
    """
    begin, order = time.monotonic(), shuffled(0, 0, len(train.source))[:MOST]
    x, y = features(model, train, order, seconds)
    held_x, held_y = features(model, val, np.arange(len(val.source))[:MOST], seconds)
    pace = (time.monotonic() - begin) / (len(y) + len(held_y))
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, held_x = (x - mean) / std, (held_x - mean) / std
    weight = torch.zeros(x.shape[1], len(train.source.labels), dtype=x.dtype)
    bias = torch.zeros(len(train.source.labels), dtype=x.dtype)
    best, chosen = float("inf"), (weight, bias, 0.0)
    for penalty in PENALTIES:  # from the strongest on, each starting where the one before has ended
        weight, bias = fitted(x, y, weight, bias, penalty)
        found = float(loss(held_x @ weight + bias, held_y))
        if found < best:
            best, chosen = found, (weight, bias, penalty)
    weight, bias, penalty = chosen
    head = cast(nn.Linear, model.head)
    with torch.no_grad():
        weight = weight / std[:, None]
        head.weight.copy_(weight.T)
        head.bias.copy_(bias - mean @ weight)
    return f"the head begins as a logistic probe of {len(y)} pictures (penalty {penalty:g})", pace


@torch.no_grad()
def features(model: Model, loader: Loader, indices: np.ndarray, seconds: float) -> tuple[Tensor, Tensor]:
    """What the head will read of the pictures, in double precision, and the targets."""
    found, begin = [], time.monotonic()
    model.eval()
    for batch in loader.evaluation(BATCH_SIZE, indices):
        found.append((model.pooled(batch.images).double(), batch.targets))
        if time.monotonic() - begin > seconds:
            break
    model.train()
    x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
    return x, y


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
