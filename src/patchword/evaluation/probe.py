"""Probes of a frozen model: features of the training and test sets, then several classifiers on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..config import DataConfig
from ..data.resolve import open_data, with_validation
from ..data.sources import DatasetSplits
from ..errors import ConfigError, DataError
from ..inference.classifier import Encoder, open_encoder
from .frozen_features import extract_features
from .knn_probe import knn_accuracies
from .logistic_probe import fit_best_logistic, refit_logistic
from .ridge_probe import L2, RidgeProbe, sample_shots

SHOTS = (1, 5, 10, 25)
NEIGHBORS = (1, 5, 20)
VAL_FRACTION = 0.2  # of the training set, if there is no validation set: to choose the penalty


class ProbeRow(NamedTuple):
    """The result of one probe.

    Attributes:
        probe: The name, such as "5-shot", "20-NN" or "logistic".
        accuracy: The accuracy, from 0 to 1; of a few-shot probe the mean over seeds.
        std: The standard deviation over seeds; None for a single number.
    """

    probe: str
    accuracy: float
    std: float | None


@dataclass(frozen=True)
class ProbeResult:
    """The accuracies of all probes, from 0 to 1.

    Attributes:
        few_shot: The accuracies of the few-shot probe, one for each seed, by the number of images per class.
        knn: The accuracy of k-nearest neighbors, by k.
        logistic: The accuracy of logistic regression.
        penalty: The L2 penalty of the logistic regression, chosen on the validation set.
        classes: The number of classes.
        train: The number of training images.
        test: The number of images that were evaluated.
        l2: The L2 penalty of the few-shot probe.
        skipped_shots: Numbers of images per class that the smallest class does not have.
        split: The split that was evaluated, "test" or "validation".
    """

    few_shot: dict[int, list[float]]
    knn: dict[int, float]
    logistic: float
    penalty: float
    classes: int
    train: int
    test: int
    l2: float
    skipped_shots: tuple[int, ...] = ()
    split: str = "test"

    def rows(self) -> list[ProbeRow]:
        """Return a row for each probe."""
        rows = [
            ProbeRow(f"{n}-shot", float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)
            for n, values in self.few_shot.items()
        ]
        rows += [ProbeRow(f"{k}-NN", accuracy, None) for k, accuracy in self.knn.items()]
        return [*rows, ProbeRow("logistic", self.logistic, None)]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `patchword probe --json` prints."""
        return {**vars(self), "summary": [row._asdict() for row in self.rows()]}


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
    """Train few-shot, k-NN and logistic classifiers on frozen features, and measure them on the test or validation set.

    Args:
        model: A model reference, a `Checkpoint` or a `Classifier`.
        data: A dataset reference, or splits. Each image must have one label.
        layer: The block whose tokens are the features, 0 for the first, -1 for the last; None: the head's input.
        shots: Numbers of images per class, by default 1, 5, 10 and 25; those that a class does not have are skipped.
        seeds: The number of random draws of these images.
        l2: The L2 penalty of the few-shot probe, by default 1024 as in the paper.
        on_progress: A function that is called after each image.

    Raises:
        DataError: The data cannot be used, or an image cannot be read.
    """
    if seeds < 1 or any(n < 1 for n in shots) or not 0 < l2 < math.inf:
        raise ConfigError(f"shots and seeds must be at least 1 and l2 above 0, not {tuple(shots)}, {seeds} and {l2}.")
    if isinstance(data, DatasetSplits):
        splits = with_validation(data, VAL_FRACTION, seed=0)
    else:
        splits = open_data(DataConfig(source=str(data), val_fraction=VAL_FRACTION), seed=0)
    assert splits.val is not None
    if splits.train.multi_label:
        raise DataError("A probe needs single-label data, but these are multi-label.", code="unsupported_by_model")
    sources = {"train": splits.train, "val": splits.val, "test": splits.test or splits.val}
    encoder = open_encoder(model)
    distinct = {id(source): source for source in sources.values()}
    features = {key: extract_features(encoder, source, layer, on_progress) for key, source in distinct.items()}
    x, val_x, test_x = (features[id(source)] for source in sources.values())
    y, val_y, test_y = (torch.from_numpy(source.targets) for source in sources.values())
    num_classes = len(splits.train.labels)
    best = fit_best_logistic(x, y, val_x, val_y, num_classes)
    if splits.test is not None:  # then the validation set is used for training as well
        x, y = torch.cat([x, val_x]), torch.cat([y, val_y])
        best = refit_logistic(x, y, num_classes, best.penalty)
    smallest = min(int(n) for n in torch.bincount(y) if n)
    return ProbeResult(
        few_shot={
            n: few_shot_accuracies(x, y, test_x, test_y, num_classes, n, seeds, l2) for n in shots if n <= smallest
        },
        knn=knn_accuracies(x, y, test_x, test_y, num_classes, [k for k in NEIGHBORS if k <= len(x)]),
        logistic=float((best.scores(test_x).argmax(dim=1) == test_y).double().mean()),
        penalty=best.penalty,
        classes=num_classes,
        train=len(y),
        test=len(test_y),
        l2=l2,
        skipped_shots=tuple(n for n in shots if n > smallest),
        split="test" if splits.test is not None else "validation",
    )


def few_shot_accuracies(
    x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, num_classes: int, shots: int, seeds: int, l2: float
) -> list[float]:
    """Return the accuracy of the ridge probe for each seed."""
    accuracies = []
    for seed in range(seeds):
        rows = torch.from_numpy(sample_shots(y.numpy(), shots, seed))
        accuracies.append(RidgeProbe(x[rows], y[rows], num_classes).accuracy(test_x, test_y, l2))
    return accuracies
