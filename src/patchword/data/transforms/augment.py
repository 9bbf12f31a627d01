"""Training augmentation. Each image is augmented by its own key, so the result does not depend on its batch.

Owns the order of the operations and the randomness of each. Random resized crops come earlier, when images are decoded
(`transforms.crop`); mixup and CutMix come later, on normalized images (`transforms.mixup`).
"""

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ...config import AugmentConfig
from ..keyed_rng import bits, uniform
from . import image_ops as op
from .crop import MAX_TRIES, sample_boxes
from .randaugment import randaugment

# Random erasing (Zhong et al., 2017) with the limits used by DeiT and its successors.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)

CHUNK_VALUES = 200_000  # values per chunk of color jitter: they stay in the CPU cache, which is twice as fast


def augment(images: torch.Tensor, config: AugmentConfig, keys: np.ndarray) -> torch.Tensor:
    """Augment uint8 (B, H, W, C) on the CPU with one key per image; returns a new tensor of the same shape.

    The order is: flip and shift, RandAugment, color jitter, cutout, random erasing; each only if `config` enables it.
    """
    flipped = uniform(keys, "flip")[:, 0] < config.flip
    shift_limit = config.shift_limit if config.crop == "shift" else 0.0
    pixels = _flip_and_shift(images.numpy(), flipped, shift_limit, uniform(keys, "shift", 2))
    if config.randaug_ops:
        pixels = randaugment(pixels, config.randaug_ops, config.randaug_magnitude, keys)
    if config.color_jitter:
        _jitter_color(pixels, config.color_jitter, uniform(keys, "colour", 3))
    if config.cutout:
        pixels = op.cutout(pixels, config.cutout, uniform(keys, "cutout", 2))
    if config.random_erasing:
        _erase(pixels, config.random_erasing, keys)
    return torch.from_numpy(pixels)


def _flip_and_shift(images: np.ndarray, flipped: np.ndarray, shift_limit: float, draws: np.ndarray) -> np.ndarray:
    """Flip some images horizontally and shift all by up to a fraction of each side, with zero padding.

    One function, because allocating memory costs more than the work: two separate steps take three times as long.
    """
    count, height, width, channels = images.shape
    pad_y, pad_x = round(shift_limit * height), round(shift_limit * width)
    padded = np.zeros((count, height + 2 * pad_y, width + 2 * pad_x, channels), np.uint8)
    center = padded[:, pad_y : pad_y + height, pad_x : pad_x + width]
    center[...] = images
    rows = np.flatnonzero(flipped)
    for channel in range(channels):  # channel by channel is three times as fast as all at once
        center[rows, :, :, channel] = images[rows, :, ::-1, channel]
    lines = padded.reshape(count, height + 2 * pad_y, (width + 2 * pad_x) * channels)
    windows = sliding_window_view(lines, (height, width * channels), axis=(1, 2))  # a view, without a copy
    top, left = np.floor(draws * (2 * pad_y + 1, 2 * pad_x + 1)).astype(int).T
    shifted: np.ndarray = windows[np.arange(count), top, left * channels].reshape(images.shape)
    return shifted


def _jitter_color(images: np.ndarray, limit: float, draws: np.ndarray) -> None:
    """Multiply brightness, contrast and saturation, in this order, by 1 - limit to 1 + limit, in place."""
    factors = 1 + limit * (2 * draws - 1)
    chunk_size = max(1, CHUNK_VALUES // math.prod(images.shape[1:]))
    for start in range(0, len(images), chunk_size):
        chunk = images[start : start + chunk_size]
        brightness, contrast, saturation = factors[start : start + chunk_size].T
        chunk[...] = op.color(op.contrast(op.brightness(chunk, brightness), contrast), saturation)


def _erase(images: np.ndarray, probability: float, keys: np.ndarray) -> None:
    """Random erasing: fill a random box of some images with noise, in place."""
    shape = images.shape[1:]
    chosen = np.flatnonzero(uniform(keys, "erase")[:, 0] < probability)
    heights, widths = np.full(len(chosen), shape[0]), np.full(len(chosen), shape[1])
    draws = uniform(keys[chosen], "erased box", 4 * MAX_TRIES)
    boxes, found = sample_boxes(draws, ERASED_AREA, ERASED_RATIO, heights, widths)
    size = math.prod(shape)
    noise = bits(keys[chosen], "erased noise", -(-size // 8)).astype("<u8").view(np.uint8)[:, :size]
    for row, (left, top, right, bottom), values in zip(chosen[found], boxes[found], noise[found], strict=True):
        inside = np.s_[top:bottom, left:right]
        images[row][inside] = values.reshape(shape)[inside]
