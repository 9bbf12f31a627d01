"""A model with all that belongs to it as one module, which can be exported: pixels in, logits or probabilities out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..data.preprocess import Preprocess
from ..errors import ConfigError
from ..models import optimize_for_cpu
from ..models.token_merging import reduce_tokens


class Packed(nn.Module):
    """uint8 (B, H, W, C), as `Preprocess.pixels` gives them, to logits (B, K) divided by the temperature.

    Args:
        merged: patches to merge in each block
        whole: takes pictures of any size, resizes and crops them, and gives probabilities: nothing is left to do
    """

    mean: Tensor
    std: Tensor

    def __init__(self, checkpoint: Checkpoint, merged: Sequence[int] = (), *, whole: bool = False) -> None:
        super().__init__()
        if checkpoint.preprocess is None:
            raise ConfigError(f"The model takes {checkpoint.config.in_channels} channels, which pictures do not have.")
        self.preprocess, self.temperature = checkpoint.preprocess, checkpoint.temperature
        self.multi_label, self.whole = checkpoint.multi_label, whole
        self.model = reduce_tokens(optimize_for_cpu(checkpoint.model().requires_grad_(False)), merged)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.preprocess.mean, self.preprocess.std))
        self.register_buffer("mean", 255 * mean, persistent=False)
        self.register_buffer("std", 255 * std, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        planes = pixels.permute(0, 3, 1, 2).float()
        if self.whole:
            planes = resampled(planes, self.preprocess)
        logits = self.model((planes - self.mean) / self.std)
        if self.temperature != 1:
            logits = logits / self.temperature
        if not self.whole:
            return logits
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)


def example_of(packed: Packed) -> tuple[Tensor, dict[int, Any]]:
    """Pixels to trace the module with, and which of their dimensions may change."""
    height, width = packed.preprocess.size
    shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if packed.whole:
        height, width = height + 5, width + 9  # nothing that the graph could take for a constant
        shapes |= {1: torch.export.Dim("height"), 2: torch.export.Dim("width")}
    return torch.zeros(2, height, width, packed.preprocess.channels, dtype=torch.uint8), shapes


def resampled(planes: Tensor, preprocess: Preprocess) -> Tensor:
    """(B, C, H, W), of any size, to (B, C, h, w): `Preprocess.pixels` in tensors, which an exported graph can hold.

    Each side is resized by a matrix of the filter's weights, widths first; between the two passes and behind them
    values are rounded and clipped, as Pillow does with its bytes.
    """
    height, width = (torch.full((), n, dtype=torch.int64) for n in planes.shape[-2:])
    rows, columns = (torch.full((), n, dtype=torch.int64) for n in preprocess.resized_to)
    if preprocess.resize == "cover":
        wide = rows * width >= columns * height
        across = torch.where(wide, torch.div(rows * width, height, rounding_mode="floor"), columns)
        down = torch.where(wide, rows, torch.div(columns * height, width, rounding_mode="floor"))
    else:
        across, down = columns, rows
    side = filter_weights(planes.shape[-1], across, preprocess.size[1], preprocess.interpolation)
    planes = rounded(planes @ side.transpose(0, 1))
    return rounded(filter_weights(planes.shape[-2], down, preprocess.size[0], preprocess.interpolation) @ planes)


def rounded(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)


def filter_weights(length: int, resized: Tensor, size: int, interpolation: str) -> Tensor:
    """(size, length): what each pixel of the crop takes from each pixel of a side.

    The side is thought resized from `length` to `resized`, of which the middle `size` are kept.
    """
    scale = torch.full((), length, dtype=torch.float32) / resized
    start = ((resized - size) / 2.0).round()
    centres = (start + torch.arange(size) + 0.5)[:, None] * scale
    places = torch.arange(length, dtype=torch.float32)[None]
    if interpolation == "nearest":
        return ((centres + 1e-4).floor() == places).float()  # so that rounding does not decide ties
    weights = kernel((places + 0.5 - centres) / scale.clamp(min=1.0), interpolation)
    return weights / weights.sum(dim=1, keepdim=True)


def kernel(distance: Tensor, interpolation: str) -> Tensor:
    """Pillow's filters, by the distance from their centre."""
    x = distance.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    if interpolation == "bicubic":  # Catmull-Rom
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    angle = torch.pi * x.clamp(min=1e-6)
    return torch.where(x < 3, angle.sin() / angle * (angle / 3).sin() / (angle / 3), 0.0)
