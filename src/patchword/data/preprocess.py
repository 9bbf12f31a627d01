"""The one evaluation transform: a picture becomes the numbers a model was trained to see.

Owns the geometry (resize, centre crop), the normalisation and their JSON form, which travels with the weights. It does
not know files or formats (`data.images` decodes), models, or training-time augmentation.

The geometry is that of torchvision's Resize + CenterCrop on Pillow pictures, to the pixel, since nearly all public
weights were evaluated with it.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image

from ..config import JsonConfig
from ..errors import ConfigError, ImageError

Resize = Literal["cover", "squash"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)  # Google's ViT checkpoints: mean = std = 0.5, pixels in -1..1

MAX_SIZE = 16384  # far above any model, low enough that a typing error cannot ask for terabytes

LARGEST_STEP = 2**27  # pixels between the two passes of resizing

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Preprocess(JsonConfig):
    """How a picture is resized, cropped and normalised; call it on a Pillow image to get a (C, H, W) tensor.

    Args:
        size: (height, width) that the model sees.
        resize: "cover" keeps the proportions and crops what juts out; "squash" scales both sides independently.
        crop: the part of the resized picture that is kept, along each side (timm's crop_pct). 224 with 0.9 means:
            resize to 248, cut 224 out of the middle.
        interpolation: a Pillow filter; all but "nearest" smooth when they shrink.
        mean, std: one number for each channel, on the scale 0..1. One channel means greyscale, three mean RGB.
    """

    size: tuple[int, int]
    resize: Resize = "cover"
    crop: float = 1.0
    interpolation: Interpolation = "bicubic"
    # Without a default: the wrong statistics cost tens of points of accuracy and raise no error.
    mean: tuple[float, ...] = field(kw_only=True)
    std: tuple[float, ...] = field(kw_only=True)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """All fields must be there: a default filled in silently would be a wrong accuracy later."""
        known = {each.name for each in fields(cls)}
        if isinstance(values, dict) and (missing := sorted(known - set(values))):
            raise ConfigError(f"Preprocess lacks {', '.join(missing)}: every key must be given.")
        return super().from_json(values)

    def validate(self) -> None:
        size_fits = all(1 <= side <= MAX_SIZE for side in self.size)
        self.require(size_fits, f"preprocess.size must be (height, width), each 1 to {MAX_SIZE}, not {self.size}.")
        self.require(0 < self.crop <= 1, f"preprocess.crop must be above 0 and at most 1, not {self.crop}.")
        self.require(
            len(self.mean) == len(self.std),
            f"preprocess.mean and preprocess.std must have one number for each channel, "
            f"but they have {len(self.mean)} and {len(self.std)}.",
        )
        self.require(
            len(self.mean) in _MODES,
            f"preprocess.mean must have 1 number (greyscale) or 3 numbers (RGB), not {len(self.mean)}.",
        )
        on_scale = all(0 <= m <= 1 for m in self.mean) and max(self.std, default=0) <= 2
        self.require(on_scale, f"preprocess.mean {self.mean} and std {self.std} must be on the scale 0..1, not 0..255.")
        self.require(min(self.std) > 0, f"preprocess.std must be above 0, since pixels are divided by it: {self.std}.")
        self.require(
            max(self.size) <= MAX_SIZE * self.crop,
            f"preprocess.size {self.size} with crop {self.crop} would resize pictures to more than {MAX_SIZE} "
            f"pixels a side: use a larger crop fraction.",
        )

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def mode(self) -> Literal["L", "RGB"]:
        """The Pillow mode, to be given to `load_image`."""
        return "L" if self.channels == 1 else "RGB"

    @property
    def resized_to(self) -> tuple[int, int]:
        """(height, width) that a picture is resized to, or to cover, before the crop."""
        # The addend: 224 / (224 / 248) must give 248, although the fraction is rounded.
        return math.floor(self.size[0] / self.crop + 1e-6), math.floor(self.size[1] / self.crop + 1e-6)

    def summary(self) -> str:
        """In a line, for people."""
        height, width = self.size
        rows, columns = self.resized_to
        cropped = f", crop {height}x{width}" if self.resize == "cover" or self.resized_to != self.size else ""
        scale = f"{'resize' if self.resize == 'cover' else 'squash'} to {rows}x{columns}{cropped}"
        return f"{scale}, {self.interpolation}, mean {self.mean}, std {self.std}"

    def pixels(self, image: Image.Image) -> np.ndarray:
        """Geometry only: a uint8 array (H, W, C).

        Only what the crop keeps is computed, so even 1 x 5000 pixels, which cover 224 x 224 only when resized to
        224 x 1,120,000, cost no more than any other picture. Raises ImageError.
        """
        if image.mode != self.mode:
            image = _converted(image, self.mode)
        width, height = image.size
        left, top, right, bottom = self.seen(height, width)
        resample = Image.Resampling[self.interpolation.upper()]
        try:
            small = _resample(image, self.size, (top, bottom), (left, right), resample)
        except (ValueError, MemoryError) as error:
            raise ImageError(
                f"An image of {width} x {height} cannot be resized to the model's size ({error}).",
                code="image_out_of_memory" if isinstance(error, MemoryError) else "image_unsupported",
            ) from None
        return np.array(small).reshape(*self.size, self.channels)

    def seen(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Which part of a picture the model sees: left, top, right, bottom, in pixels of the picture."""
        resized = self._resized(height, width)
        top, bottom = _kept(height, resized[0], self.size[0])
        left, right = _kept(width, resized[1], self.size[1])
        return left, top, right, bottom

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the whole resized picture, of which the crop is a part."""
        rows, columns = self.resized_to
        if self.resize == "squash":
            return rows, columns
        # The axis that needs the larger scale sets it. int() and the float division are torchvision's own rounding.
        if rows * width >= columns * height:
            return rows, int(rows * width / height)
        return int(columns * height / width), columns

    def normalise(self, batch: torch.Tensor) -> torch.Tensor:
        """uint8 (B, H, W, C) from `pixels` to contiguous float32 (B, C, H, W), on the batch's device.

        Bit-equal to torchvision's ToTensor + Normalize. Transposing while still bytes and then working in place makes
        it five times as fast as the same formula written plainly; folding it into one multiplication and one addition
        would save another third of 0.2 ms, and the last bits.
        """
        shape = (self.channels, 1, 1)
        mean = torch.tensor(self.mean, device=batch.device).view(shape)
        std = torch.tensor(self.std, device=batch.device).view(shape)
        planes = batch.permute(0, 3, 1, 2).contiguous()  # (B, C, H, W), still uint8
        return planes.float().div_(255).sub_(mean).div_(std)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return self.normalise(torch.from_numpy(self.pixels(image))[None])[0]


def _kept(length: int, resized: int, size: int) -> tuple[float, float]:
    """Where the centre crop begins and ends along one side, in pixels of the original picture."""
    start = int(round((resized - size) / 2.0))  # torchvision's CenterCrop, half to even included
    scale = length / resized
    return start * scale, min((start + size) * scale, length)  # the product may pass the edge by a rounding error


def _resample(
    image: Image.Image,
    size: tuple[int, int],
    rows: tuple[float, float],
    columns: tuple[float, float],
    resample: Image.Resampling,
) -> Image.Image:
    """The given rows and columns of the picture, resized to (height, width): widths first, then heights.

    One call with a two-dimensional box would do the same if Pillow always took the widths first. Since version 13 it
    takes the heights first for tall boxes; as values beyond 0..255 are clipped between the two passes, up to 10 grey
    levels then differ from resizing the whole picture and cropping it (seen in ImageNet pictures). This way it is 2
    at most, in a few pixels of every tenth picture, since Pillow keeps the box in single precision.
    """
    height, width = size
    # The filter reaches over the edge of the crop, three pixels (lanczos) of the coarser of the two grids; one for
    # rounding. Rows beyond that need not be resized.
    reach = math.ceil(3 * max(1.0, (rows[1] - rows[0]) / height)) + 1
    first, last = max(0, math.floor(rows[0]) - reach), min(image.height, math.ceil(rows[1]) + reach)
    if last - first < image.height:
        image = image.crop((0, first, image.width, last))
    if image.height * width > LARGEST_STEP:  # a line of a million pixels that is squashed: heights first after all
        image = image.resize((image.width, height), resample, box=(0, rows[0] - first, image.width, rows[1] - first))
        return image.resize((width, height), resample, box=(columns[0], 0, columns[1], height))
    narrow = image.resize((width, image.height), resample, box=(columns[0], 0, columns[1], image.height))
    # The subtraction can pass the lower edge by a rounding error, at which Pillow would raise.
    return narrow.resize((width, height), resample, box=(0, rows[0] - first, width, min(rows[1] - first, image.height)))


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Between grey and colour only: what to do with transparency, palettes and 16 bits is decided in one place."""
    if image.mode not in _MODES.values():
        raise ImageError(
            f"The image has mode {image.mode!r}, but preprocessing takes L or RGB: "
            f"convert it with patchword.data.images.to_mode(image, {mode!r}).",
            code="image_unsupported",
        )
    return image.convert(mode)
