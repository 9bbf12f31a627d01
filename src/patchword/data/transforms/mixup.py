"""Mixup (Zhang et al., 2017) and CutMix (Yun et al., 2019) between neighbors in a batch.

Samples 2i and 2i + 1 form a pair; the key of the first determines all random choices of the pair. So the result does
not depend on how a batch is divided among processes, as long as pairs stay together.
"""

import numpy as np
import torch
from scipy.special import betaincinv

from ...config import AugmentConfig
from ..keyed_rng import uniform


def mix_batch(
    images: torch.Tensor, targets: torch.Tensor, config: AugmentConfig, keys: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix normalized images (B, C, H, W) and float targets (B, K) in place; the last of an odd number is not mixed.

    If both mixup and CutMix are enabled, each pair uses one of them with probability 1/2.
    """
    if config.mixup or config.cutmix:
        pair_keys = np.asarray(keys)[: len(images) // 2 * 2 : 2]
        pixel_weights, label_weights = sample_mixing_weights(config, pair_keys, images.shape[2], images.shape[3])
        _mix_pairs(images, pixel_weights[:, None, None])
        _mix_pairs(targets, label_weights[:, None, None])
    return images, targets


def sample_mixing_weights(
    config: AugmentConfig, keys: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sample the weight of the partner for each pair.

    Returns:
        The weight of each pixel, (N, H, W) or (N, 1, 1), and that of the label, (N,).
    """
    coin, quantile, center_y, center_x = uniform(keys, "mix", 4).T
    use_cutmix = coin < (0.5 if config.mixup and config.cutmix else bool(config.cutmix))
    alpha = np.where(use_cutmix, config.cutmix, config.mixup)
    weight = 1 - betaincinv(alpha, alpha, quantile)  # Beta(alpha, alpha), by its inverse distribution function
    if not config.cutmix:
        return weight[:, None, None], weight
    rows = _box_interval(weight, center_y, height)  # (N, H)
    columns = _box_interval(weight, center_x, width)
    boxes = rows[:, :, None] & columns[:, None, :]
    area = rows.sum(axis=1) * columns.sum(axis=1) / (height * width)  # below `weight` if the box exceeds the image
    return np.where(use_cutmix[:, None, None], boxes, weight[:, None, None]), np.where(use_cutmix, area, weight)


def _box_interval(area: np.ndarray, center: np.ndarray, length: int) -> np.ndarray:
    """Bool (N, length): along one side, the pixels of a box with that fraction of the area, centered at 0..1."""
    num_pixels = np.floor(np.sqrt(area) * length)
    start = (np.floor(center * length) - num_pixels // 2)[:, None]
    positions = np.arange(length)
    inside: np.ndarray = (positions >= start) & (positions < start + num_pixels[:, None])
    return inside


def _mix_pairs(batch: torch.Tensor, weights: np.ndarray) -> None:
    """Interpolate both samples of each pair towards the other, in place; `weights` broadcast to (N, 2, ...)."""
    weight = torch.from_numpy(weights.astype(np.float32)).to(batch.device)
    pairs = batch[: 2 * len(weight)].view(len(weight), 2, *batch.shape[1:])
    pairs.lerp_(pairs.flip(1), weight)  # lerp is exact at 0 and at 1
