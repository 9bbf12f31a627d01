"""The evaluation transform: resize, center crop and normalize an image as the model expects.

Owns the geometry, the normalization and their JSON form, which is stored with the weights. It does not know file
formats (`data.image_decoder` decodes), models, or training augmentation.

The geometry is that of torchvision's Resize + CenterCrop on Pillow images, to the pixel, because nearly all public
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
"""How `Preprocess` resizes images: to cover the model's input (and be cropped), or exactly to its size."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
"""A filter of Pillow for resizing."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  # mean and std of Google's ViT checkpoints: pixels in -1..1

MAX_SIZE = 16384  # pixels per side; far above any model, but a typo cannot allocate terabytes

MAX_INTERMEDIATE_PIXELS = 2**27  # between the horizontal and the vertical pass of resizing

_MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Preprocess(JsonConfig):
    """The evaluation transform: resizes, center-crops and normalizes an image as the model expects.

    Args:
        size: The height and width of the model's input in pixels.
        resize: "cover" keeps the aspect ratio and crops what exceeds `size`; "squash" scales both sides independently.
        crop: The fraction of the resized image that is kept along each side (timm's crop_pct), above 0 and at most 1.
            224 with 0.9 means: resize to 248, then center-crop to 224.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos", a filter of Pillow. All but "nearest" are
            antialiased.
        mean: The mean of each channel that is subtracted, for pixels from 0 to 1: one number for grayscale images,
            three for RGB.
        std: The standard deviation of each channel that pixels are divided by.
        trim: The rows at the bottom and columns at the right that are cut off after the crop, because they are less
            than a patch: a model that was trained at 384 pixels with patches of 14 sees the first 378 of them.

    Examples:
        ```python
        from PIL import Image
        import patchword as pw

        preprocess = pw.Preprocess(size=(224, 224), crop=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        image = preprocess(Image.open("cat.jpg"))  # (3, 224, 224)
        ```
    """

    section = "preprocess"

    size: tuple[int, int]
    resize: Resize = "cover"
    crop: float = 1.0
    interpolation: Interpolation = "bicubic"
    # No defaults: wrong statistics cost tens of points of accuracy without any error.
    mean: tuple[float, ...] = field(kw_only=True)
    std: tuple[float, ...] = field(kw_only=True)
    trim: tuple[int, int] = field(default=(0, 0), kw_only=True)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build a transform from a JSON object, which must have every field but `trim`.

        Raises:
            ConfigError: A field is missing, unknown or invalid.
        """
        names = {field.name for field in fields(cls)} - {"trim"}
        if isinstance(values, dict) and (missing := sorted(names - set(values))):
            raise ConfigError(f"preprocess lacks {', '.join(missing)}: every key is required.")
        return super().from_json(values)

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`; without `trim`, which few models have, if nothing is cut off."""
        return {name: value for name, value in super().to_json().items() if name != "trim" or any(self.trim)}

    def validate(self) -> None:
        size_fits = all(1 <= side <= MAX_SIZE for side in self.size)
        self.require(size_fits, f"preprocess.size must be (height, width), each 1 to {MAX_SIZE}, not {self.size}.")
        trimmed = all(0 <= side <= MAX_SIZE for side in self.trim)
        self.require(trimmed, f"preprocess.trim must be (rows, columns), each 0 to {MAX_SIZE}, not {self.trim}.")
        self.require(0 < self.crop <= 1, f"preprocess.crop must be above 0 and at most 1, not {self.crop}.")
        self.require(
            len(self.mean) == len(self.std),
            f"preprocess.mean and preprocess.std must have one number per channel, "
            f"but they have {len(self.mean)} and {len(self.std)}.",
        )
        self.require(
            len(self.mean) in _MODES,
            f"preprocess.mean must have 1 number (grayscale) or 3 numbers (RGB), not {len(self.mean)}.",
        )
        on_scale = all(0 <= m <= 1 for m in self.mean) and max(self.std, default=0) <= 2
        self.require(on_scale, f"preprocess.mean {self.mean} and std {self.std} must be on the scale 0..1, not 0..255.")
        self.require(min(self.std) > 0, f"preprocess.std must be above 0 (pixels are divided by it), not {self.std}.")
        self.require(
            max(self.crop_size) <= MAX_SIZE * self.crop,
            f"preprocess.size {self.crop_size} with crop {self.crop} would resize images to more than {MAX_SIZE} "
            f"pixels per side: use a larger crop fraction.",
        )

    @property
    def channels(self) -> int:
        """The number of channels: 1 (grayscale) or 3 (RGB)."""
        return len(self.mean)

    @property
    def mode(self) -> Literal["L", "RGB"]:
        """The Pillow mode of the images: "L" (grayscale) or "RGB"."""
        return "L" if self.channels == 1 else "RGB"

    @property
    def crop_size(self) -> tuple[int, int]:
        """The (height, width) of the center crop, of which the model sees the first `size`."""
        return self.size[0] + self.trim[0], self.size[1] + self.trim[1]

    @property
    def resize_size(self) -> tuple[int, int]:
        """The (height, width) that images are resized to before the crop; with "cover", the minimum."""
        # 1e-6: 224 / (224 / 248) must give 248 although the fraction is rounded.
        height, width = self.crop_size
        return math.floor(height / self.crop + 1e-6), math.floor(width / self.crop + 1e-6)

    def summary(self) -> str:
        """Describe the transform in one line."""
        height, width = self.crop_size
        rows, columns = self.resize_size
        crop = f", crop {height}x{width}" if self.resize == "cover" or self.resize_size != self.crop_size else ""
        crop += f", keep the first {self.size[0]}x{self.size[1]}" if any(self.trim) else ""
        scale = f"{'resize' if self.resize == 'cover' else 'squash'} to {rows}x{columns}{crop}"
        return f"{scale}, {self.interpolation}, mean {self.mean}, std {self.std}"

    def resize_and_crop(self, image: Image.Image) -> np.ndarray:
        """Resize and crop an image without normalizing it.

        Only the cropped region is computed: an image of 1 x 5000 pixels, which would have to be resized to
        224 x 1,120,000 to cover 224 x 224, costs no more than any other.

        Args:
            image: A Pillow image of mode "L" or "RGB".

        Returns:
            The pixels, uint8 (H, W, C).

        Raises:
            ImageError: The image has another mode, or cannot be resized.
        """
        if image.mode != self.mode:
            image = _convert_mode(image, self.mode)
        width, height = image.size
        left, top, right, bottom = self.crop_box(height, width)
        resample = Image.Resampling[self.interpolation.upper()]
        try:
            resized = _resample(image, self.size, (top, bottom), (left, right), resample)
        except (ValueError, MemoryError) as error:
            raise ImageError(
                f"An image of {width} x {height} pixels cannot be resized to {self.size} ({error}).",
                code="image_out_of_memory" if isinstance(error, MemoryError) else "image_unsupported",
            ) from None
        return np.array(resized).reshape(*self.size, self.channels)

    def crop_box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return the region that the model sees of an image of this height and width.

        Returns:
            (left, top, right, bottom) in pixels of that image.
        """
        resized = self._full_size(height, width)
        top, bottom = _center_interval(height, resized[0], self.size[0], self.crop_size[0])
        left, right = _center_interval(width, resized[1], self.size[1], self.crop_size[1])
        return left, top, right, bottom

    def _full_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the full image after resizing, before the crop."""
        rows, columns = self.resize_size
        if self.resize == "squash":
            return rows, columns
        # The axis that needs the larger scale determines it. int() and the float division round as torchvision does.
        if rows * width >= columns * height:
            return rows, int(rows * width / height)
        return int(columns * height / width), columns

    def normalize(self, batch: torch.Tensor) -> torch.Tensor:
        """Normalize pixels of `resize_and_crop`; bit-equal to torchvision's ToTensor and Normalize.

        Args:
            batch: Pixels, uint8 (B, H, W, C).

        Returns:
            The model's input, float32 (B, C, H, W), contiguous and on the same device.
        """
        # Transposing bytes and then working in place is five times as fast as the same formula written plainly. A fused
        # multiply-add would be faster still, but not bit-equal.
        shape = (self.channels, 1, 1)
        mean = torch.tensor(self.mean, device=batch.device).view(shape)
        std = torch.tensor(self.std, device=batch.device).view(shape)
        planes = batch.permute(0, 3, 1, 2).contiguous()  # (B, C, H, W), still uint8
        return planes.float().div_(255).sub_(mean).div_(std)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Resize, crop and normalize a Pillow image of mode "L" or "RGB" to a tensor, float32 (C, H, W)."""
        return self.normalize(torch.from_numpy(self.resize_and_crop(image))[None])[0]


def _center_interval(length: int, resized: int, size: int, crop_size: int) -> tuple[float, float]:
    """Start and end of the first `size` of the center crop along one side, in pixels of the original image."""
    start = round((resized - crop_size) / 2.0)  # as torchvision's CenterCrop, which rounds half to even
    scale = length / resized
    return start * scale, min((start + size) * scale, length)  # a rounding error may exceed the edge


def _resample(
    image: Image.Image,
    size: tuple[int, int],
    rows: tuple[float, float],
    columns: tuple[float, float],
    resample: Image.Resampling,
) -> Image.Image:
    """Resize the given rows and columns of an image to (height, width): horizontally first, then vertically.

    A single call with a two-dimensional box would be equivalent if Pillow always resized horizontally first. Since
    version 13, Pillow starts with the vertical pass for tall boxes. Values outside 0..255 are clipped between the two
    passes, so up to 10 gray levels differ from resizing the full image and cropping it (seen on ImageNet). With two
    calls the difference is at most 2, in a few pixels of one in ten images, because Pillow stores the box as float32.
    """
    height, width = size
    # The filter extends beyond the crop by up to three pixels (Lanczos) of the coarser grid, plus one for rounding.
    # Rows beyond that need not be resized.
    margin = math.ceil(3 * max(1.0, (rows[1] - rows[0]) / height)) + 1
    first, last = max(0, math.floor(rows[0]) - margin), min(image.height, math.ceil(rows[1]) + margin)
    if last - first < image.height:
        image = image.crop((0, first, image.width, last))
    if image.height * width > MAX_INTERMEDIATE_PIXELS:  # e.g. 1 x 1,000,000 pixels, squashed: vertical pass first
        image = image.resize((image.width, height), resample, box=(0, rows[0] - first, image.width, rows[1] - first))
        return image.resize((width, height), resample, box=(columns[0], 0, columns[1], height))
    narrow = image.resize((width, image.height), resample, box=(columns[0], 0, columns[1], image.height))
    # The subtraction may exceed the lower edge by a rounding error, and Pillow would raise.
    return narrow.resize((width, height), resample, box=(0, rows[0] - first, width, min(rows[1] - first, image.height)))


def _convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert between L and RGB only: `data.image_decoder.to_mode` handles transparency, palettes and 16 bits."""
    if image.mode not in _MODES.values():
        raise ImageError(
            f"The image has mode {image.mode!r}, but Preprocess accepts only L and RGB: "
            f"convert it with patchword.data.image_decoder.to_mode(image, {mode!r}).",
            code="image_unsupported",
        )
    return image.convert(mode)
