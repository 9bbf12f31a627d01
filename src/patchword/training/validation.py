"""A model on a part of the data: figures, and what the report shows of the mistakes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..data.loader import Loader
from ..errors import DataError
from ..evaluation.metrics import Tally, multi_label_figures
from .world import World

BATCH_SIZE = 256  # pictures; evaluation needs no memory for gradients


@dataclass(frozen=True)
class Answers:
    """What a model said of every readable sample of a part."""

    logits: np.ndarray  # float32 (N, K)
    targets: np.ndarray  # int64 (N,) or float32 (N, K)
    indices: np.ndarray  # the samples in their source

    def figures(self) -> dict[str, float | int]:
        if self.targets.ndim == 2:
            return multi_label_figures(self.logits, self.targets)
        return self.tally().figures()

    def tally(self) -> Tally:
        tally = Tally()
        tally.add(torch.from_numpy(self.logits), self.targets.tolist())
        return tally


def ask(model: nn.Module, loader: Loader, *, flip: bool, world: World, batch_size: int = BATCH_SIZE) -> Answers:
    """Every process takes each size-th picture; all get all answers, in the order of the source."""
    mine = np.arange(world.rank, len(loader.source), world.size)
    parts = list(_answers(model, loader, mine, flip, world.device, batch_size))
    empty = np.empty(0, np.int64)
    logits = np.concatenate([p[0] for p in parts]) if parts else np.empty((0, len(loader.source.labels)), np.float32)
    indices = np.concatenate([p[1] for p in parts]) if parts else empty
    gathered = world.gathered((logits, indices))
    logits, indices = (np.concatenate([g[i] for g in gathered]) for i in (0, 1))
    if not len(indices):
        reason = next(iter(loader.unreadable.values()), "")
        raise DataError(f"None of the {len(loader.source)} pictures to evaluate on can be read. {reason}")
    order = np.argsort(indices)
    return Answers(logits[order], loader.source.targets[indices[order]], indices[order])


def _answers(
    model: nn.Module, loader: Loader, indices: np.ndarray, flip: bool, device: torch.device, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    was_training = model.training
    model.eval()
    try:
        for batch in loader.evaluation(batch_size, indices):
            with torch.inference_mode():
                logits = _logits(model, batch.images.to(device), flip)
            yield logits.float().cpu().numpy(), batch.indices
    finally:
        model.train(was_training)


def _logits(model: nn.Module, images: Tensor, flip: bool) -> Tensor:
    return (model(images) + model(images.flip(-1))) / 2 if flip else model(images)
