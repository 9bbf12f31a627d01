"""A model on a part of the data: figures, and what the report shows of the mistakes."""

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

BATCH_SIZE = 64  # pictures, on each core


@dataclass(frozen=True)
class Answers:
    """What a model said of every readable sample of a part."""

    logits: np.ndarray  # float32 (N, K)
    plain: np.ndarray  # the same without mirror images, as the finished model will be used
    targets: np.ndarray  # int64 (N,) or float32 (N, K)
    indices: np.ndarray  # the samples in their source

    def figures(self) -> dict[str, float | int]:
        if self.targets.ndim == 2:
            return multi_label_metrics(self.logits, self.targets)
        return self.tally().compute()

    def tally(self) -> ClassificationMetrics:
        return ClassificationMetrics.from_arrays(self.logits, self.targets)

    def temperature(self) -> float:
        """What makes the model's confidence honest on these samples; 1 where labels are several."""
        return fit_temperature(self.plain, self.targets) if self.targets.ndim == 1 else 1.0

    def calibrated(self, temperature: float) -> dict[str, float]:
        """How honest the finished model's probabilities are, before and after it has a temperature."""
        if self.targets.ndim == 2:
            return {}
        before, after = (ClassificationMetrics.from_arrays(self.plain / t, self.targets).compute() for t in (1.0, temperature))
        return {"ece_uncalibrated": before["ece"], "ece_calibrated": after["ece"], "nll_calibrated": after["nll"]}


def ask(model: nn.Module, loader: Loader, *, flip: bool, world: ProcessGroup, batch_size: int = BATCH_SIZE) -> Answers:
    """Every process takes each size-th picture; all get all answers, in the order of the source."""
    world.agree(model)
    mine = np.arange(world.rank, len(loader.source), world.size)
    parts = list(_answers(model, loader, mine, flip, world.device, batch_size))
    nothing = np.empty((0, len(loader.source.labels)), np.float32)
    empty = (nothing, nothing, np.empty(0, np.int64))
    own = tuple(np.concatenate(column) for column in zip(*parts, strict=True)) if parts else empty
    logits, plain, indices = (np.concatenate(column) for column in zip(*world.gathered(own), strict=True))
    if not len(indices):
        reason = next(iter(loader.unreadable.values()), "")
        raise DataError(f"None of the {len(loader.source)} pictures to evaluate on can be read. {reason}")
    order = np.argsort(indices)
    return Answers(logits[order], plain[order], loader.source.targets[indices[order]], indices[order])


def _answers(
    model: nn.Module, loader: Loader, indices: np.ndarray, flip: bool, device: torch.device, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    def answer(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        images = batch.images.to(device)
        with torch.inference_mode():
            plain = model(images).float()
            both = (plain + model(images.flip(-1)).float()) / 2 if flip else plain
        return both.cpu().numpy(), plain.cpu().numpy(), batch.indices

    was_training = model.training
    model.eval()
    try:
        if device.type == "cpu":
            yield from loader.map_batches(answer, batch_size, indices)
        else:
            yield from map(answer, loader.eval_batches(batch_size, indices))
    finally:
        model.train(was_training)
