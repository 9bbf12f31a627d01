"""Small layers: norms and activations, and what the paper's model does not use (dropouts, LayerScale, SwiGLU, ...)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Size, ViTConfig
from ..errors import ConfigError


def make_norm(config: ViTConfig, dim: int | None = None, *, when: bool = True) -> nn.Module:
    """Makes the norm that the config names, of width `dim` (by default that of the tokens); else the identity."""
    if not when:
        return nn.Identity()
    kind = nn.LayerNorm if config.norm_layer == "layer_norm" else RMSNorm
    return kind(dim or config.embed_dim, eps=config.norm_eps)


class RMSNorm(nn.RMSNorm):
    """torch's, with a weight of the type of its input: torch warns about the mixture that bf16 would give."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes x / sqrt(mean(x^2) + eps) * weight."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies the activation of an MLP: exact GELU, its tanh approximation, or CLIP's quick GELU."""
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class Branch(nn.Module):
    """Dropout, LayerScale and drop path of a residual branch; the identity by default."""

    def __init__(self, config: ViTConfig, layer: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.drop_path = config.drop_path * layer / max(1, config.depth - 1)  # deeper blocks are dropped more often
        scale = config.layer_scale
        self.gamma = None if scale is None else nn.Parameter(torch.full((config.embed_dim,), scale))

    def forward(self, branch: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        """LayerScale: Touvron et al., 2021. Drop path, which drops a whole branch of an image: Huang et al., 2016."""
        branch = self.drop(branch)
        if self.gamma is not None:
            branch = branch * self.gamma
        if self.training and self.drop_path > 0:
            keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.drop_path
            branch = branch * keep / (1 - self.drop_path)
        return branch


class SwiGLU(nn.Module):
    """The gated MLP of Shazeer (2020), as in DINOv2's giant model; the first layer computes gate and value."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.embed_dim, 2 * config.mlp_dim, bias=config.mlp_bias)
        self.norm = make_norm(config, config.mlp_dim, when=config.mlp_norm)
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim, bias=config.mlp_bias)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        """fc2(silu(gate) * value)."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(self.norm(self.drop(F.silu(gate) * value)))


class NoKeyBiasLinear(nn.Linear):
    """The projection to queries, keys and values of BEiT, EVA and DINOv3, whose keys have no bias.

    That third of the bias is zero and gets no gradient, so everything that works on a plain layer works on this one.
    """

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, 3*H*d)
        """With gradients, the keys' third of the bias is masked."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        queries, keys, values = self.bias.chunk(3)
        return F.linear(x, self.weight, torch.cat([queries, torch.zeros_like(keys), values]))

    @torch.no_grad()
    def clear_key_bias(self) -> None:
        """Sets the keys' third of the bias to zero, after something wrote into all of it."""
        self.bias.chunk(3)[1].zero_()


class NormOrder(nn.Module):
    """Another order of a block's layers than the paper's; `vit.Block` has the layers."""

    norm1: Any
    norm2: Any
    attention: Any
    mlp: Any
    add1: Any
    add2: Any


class PostNorm(NormOrder):
    """The order of the original Transformer (Vaswani et al., 2017), for comparison: norms follow the sums."""

    def forward(self, z: Tensor, grid: Size | None = None) -> Tensor:
        """Computes z' = LN(MSA(z) + z), then LN(MLP(z') + z')."""
        z = self.norm1(z + self.add1(self.attention(z, grid)))
        return self.norm2(z + self.add2(self.mlp(z)))


class ResidualPostNorm(NormOrder):
    """The order of Swin v2 and of timm's "rpn" models: norms follow the branches, inside the residual sums."""

    def forward(self, z: Tensor, grid: Size | None = None) -> Tensor:
        """Computes z' = LN(MSA(z)) + z, then LN(MLP(z')) + z'."""
        z = z + self.add1(self.norm1(self.attention(z, grid)))
        return z + self.add2(self.norm2(self.mlp(z)))


def patch_dropout_indices(patches: Tensor, rate: float) -> Tensor:
    """Picks a random subset of each image's patches (B, N, D), in order: (B, kept) (FLIP, Li et al., 2023)."""
    b, n, _ = patches.shape
    kept = max(1, round(n * (1 - rate)))
    return torch.rand(b, n, device=patches.device).topk(kept, dim=1).indices.sort(dim=1).values


def layer_indices(depth: int, layers: Sequence[int] | None) -> list[int]:
    """Returns `layers` as indices from 0; negative ones count from the end, and None means all."""
    wrong = [i for i in layers or () if i not in range(-depth, depth)]
    if wrong:
        raise ConfigError(f"The model has {depth} layers, 0 to {depth - 1}; there is no layer {wrong[0]}.")
    return list(range(depth)) if layers is None else [i % depth for i in layers]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its class's `forward`, so that the call must not be skipped."""
    own = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(own) or nn.modules.module._has_any_global_hook()


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling the module without gradients does nothing but a matmul with its weights and adding its bias."""
    return type(module) in (nn.Linear, NoKeyBiasLinear) and not has_hooks(module)
