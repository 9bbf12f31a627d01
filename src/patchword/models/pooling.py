"""Pooling of the tokens to one vector: class token, average of the patches, both, or attention; and what follows it."""

import torch
from torch import Tensor, nn

from ..config import ViTConfig
from .attention import ScaledDotProductAttention
from .layers import activate, make_norm


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
        self.num_skipped = 0 if config.pool_prefix else config.num_prefix
        self.num_heads = config.pool_heads or config.num_heads
        self.activation = config.activation
        self.probe = nn.Parameter(torch.zeros(1, 1, dim))
        self.q: nn.Module = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attend = ScaledDotProductAttention()
        self.out = nn.Linear(dim, dim)
        self.norm = make_norm(config)
        hidden = config.pool_mlp_dim or config.mlp_dim
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The probe's queries (B, H, 1, d), and keys and values of the patches (B, H, N, d)."""
        patches = tokens[:, self.num_skipped :]
        b, n, dim = patches.shape
        q = self.q(self.probe).view(1, 1, self.num_heads, -1).transpose(1, 2).expand(b, -1, -1, -1)
        k, v = self.kv(patches).view(b, n, 2, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:  # (B, N, D) -> (B, D)
        """`bias` is added to the scores of the patches."""
        x = self.attend(*self.project(tokens), bias)
        x = self.out(x.transpose(1, 2).flatten(2))[:, 0]
        return x + self.fc2(activate(self.fc1(self.norm(x)), self.activation))


class QueryPool(AttentionPool):
    """A learned query attends to the patch tokens: AIMv2's pooling, without a projection of the query or an MLP."""

    def __init__(self, config: ViTConfig) -> None:
        nn.Module.__init__(self)
        dim = config.embed_dim
        self.num_skipped = 0 if config.pool_prefix else config.num_prefix
        self.num_heads = config.pool_heads or config.num_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Identity()
        self.kv = nn.Linear(dim, 2 * dim, bias=config.qkv_bias)
        self.attend = ScaledDotProductAttention()
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:  # (B, N, D) -> (B, D)
        """`bias` is added to the scores of the patches."""
        x = self.attend(*self.project(tokens), bias)
        return self.out(x.transpose(1, 2).flatten(2))[:, 0]


def make_pool(config: ViTConfig) -> nn.Module:
    """Makes the pooling that the config names."""
    if config.pooling == "class":
        return ClassPool()
    kinds = {"average": AveragePool, "class+average": ClassAveragePool, "attention": AttentionPool, "query": QueryPool}
    return kinds[config.pooling](config)


class TanhLinear(nn.Linear):
    """A linear layer with a tanh, the hidden layer of the paper's pre-training head."""

    def forward(self, x: Tensor) -> Tensor:  # (B, D) -> (B, pre_logits)
        """tanh(W x + b)."""
        return torch.tanh(super().forward(x))


def make_pre_logits(config: ViTConfig) -> nn.Module:
    """Makes what follows pooling: the pre-training head's hidden layer, CLIP's projection, or nothing."""
    if config.pre_logits:
        return TanhLinear(config.pooled_dim, config.pre_logits)
    if config.projection_dim:
        return nn.Linear(config.pooled_dim, config.projection_dim, bias=False)
    return nn.Identity()
