"""Evaluate a model on a split during training: the logits of all images, and their metrics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from ..data.loader import Batch, Loader
from ..data.prefetch import prefetch
from ..errors import DataError
from ..metrics.calibration import fit_temperature
from ..metrics.classification import ClassificationMetrics
from ..metrics.multilabel import multi_label_metrics
from .distributed import ProcessGroup

BATCH_SIZE = 64  # images, on each core

Outputs = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Logits with TTA, logits without it (None if they are the same), and the sample indices."""


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
) -> EvalOutputs | None:
    """Run the model on all images of a split; each process computes every size-th image.

    Returns:
        All outputs, in the main process; None in the others.

    Raises:
        DataError: No image can be read.
    """
    group.broadcast_buffers(model)
    own_indices = np.arange(group.rank, len(loader.source), group.size)
    batches = list(run_model(model, loader, own_indices, tta_flip, group.device, batch_size))
    return gather_outputs(batches, loader, tta_flip, group)


def evaluate_sharded(
    model: nn.Module, loader: Loader, *, tta_flip: bool, group: ProcessGroup, batch_size: int = BATCH_SIZE
) -> EvalOutputs | None:
    """Run a model that the processes share on all images of a split; see `evaluate_split`."""
    own_indices = np.arange(group.rank, len(loader.source), group.size)
    batches = list(run_sharded_model(model, loader, own_indices, tta_flip, group, batch_size))
    return gather_outputs(batches, loader, tta_flip, group)


def gather_outputs(batches: list[Outputs], loader: Loader, tta_flip: bool, group: ProcessGroup) -> EvalOutputs | None:
    """Gather the outputs of all processes in the main process, in the order of the images."""
    no_logits = np.empty((0, len(loader.source.labels)), np.float32)
    nothing = (no_logits, no_logits if tta_flip else None, np.empty(0, np.int64))
    gathered = group.gather(concatenate(batches) if batches else nothing)
    reasons = group.gather(next(iter(loader.unreadable.values()), ""))

    def check() -> None:
        if gathered and not any(len(indices) for _, _, indices in gathered):
            reason = next(filter(None, reasons or ()), "")
            raise DataError(f"None of the {len(loader.source)} images to evaluate on can be read. {reason}")

    group.run_on_main(check)
    if gathered is None:
        return None
    logits, plain, indices = concatenate(gathered)
    order = np.argsort(indices)
    logits = logits[order]
    plain = logits if plain is None else plain[order]
    return EvalOutputs(logits, plain, loader.source.targets[indices[order]], indices[order])


def concatenate(parts: list[Outputs]) -> Outputs:
    """Concatenate the outputs of batches or processes."""
    logits, plain, indices = zip(*parts, strict=True)
    return np.concatenate(logits), None if plain[0] is None else np.concatenate(plain), np.concatenate(indices)


def run_model(
    model: nn.Module, loader: Loader, indices: np.ndarray, tta_flip: bool, device: torch.device, batch_size: int
) -> Iterator[Outputs]:
    """Yield the outputs of each batch."""
    was_training = model.training
    model.eval()
    compute = partial(run_batch, model, tta_flip, device)
    try:
        if device.type == "cpu":
            yield from loader.map_batches(compute, batch_size, indices)
        else:
            yield from map(compute, loader.eval_batches(batch_size, indices))
    finally:
        model.train(was_training)


def run_sharded_model(
    model: nn.Module, loader: Loader, indices: np.ndarray, tta_flip: bool, group: ProcessGroup, batch_size: int
) -> Iterator[Outputs]:
    """Yield the outputs of each batch of a sharded model.

    All processes gather its weights together, so they compute equally many batches, one at a time: a process without
    images left, or with unreadable ones only, computes one on zeros.
    """
    was_training = model.training
    model.eval()
    compute = partial(run_batch, model, tta_flip, group.device)
    most_images = math.ceil(len(loader.source) / group.size)
    num_batches = math.ceil(most_images / batch_size)
    chunks = (indices[i * batch_size : (i + 1) * batch_size] for i in range(num_batches))
    size = (loader.preprocess.channels, *loader.preprocess.size)
    try:
        for batch in prefetch(loader.make_eval_batch, chunks, loader.num_workers):
            outputs = compute(batch if len(batch.indices) else replace(batch, images=torch.zeros(1, *size)))
            if len(batch.indices):
                yield outputs
    finally:
        model.train(was_training)


@torch.inference_mode()
def run_batch(model: nn.Module, tta_flip: bool, device: torch.device, batch: Batch) -> Outputs:
    """Compute the outputs of one batch."""
    images = batch.images.to(device)
    plain = model(images).float()
    if not tta_flip:
        return plain.cpu().numpy(), None, batch.indices
    logits = (plain + model(images.flip(-1)).float()) / 2
    return logits.cpu().numpy(), plain.cpu().numpy(), batch.indices
