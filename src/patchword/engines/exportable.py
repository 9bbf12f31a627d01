"""A model with normalization, temperature and, on request, resizing as one module that can be exported."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..data.preprocess import Preprocess
from ..errors import ConfigError
from ..models import optimize_for_cpu
from ..models.token_merging import reduce_tokens


class ExportableModel(nn.Module):
    """Maps uint8 (B, H, W, C), as `Preprocess.resize_and_crop` returns them, to logits (B, K) over the temperature.

    Args:
        checkpoint: The model.
        merge_counts: Patches to merge in each block.
        include_preprocessing: Accept images of any size, resize and crop them, and return probabilities.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, checkpoint: Checkpoint, merge_counts: Sequence[int] = (), *, include_preprocessing: bool = False
    ) -> None:
        super().__init__()
        if checkpoint.preprocess is None:
            raise ConfigError(f"The model takes {checkpoint.config.in_channels} channels, but images have 1 or 3.")
        self.preprocess, self.temperature = checkpoint.preprocess, checkpoint.temperature
        self.multi_label, self.include_preprocessing = checkpoint.multi_label, include_preprocessing
        self.model = reduce_tokens(optimize_for_cpu(checkpoint.build_model().requires_grad_(False)), merge_counts)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.preprocess.mean, self.preprocess.std))
        self.register_buffer("mean", 255 * mean, persistent=False)
        self.register_buffer("std", 255 * std, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.permute(0, 3, 1, 2).float()
        if self.include_preprocessing:
            images = resize_and_crop(images, self.preprocess)
        logits: Tensor = self.model((images - self.mean) / self.std)
        if self.temperature != 1:
            logits = logits / self.temperature
        if not self.include_preprocessing:
            return logits
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)


def example_inputs(model: ExportableModel) -> tuple[Tensor, dict[int, Any]]:
    """Return pixels to trace the module with, and its dynamic dimensions."""
    height, width = model.preprocess.size
    dynamic_shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if model.include_preprocessing:
        height, width = height + 5, width + 9  # sizes that the tracer cannot mistake for constants
        dynamic_shapes |= {1: torch.export.Dim("height"), 2: torch.export.Dim("width")}
    return torch.zeros(2, height, width, model.preprocess.channels, dtype=torch.uint8), dynamic_shapes


def resize_and_crop(images: Tensor, preprocess: Preprocess) -> Tensor:
    """Resize and crop (B, C, H, W) of any size to (B, C, h, w), like `Preprocess.resize_and_crop` but in tensors.

    Each axis is resized by a matrix of filter weights, width first. After each pass values are rounded and clipped, as
    Pillow does with uint8 pixels.
    """
    height, width = (torch.full((), n, dtype=torch.int64) for n in images.shape[-2:])
    target_height, target_width = (torch.full((), n, dtype=torch.int64) for n in preprocess.resize_size)
    if preprocess.resize == "cover":
        is_wide = target_height * width >= target_width * height
        scaled_width = torch.div(target_height * width, height, rounding_mode="floor")
        scaled_height = torch.div(target_width * height, width, rounding_mode="floor")
        resized_width = torch.where(is_wide, scaled_width, target_width)
        resized_height = torch.where(is_wide, target_height, scaled_height)
    else:
        resized_width, resized_height = target_width, target_height
    matrix = resize_matrix(images.shape[-1], resized_width, preprocess, axis=1)
    images = round_to_uint8(images @ matrix.transpose(0, 1))
    return round_to_uint8(resize_matrix(images.shape[-2], resized_height, preprocess, axis=0) @ images)


def round_to_uint8(values: Tensor) -> Tensor:
    """Round half up and clip to 0..255, in float."""
    return (values + 0.5).floor().clamp(0, 255)


def resize_matrix(length: int, resized: Tensor, preprocess: Preprocess, axis: int) -> Tensor:
    """Return (size, length): the weight of each input pixel in each pixel that the model sees, along one axis.

    The axis is resized from `length` to `resized`; the model sees the first `size` pixels of the center crop.
    """
    size, interpolation = preprocess.size[axis], preprocess.interpolation
    scale = torch.full((), length, dtype=torch.float32) / resized
    start = ((resized - preprocess.crop_size[axis]) / 2.0).round()
    centers = (start + torch.arange(size) + 0.5)[:, None] * scale
    positions = torch.arange(length, dtype=torch.float32)[None]
    if interpolation == "nearest":
        return ((centers + 1e-4).floor() == positions).float()  # the offset makes ties independent of rounding
    weights = resize_kernel((positions + 0.5 - centers) / scale.clamp(min=1.0), interpolation)
    return weights / weights.sum(dim=1, keepdim=True)


def resize_kernel(distance: Tensor, interpolation: str) -> Tensor:
    """Evaluate Pillow's bilinear, bicubic or Lanczos filter at a distance from its center."""
    x = distance.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    if interpolation == "bicubic":  # Catmull-Rom
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    angle = torch.pi * x.clamp(min=1e-6)
    return torch.where(x < 3, angle.sin() / angle * (angle / 3).sin() / (angle / 3), 0.0)
