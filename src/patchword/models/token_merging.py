"""Fewer tokens at inference: skips tokens that the head does not read, and merges similar patches (ToMe).

If the head reads only the class token, the last block's queries, MLP and norms are needed for that token only. This
saves a twelfth of ViT-B's compute, and the result is the same.

Token merging (Bolya et al., 2023, "ToMe") changes the result a little: after the attention of a block the most similar
patches are merged. Patches alternate between two sets; each one of the first set is matched to its most similar one in
the second, by the cosine similarity of their keys; the pairs of lowest cost are replaced by their mean, weighted by
the number of patches in each. Attention adds the logarithm of that number to a key's score (proportional attention),
so that merging identical patches does not change the result. Weights do not change.

Two things differ from the paper. The cost of a merge is the distance times the attention of the class token to the
patch that is merged. And the first quarter of the blocks merges nothing, since later blocks cannot recover what is
lost early; each of the others merges the same fraction of the remaining patches. For ViT-Ti/16, at two thirds of the
compute, the KL divergence is a third of that of the original ToMe (LOG.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError
from .attention import Attention, attention_weights
from .distilled import DistilledViT
from .layers import is_plain_linear
from .vit import Block, ViT


def reduce_tokens(model: nn.Module, merged: Sequence[int] = ()) -> nn.Module:
    """Skips tokens that the head does not read, and merges `merged[i]` patches in block i.

    Returns the model itself if there is nothing to merge or skip.
    """
    if merged or (isinstance(model, ViT) and num_read_tokens(model)):
        return TokenMergingViT(model, merged)
    return model


def num_read_tokens(model: ViT) -> int:
    """Returns how many leading tokens of the last block the head reads, if they can be computed alone; 0 means all."""
    config = model.config
    alone = config.depth and config.pre_norm and not config.has_rope and not config.has_relative
    if config.pooling != "class" or not alone or config.attention_pattern != "global":
        return 0
    return 2 if config.distillation else 1


def merge_schedule(config: ModelConfig, ratio: float) -> tuple[int, ...]:
    """Returns how many patches to merge in each block: `ratio` of those left, from a quarter of the depth on."""
    if not isinstance(config, ViTConfig):
        raise ConfigError("Token merging needs a ViT; a ResNet has no tokens.")
    counts, left = [0] * config.depth, config.num_patches
    for number in range(config.depth // 4, config.depth):
        counts[number] = int(ratio * left)
        left -= counts[number]
    return tuple(counts)


class TokenMergingViT(nn.Module):
    """A trained ViT that merges `merged[i]` patches in block i; the same inputs and outputs."""

    def __init__(self, model: nn.Module, merged: Sequence[int] = ()) -> None:
        super().__init__()
        if not isinstance(model, ViT):
            raise ConfigError("Token merging needs a ViT; a ResNet has no tokens.")
        self.model, self.config, self.num_read = model, model.config, num_read_tokens(model)
        self.merged = tuple(merged) or (0,) * self.config.depth
        if any(self.merged):
            self.check_merging()

    def check_merging(self) -> None:
        """Raises a ConfigError for a model whose tokens cannot be merged."""
        config = self.config
        if config.has_rope or config.has_relative or config.attention_pattern != "global":
            raise ConfigError(
                f"Token merging needs global attention without relative or rotary positions, not "
                f"{config.attention_pattern} attention with pos_embed {config.pos_embed!r}."
            )
        if not config.pre_norm:
            field = "post_norm" if config.post_norm else "res_post_norm"
            raise ConfigError(f"Token merging needs pre-norm blocks, but model.{field} is true.")
        if len(self.merged) != config.depth or any(count < 0 for count in self.merged):
            raise ConfigError(
                f"merged must have {config.depth} numbers of at least 0, one per block, not {self.merged}."
            )

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, K)."""
        model, prefix = self.model, self.config.num_prefix
        x, sizes = model.embed_patches(images), None  # None: no token is merged
        for block, count in zip(model.blocks[:-1] if self.num_read else model.blocks, self.merged, strict=False):
            x, sizes = merging_block(block, x, sizes, count, prefix, self.num_read)  # type: ignore[arg-type]
        if self.num_read:
            x = last_block(model.blocks[-1], x, sizes, self.num_read)  # type: ignore[arg-type]
        tokens = x if self.config.norm_after_pool else model.norm(x)
        if isinstance(model, DistilledViT):
            logits, distilled = model.forward_heads(tokens)
            return (logits + distilled) / 2
        return model.head(self.forward_pool(tokens, sizes))

    def forward_pool(self, tokens: Tensor, sizes: Tensor | None) -> Tensor:
        """Like `ViT.forward_pool`, with merged tokens."""
        model, prefix, pooling = self.model, self.config.num_prefix, self.config.pooling
        if sizes is None or pooling == "class":
            return model.forward_pool(tokens)
        patches, weights = tokens[:, prefix:], sizes[:, prefix:]
        mean = (patches * weights).sum(dim=1) / weights.sum(dim=1)
        if pooling == "average":
            x = mean
        elif pooling == "class+average":
            x = torch.cat([tokens[:, 0], mean], dim=1)
        else:
            x = model.pool(tokens, size_bias(sizes if self.config.pool_prefix else weights))
        return model.pre_logits(model.norm(x) if self.config.norm_after_pool else x)


