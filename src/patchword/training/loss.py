"""The training loss: cross-entropy with hard, soft or multi-label targets, and distillation from a teacher."""

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
    """The loss of a model on a batch, against its labels and, with distillation, against a teacher's logits.

    Args:
        multi_label: Use binary cross-entropy for each class.
        smoothing: Label smoothing.
        two_heads: The model has a distillation head (DeiT, Touvron et al. 2021, https://arxiv.org/abs/2012.12877).
        weights: The weight of each class, (K,).
        distill: How the teacher's logits are used.
    """

    def __init__(
        self, *, multi_label: bool, smoothing: float, two_heads: bool, weights: Tensor | None, distill: DistillConfig
    ) -> None:
        self.multi_label, self.smoothing, self.two_heads = multi_label, smoothing, two_heads
        self.weights, self.distill = weights, distill

    def __call__(
        self, model: nn.Module, images: Tensor, targets: Tensor, teacher_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the logits of the head that is trained on the labels."""
        if self.two_heads:
            logits, distilled = model.forward_distilled(images)  # type: ignore[operator]  # models with two heads
        else:
            logits = distilled = model(images)
        loss = self.label_loss(logits, targets)
        if teacher_logits is not None:
            weight = self.distill.weight
            loss = (1 - weight) * loss + weight * self.distillation_loss(distilled, teacher_logits)
        elif self.two_heads:  # inference averages both heads, so both are trained
            loss = (loss + self.label_loss(distilled, targets)) / 2
        return loss, logits

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the (binary) cross-entropy against the labels."""
        if self.multi_label:
            smooth = targets * (1 - self.smoothing) + self.smoothing / 2
            return F.binary_cross_entropy_with_logits(logits, smooth, pos_weight=self.weights)
        # The weights have mean 1 over the dataset. Dividing by those of a batch would weight its chunks differently.
        losses = F.cross_entropy(logits, targets, self.weights, reduction="none", label_smoothing=self.smoothing)
        return losses.mean()

    def distillation_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the loss against the teacher: hard, its top class; soft, its distribution at a temperature."""
        if self.distill.kind == "hard":
            return F.cross_entropy(logits, teacher_logits.argmax(dim=1))
        t = self.distill.temperature
        student, teacher = (logits / t).log_softmax(1), (teacher_logits / t).log_softmax(1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * t * t

    def to(self, device: torch.device) -> Self:
        """Move the class weights to a device."""
        self.weights = self.weights.to(device) if self.weights is not None else None
        return self

    def to_json(self) -> dict[str, Any]:
        """Return everything but the class weights, which are a tensor."""
        flags = {"multi_label": self.multi_label, "smoothing": self.smoothing, "two_heads": self.two_heads}
        return {**flags, "distill": self.distill.to_json()}

    @classmethod
    def from_json(cls, document: dict[str, Any], weights: Tensor | None) -> "Objective":
        """Inverse of `to_json`."""
        return cls(**{**document, "distill": DistillConfig.from_json(document["distill"])}, weights=weights)


def make_objective(config: Config, targets: np.ndarray, num_classes: int) -> Objective:
    """Make the loss of a run.

    Args:
        config: The configuration.
        targets: The training targets, (N,) or multi-label (N, K).
        num_classes: The number of classes.
    """
    if config.distill.teacher and targets.ndim == 2:
        raise ConfigError("distill.teacher does not work with multi-label data: set distill.teacher to none.")
    return Objective(
        multi_label=targets.ndim == 2,
        smoothing=config.label_smoothing,
        two_heads=isinstance(config.model, ViTConfig) and config.model.distillation,
        weights=class_weights(targets, num_classes) if config.class_weights else None,
        distill=config.distill,
    )


def class_weights(targets: np.ndarray, num_classes: int) -> Tensor:
    """Return the inverse class frequencies, with mean 1 over the samples; multi-label: negatives per positive."""
    if targets.ndim == 2:
        positives = targets.sum(axis=0).clip(1)
        return torch.from_numpy((len(targets) - positives).clip(1) / positives).float()
    counts = np.bincount(targets, minlength=num_classes)
    present = counts > 0
    weights = np.where(present, len(targets) / (present.sum() * counts.clip(1)), 0.0)
    return torch.from_numpy(weights).float()


class Teacher:
    """A trained model that gives logits for each training batch, at its own image size and normalization."""

    def __init__(self, config: DistillConfig, labels: tuple[str, ...], preprocess: Preprocess) -> None:
        assert config.teacher is not None
        checkpoint = read_checkpoint(config.teacher)
        self.model = optimize_for_cpu(checkpoint.build_model()).requires_grad_(False)
        self.class_order = match_teacher_classes(
            config.teacher, checkpoint.labels, checkpoint.config.num_classes, labels
        )
        self.image_size = checkpoint.config.image_size
        self.shift, self.scale = convert_normalization(preprocess, checkpoint.preprocess)

    def to(self, device: torch.device) -> Self:
        """Move the teacher to a device."""
        self.model = self.model.to(device)
        self.shift, self.scale = self.shift.to(device), self.scale.to(device)
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return logits (B, K), in the student's class order, for images normalized for the student."""
        if images.shape[-2:] != self.image_size:
            images = F.interpolate(images, self.image_size, mode="bicubic", antialias=True)
        logits: Tensor = self.model(images * self.scale + self.shift)
        return logits if self.class_order is None else logits[:, self.class_order]


def match_teacher_classes(
    name: str, teacher_labels: tuple[str, ...] | None, num_classes: int, labels: tuple[str, ...]
) -> Tensor | None:
    """Return the teacher's class index of each of the student's classes, by any of their names; None if equal."""
    if num_classes != len(labels):
        raise ConfigError(
            f"distill.teacher: {name} has {num_classes} classes, but the data has {len(labels)}. They must be the same."
        )
    if teacher_labels == labels:
        return None
    try:
        indices = match_classes(labels, teacher_labels, num_classes)
    except DataError as error:
        raise ConfigError(f"distill.teacher: {name} does not have the classes of the data. {error}") from None
    if len(set(indices.values())) < num_classes:
        raise ConfigError(f"distill.teacher: two classes of the data match one class of {name}.")
    return torch.tensor([indices[label] for label in labels])


def convert_normalization(student: Preprocess, teacher: Preprocess | None) -> tuple[Tensor, Tensor]:
    """Return (shift, scale) so that `images * scale + shift` is normalized for the teacher."""
    if teacher is None or teacher.channels != student.channels:
        raise ConfigError("distill.teacher: the teacher's images do not have the same channels as the student's.")
    own, other = ((torch.tensor(p.mean), torch.tensor(p.std)) for p in (student, teacher))
    scale, shift = own[1] / other[1], (own[0] - other[0]) / other[1]
    return shift.view(-1, 1, 1), scale.view(-1, 1, 1)
