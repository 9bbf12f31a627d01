"""What a run minimises: cross-entropy on hard, soft, mixed or several labels, and what a teacher adds to it."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoints import read_checkpoint
from ..config import Config, DistillConfig, ViTConfig
from ..data.formats.image_folder import match_classes
from ..data.preprocess import Preprocess
from ..errors import ConfigError, DataError
from ..models import optimize_for_cpu


class Objective:
    """The loss of a model on a batch: held against the labels and, if there is a teacher, against what it thinks."""

    def __init__(
        self, *, multi_label: bool, smoothing: float, two_heads: bool, weights: Tensor | None, distill: DistillConfig
    ) -> None:
        self.multi_label, self.smoothing, self.two_heads = multi_label, smoothing, two_heads
        self.weights, self.distill = weights, distill

    def __call__(
        self, model: nn.Module, images: Tensor, targets: Tensor, taught: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss, and the logits that the labels were held against. `taught`: the teacher's logits (B, K)."""
        if self.two_heads:
            logits, distilled = model.forward_distilled(images)  # type: ignore[operator]
        else:
            logits = distilled = model(images)
        loss = self.labelled(logits, targets)
        if taught is not None:
            loss = (1 - self.distill.weight) * loss + self.distill.weight * self.taught(distilled, taught)
        elif self.two_heads:  # both are used in the end, so both must learn
            loss = (loss + self.labelled(distilled, targets)) / 2
        return loss, logits

    def labelled(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.multi_label:
            smooth = targets * (1 - self.smoothing) + self.smoothing / 2
            return F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=self.weights)
        # The weights have mean one over the data. Dividing by those of a batch would make its parts count differently.
        losses = F.cross_entropy(logits, targets, self.weights, reduction="none", label_smoothing=self.smoothing)
        return losses.mean()

    def taught(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Hard: the teacher's choice is the label. Soft: its whole distribution is, at a raised temperature."""
        if self.distill.kind == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=1))
        t = self.distill.temperature
        own, theirs = (logits / t).log_softmax(1), (taught / t).log_softmax(1)
        return F.kl_div(own, theirs, reduction="batchmean", log_target=True) * t * t

    def to(self, device: torch.device) -> Self:
        self.weights = self.weights.to(device) if self.weights is not None else None
        return self

    def to_json(self) -> dict[str, Any]:
        """All but the weights of the classes, which are a tensor."""
        plain = {"multi_label": self.multi_label, "smoothing": self.smoothing, "two_heads": self.two_heads}
        return {**plain, "distill": self.distill.to_json()}

    @classmethod
    def from_json(cls, said: dict[str, Any], weights: Tensor | None) -> "Objective":
        return cls(**{**said, "distill": DistillConfig.from_json(said["distill"])}, weights=weights)


def make_objective(config: Config, targets: np.ndarray, num_classes: int) -> Objective:
    if config.distill.teacher and targets.ndim == 2:
        raise ConfigError("Distillation is for one label a picture; leave distill.teacher out.")
    return Objective(
        multi_label=targets.ndim == 2,
        smoothing=config.label_smoothing,
        two_heads=isinstance(config.model, ViTConfig) and config.model.distillation,
        weights=class_weights(targets, num_classes) if config.class_weights else None,
        distill=config.distill,
    )


def class_weights(targets: np.ndarray, num_classes: int) -> Tensor:
    """One label: the inverse of how often a class occurs, of mean one over the samples. Several: how many lack it."""
    if targets.ndim == 2:
        present = targets.sum(axis=0).clip(1)
        return torch.from_numpy((len(targets) - present).clip(1) / present).float()
    counts = np.bincount(targets, minlength=num_classes)
    present = counts > 0
    weights = np.where(present, len(targets) / (present.sum() * counts.clip(1)), 0.0)
    return torch.from_numpy(weights).float()


class Teacher:
    """A trained model that says of each training batch what it thinks; it sees it as it is used to."""

    def __init__(self, config: DistillConfig, labels: tuple[str, ...], preprocess: Preprocess) -> None:
        assert config.teacher is not None
        checkpoint = read_checkpoint(config.teacher)
        self.model = optimize_for_cpu(checkpoint.model()).requires_grad_(False)
        self.order = label_order(config.teacher, checkpoint.labels, checkpoint.config.num_classes, labels)
        self.size = checkpoint.config.image_size
        self.mean, self.std = retouch(preprocess, checkpoint.preprocess)

    def to(self, device: torch.device) -> Self:
        self.model = self.model.to(device)
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, K) for normalised images of the student."""
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits = self.model(images * self.std + self.mean)
        return logits if self.order is None else logits[:, self.order]


def label_order(name: str, teacher: tuple[str, ...] | None, count: int, student: tuple[str, ...]) -> Tensor | None:
    """Where the student's classes stand among the teacher's, by any of their names; None: in the same order."""
    if count != len(student):
        raise ConfigError(f"The teacher {name} has {count} classes, the data {len(student)}: they must be the same.")
    if teacher == student:
        return None
    try:
        indices = match_classes(student, teacher, count)
    except DataError as error:
        raise ConfigError(f"The teacher {name} does not know the classes of the data. {error}") from None
    if len(set(indices.values())) < count:
        raise ConfigError(f"The teacher {name} takes two classes of the data for one.")
    return torch.tensor([indices[label] for label in student])


def retouch(student: Preprocess, teacher: Preprocess | None) -> tuple[Tensor, Tensor]:
    """(mean, std) so that images * std + mean are normalised as the teacher wants them."""
    if teacher is None or teacher.channels != student.channels:
        raise ConfigError("The teacher takes pictures with other channels than the student.")
    own, theirs = ((torch.tensor(p.mean), torch.tensor(p.std)) for p in (student, teacher))
    std, mean = own[1] / theirs[1], (own[0] - theirs[0]) / theirs[1]
    return mean.view(-1, 1, 1), std.view(-1, 1, 1)
