"""Attention of each layer and head, and attention rollout (Abnar and Zuidema, 2020).

Maps show the attention of the tokens that the head reads: the class token (with a distillation token, the mean of the
two), the mean over the patches for average pooling, or the probe for attention pooling, which AIMv2 calls a query.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ViTConfig
from ..errors import ConfigError
from ..models import ViT
from ..models.attention import attention_weights
from .capture import map_chunks, observe_attention, select_bias

HeadFusion = Literal["mean", "max", "min"]
"""How the attention maps of all heads of a layer are reduced to one."""


def readout_weights(config: ViTConfig) -> Tensor:
    """Returns the weight of each token in the pooled output: (N,), sum 1.

    Those of attention pooling depend on the image; the mean over the patches stands for them.
    """
    weights = torch.zeros(config.num_prefix + config.num_patches)
    if config.pooling == "class":
        weights[: 1 + config.distillation] = 1
    elif config.pooling == "class+average":
        weights[0], weights[config.num_prefix :] = 1, 1 / config.num_patches
    else:
        weights[config.num_prefix :] = 1
    return weights / weights.sum()


def read_out(config: ViTConfig, matrices: Tensor, pool: Tensor | None) -> Tensor:
    """Averages the rows of (B, ..., N, N) by the weights of the pooling, and keeps the patches: (B, ..., N').

    `pool` is the attention of an attention pool to the tokens that it reads, the last ones: (B, n).
    """
    k = config.num_prefix
    if pool is None:
        return torch.einsum("n,b...nm->b...m", readout_weights(config).to(matrices), matrices)[..., k:]
    return torch.einsum("bn,b...nm->b...m", pool, matrices[..., -pool.shape[1] :, :])[..., k:]


@torch.inference_mode()
def head_attention(model: ViT, images: Tensor) -> Tensor:
    """Returns the attention to the patches of the tokens that the head reads, for each layer and head.

    These tokens are the class token, or all patches (their mean) for average pooling.

    Args:
        model: The model, in evaluation mode.
        images: Normalized images, (B, C, H, W).

    Returns:
        Maps (B, L, H, h, w) for L layers and H heads on a grid of h x w patches. An attention pool is one more layer;
            the blocks of such a model show the mean over the patches. If pool and blocks differ in their number of
            heads, the heads that a layer does not have are NaN.
    """
    require_blocks(model)
    rows: list[Tensor] = []
    config = model.config
    weights_read = readout_weights(config)
    rows_read = weights_read.nonzero()[:, 0].to(images.device)  # no other rows are computed

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if layer == config.depth:
            rows.append(attention_weights(q, k, bias)[:, :, 0, -config.num_patches :])
            return
        layer_rows = torch.empty(*q.shape[:2], q.shape[2], device=q.device)
        for batch, heads in map_chunks(len(q), q.shape[1], q.shape[2]):
            head_bias = select_bias(bias, heads)
            row_bias = None if head_bias is None else head_bias[..., rows_read, :]
            weights = attention_weights(q[batch, heads][:, :, rows_read], k[batch, heads], row_bias)
            row_weights = weights_read[weights_read > 0].to(weights)
            layer_rows[batch, heads] = torch.einsum("n,bhnm->bhm", row_weights, weights)
        rows.append(layer_rows[..., config.num_prefix :])

    with observe_attention(model, observe):
        model(images)
    num_heads = max(layer.shape[1] for layer in rows)
    padded = [F.pad(layer, (0, 0, 0, num_heads - layer.shape[1]), value=torch.nan) for layer in rows]
    return torch.stack(padded, dim=1).unflatten(-1, config.grid)


@torch.inference_mode()
def rollout(model: ViT, images: Tensor, fusion: HeadFusion = "mean", discard: float = 0.0) -> Tensor:
    """Computes attention rollout (Abnar and Zuidema, 2020): the product of all layers' attention maps.

    Each map is averaged with the identity, which represents the residual connection.

    Args:
        model: The model, in evaluation mode.
        images: Normalized images, (B, C, H, W).
        fusion: How the heads of a layer are reduced to one map.
        discard: The fraction of the smallest weights of each row that is set to 0, at least 0 and below 1.

    Returns:
        Maps (B, h, w) on the patch grid.

    Raises:
        ConfigError: The model has no blocks, or an argument is out of range.
    """
    require_blocks(model)
    if fusion not in get_args(HeadFusion):
        raise ConfigError(f"fusion must be one of {', '.join(get_args(HeadFusion))}, not {fusion!r}.")
    if not 0 <= discard < 1:
        raise ConfigError(f"discard must be at least 0 and below 1, not {discard}.")
    maps: list[Tensor] = []
    pools: list[Tensor] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        weights = attention_weights(q, k, bias)
        if layer < len(model.blocks):
            maps.append(fuse_heads(weights, fusion))
        else:
            pools.append(fuse_heads(weights, fusion)[:, 0])

    with observe_attention(model, observe):
        model(images)
    rolled, config = compose_maps(maps, discard), model.config
    return read_out(config, rolled, pools[0] if pools else None).unflatten(-1, config.grid)


def require_blocks(model: ViT) -> None:
    """Raises a ConfigError for a model without attention."""
    if not len(model.blocks):
        raise ConfigError("The model has no blocks (model.depth 0), so it has no attention.")


def fuse_heads(weights: Tensor, fusion: HeadFusion) -> Tensor:
    """Reduces the maps of all heads to one: (B, H, N, N) to (B, N, N)."""
    if fusion == "mean":
        return weights.mean(dim=1)
    return weights.amax(dim=1) if fusion == "max" else weights.amin(dim=1)


def compose_maps(maps: list[Tensor], discard: float = 0.0) -> Tensor:
    """Multiplies the layers' maps (B, N, N), each averaged with the identity, first layer rightmost; rows sum to 1."""
    size = maps[0].shape[-1]
    identity = torch.eye(size, device=maps[0].device)
    rolled = identity.expand_as(maps[0])
    for weights in maps:
        if discard > 0:
            smallest = weights.argsort(dim=-1)[..., : int(discard * size)]
            weights = weights.scatter(-1, smallest, 0.0)
        total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        rolled = (weights / total + identity) / 2 @ rolled
    return rolled
