"""Random boxes in images, and cropping with resizing. Works on one Pillow image at a time."""

import numpy as np
from PIL import Image

from ...config import AugmentConfig
from ..keyed_rng import uniform
from ..preprocess import Interpolation

MAX_TRIES = 10  # as in torchvision; if all fail, the image is so narrow that hardly any box fits


def sample_crop_boxes(config: AugmentConfig, keys: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Sample the boxes of random resized crops: int64 (B, 4), each (left, top, right, bottom).

    If no try fits, the box is the largest centered one with an allowed aspect ratio, as in torchvision's
    RandomResizedCrop.
    """
    boxes, found = sample_boxes(uniform(keys, "crop", 4 * MAX_TRIES), config.scale, config.ratio, heights, widths)
    return np.where(found[:, None], boxes, _center_boxes(config.ratio, np.asarray(heights), np.asarray(widths)))


def crop_and_resize(
    image: Image.Image, box: np.ndarray, size: tuple[int, int], interpolation: Interpolation
) -> np.ndarray:
    """Crop the box (left, top, right, bottom) and resize it to (height, width): uint8 (H, W, C)."""
    left, top, right, bottom = np.asarray(box).tolist()
    resample = Image.Resampling[interpolation.upper()]
    resized = image.resize(size[::-1], resample, box=(left, top, right, bottom))
    return np.array(resized).reshape(*size, -1)


def sample_boxes(
    draws: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    heights: np.ndarray,
    widths: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample boxes of random area, aspect ratio and position in images of the given sizes.

    Args:
        draws: uniform numbers in 0..1, (B, 4 * tries).
        scale: minimum and maximum area, as a fraction of the image; uniform.
        ratio: minimum and maximum width / height; log-uniform.

    Returns:
        The first box that fits, int64 (B, 4): left, top, right, bottom; and whether any try fits, bool (B,).
    """
    area, aspect, down, across = np.moveaxis(draws.reshape(-1, draws.shape[1] // 4, 4), 2, 0)  # each (B, tries)
    height, width = np.asarray(heights)[:, None], np.asarray(widths)[:, None]
    pixels = height * width * (scale[0] + area * (scale[1] - scale[0]))
    low, high = np.log(ratio)
    root = np.exp((low + aspect * (high - low)) / 2)  # of width / height
    rows, columns = np.rint(np.sqrt(pixels) / root), np.rint(np.sqrt(pixels) * root)
    fits = (rows >= 1) & (rows <= height) & (columns >= 1) & (columns <= width)
    top, left = np.floor(down * (height - rows + 1)), np.floor(across * (width - columns + 1))
    boxes = np.stack([left, top, left + columns, top + rows], axis=2).astype(np.int64)
    return boxes[np.arange(len(boxes)), fits.argmax(axis=1)], fits.any(axis=1)


def _center_boxes(ratio: tuple[float, float], heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The largest centered boxes with an allowed aspect ratio."""
    rows = np.maximum(np.minimum(heights, np.rint(widths / ratio[0])), 1).astype(np.int64)
    columns = np.maximum(np.minimum(widths, np.rint(heights * ratio[1])), 1).astype(np.int64)
    top, left = (heights - rows) // 2, (widths - columns) // 2
    return np.stack([left, top, left + columns, top + rows], axis=1)
