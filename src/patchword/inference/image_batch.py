"""A set of images in memory, as a model sees them: for inspections and for the calibration of int8 exports."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from ..errors import ImageError
from .classifier import Encoder
from .inputs import InputImage, UnreadableImage

MAX_SIDE = 1024  # pixels of the longer side of an original that is kept


@dataclass(frozen=True)
class ImageBatch:
    """Images in the order in which they were given, without those that could not be read."""

    names: tuple[str, ...]
    pixels: Tensor  # uint8 (N, H, W, C): what the model sees
    originals: tuple[Image.Image, ...]  # the first few, uncropped
    unreadable: tuple[UnreadableImage, ...]


def load_image_batch(encoder: Encoder, images: Sequence[InputImage], num_originals: int = 0) -> ImageBatch:
    """Decode images; the first `num_originals` are also kept uncropped, to be shown."""
    names: list[str] = []
    pixels: list[Tensor] = []
    originals: list[Image.Image] = []
    unreadable: list[UnreadableImage] = []
    for image in images:
        try:
            decoded = encoder.decode(image.image, full=len(originals) < num_originals)
        except ImageError as error:
            unreadable.append(UnreadableImage(image.name, str(error)))
            continue
        names.append(image.name)
        pixels.append(torch.from_numpy(decoded.pixels))
        if len(originals) < num_originals:
            originals.append(shrink(decoded.image))
    shape = (0, *encoder.preprocess.size, encoder.preprocess.channels)
    stacked = torch.stack(pixels) if pixels else torch.zeros(shape, dtype=torch.uint8)
    return ImageBatch(tuple(names), stacked, tuple(originals), tuple(unreadable))


def shrink(image: Image.Image) -> Image.Image:
    """A copy with at most `MAX_SIDE` pixels on its longer side, enough for every figure."""
    image = image.copy()
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return image
