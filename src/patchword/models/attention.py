"""Multi-head self-attention, with optional relative positions and axial or local masks.

Shapes: B images, N tokens (prefix tokens, then patches), D embed_dim, H heads, d width of a head. The paper's
model is `Attention` with `NoBias`; the rest is optional.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Size, ViTConfig
from .layers import NoKeyBiasLinear, make_norm
from .pos_embed import coordinates
from .rope import make_rotary

NEIGHBORS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))
LOCAL_INIT_CLAMP = 8  # squared distance in patches beyond which all patches start with the same bias


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(d) + bias): (..., N, d), (..., M, d) -> (..., N, M).

    The model itself uses a fused kernel, which never stores this matrix.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return (scores if bias is None else scores + bias).softmax(dim=-1)


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v, fused. A module, so that hooks can capture q, k, v and bias."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Q (B, H, N, d), k and v (B, H, M, d), bias that broadcasts to (B, H, N, M) -> (B, H, N, d)."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)


class Attention(nn.Module):
    """Multi-head self-attention (MSA); queries, keys and values come from one matrix."""

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.attention_dim
        inner_dim = self.num_heads * self.head_dim
        linear = nn.Linear if config.key_bias else NoKeyBiasLinear
        self.qkv = linear(config.embed_dim, 3 * inner_dim, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (make_norm(config, self.head_dim, when=config.qk_norm) for _ in range(2))
        self.rotary = make_rotary(config)
        self.bias = make_bias(config, layer)
        self.attend = ScaledDotProductAttention(config.attention_dropout)
        self.norm = make_norm(config, inner_dim, when=config.attention_norm)
        self.out = nn.Linear(inner_dim, config.embed_dim, bias=config.out_bias)

    def forward(self, x: Tensor, grid: Size | None = None) -> Tensor:  # (B, N, D) -> (B, N, D)
        """Mixes the tokens; `grid` is the rows and columns of patches, if they differ from the model's."""
        q, k, v = self.project(x, grid)  # (B, H, N, d) each
        return self.merge_heads(self.attend(q, k, v, self.bias(grid)))

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Projects tokens to queries, keys and values: (B, N, D) -> (B, H, N, d) each."""
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for t in self.split_qkv(x))
        return self.rotary(self.q_norm(q), grid), self.rotary(self.k_norm(k), grid), v

    def merge_heads(self, x: Tensor) -> Tensor:
        """Projects the heads' outputs to tokens: (B, H, N, d) -> (B, N, D)."""
        return self.out(self.norm(x.transpose(1, 2).flatten(2)))

    def split_qkv(self, x: Tensor) -> Sequence[Tensor]:
        """Projects tokens to queries, keys and values of all heads together, (B, N, H*d) each."""
        return self.qkv(x).chunk(3, dim=-1)


def make_bias(config: ViTConfig, layer: int) -> nn.Module:
    """Makes the additive bias of a layer's attention scores."""
    plain = config.attention_pattern == "global" and not config.has_relative
    return NoBias() if plain else AttentionBias(config, layer)


class NoBias(nn.Module):
    """The paper's attention: every token attends to every token, and nothing is added to the scores."""

    def forward(self, grid: Size | None = None) -> Tensor | None:
        """Returns None."""
        return None


class AttentionBias(nn.Module):
    """An additive (H or 1, N, N) bias: minus infinity where attention is masked, plus a learned relative position.

    Prefix tokens attend to everything and everything attends to them, whatever the mask.
    """

    mask: Tensor
    offsets: Tensor

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.num_prefix, self.grid = config.num_prefix, config.grid
        self.heads = range(layer * config.num_heads, (layer + 1) * config.num_heads)  # counted through all layers
        visible = attention_mask(config, layer)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        self.register_buffer("mask", mask, persistent=False)
        self.relative = self.prefix = None
        if config.has_relative:
            h, w = self.grid
            self.relative = nn.Parameter(torch.zeros(config.num_heads, 2 * h - 1, 2 * w - 1))
            self.register_buffer("offsets", relative_offsets(self.grid), persistent=False)
        if config.relative_prefix:  # of the class token to patches, of patches to it, and of the class token to itself
            self.prefix = nn.Parameter(torch.zeros(config.num_heads, 3))

    def forward(self, grid: Size | None = None) -> Tensor:
        """Returns the bias for the model's grid, or for a smaller one, the top left corner of it."""
        k, mask = self.num_prefix, self.mask
        patches: Tensor | slice = slice(None)
        if grid is not None and grid != self.grid:
            corner = torch.arange(self.grid[0] * self.grid[1]).view(self.grid)[: grid[0], : grid[1]].flatten()
            tokens = torch.cat([torch.arange(k), k + corner])
            mask, patches = mask[tokens][:, tokens], corner
        if self.relative is None:
            return mask
        bias = self.relative.flatten(1)[:, self.offsets[patches][:, patches]]  # (H, N, N)
        if self.prefix is None:
            return mask + F.pad(bias, (k, 0, k, 0))
        to_patches, to_prefix, to_itself = self.prefix[:, None].unbind(-1)  # (H, 1) each
        n = bias.shape[-1]
        first = torch.cat([to_itself, to_patches.expand(-1, n)], dim=1)[:, None]  # (H, 1, 1 + N)
        rest = torch.cat([to_prefix[..., None].expand(-1, n, -1), bias], dim=2)  # (H, N, 1 + N)
        return mask + torch.cat([first, rest], dim=1)

    def local_init(self, sharpness: float) -> Tensor:
        """Returns initial relative positions (H, 2h-1, 2w-1): each head attends to one patch of its 3x3 neighborhood.

        Together the heads start as a 3x3 convolution (ConViT, d'Ascoli et al., 2021). Directions alternate over all
        heads of all layers. Distant patches keep a small weight, without which they would get no gradient.
        """
        y, x = (torch.arange(1.0 - n, n) for n in self.grid)  # offsets of rows and columns
        centers = [NEIGHBORS[head % len(NEIGHBORS)] for head in self.heads]
        squares = torch.stack([(y[:, None] - dy) ** 2 + (x[None] - dx) ** 2 for dy, dx in centers])
        return -sharpness * squares.clamp(max=LOCAL_INIT_CLAMP)


def relative_offsets(grid: Size) -> Tensor:
    """Returns the index of each pair's (row, column) offset in the flattened table of offsets: (N, N)."""
    h, w = grid
    y, x = (g.flatten().long() for g in coordinates(grid))
    return (y[:, None] - y[None] + h - 1) * (2 * w - 1) + (x[:, None] - x[None] + w - 1)


def attention_mask(config: ViTConfig, layer: int) -> Tensor:
    """Returns True where a token (row) may attend to another (column): (N, N), prefix tokens included."""
    y, x = (g.flatten().long() for g in coordinates(config.grid))
    dy, dx = (y[:, None] - y[None]).abs(), (x[:, None] - x[None]).abs()
    if config.attention_pattern == "axial":  # rows in even layers, columns in odd ones
        patches = (dy == 0) if layer % 2 == 0 else (dx == 0)
    elif config.attention_pattern == "local":
        patches = (dy <= config.window_size // 2) & (dx <= config.window_size // 2)
    else:
        patches = torch.ones_like(dy, dtype=torch.bool)
    k = config.num_prefix
    return F.pad(patches, (k, 0, k, 0), value=True)
