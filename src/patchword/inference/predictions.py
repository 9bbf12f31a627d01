"""From logits to predictions: probabilities, class labels and the top-k classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints import Checkpoint
from ..errors import ConfigError


@dataclass(frozen=True)
class Score:
    """One class and its probability.

    Attributes:
        label: The class name.
        index: The class index.
        probability: The probability, from 0 to 1.
    """

    label: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image.

    Attributes:
        scores: The classes and their probabilities, the most probable first.
    """

    scores: tuple[Score, ...]

    @property
    def label(self) -> str:
        """The name of the most probable class."""
        return self.scores[0].label

    @property
    def index(self) -> int:
        """The index of the most probable class."""
        return self.scores[0].index

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.scores[0].probability


def class_labels(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the labels of a model, in the order of its classes; "0", "1", ... if it has none."""
    return checkpoint.labels or tuple(str(index) for index in range(checkpoint.config.num_classes))


def to_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Apply a softmax over the last dimension, or a sigmoid to each class if an image can have more than one label."""
    return logits.sigmoid() if multi_label else logits.softmax(dim=-1)


def top_predictions(probabilities: Tensor, labels: Sequence[str], top: int = 5) -> Prediction:
    """Return the `top` most probable classes from probabilities (K,). Ties keep the order of the classes."""
    if top < 1:
        raise ConfigError(f"top must be at least 1, not {top}.")
    best = torch.sort(probabilities, descending=True, stable=True)
    pairs = zip(best.indices[:top].tolist(), best.values[:top].tolist(), strict=True)
    return Prediction(tuple(Score(labels[index], index, probability) for index, probability in pairs))
