"""A map laid over the picture it belongs to, at the picture's own size and proportions."""

import math

import numpy as np
from PIL import Image

from ..data.preprocess import Preprocess

MAX_PIXELS = 16_000_000  # larger pictures are shrunk to so many, since nobody sees the difference
MAX_OPACITY = 0.75
CROPPED_BRIGHTNESS = 0.35  # brightness of what the crop left out
# From cold to hot; cold is transparent as well, so the picture shows where the map is low.
HEAT_COLORS = ((0.0, (72, 24, 120)), (0.4, (190, 40, 110)), (0.7, (250, 120, 50)), (1.0, (255, 240, 130)))


def resize_to_image(heat: np.ndarray, picture: tuple[int, int], preprocess: Preprocess) -> np.ndarray:
    """A map (h, w) of what the model saw, on the (height, width) of the picture: 0 to 1, NaN where it saw nothing."""
    height, width = picture
    left, top, right, bottom = (round(v) for v in preprocess.crop_box(height, width))
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    small = Image.fromarray(scale_to_unit(heat))
    spread = small.resize((right - left, bottom - top), Image.Resampling.BICUBIC)
    result = np.full((height, width), np.nan, dtype=np.float32)
    result[top:bottom, left:right] = np.clip(np.asarray(spread), 0, 1)[: height - top, : width - left]
    return result


def scale_to_unit(heat: np.ndarray) -> np.ndarray:
    """From 0 to 1, by the extremes; a flat map becomes 0."""
    low, high = float(heat.min()), float(heat.max())
    return ((heat - low) / (high - low) if high > low else np.zeros_like(heat)).astype(np.float32)


def overlay_heatmap(picture: Image.Image, heat: np.ndarray, preprocess: Preprocess, strength: float = MAX_OPACITY) -> Image.Image:
    """The picture with the map over it; what the model did not see is dark."""
    if picture.width * picture.height > MAX_PIXELS:
        shrink = math.sqrt(MAX_PIXELS / (picture.width * picture.height))
        size = (max(1, int(picture.width * shrink)), max(1, int(picture.height * shrink)))
        picture = picture.resize(size, Image.Resampling.BOX)
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    spread = resize_to_image(heat, pixels.shape[:2], preprocess)
    unseen = np.isnan(spread)
    level = np.nan_to_num(spread)
    alpha = (strength * np.sqrt(level))[..., None]
    mixed = (1 - alpha) * pixels + alpha * apply_colormap(level)
    mixed[unseen] = CROPPED_BRIGHTNESS * pixels[unseen]
    return Image.fromarray(np.round(mixed).astype(np.uint8))


def apply_colormap(level: np.ndarray) -> np.ndarray:
    """0 to 1 on the ramp: float32 (..., 3), 0 to 255."""
    places, steps = [place for place, _ in HEAT_COLORS], np.linspace(0, 1, 256)
    table = np.stack([np.interp(steps, places, [c[i] for _, c in HEAT_COLORS]) for i in range(3)], axis=-1)
    return table.astype(np.float32)[np.round(255 * level).astype(np.uint8)]
