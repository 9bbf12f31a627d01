"""Rotary position embeddings (RoPE; Su et al., 2021): queries and keys are rotated by their position.

A score then depends on the offset of two patches. Projects differ in the coordinates of a patch, in the frequencies,
and in which entries of a head form a pair. `CONVENTIONS` has those of the public checkpoints. Prefix tokens are not
rotated.

Shapes: B images, H heads, N tokens, d width of a head; a head has d/2 pairs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import Size, ViTConfig
from .pos_embed import coordinates


@dataclass(frozen=True)
class Convention:
    """How a project defines its rotary positions.

    Attributes:
        base: The frequencies are base^(-4j/d) for j < d/4.
        rows_first: Whether the first d/4 pairs rotate with the row, and the others with the column, or vice versa.
        neighbors: Whether entries 2i and 2i+1 form a pair; otherwise i and i + d/2.
        offset: The coordinate of the first row and column, if the model has a class token.
        centers: Whether coordinates are the centers of the patches on a scale from -1 to 1, times 2 pi.
    """

    base: float
    rows_first: bool = True
    neighbors: bool = False
    offset: float = 0.0
    centers: bool = False


CONVENTIONS = {
    "patchword": Convention(base=100.0),
    "eva02": Convention(base=10_000.0, neighbors=True),  # EVA-02 (Fang et al., 2023)
    "pe": Convention(base=10_000.0, rows_first=False, neighbors=True, offset=1.0),  # Perception Encoder
    "axial": Convention(base=100.0, rows_first=False, neighbors=True),  # RoPE-ViT (Heo et al., 2024)
    "mixed": Convention(base=10.0, neighbors=True),  # RoPE-ViT with learned frequencies
    "dinov3": Convention(base=100.0, centers=True),  # DINOv3 (Simeoni et al., 2025)
}


class Rotary(nn.Module):
    """Rotates the patches of every head, by angles that are the same in all heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.num_prefix, self.grid = config, config.num_prefix, config.grid
        self.neighbors = CONVENTIONS[config.rope].neighbors
        cos, sin = self.rotation(self.grid)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rotation(self, grid: Size) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the angles of the patches of a grid, (N, d/2) each."""
        angles = axial_angles(self.config, grid)
        return angles.cos().float(), angles.sin().float()

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:  # (B, H, N, d)
        """`grid` is the rows and columns of patches, if they differ from the model's."""
        if grid is None or grid == self.grid:
            return rotate(x, self.cos, self.sin, self.num_prefix, neighbors=self.neighbors)
        cos, sin = (t.to(x.device) for t in self.rotation(grid))
        return rotate(x, cos, sin, self.num_prefix, neighbors=self.neighbors)


class MixedRotary(nn.Module):
    """Rotates by learned frequencies for row and column, which differ between heads (RoPE-ViT's "mixed")."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_prefix, self.grid = config.num_prefix, config.grid
        shape = (2, config.num_heads, config.attention_dim // 2)
        self.frequencies = nn.Parameter(torch.zeros(shape))  # of columns, and of rows

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:  # (B, H, N, d)
        """`grid` is the rows and columns of patches, if they differ from the model's."""
        rows, columns = (c.flatten().to(x.device, torch.float32) for c in coordinates(grid or self.grid))
        of_columns, of_rows = self.frequencies.float()[:, :, None]  # (H, 1, d/2) each
        angles = columns[:, None] * of_columns + rows[:, None] * of_rows  # (H, N, d/2)
        return rotate(x, angles.cos(), angles.sin(), self.num_prefix, neighbors=True)

    @torch.no_grad()
    def reset(self) -> None:
        """Initializes half of the frequencies for the horizontal, half for the vertical, in each head turned at random.

        Frequencies fall from 1 to 1/base, as in `axial_angles`.
        """
        _, heads, pairs = self.frequencies.shape
        exponents = torch.arange(pairs) // 2 / max(1, pairs // 2)
        directions = 2 * math.pi * torch.rand(heads, 1) + math.pi / 2 * (torch.arange(pairs) % 2)
        magnitudes = CONVENTIONS["mixed"].base ** -exponents
        self.frequencies.copy_(torch.stack([directions.cos(), directions.sin()]) * magnitudes)


def make_rotary(config: ViTConfig) -> nn.Module:
    """Makes the rotary positions that the config names; `NoRotary` for none."""
    if not config.has_rope:
        return NoRotary()
    return MixedRotary(config) if config.rope == "mixed" else Rotary(config)


class NoRotary(nn.Module):
    """The paper's attention: queries and keys are not rotated."""

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:
        """Returns x."""
        return x


def axial_angles(config: ViTConfig, grid: Size) -> Tensor:
    """Returns the angle of each pair of each patch: (N, d/2), in float64."""
    rule, quarter = CONVENTIONS[config.rope], config.attention_dim // 4
    if config.rope_periods:
        omega = 1 / torch.tensor(config.rope_periods, dtype=torch.float64)
    else:
        omega = (config.rope_base or rule.base) ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (c.flatten()[:, None] * omega for c in patch_coordinates(config, grid))
    return torch.cat([rows, columns] if rule.rows_first else [columns, rows], dim=1)


def patch_coordinates(config: ViTConfig, grid: Size) -> tuple[Tensor, Tensor]:
    """Returns row and column of every patch of a grid, on the scale of the convention."""
    rule = CONVENTIONS[config.rope]
    y, x = coordinates(grid)
    if rule.centers:
        y, x = (2 * math.pi * (2 * (c + 0.5) / n - 1) for c, n in zip((y, x), grid, strict=True))
        return y, x
    reference = config.rope_reference or grid
    offset = rule.offset * config.class_token
    y, x = ((c + offset) * (own / n) for c, own, n in zip((y, x), reference, grid, strict=True))
    return y, x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, num_prefix: int, *, neighbors: bool) -> Tensor:
    """Rotates the pairs of each head (B, H, N, d), but not those of prefix tokens: (a, b) -> (a cos - b sin, ...).

    Angles are float32; the result has the type of `x`, so that training in bf16 stays on its fast path (cpu.py).
    """
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:]
    a, b = patches.unflatten(-1, (-1, 2)).unbind(-1) if neighbors else patches.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if neighbors else torch.cat(pairs, dim=-1)
    return torch.cat([prefix, rotated.to(x.dtype)], dim=2)
