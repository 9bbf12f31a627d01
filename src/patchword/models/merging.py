"""Fewer tokens: after the attention of each block the most similar patches become one (Bolya et al., 2023, "ToMe").

Patches are dealt into two halves by turns; each of the first half finds its most similar one in the second, by the
cosine of their keys; the pairs most alike are merged into their mean, weighted by how many patches each stands for.
Attention adds the logarithm of that number to a key's score, so that a token that stands for five is looked at like
five: patches that are exactly alike can be merged without any change of the result. Weights stay as they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from .pooling import AttentionPool
from .vit import Block, ViT


class MergingViT(nn.Module):
    """A trained ViT that merges `merged[i]` patches in block i; the same inputs and outputs. For inference."""

    def __init__(self, model: ViT, merged: Sequence[int]) -> None:
        super().__init__()
        config = model.config
        if config.positions in ("rotary", "relative") or config.attention != "global":
            raise ConfigError("Tokens can be merged only where attention does not ask which patch is where.")
        if config.post_norm or config.pre_logits is not None and not config.depth:
            raise ConfigError("Tokens can be merged only in blocks that norm before they attend.")
        if len(merged) != config.depth or any(count < 0 for count in merged):
            raise ConfigError(f"merged takes a number for each of the {config.depth} blocks, 0 or more.")
        self.model, self.merged, self.config = model, tuple(merged), config

    def forward(self, images: Tensor) -> Tensor:
        model, prefix = self.model, self.config.num_prefix
        x = model.embed(images)
        sizes = torch.ones(*x.shape[:2], 1, device=x.device, dtype=x.dtype)
        for block, count in zip(model.blocks, self.merged, strict=True):
            x, sizes = advanced(block, x, sizes, count, prefix)  # type: ignore[arg-type]
        tokens = x if self.config.norm_after_pool else model.norm(x)
        logits = model.head(self.represent(tokens, sizes))
        if model.distillation_token is not None:
            logits = (logits + model.classify_distilled(tokens)) / 2
        return logits

    def represent(self, tokens: Tensor, sizes: Tensor) -> Tensor:
        """As `ViT.represent`, with tokens that stand for several patches."""
        model, prefix, pooling = self.model, self.config.num_prefix, self.config.pooling
        patches, weights = tokens[:, prefix:], sizes[:, prefix:]
        mean = (patches * weights).sum(dim=1) / weights.sum(dim=1)
        if pooling == "class":
            x = tokens[:, 0]
        elif pooling == "average":
            x = mean
        elif pooling == "class+average":
            x = torch.cat([tokens[:, 0], mean], dim=1)
        else:
            x = probed(model.pool, tokens, weights)  # type: ignore[arg-type]
        if self.config.norm_after_pool:
            x = model.norm(x)
        return x if model.pre_logits is None else torch.tanh(model.pre_logits(x))


def advanced(block: Block, x: Tensor, sizes: Tensor, count: int, prefix: int) -> tuple[Tensor, Tensor]:
    """A block's tokens and their sizes, after its attention and merging and MLP."""
    q, k, v = block.attention.project(block.norm1(x))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sizes.log().transpose(1, 2)[:, None])
    x = block.add1(x, block.attention.out(attended.transpose(1, 2).flatten(2)))
    if count:
        x, sizes = merge(x, sizes, k.mean(dim=1), count, prefix)
    return block.add2(x, block.mlp(block.norm2(x))), sizes


def merge(x: Tensor, sizes: Tensor, keys: Tensor, count: int, prefix: int) -> tuple[Tensor, Tensor]:
    """`count` patches fewer, or as many as there are partners for. (B, N, D), (B, N, 1), (B, N, d)."""
    keys = F.normalize(keys[:, prefix:], dim=-1)
    alike, partners = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(dim=-1)  # (B, N/2)
    count = min(count, alike.shape[1] if x.shape[1] - prefix > 1 else 0)
    order = alike.argsort(dim=-1, descending=True)
    gone, kept = order[:, :count], order[:, count:]
    carried = torch.cat([x * sizes, sizes], dim=-1)  # sums can be added; the mean comes at the end
    front, first, second = carried[:, :prefix], carried[:, prefix::2], carried[:, prefix + 1 :: 2]
    width = carried.shape[-1]
    moved = first.gather(1, gone[..., None].expand(-1, -1, width))
    goals = partners.gather(1, gone)[..., None].expand(-1, -1, width)
    second = second.scatter_add(1, goals, moved)
    stayed = first.gather(1, kept[..., None].expand(-1, -1, width))
    whole = torch.cat([front, stayed, second], dim=1)
    return whole[..., :-1] / whole[..., -1:], whole[..., -1:]


def probed(pool: AttentionPool, tokens: Tensor, sizes: Tensor) -> Tensor:
    """An attention pool's vector, where tokens stand for several patches."""
    q, k, v = pool.project(tokens)
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=sizes.log().transpose(1, 2)[:, None])
    x = pool.out(x.transpose(1, 2).flatten(2))[:, 0]
    return x + pool.fc2(F.gelu(pool.fc1(pool.norm(x)), approximate=pool.approximate))
