"""How far attention reaches: mean distance by layer and head (the paper's Figures 7, right, and 11), and entropy."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from ..config import Size
from ..errors import ConfigError
from ..models import ViT
from ..models.pos_embed import coordinates
from .capture import reduce_maps


@dataclass(frozen=True)
class AttentionDistance:
    """Averages over images and patches, for each layer and head."""

    distance: np.ndarray  # (L, H), pixels of what the model sees
    entropy: np.ndarray  # (L, H), bits
    images: int
    patches: int

    @property
    def growth(self) -> float:
        """Spearman's rank correlation of depth with a layer's mean distance: 1 if it grows from layer to layer."""
        layers = self.distance.mean(axis=1)
        if len(layers) < 2 or np.ptp(layers) == 0:
            return float("nan")
        return float(spearmanr(np.arange(len(layers)), layers).statistic)


def measure_attention_distance(model: ViT, batches: Iterable[Tensor]) -> AttentionDistance:
    """Distance weighted by attention, from patch to patch: prefix tokens are left out and the rest sums to one again.

    `batches` are normalised images (B, C, H, W). Memory does not grow with the number of images (see capture.py).
    """
    config = model.config
    distances = patch_distances(config.grid, config.stride)
    sums = torch.zeros(2, config.depth, config.num_heads, dtype=torch.float64)
    count = 0

    def reduce(layer: int, rows: slice, heads: slice, weights: Tensor) -> None:
        between = between_patches(weights, config.num_prefix)
        sums[0, layer, heads] += mean_distance(between, distances.to(between)).double().sum(dim=0).cpu()
        sums[1, layer, heads] += mean_entropy(between).double().sum(dim=0).cpu()

    for images in batches:
        reduce_maps(model, images, reduce)
        count += len(images)
    if not count:
        raise ConfigError("There are no images to follow attention in; was the iterator used up before?")
    distance, entropy = (sums / count).numpy()
    return AttentionDistance(distance, entropy, count, config.num_patches)


def patch_distances(grid: Size, stride: Size) -> Tensor:
    """Pixels between the centres of every two patches: (N, N)."""
    y, x = (g.flatten() * s for g, s in zip(coordinates(grid), stride, strict=True))
    return torch.hypot(y[:, None] - y, x[:, None] - x).float()


def between_patches(weights: Tensor, num_prefix: int) -> Tensor:
    """Maps among the patches only, (..., N, N), each row with sum one. A row that saw prefix tokens only is uniform."""
    patches = weights[..., num_prefix:, num_prefix:]
    total = patches.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, patches / total, torch.full_like(total, 1 / patches.shape[-1]))


def mean_distance(between: Tensor, distances: Tensor) -> Tensor:
    """(..., N, N) to (...): the mean over the patches that look."""
    return (between * distances).sum(dim=-1).mean(dim=-1)


def mean_entropy(between: Tensor) -> Tensor:
    """Bits: 0 looks at one patch, log2 N at all alike."""
    return torch.special.entr(between).sum(dim=-1).mean(dim=-1) / np.log(2)
