"""What is added to the attention scores: relative positions, and masks that narrow the span of attention.

Prefix tokens see everything and are seen by everything, whatever the span.
"""

import torch
from torch import Tensor, nn

from ..config import Size, ViTConfig
from .positions import coordinates

NEIGHBOURS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))
FAR = 8  # squared distance in patches beyond which, at first, all are alike


class NoBias(nn.Module):
    """The paper's attention: every token looks at every token, and scores stay as they are."""

    def forward(self, grid: Size | None = None) -> Tensor | None:
        return None


class Bias(nn.Module):
    """An additive (H or 1, N, N) bias: minus infinity outside the span, plus a learned relative position."""

    mask: Tensor
    offsets: Tensor

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.num_prefix, self.grid = config.num_prefix, config.grid
        self.heads = range(layer * config.num_heads, (layer + 1) * config.num_heads)  # counted through all layers
        visible = span_mask(config, layer)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        self.register_buffer("mask", mask, persistent=False)
        self.relative = None
        if config.positions == "relative":
            h, w = self.grid
            self.relative = nn.Parameter(torch.zeros(config.num_heads, 2 * h - 1, 2 * w - 1))
            self.register_buffer("offsets", relative_offsets(self.grid), persistent=False)

    def forward(self, grid: Size | None = None) -> Tensor:
        """For the model's own grid, or a smaller one, whose patches see each other as those in a corner of it do."""
        k, mask = self.num_prefix, self.mask
        patches: Tensor | slice = slice(None)
        if grid is not None and grid != self.grid:
            corner = torch.arange(self.grid[0] * self.grid[1]).view(self.grid)[: grid[0], : grid[1]].flatten()
            tokens = torch.cat([torch.arange(k), k + corner])
            mask, patches = mask[tokens][:, tokens], corner
        if self.relative is None:
            return mask
        between_patches = self.relative.flatten(1)[:, self.offsets[patches][:, patches]]  # (H, N, N)
        return mask + nn.functional.pad(between_patches, (k, 0, k, 0))

    def looking_at_neighbours(self, sharpness: float) -> Tensor:
        """Relative positions with which each head looks at itself or one of the eight patches around it.

        Together the heads then do what a 3x3 convolution does, until they learn something else; ConViT's idea. They
        take turns, so that the layers together see all sides. What is far away keeps a little weight, without which
        no gradient would ever reach it.
        """
        y, x = (torch.arange(1.0 - n, n) for n in self.grid)  # offsets of rows and columns
        places = [NEIGHBOURS[head % len(NEIGHBOURS)] for head in self.heads]
        squares = torch.stack([(y[:, None] - dy) ** 2 + (x[None] - dx) ** 2 for dy, dx in places])
        return -sharpness * squares.clamp(max=FAR)


def relative_offsets(grid: Size) -> Tensor:
    """For each pair of patches the place of its (row, column) offset in the flattened table of offsets: (N, N)."""
    h, w = grid
    y, x = (g.flatten().long() for g in coordinates(grid))
    return (y[:, None] - y[None] + h - 1) * (2 * w - 1) + (x[:, None] - x[None] + w - 1)


def span_mask(config: ViTConfig, layer: int) -> Tensor:
    """True where a token (row) may look (column): (N, N) with prefix tokens."""
    y, x = (g.flatten().long() for g in coordinates(config.grid))
    dy, dx = (y[:, None] - y[None]).abs(), (x[:, None] - x[None]).abs()
    if config.attention == "axial":  # rows in even layers, columns in odd ones
        patches = (dy == 0) if layer % 2 == 0 else (dx == 0)
    elif config.attention == "local":
        patches = (dy <= config.window // 2) & (dx <= config.window // 2)
    else:
        patches = torch.ones_like(dy, dtype=torch.bool)
    k = config.num_prefix
    return nn.functional.pad(patches, (k, 0, k, 0), value=True)


def make_bias(config: ViTConfig, layer: int) -> nn.Module:
    plain = config.attention == "global" and config.positions != "relative"
    return NoBias() if plain else Bias(config, layer)
