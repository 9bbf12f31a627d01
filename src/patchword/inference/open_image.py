"""Decoding of one image for a model: the only code between an input and the pixels that the model sees.

predict, evaluate, inspect, export and serve all call it, so an image has the same pixels in each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from ..data.image_decoder import MAX_PIXELS, Mode, load_image, to_mode
from ..data.preprocess import Preprocess
from ..errors import ImageError

ImageReader = Callable[..., Image.Image]
"""A function that reads one image of a dataset: `read(mode=..., min_size=...)`, as `Source.read` does."""
ImageInput = str | Path | bytes | np.ndarray | Image.Image | ImageReader
"""An image: the path of a file, the bytes of a file, a uint8 array (H, W) or (H, W, C) with 1, 3 or 4 channels, a
Pillow image, or a function that reads an image of a dataset, as `Source.read` does."""


@dataclass(frozen=True)
class DecodedImage:
    """An image, and what the model sees of it.

    Attributes:
        image: The image, in the mode of the model; a large JPEG may have been decoded at reduced scale.
        pixels: What the model sees, uint8 (H, W, C): resized and cropped, not yet normalized.
    """

    image: Image.Image
    pixels: np.ndarray


def decode(
    image: ImageInput, preprocess: Preprocess, *, full: bool = False, max_pixels: int = MAX_PIXELS
) -> DecodedImage:
    """Decode, resize and crop an image for a model.

    Args:
        image: The image.
        preprocess: The evaluation transform of the model.
        full: Whether to decode at the original size, to show the image. By default large JPEGs are decoded at reduced
            scale, which is several times faster and changes pixels by less than one gray level on average.
        max_pixels: The maximum size; larger images are refused before they are decoded.

    Raises:
        ImageError: The image cannot be read.
    """
    min_size = None if full else preprocess.resize_size
    decoded = decode_image(image, preprocess.mode, min_size=min_size, max_pixels=max_pixels)
    return DecodedImage(decoded, preprocess.resize_and_crop(decoded))


def decode_image(
    image: ImageInput, mode: Mode, *, min_size: tuple[int, int] | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Decode any input to a Pillow image of 8 bits per channel. See `load_image` for the arguments."""
    if isinstance(image, str | Path | bytes):
        return load_image(image, mode=mode, min_size=min_size, max_pixels=max_pixels)
    if isinstance(image, Image.Image):
        return to_mode(image, mode)
    if isinstance(image, np.ndarray):
        return to_mode(array_to_image(image), mode)
    if callable(image):
        return to_mode(image(mode=mode, min_size=min_size), mode)
    raise ImageError(
        f"An image is a path, the bytes of a file, a uint8 array or a Pillow image, not {type(image).__name__}.",
        code="image_unsupported",
    )


def array_to_image(pixels: np.ndarray) -> Image.Image:
    """Convert a uint8 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) to a Pillow image."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    color = pixels.ndim == 3 and pixels.shape[2] in (3, 4)
    if pixels.dtype != np.uint8 or not (color or pixels.ndim == 2) or 0 in pixels.shape:
        raise ImageError(
            f"An array must be uint8 (0..255) of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), not {pixels.dtype} "
            f"of shape {pixels.shape}. Scale and convert it first.",
            code="image_unsupported",
        )
    return Image.fromarray(np.ascontiguousarray(pixels))
