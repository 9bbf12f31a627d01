"""Evaluate a model on a split during training: the logits of all images, and their metrics."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..data.loader import Batch, Loader
from ..errors import DataError
from ..metrics.calibration import fit_temperature
from ..metrics.classification import ClassificationMetrics
from ..metrics.multilabel import multi_label_metrics
from .distributed import ProcessGroup

BATCH_SIZE = 64  # images, on each core


@dataclass(frozen=True)
class EvalOutputs:
    """The outputs of a model for every readable image of a split.

    Attributes:
        logits: float32 (N, K); with flip TTA, the mean over the image and its horizontal flip.
        plain_logits: The same without TTA, as the published model is used.
        targets: int64 (N,), or multi-label float32 (N, K).
        indices: The samples' indices in their source.
    """

    logits: np.ndarray
    plain_logits: np.ndarray
    targets: np.ndarray
    indices: np.ndarray

    @property
    def is_multi_label(self) -> bool:
        """Whether an image can have more than one label."""
        return self.targets.ndim == 2

    def metrics(self) -> dict[str, float | int]:
        """Return top1, top5, ece, nll and n; multi-label: map, f1, nll and n."""
        if self.is_multi_label:
            return multi_label_metrics(self.logits, self.targets)
        return ClassificationMetrics.from_arrays(self.logits, self.targets).compute()

    def temperature(self) -> float:
        """Return the temperature that calibrates the published model on these images; 1 for multi-label data."""
        return 1.0 if self.is_multi_label else fit_temperature(self.plain_logits, self.targets)

    def calibration_metrics(self, temperature: float) -> dict[str, float | int]:
        """Return the calibration error of the published model before and after temperature scaling."""
        if self.is_multi_label:
            return {}
        before, after = (
            ClassificationMetrics.from_arrays(self.plain_logits / t, self.targets).compute() for t in (1.0, temperature)
        )
        return {"ece_uncalibrated": before["ece"], "ece_calibrated": after["ece"], "nll_calibrated": after["nll"]}


def evaluate_split(
    model: nn.Module, loader: Loader, *, tta_flip: bool, group: ProcessGroup, batch_size: int = BATCH_SIZE
) -> EvalOutputs:
    """Run the model on all images of a split. Each process computes every size-th image, and all get all outputs.

    Raises:
        DataError: No image can be read.
    """
    group.broadcast_buffers(model)
    own_indices = np.arange(group.rank, len(loader.source), group.size)
    batches = list(run_model(model, loader, own_indices, tta_flip, group.device, batch_size))
    no_logits = np.empty((0, len(loader.source.labels)), np.float32)
    nothing = (no_logits, no_logits, np.empty(0, np.int64))
    own = tuple(np.concatenate(column) for column in zip(*batches, strict=True)) if batches else nothing
    logits, plain, indices = (np.concatenate(column) for column in zip(*group.all_gather(own), strict=True))
    if not len(indices):
        reason = next(iter(loader.unreadable.values()), "")
        raise DataError(f"None of the {len(loader.source)} images to evaluate on can be read. {reason}")
    order = np.argsort(indices)
    return EvalOutputs(logits[order], plain[order], loader.source.targets[indices[order]], indices[order])


def run_model(
    model: nn.Module, loader: Loader, indices: np.ndarray, tta_flip: bool, device: torch.device, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield logits with TTA, logits without it, and the sample indices of each batch."""

    def compute(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        images = batch.images.to(device)
        with torch.inference_mode():
            plain = model(images).float()
            logits = (plain + model(images.flip(-1)).float()) / 2 if tta_flip else plain
        return logits.cpu().numpy(), plain.cpu().numpy(), batch.indices

    was_training = model.training
    model.eval()
    try:
        if device.type == "cpu":
            yield from loader.map_batches(compute, batch_size, indices)
        else:
            yield from map(compute, loader.eval_batches(batch_size, indices))
    finally:
        model.train(was_training)
