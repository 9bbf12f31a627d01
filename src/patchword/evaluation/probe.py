"""A probe from start to end: features of two parts, then each way to read classes off them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoints import Checkpoint, read_checkpoint
from ..config import DataConfig
from ..data.resolve import open_data, with_validation
from ..data.sources import DatasetSplits
from ..errors import ConfigError, DataError
from ..inference.classifier import Encoder
from .frozen_features import features
from .knn_probe import neighbour_accuracies
from .logistic_probe import logistic_probe, refitted
from .ridge_probe import L2, Ridge, draw_shots

SHOTS = (1, 5, 10, 25)
NEIGHBOURS = (1, 5, 20)
HELD_OUT = 0.2  # of the training part, where there is no validation part: for the penalty of the logistic regression


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies on the part that was asked about."""

    few_shot: dict[int, list[float]]  # shots of each class: one accuracy for each seed
    neighbours: dict[int, float]  # k
    logistic: float
    penalty: float
    classes: int
    train: int
    test: int
    l2: float
    left_out: tuple[int, ...] = ()  # shots that the smallest class does not have
    part: str = "test"  # that was asked about

    def rows(self) -> list[tuple[str, float, float | None]]:
        """A line each: what, accuracy, and the standard deviation over seeds."""
        said: list[tuple[str, float, float | None]] = [
            (f"{n}-shot", float(np.mean(found)), float(np.std(found, ddof=1)) if len(found) > 1 else None)
            for n, found in self.few_shot.items()
        ]
        said += [(f"{k} nearest", accuracy, None) for k, accuracy in self.neighbours.items()]
        return [*said, ("logistic", self.logistic, None)]

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "summary": [{"probe": name, "accuracy": mean, "std": std} for name, mean, std in self.rows()],
        }


def probe(
    model: str | Path | Checkpoint | Encoder,
    data: str | Path | DatasetSplits,
    *,
    layer: int | None = None,
    shots: Sequence[int] = SHOTS,
    seeds: int = 5,
    l2: float = L2,
    on_progress: Callable[[], object] = lambda: None,
) -> ProbeResult:
    """Accuracy on the test part (or else validation) of what is learnt of the training part with the model frozen.

    Args:
        layer: the block whose tokens are read; None: what the head reads
        shots: pictures of each class in the paper's few-shot probe; numbers that a class does not have are left out
        seeds: draws of those pictures
    """
    if seeds < 1 or any(n < 1 for n in shots) or not 0 < l2 < math.inf:
        raise ConfigError("Shots and seeds are at least 1, and l2 is a number above 0.")
    if isinstance(data, DatasetSplits):
        parts = with_validation(data, HELD_OUT, seed=0)
    else:
        parts = open_data(DataConfig(source=str(data), val_fraction=HELD_OUT), seed=0)
    assert parts.val is not None
    train, val, test = parts.train, parts.val, parts.test or parts.val
    if train.multi_label:
        raise DataError("A probe needs one class for each picture; these data have several.")
    encoder = opened(model)
    distinct = {id(part): part for part in (train, val, test)}
    found = {key: features(encoder, part, layer, on_progress) for key, part in distinct.items()}
    x, held, asked = (found[id(part)] for part in (train, val, test))
    y, held_y, truth = (torch.from_numpy(part.targets) for part in (train, val, test))
    classes = len(train.labels)
    best = logistic_probe(x, y, held, held_y, classes)
    if test is not val:  # what was held out for choosing is learnt from as well
        x, y = torch.cat([x, held]), torch.cat([y, held_y])
        best = refitted(x, y, classes, best.penalty)
    least = min(int(n) for n in torch.bincount(y) if n)
    few = {n: few_shot(x, y, asked, truth, classes, n, seeds, l2) for n in shots if n <= least}
    near = neighbour_accuracies(x, y, asked, truth, classes, [k for k in NEIGHBOURS if k <= len(x)])
    right = float((best.scores(asked).argmax(dim=1) == truth).double().mean())
    missing = tuple(n for n in shots if n > least)
    part = "test" if test is not val else "validation"
    return ProbeResult(few, near, right, best.penalty, classes, len(y), len(truth), l2, missing, part)


def opened(model: str | Path | Checkpoint | Encoder) -> Encoder:
    if isinstance(model, str | Path):
        model = read_checkpoint(model)
    if isinstance(model, Checkpoint):
        return Encoder(model)
    if not isinstance(model, Encoder):
        kind = type(model).__name__
        raise ConfigError(
            f"A probe takes a model reference, a Checkpoint or a Classifier, which know how pictures are "
            f"prepared, not {kind}."
        )
    return model


def few_shot(
    x: torch.Tensor, y: torch.Tensor, asked: torch.Tensor, truth: torch.Tensor,
    classes: int, shots: int, seeds: int, l2: float,
) -> list[float]:  # fmt: skip
    found = []
    for seed in range(seeds):
        rows = torch.from_numpy(draw_shots(y.numpy(), shots, seed))
        found.append(Ridge(x[rows], y[rows], classes).accuracy(asked, truth, l2))
    return found
