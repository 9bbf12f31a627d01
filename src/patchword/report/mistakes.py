"""The hardest mistakes of a model, with their images as thumbnails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..errors import ImageError
from ..metrics.classification import PredictionRow
from .embedded_images import data_uri
from .report_data import ClassificationResults, Mistake

MAX_MISTAKES = 36
THUMBNAIL = 240  # pixels of the longer side; keeps a page of photos below a megabyte
SMALL = 96  # up to this size pixels are kept exactly, and shown as squares


@dataclass(frozen=True)
class Thumbnail:
    """A misclassified image as the page shows it; `pixelated` if it is so small that it is enlarged."""

    mistake: Mistake
    source: str
    pixelated: bool


def thumbnails(results: ClassificationResults) -> list[Thumbnail]:
    """The first MAX_MISTAKES mistakes, ready to be shown."""
    return [thumbnail(each) for each in results.mistakes[:MAX_MISTAKES]]


def thumbnail(mistake: Mistake) -> Thumbnail:
    """Small images are kept exactly, larger ones are scaled down."""
    pixels = mistake.image
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = max(image.size) <= SMALL
    if not small:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    return Thumbnail(mistake, data_uri(image, "PNG" if small else "JPEG"), small)


def hardest_mistakes(
    rows: Sequence[PredictionRow], read_pixels: Callable[[int], np.ndarray], limit: int = MAX_MISTAKES
) -> list[Mistake]:
    """The wrong predictions by decreasing loss, with their images. Training and evaluation reports both use this.

    Args:
        rows: a row for each image, from `ClassificationMetrics.prediction_rows`.
        read_pixels: returns the image of row i as the model sees it, uint8 (h, w, c). If it raises `ImageError`
            (the file was deleted since), the mistake is left out.
        limit: the number of mistakes.
    """
    wrong = [i for i, row in enumerate(rows) if row["true"] != row["predicted"]]
    mistakes = []
    for i in sorted(wrong, key=lambda i: -rows[i]["loss"])[:limit]:
        row = rows[i]
        try:
            image = read_pixels(i)
        except ImageError:
            continue
        mistakes.append(Mistake(row["name"], image, row["true"], row["predicted"], row["probability"], row["loss"]))
    return mistakes
