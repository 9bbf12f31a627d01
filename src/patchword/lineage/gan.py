"""TransGAN (Jiang, Chang, Wang, 2021) in small: a GAN without convolutions, for grayscale digits of 8x8 pixels.

    G: z -> linear -> tokens on a 4x4 grid -> blocks -> pixel shuffle to 8x8 -> blocks -> one linear layer: pixels
    D: image -> ViT -> one logit: how real the image looks                               section 3.1

Both networks consist of the `Block` of models/vit.py. A stage of G is as in section 3.1: learned positions are added,
and after the blocks a pixel shuffle doubles the sides of the grid and quarters the width, so memory grows slowly.
From section 3.4 are augmentation of all that D sees (DiffAugment: Zhao et al., 2020) and relative positions. Left out
is what 64 pixels do not need: patches of several sizes in D (section 3.2) and grid self-attention (section 3.3).

gan_fit.py has the losses and the training.

Shapes: B images, N tokens, D width, S side of the grid, Z width of the noise. Pixels are between -1 and 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import JsonConfig, ViTConfig
from ..models.vit import Block, ViT

IMAGE_SIDE, START_SIDE = 8, 4  # of the images, and of the first grid of tokens


@dataclass(frozen=True)
class GanConfig(JsonConfig):
    """Both networks and how they are trained. In brackets: the paper's values for CIFAR-10."""

    section = "gan"

    noise_dim: int = 64
    """Width of the noise, Z [256]."""
    dim: int = 128
    """Width of the generator's tokens on the first grid [1024]; on the second, it is a quarter."""
    depth: int = 2
    """Number of the generator's blocks on each grid [5, 4, 2]."""
    critic_dim: int = 64
    """Width of the discriminator's tokens [384]."""
    critic_depth: int = 2
    """Number of the discriminator's blocks [3]."""
    patch_size: int = 4
    """Patch size of the discriminator [2, 4 and 8 together]."""
    num_heads: int = 4
    """Number of attention heads in both networks [4]."""
    relative: bool = True
    """Whether attention has relative positions besides the learned ones (section 3.4)."""
    shift: int = 1
    """Augmentation of all that the discriminator sees: largest shift in pixels; 0 turns it off."""
    cutout: int = 0
    """Augmentation: side of the hidden square in pixels; 0 turns it off."""
    lr: float = 1e-3
    """Learning rate of both networks [1e-4]."""
    batch_size: int = 32
    """Real images, and generated ones, per step [64]."""
    penalty: float = 1.0
    """Weight of the gradient penalty, lambda [10]; 0 turns it off."""
    ema: float = 0.998
    """Decay of the average of the generator's weights, which makes the samples."""

    def validate(self) -> None:
        self.check_range(1, 4096, "noise_dim", "dim", "critic_dim", "batch_size")
        self.check_range(1, 64, "depth", "critic_depth", "num_heads")
        self.check_range(0, IMAGE_SIDE - 1, "shift", "cutout")
        self.check("dim", self.dim % (4 * self.num_heads) == 0, "divisible by 4 num_heads")
        self.check("critic_dim", self.critic_dim % self.num_heads == 0, "divisible by num_heads")
        self.check("patch_size", self.patch_size in (1, 2, 4, 8), "1, 2, 4 or 8")
        self.check("lr", self.lr > 0, "above 0")
        self.check("penalty", self.penalty >= 0, "at least 0")
        self.check("ema", 0 <= self.ema < 1, "at least 0 and below 1")

    def vit(self, side: int, patch_size: int, dim: int) -> ViTConfig:
        """Describes a ViT, or the blocks of one, for images or grids of this side."""
        return ViTConfig(
            image_size=(side, side), patch_size=(patch_size, patch_size), in_channels=1, num_classes=1, embed_dim=dim,
            depth=self.critic_depth, num_heads=self.num_heads, mlp_dim=2 * dim,
            pos_embed="learned+relative" if self.relative else "learned",
        )  # fmt: skip


