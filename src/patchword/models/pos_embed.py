"""Position embeddings that are added to tokens: learned 1-D (the paper), learned 2-D, sin-cos, none.

Relative positions are in attention.py, rotary ones in rope.py.

Also resamples them to another grid, by the rule of the project that trained the weights.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Resample, Size, ViTConfig


class PosEmbed(nn.Module):
    """Puts the prefix tokens in front of the patches and adds position embeddings to both. The base class has none."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_positioned, self.grid, self.mode = config.num_positioned, config.grid, config.pos_embed_resample

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """Position embeddings of the leading prefix tokens (1, k, D) and of the patches (1, N, D)."""
        return None, None

    def forward(self, patches: Tensor, prefix: Tensor | None, grid: Size, keep: Tensor | None = None) -> Tensor:
        """Patches (B, N, D) and prefix tokens (B, k, D) to all tokens (B, k + N, D).

        Args:
            grid: rows and columns of the patches, to which the embeddings are interpolated.
            keep: indices (B, kept) of the patches that patch dropout keeps, with their own positions.
        """
        for_prefix, for_patches = self.tables()
        if for_patches is not None:
            patches = patches + resample_grid(for_patches[0], self.grid, grid, self.mode)
        if keep is not None:
            patches = patches.gather(1, keep[..., None].expand(-1, -1, patches.shape[-1]))
        if prefix is None:
            return patches
        if for_prefix is not None and self.num_positioned:
            k = self.num_positioned
            prefix = torch.cat([prefix[:, :k] + for_prefix, prefix[:, k:]], dim=1)
        return torch.cat([prefix, patches], dim=1)


class LearnedPosEmbed(PosEmbed):
    """The paper's: one learned vector for each position in the sequence."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(1, self.num_positioned + config.num_patches, config.embed_dim))

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """See `PosEmbed.tables`."""
        return self.table[:, : self.num_positioned], self.table[:, self.num_positioned :]


class Learned2DPosEmbed(PosEmbed):
    """A learned half-vector for each row and one for each column, side by side."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (h, w), half = config.grid, config.embed_dim // 2
        self.rows = nn.Parameter(torch.zeros(h, half))
        self.columns = nn.Parameter(torch.zeros(w, half))
        self.prefix_table = nn.Parameter(torch.zeros(1, self.num_positioned, config.embed_dim))

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """See `PosEmbed.tables`."""
        h, w = len(self.rows), len(self.columns)
        rows, columns = self.rows[:, None].expand(h, w, -1), self.columns[None].expand(h, w, -1)
        return self.prefix_table, torch.cat([rows, columns], dim=-1).flatten(0, 1)[None]


class SinCosPosEmbed(PosEmbed):
    """Fixed sine and cosine of column and row, as in MoCo v3, big_vision and SimpleViT, or as in MAE and AIMv2."""

    table: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        steps = config.embed_dim // 4 - (config.pos_embed == "sincos")  # MAE and AIMv2 stop short of the last frequency
        self.register_buffer("table", sincos_2d(config.grid, config.embed_dim, steps)[None], persistent=False)

    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """See `PosEmbed.tables`."""
        return None, self.table


def sincos_2d(grid: Size, dim: int, steps: int, temperature: float = 10_000.0) -> Tensor:
    """(N, D): [sin x, cos x, sin y, cos y] at D/4 frequencies, which reach 1/temperature after `steps`."""
    omega = temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / steps)
    y, x = (g.flatten()[:, None] * omega for g in coordinates(grid))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


def coordinates(grid: Size) -> tuple[Tensor, Tensor]:
    """Returns row and column of every patch, each of the grid's shape."""
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return y, x


def make_pos_embed(config: ViTConfig) -> PosEmbed:
    """Makes the position embedding that the config names; relative and rotary positions are part of attention."""
    kinds = {"learned": LearnedPosEmbed, "learned_2d": Learned2DPosEmbed, "none": PosEmbed}
    return kinds.get(config.absolute_pos_embed, SinCosPosEmbed)(config)


def resample_grid(table: Tensor, old: Size, new: Size, mode: Resample) -> Tensor:
    """Resamples position embeddings (N, D) to another grid, by the rule of the named project."""
    if old == new:
        return table
    x = table.float().reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    if mode == "google":  # like scipy's zoom of order 1: linear, with aligned corners
        x = F.interpolate(x, new, mode="bilinear", align_corners=True)
    elif mode == "torchvision":
        x = F.interpolate(x, new, mode="bicubic", align_corners=True)
    elif mode == "transformers":
        x = F.interpolate(x, new, mode="bicubic", align_corners=False)
    elif mode == "dinov2":  # a scale factor with an offset, which shifts every sample slightly
        scale = ((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1])
        x = F.interpolate(x, scale_factor=scale, mode="bicubic", align_corners=False)
    elif mode == "siglip2":  # SigLIP 2 with variable aspect ratio (NaFlex)
        x = F.interpolate(x, new, mode="bilinear", align_corners=False, antialias=True)
    else:  # timm, and DINOv2's and transformers' models with registers
        x = F.interpolate(x, new, mode="bicubic", align_corners=False, antialias=True)
    return x.permute(0, 2, 3, 1).reshape(new[0] * new[1], -1).to(table.dtype)


def resample_line(table: Tensor, length: int, mode: Resample) -> Tensor:
    """Resamples the embeddings of rows or columns (n, D)."""
    return resample_grid(table, (len(table), 1), (length, 1), mode)
