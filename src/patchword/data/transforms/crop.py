"""Random rectangles in pictures, and cutting one out while scaling it. Knows no batches of pixels."""

import numpy as np
from PIL import Image

from ...config import AugmentConfig
from ..keyed_rng import uniform
from ..preprocess import Interpolation

TRIES = 10  # as in torchvision; beyond, a picture is so narrow that hardly any rectangle fits


def crop_boxes(config: AugmentConfig, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """For `crop="resized"`: the part of each picture to keep, int64 (B, 4): left, top, right, bottom.

    Where no try fits, it is the largest part around the centre whose proportions are allowed.
    """
    boxes, found = rectangles(uniform(keys, "crop", 4 * TRIES), config.scale, config.ratio, heights, widths)
    return np.where(found[:, None], boxes, _centred(config.ratio, np.asarray(heights), np.asarray(widths)))


def crop_resized(
    image: Image.Image, box: np.ndarray, size: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """The box of a picture (left, top, right, bottom), scaled to (height, width): uint8 (H, W, C)."""
    left, top, right, bottom = np.asarray(box).tolist()
    resample = Image.Resampling[interpolation.upper()]
    part = image.resize(size[::-1], resample, box=(left, top, right, bottom))
    return np.array(part).reshape(*size, -1)


def rectangles(
    draws: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    heights: np.ndarray,
    widths: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Boxes of random area, proportions and place in pictures of the given sizes, and whether one fitted.

    Args:
        draws: uniform numbers (B, 4 * tries).
        scale: lowest and highest part of the area, uniform.
        ratio: lowest and highest width / height, uniform in its logarithm.

    Returns:
        int64 (B, 4): left, top, right, bottom; and bool (B,).
    """
    area, proportion, down, across = np.moveaxis(draws.reshape(-1, draws.shape[1] // 4, 4), 2, 0)  # each (B, tries)
    height, width = np.asarray(heights)[:, None], np.asarray(widths)[:, None]
    pixels = height * width * (scale[0] + area * (scale[1] - scale[0]))
    low, high = np.log(ratio)
    root = np.exp((low + proportion * (high - low)) / 2)  # of width / height
    rows, columns = np.rint(np.sqrt(pixels) / root), np.rint(np.sqrt(pixels) * root)
    fits = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
    top, left = np.floor(down * (height - rows + 1)), np.floor(across * (width - columns + 1))
    boxes = np.stack([left, top, left + columns, top + rows], axis=2).astype(np.int64)
    return boxes[np.arange(len(boxes)), fits.argmax(axis=1)], fits.any(axis=1)  # argmax: the first that fits


def _centred(ratio: tuple[float, float], heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The largest box around the centre that is neither too narrow nor too wide."""
    rows = np.maximum(np.minimum(heights, np.rint(widths / ratio[0])), 1).astype(np.int64)
    columns = np.maximum(np.minimum(widths, np.rint(heights * ratio[1])), 1).astype(np.int64)
    top, left = (heights - rows) // 2, (widths - columns) // 2
    return np.stack([left, top, left + columns, top + rows], axis=1)