def pixel_shuffle(tokens: Tensor, side: int) -> Tensor:
    """Doubles the sides of a grid, and quarters the width: (B, S*S, 4*D) -> (B, 2*S*2*S, D).

    Each token becomes 2x2 tokens. As in `nn.PixelShuffle`, a token's numbers are ordered (channel, row, column).
    """
    b, _, dim = tokens.shape
    x = tokens.reshape(b, side, side, dim // 4, 2, 2)  # (B, row, column, D, row in it, column in it)
    return x.permute(0, 1, 4, 2, 5, 3).reshape(b, 4 * side * side, dim // 4)


class Stage(nn.Module):
    """Positions and blocks on one grid of the generator. Every token of the grid is a "patch" of one pixel."""

    def __init__(self, config: GanConfig, side: int, dim: int) -> None:
        super().__init__()
        vit = config.vit(side, 1, dim).replace(class_token=False, pooling="average")
        self.positions = nn.Parameter(0.02 * torch.randn(1, side * side, dim))
        self.blocks = nn.Sequential(*(Block(vit, layer) for layer in range(config.depth)))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, S*S, D) -> (B, S*S, D)
        """Transforms the tokens of a grid."""
        return self.blocks(tokens + self.positions)


class Generator(nn.Module):
    """Noise (B, Z) -> images (B, 1, 8, 8) (section 3.1)."""

    def __init__(self, config: GanConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dim
        self.from_noise = nn.Linear(config.noise_dim, START_SIDE**2 * dim)
        self.coarse = Stage(config, START_SIDE, dim)
        self.fine = Stage(config, IMAGE_SIDE, dim // 4)
        self.norm = nn.LayerNorm(dim // 4)
        self.to_pixel = nn.Linear(dim // 4, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, noise: Tensor) -> Tensor:
        """Generates images."""
        z = self.from_noise(noise).unflatten(1, (START_SIDE**2, -1))  # (B, 16, D)
        z = self.fine(pixel_shuffle(self.coarse(z), START_SIDE))  # (B, 64, D/4)
        pixels = self.to_pixel(self.norm(z)).tanh()  # (B, 64, 1)
        return pixels.mT.unflatten(2, (IMAGE_SIDE, IMAGE_SIDE))


def make_discriminator(config: GanConfig) -> ViT:
    """Makes D, our ViT with one logit instead of classes: images (B, 1, 8, 8) -> (B, 1).

    The head of a new ViT is zero, but then D would have no gradient with respect to images.
    """
    vit = ViT(config.vit(IMAGE_SIDE, config.patch_size, config.critic_dim))
    assert isinstance(vit.head, nn.Linear)
    nn.init.xavier_uniform_(vit.head.weight)
    return vit


def augment(images: Tensor, shift: int, cutout: int, rng: torch.Generator) -> Tensor:
    """DiffAugment (Zhao et al., 2020): shifts each image by up to `shift` pixels, hides a square of side `cutout`.

    Gradients pass through to the generator, and D sees real and generated images only so, or G would learn to make
    shifted digits. New pixels are 0, a gray between ink and paper. The square lies inside the image.
    """
    b, _, h, w = images.shape
    row, column = torch.arange(h)[None, :, None], torch.arange(w)[None, None]  # (1, H, 1), (1, 1, W)
    if shift:
        dy, dx = torch.randint(2 * shift + 1, (2, b, 1, 1), generator=rng)  # offsets in the padded image
        padded = F.pad(images, (shift,) * 4)
        images = padded[torch.arange(b)[:, None, None], :, row + dy, column + dx].permute(0, 3, 1, 2)
    if cutout:
        top = torch.randint(h - cutout + 1, (b, 1, 1), generator=rng)
        left = torch.randint(w - cutout + 1, (b, 1, 1), generator=rng)
        hidden = (row >= top) & (row < top + cutout) & (column >= left) & (column < left + cutout)  # (B, H, W)
        images = images.masked_fill(hidden[:, None], 0.0)
    return images


def to_pixels(images: Tensor) -> Tensor:
    """Images (B, 1, H, W) between -1 and 1 -> uint8 pixels (B, H, W, 1)."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)


def from_pixels(pixels: Tensor) -> Tensor:
    """The inverse of `to_pixels`."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
