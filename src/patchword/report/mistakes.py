"""The hardest mistakes: found in the predictions of an evaluation, and as thumbnails for a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..errors import ImageError
from ..evaluation.evaluate import LabeledImage
from ..inference.classifier import Classifier
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
    classifier: Classifier, images: Sequence[LabeledImage], predictions: Sequence[Mapping[str, object]]
) -> Iterator[Mistake]:
    """Wrong predictions by decreasing loss, with the images read again as the model sees them."""
    by_name = {each.name: each for each in images}
    wrong = [row for row in predictions if row["true"] != row["predicted"]]
    for row in sorted(wrong, key=lambda row: -float(str(row["loss"])))[:MAX_MISTAKES]:
        each = by_name[str(row["name"])]
        try:
            pixels = classifier.pixels(each.picture).numpy()
        except ImageError:  # deleted since it was evaluated
            continue
        probability, loss = float(str(row["probability"])), float(str(row["loss"]))
        yield Mistake(each.name, pixels, str(row["true"]), str(row["predicted"]), probability, loss)
