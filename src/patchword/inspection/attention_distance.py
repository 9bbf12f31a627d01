"""Mean attention distance by layer and head (the paper's Figures 7, right, and 11), and attention entropy."""

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
    """Mean attention distance and entropy of each layer and head, averaged over images and query patches.

    Attributes:
        distance: The mean attention distance in pixels of the input image, (L, H) for L layers and H heads.
        entropy: The mean entropy of attention in bits, (L, H).
        num_images: The number of images.
        num_patches: The number of patches of an image.
    """

    distance: np.ndarray
    entropy: np.ndarray
    num_images: int
    num_patches: int

    @property
    def depth_correlation(self) -> float:
        """Spearman's rank correlation of depth and a layer's mean distance: 1 if each layer attends farther."""
        layers = self.distance.mean(axis=1)
        if len(layers) < 2 or np.ptp(layers) == 0:
            return float("nan")
        return float(spearmanr(np.arange(len(layers)), layers).statistic)


def measure_attention_distance(model: ViT, batches: Iterable[Tensor]) -> AttentionDistance:
    """Measures the mean attention distance and the entropy of attention (the paper's Figure 7, right).

    The attention distance of a patch is the mean distance to all patches, weighted by attention. Prefix tokens are
    excluded, and the rest is renormalized. Memory does not grow with the number of images.

    Args:
        model: The model, in evaluation mode.
        batches: Batches of normalized images, (B, C, H, W) each.

    Raises:
        ConfigError: There are no images.
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
        raise ConfigError("There are no images to measure attention on; was the iterator consumed before?")
    distance, entropy = (sums / count).numpy()
    return AttentionDistance(distance, entropy, count, config.num_patches)


def patch_distances(grid: Size, stride: Size) -> Tensor:
    """Returns the distance in pixels between the centers of every two patches: (N, N)."""
    y, x = (g.flatten() * s for g, s in zip(coordinates(grid), stride, strict=True))
    return torch.hypot(y[:, None] - y, x[:, None] - x).float()


def between_patches(weights: Tensor, num_prefix: int) -> Tensor:
    """Restricts maps to the patches and renormalizes their rows; a row without any attention to patches is uniform."""
    patches = weights[..., num_prefix:, num_prefix:]
    total = patches.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, patches / total, torch.full_like(total, 1 / patches.shape[-1]))


def mean_distance(between: Tensor, distances: Tensor) -> Tensor:
    """Averages distances over keys, weighted by attention, and over queries: (..., N, N) to (...)."""
    return (between * distances).sum(dim=-1).mean(dim=-1)


def mean_entropy(between: Tensor) -> Tensor:
    """Returns the entropy in bits: 0 if all attention is on one patch, log2 N if it is uniform."""
    return torch.special.entr(between).sum(dim=-1).mean(dim=-1) / np.log(2)
