"""Heatmaps over images, at the size of the original image."""

import math

import numpy as np
from PIL import Image

from ..data.preprocess import Preprocess

MAX_PIXELS = 16_000_000  # larger images are shrunk to this
MAX_OPACITY = 0.75
CROPPED_BRIGHTNESS = 0.35  # brightness of what the preprocessing crops away
SATURATED = 0.97  # quantile of a map that gets the brightest color
MIN_TOP = 0.2  # but at least this fraction of its range, so that a map of one bright patch does not show noise
# From low to high relevance; opacity grows with relevance, too.
HEAT_COLORS = ((0.0, (72, 24, 120)), (0.4, (190, 40, 110)), (0.7, (250, 120, 50)), (1.0, (255, 240, 130)))


def resize_to_image(heat: np.ndarray, size: tuple[int, int], preprocess: Preprocess) -> np.ndarray:
    """Resizes a map (h, w) of the cropped image to the original (height, width): 0 to 1, NaN outside of the crop."""
    height, width = size
    left, top, right, bottom = (round(v) for v in preprocess.crop_box(height, width))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    small = Image.fromarray(scale_to_unit(heat))
    spread = small.resize((right - left, bottom - top), Image.Resampling.BICUBIC)
    result = np.full((height, width), np.nan, dtype=np.float32)
    result[top:bottom, left:right] = np.clip(np.asarray(spread), 0, 1)[: height - top, : width - left]
    return result


def scale_to_unit(heat: np.ndarray) -> np.ndarray:
    """Scales a map to 0..1 for display; the brightest patches are all 1, and a constant map becomes 0.

    In many ViTs a few background patches outshine all others, often in the corners: the artifacts that registers
    remove (Darcet et al. 2023). Scaled by its maximum, such a map would be dark everywhere else.
    """
    low, high = float(heat.min()), float(heat.max())
    if high <= low:
        return np.zeros_like(heat, dtype=np.float32)
    top = max(float(np.quantile(heat, SATURATED, method="higher")), low + MIN_TOP * (high - low))
    return np.clip((heat - low) / (top - low), 0, 1).astype(np.float32)


def overlay_heatmap(
    image: Image.Image, heat: np.ndarray, preprocess: Preprocess, max_opacity: float = MAX_OPACITY
) -> Image.Image:
    """Draws a heatmap over an image; what the preprocessing crops away is darkened."""
    if image.width * image.height > MAX_PIXELS:
        shrink = math.sqrt(MAX_PIXELS / (image.width * image.height))
        size = (max(1, int(image.width * shrink)), max(1, int(image.height * shrink)))
        image = image.resize(size, Image.Resampling.BOX)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    spread = resize_to_image(heat, pixels.shape[:2], preprocess)
    cropped = np.isnan(spread)
    level = np.nan_to_num(spread)
    alpha = (max_opacity * np.sqrt(level))[..., None]
    mixed = (1 - alpha) * pixels + alpha * apply_colormap(level)
    mixed[cropped] = CROPPED_BRIGHTNESS * pixels[cropped]
    return Image.fromarray(np.round(mixed).astype(np.uint8))


def apply_colormap(level: np.ndarray) -> np.ndarray:
    """Maps values from 0 to 1 to colors: float32 (..., 3), 0 to 255."""
    stops, steps = [stop for stop, _ in HEAT_COLORS], np.linspace(0, 1, 256)
    table = np.stack([np.interp(steps, stops, [c[i] for _, c in HEAT_COLORS]) for i in range(3)], axis=-1)
    return table.astype(np.float32)[np.round(255 * level).astype(np.uint8)]
