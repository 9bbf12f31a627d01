"""Mixup and CutMix: neighbours in a batch lend each other a part of their pixels, and of their labels.

Samples 2i and 2i + 1 are a pair; what is random about a pair follows from the key of the first. So the result does not
depend on how a batch is divided among processes, as long as pairs stay together.
"""

import numpy as np
import torch
from scipy.special import betaincinv

from ...config import AugmentConfig
from ..keyed_rng import uniform


def mix(
    images: torch.Tensor, targets: torch.Tensor, config: AugmentConfig, keys: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixes normalised images (B, C, H, W) and targets (B, K), both float and both in place; a last odd one stays.

    With both mixup and cutmix, each pair takes one of them by a fair coin.
    """
    if config.mixup or config.cutmix:
        first = np.asarray(keys)[: len(images) // 2 * 2 : 2]
        pixels, shares = lent(config, first, images.shape[2], images.shape[3])
        _exchange(images, pixels[:, None, None])
        _exchange(targets, shares[:, None, None])
    return images, targets


def lent(config: AugmentConfig, keys: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What each pair takes from its partner: of every pixel (n, H, W) or (n, 1, 1), and over the whole picture (n,)."""
    coin, quantile, down, across = uniform(keys, "mix", 4).T
    cut = coin < (0.5 if config.mixup and config.cutmix else bool(config.cutmix))
    alpha = np.where(cut, config.cutmix, config.mixup)
    part = 1 - betaincinv(alpha, alpha, quantile)  # Beta(alpha, alpha), by the inverse of its distribution function
    if not config.cutmix:
        return part[:, None, None], part
    rows = _spans(part, down, height)  # (n, H)
    columns = _spans(part, across, width)
    boxes = rows[:, :, None] & columns[:, None, :]
    share = rows.sum(axis=1) * columns.sum(axis=1) / (height * width)  # a box that juts out is smaller than `part`
    return np.where(cut[:, None, None], boxes, part[:, None, None]), np.where(cut, share, part)


def _spans(part: np.ndarray, centre: np.ndarray, length: int) -> np.ndarray:
    """Bool (n, length): along one side, the pixels in a square of `part` of the area around a centre in 0..1."""
    pixels = np.floor(np.sqrt(part) * length)
    start = (np.floor(centre * length) - pixels // 2)[:, None]
    places = np.arange(length)
    return (places >= start) & (places < start + pixels[:, None])


def _exchange(batch: torch.Tensor, share: np.ndarray) -> None:
    """Both of each pair move towards the other, in place, by a share that broadcasts to (n, 2, ...)."""
    weight = torch.from_numpy(share.astype(np.float32)).to(batch.device)
    pairs = batch[: 2 * len(weight)].unflatten(0, (len(weight), 2))
    pairs.lerp_(pairs.flip(1), weight)  # lerp is exact at 0 and at 1
