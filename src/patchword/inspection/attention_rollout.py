"""What a model looks at, without asking why: raw attention of each layer and head, and attention rollout.

Maps are read from where the model reads its answer: the class token's row (with a distillation token the mean of the
two), the mean over all patches where it averages them, the probe's where it pools by attention.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from ..config import ViTConfig
from ..config.model import Pooling
from ..errors import ConfigError
from ..models import ViT
from ..models.attention import attention_weights
from .capture import map_chunks, observe_attention, select_bias

HeadFusion = Literal["mean", "max", "min"]


def readout_weights(model: ViT) -> Tensor:
    """How much of each token the answer is read from: (N,), sum one. Not for attention pooling, which learns it."""
    return pooling_weights(model.config.pooling, model.config)


def pooling_weights(pooling: Pooling, config: ViTConfig) -> Tensor:
    weights = torch.zeros(config.num_prefix + config.num_patches)
    if pooling == "class":
        weights[: 1 + config.distillation] = 1
    elif pooling == "average":
        weights[config.num_prefix :] = 1
    else:  # class+average
        weights[0], weights[config.num_prefix :] = 1, 1 / config.num_patches
    return weights / weights.sum()


def read_out(model: ViT, matrices: Tensor, pool: Tensor | None) -> Tensor:
    """The rows of (B, ..., N, N) that the answer is read from, as their weighted mean over patches: (B, ..., N').

    `pool` is what an attention pool gives to each patch, (B, N').
    """
    k = model.config.num_prefix
    if pool is None:
        return torch.einsum("n,b...nm->b...m", readout_weights(model).to(matrices), matrices)[..., k:]
    return torch.einsum("bn,b...nm->b...m", pool, matrices[..., k:, :])[..., k:]


@torch.inference_mode()
def head_attention(model: ViT, images: Tensor) -> Tensor:
    """What each head of each layer looks at: (B, L, H, h, w). One more layer, the last, for an attention pool.

    In the blocks of a model with an attention pool no token is read alone: there it is the mean over the patches.
    """
    require_blocks(model)
    rows: list[Tensor] = []
    config = model.config
    rule = readout_weights(model) if config.pooling != "attention" else pooling_weights("average", config)
    reading = rule.nonzero()[:, 0].to(images.device)  # only the rows that are read are computed

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        if layer == config.depth:
            rows.append(attention_weights(q, k, bias)[:, :, 0])
            return
        found = torch.empty(*q.shape[:2], q.shape[2], device=q.device)
        for some, heads in map_chunks(len(q), q.shape[1], q.shape[2]):
            own = select_bias(bias, heads)
            chosen = None if own is None else own[..., reading, :]
            weights = attention_weights(q[some, heads][:, :, reading], k[some, heads], chosen)
            found[some, heads] = torch.einsum("n,bhnm->bhm", rule[rule > 0].to(weights), weights)
        rows.append(found[..., config.num_prefix :])

    with observe_attention(model, observe):
        model(images)
    return torch.stack(rows, dim=1).unflatten(-1, config.grid)


@torch.inference_mode()
def rollout(model: ViT, images: Tensor, fusion: HeadFusion = "mean", discard: float = 0.0) -> Tensor:
    """Attention followed through all layers, (B, h, w): each layer's map, half of it identity for the residual path.

    Args:
        fusion: how the heads of a layer become one map.
        discard: the part of each row's smallest weights that is left out, below 1.
    """
    require_blocks(model)
    if fusion not in get_args(HeadFusion):
        raise ConfigError(f"fusion must be one of {', '.join(get_args(HeadFusion))}, not {fusion!r}.")
    if not 0 <= discard < 1:
        raise ConfigError(f"discard must be at least 0 and below 1, not {discard}.")
    found: list[Tensor] = []
    pools: list[Tensor] = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
        weights = attention_weights(q, k, bias)
        if layer < len(model.blocks):
            found.append(fuse_heads(weights, fusion))
        else:
            pools.append(fuse_heads(weights, fusion)[:, 0])

    with observe_attention(model, observe):
        model(images)
    rolled = compose_maps(found, discard)
    return read_out(model, rolled, pools[0] if pools else None).unflatten(-1, model.config.grid)


def require_blocks(model: ViT) -> None:
    if not len(model.blocks):
        raise ConfigError("A model without blocks has no attention.")


def fuse_heads(weights: Tensor, fusion: HeadFusion) -> Tensor:
    """One map of all heads: (B, H, N, N) to (B, N, N)."""
    if fusion == "mean":
        return weights.mean(dim=1)
    return weights.amax(dim=1) if fusion == "max" else weights.amin(dim=1)


def compose_maps(maps: list[Tensor], discard: float = 0.0) -> Tensor:
    """The product of the layers' maps (B, N, N), the first layer rightmost; rows sum to one."""
    size = maps[0].shape[-1]
    identity = torch.eye(size, device=maps[0].device)
    rolled = identity.expand_as(maps[0])
    for weights in maps:
        if discard > 0:
            least = weights.argsort(dim=-1)[..., : int(discard * size)]
            weights = weights.scatter(-1, least, 0.0)
        total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        rolled = (weights / total + identity) / 2 @ rolled
    return rolled
