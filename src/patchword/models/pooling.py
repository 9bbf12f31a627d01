"""Pooling of the tokens to one vector: class token, average of the patches, both, or attention pooling (MAP)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ViTConfig
from .attention import ScaledDotProductAttention


class ClassPool(nn.Module):
    """The class token, as in the paper."""

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        """z_L^0."""
        return tokens[:, 0]


class AveragePool(nn.Module):
    """The mean of the patch tokens; without prefix tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_prefix = config.num_prefix

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        """Global average pooling (GAP)."""
        return tokens[:, self.num_prefix :].mean(dim=1)


class ClassAveragePool(AveragePool):
    """Class token and average side by side, as in DINOv2's classifiers: (B, 2D)."""

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, 2D)
        """Concatenates the two."""
        return torch.cat([tokens[:, 0], super().forward(tokens)], dim=1)


class AttentionPool(nn.Module):
    """A learned probe attends to the patch tokens, then a residual MLP: big_vision's MAP head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        dim = config.embed_dim
        self.num_prefix, self.num_heads = config.num_prefix, config.num_heads
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.probe = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attend = ScaledDotProductAttention()
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.fc1 = nn.Linear(dim, config.mlp_dim)
        self.fc2 = nn.Linear(config.mlp_dim, dim)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The probe's queries (B, H, 1, d), and keys and values of the patches (B, H, N, d)."""
        patches = tokens[:, self.num_prefix :]
        b, n, dim = patches.shape
        q = self.q(self.probe).view(1, 1, self.num_heads, -1).transpose(1, 2).expand(b, -1, -1, -1)
        k, v = self.kv(patches).view(b, n, 2, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:  # (B, N, D) -> (B, D)
        """`bias` is added to the scores of the patches."""
        x = self.attend(*self.project(tokens), bias)
        x = self.out(x.transpose(1, 2).flatten(2))[:, 0]
        return x + self.fc2(F.gelu(self.fc1(self.norm(x)), approximate=self.approximate))


def make_pool(config: ViTConfig) -> nn.Module:
    """Makes the pooling that the config names."""
    if config.pooling == "class":
        return ClassPool()
    kinds = {"average": AveragePool, "class+average": ClassAveragePool, "attention": AttentionPool}
    return kinds[config.pooling](config)