def merging_block(
    block: Block, x: Tensor, sizes: Tensor | None, count: int, prefix: int, num_read: int
) -> tuple[Tensor, Tensor | None]:
    """Runs a block with merging after its attention; returns tokens and their sizes."""
    if sizes is None and not count:
        return block(x), None
    q, k, v = block.attention.project(block.norm1(x))
    x = x + block.add1(attend(block.attention, q, k, v, sizes))
    if count:
        received = attention_received(q[:, :, :num_read], k, sizes) if num_read else None
        x, sizes = merge(x, sizes, k.mean(dim=1), count, prefix, received)
    return x + block.add2(block.mlp(block.norm2(x))), sizes


def last_block(block: Block, x: Tensor, sizes: Tensor | None, num_read: int) -> Tensor:
    """Computes the first `num_read` tokens of a block's output: (B, num_read, D)."""
    attention, normed = block.attention, block.norm1(x)
    if is_plain_linear(attention.qkv):
        weights = attention.qkv.weight.chunk(3)
        biases = (None,) * 3 if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
        q, k, v = (
            F.linear(tokens, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for tokens, weight, bias in zip((normed[:, :num_read], normed, normed), weights, biases, strict=True)
        )
        q, k = attention.q_norm(q), attention.k_norm(k)
    else:  # a layer in another precision, or one with hooks, computes all three at once
        q, k, v = attention.project(normed)
        q = q[:, :, :num_read]
    x = x[:, :num_read] + block.add1(attend(attention, q, k, v, sizes))
    return x + block.add2(block.mlp(block.norm2(x)))


def attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor, sizes: Tensor | None) -> Tensor:
    """Computes attention with merged tokens for these queries: (B, n, D)."""
    return attention.merge_heads(attention.attend(q, k, v, None if sizes is None else size_bias(sizes)))


def size_bias(sizes: Tensor) -> Tensor:
    """Returns the bias of proportional attention to merged tokens: (B, N, 1) -> (B, 1, 1, N)."""
    return sizes.log().transpose(1, 2)[:, None]


def attention_received(q: Tensor, k: Tensor, sizes: Tensor | None) -> Tensor:
    """Returns the attention of these queries to each token, mean over queries and heads: (B, N)."""
    return attention_weights(q, k, None if sizes is None else size_bias(sizes)).mean(dim=(1, 2))


def merge(
    x: Tensor, sizes: Tensor | None, keys: Tensor, count: int, prefix: int, received: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges `count` patches, or as many as have partners: tokens (B, N, D), sizes (B, N, 1), keys (B, N, d)."""
    if sizes is None:
        sizes = torch.ones_like(x[..., :1])
    if x.shape[1] - prefix < 2:
        return x, sizes
    keys = F.normalize(keys[:, prefix:], dim=-1)
    similarity, partners = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(dim=-1)  # (B, N/2)
    count = min(count, similarity.shape[1])
    costs = 1 - similarity if received is None else (1 - similarity) * received[:, prefix::2]
    order = costs.argsort(dim=-1)
    gone, kept = order[:, :count], order[:, count:]
    # Move whole rows of one list of all images' tokens, which is fast in every engine.
    sums = torch.cat([x * sizes, sizes], dim=-1)  # sums can be added; the mean comes at the end
    batch, length, width = sums.shape
    front, second = torch.arange(prefix, device=x.device), torch.arange(prefix + 1, length, 2, device=x.device)
    staying = torch.cat([front.expand(batch, -1), prefix + 2 * kept, second.expand(batch, -1)], dim=1)
    rows = gather_tokens(sums, staying).flatten(0, 1)
    starts = torch.arange(batch, device=x.device)[:, None] * staying.shape[1]
    targets = starts + prefix + kept.shape[1] + partners.gather(1, gone)
    moved = gather_tokens(sums, prefix + 2 * gone).flatten(0, 1)
    merged = rows.index_put((targets.flatten(),), moved, accumulate=True).view(batch, -1, width)
    return merged[..., :-1] / merged[..., -1:], merged[..., -1:]


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Picks tokens by index: (B, N, D), (B, n) -> (B, n, D)."""
    starts = torch.arange(tokens.shape[0], device=tokens.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1).index_select(0, (starts + indices).flatten()).view(*indices.shape, tokens.shape[2])
