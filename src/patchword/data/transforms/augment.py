"""Training pictures, varied: each by its own key, so the same whatever batch it is in.

Owns the order of the steps and what is random about each. Cutting out a random part (`crop="resized"`) comes before,
when pictures are decoded: see `crops`. Mixing pictures comes after, when they are normalised: see `mixing`.
"""

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from ...config import AugmentConfig
from ..keyed_rng import bits, uniform
from . import image_ops as op
from .crop import TRIES, rectangles
from .randaugment import randaugment

# Random erasing (Zhong et al., 2017), with the limits that DeiT and its successors train with.
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 1 / 0.3)

CACHED = 200_000  # values that are worked on at once, where several steps follow each other: twice as fast as all


def augment(images: torch.Tensor, config: AugmentConfig, keys: np.ndarray) -> torch.Tensor:
    """uint8 (B, H, W, C) on the CPU, with one key for each picture; the result is a new tensor of that shape.

    Flip and shift, RandAugment, changes of colour, a blank square, an erased rectangle: those that `config` asks for.
    """
    mirrored = uniform(keys, "flip")[:, 0] < config.flip
    shift = config.shift_limit if config.crop == "shift" else 0.0
    pictures = _moved(images.numpy(), mirrored, shift, uniform(keys, "shift", 2))
    if config.randaug_ops:
        pictures = randaugment(pictures, config.randaug_ops, config.randaug_magnitude, keys)
    if config.color_jitter:
        _recolour(pictures, config.color_jitter, uniform(keys, "colour", 3))
    if config.cutout:
        pictures = op.cutout(pictures, config.cutout, uniform(keys, "cutout", 2))
    if config.random_erasing:
        _erase(pictures, config.random_erasing, keys)
    return torch.from_numpy(pictures)


def _moved(pictures: np.ndarray, mirrored: np.ndarray, part: float, draws: np.ndarray) -> np.ndarray:
    """Some of them mirrored, and all moved by up to a part of each side; what comes in from outside is black.

    In one, since fresh memory costs more than the work in it: apart they take three times as long.
    """
    count, height, width, channels = pictures.shape
    down, across = round(part * height), round(part * width)
    padded = np.zeros((count, height + 2 * down, width + 2 * across, channels), np.uint8)
    middle = padded[:, down : down + height, across : across + width]
    middle[...] = pictures
    rows = np.flatnonzero(mirrored)
    for channel in range(channels):  # one at a time: three times as fast as all at once
        middle[rows, :, :, channel] = pictures[rows, :, ::-1, channel]
    lines = padded.reshape(count, height + 2 * down, (width + 2 * across) * channels)
    windows = sliding_window_view(lines, (height, width * channels), axis=(1, 2))  # a view: nothing is copied yet
    top, left = np.floor(draws * (2 * down + 1, 2 * across + 1)).astype(int).T
    return windows[np.arange(count), top, left * channels].reshape(pictures.shape)


def _recolour(pictures: np.ndarray, most: float, draws: np.ndarray) -> None:
    """Brightness, contrast and saturation, in this order, each times 1 - most to 1 + most, in place."""
    factors = 1 + most * (2 * draws - 1)
    few = max(1, CACHED // math.prod(pictures.shape[1:]))
    for start in range(0, len(pictures), few):
        part = pictures[start : start + few]
        bright, contrast, colour = factors[start : start + few].T
        part[...] = op.colour(op.contrast(op.brightness(part, bright), contrast), colour)


def _erase(pictures: np.ndarray, probability: float, keys: np.ndarray) -> None:
    """Fills a rectangle of some pictures with noise, in place."""
    shape = pictures.shape[1:]
    chosen = np.flatnonzero(uniform(keys, "erase")[:, 0] < probability)
    heights, widths = np.full(len(chosen), shape[0]), np.full(len(chosen), shape[1])
    draws = uniform(keys[chosen], "erased box", 4 * TRIES)
    boxes, found = rectangles(draws, ERASED_AREA, ERASED_RATIO, heights, widths)
    size = math.prod(shape)
    noise = bits(keys[chosen], "erased noise", -(-size // 8)).astype("<u8").view(np.uint8)[:, :size]
    for row, (left, top, right, bottom), values in zip(chosen[found], boxes[found], noise[found], strict=True):
        inside = np.s_[top:bottom, left:right]
        pictures[row][inside] = values.reshape(shape)[inside]
