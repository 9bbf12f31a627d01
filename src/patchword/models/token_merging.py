"""Fewer tokens at inference: none is computed that no head reads, and similar patches are merged (ToMe).

Where the head reads the class token alone, the last block's queries, its MLP and its norms are needed for that token
only: a twelfth of ViT-B's arithmetic less, with the same result.

Token merging (Bolya et al., 2023, "ToMe") changes the result a little: after the attention of a block the most similar
patches become one. Patches are divided into two halves in turn; each of the first half finds its most similar one in
the second, by the cosine of their keys; the pairs that cost least are merged into their mean, weighted by how many
patches each stands for. Attention adds the logarithm of that number to a key's score, so that a token that stands for
five gets the attention of five: identical patches can be merged without any change of the result. Weights stay as they
are.

Two things differ from the paper. The cost of a merge is the distance of the two times the attention that the class
token pays to the one that goes. And the first quarter of the blocks merges nothing, since what is lost early is lost to
all; behind it each block merges the same fraction of what is left. For ViT-Ti/16, at two thirds of the arithmetic, this
has a third of the KL divergence of ToMe's equal numbers by similarity alone (LOG.md).
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
    """The model without the tokens that nothing reads; `merged` are patches to merge in each block.

    Without merging, a model all of whose tokens are read comes back as it is.
    """
    if merged or (isinstance(model, ViT) and num_read_tokens(model)):
        return TokenMergingViT(model, merged)
    return model


def num_read_tokens(model: ViT) -> int:
    """How many tokens of the last block are read, if they come first and can be computed alone; else 0: all."""
    config = model.config
    alone = config.depth and not config.post_norm and config.pos_embed not in ("rotary", "relative")
    if config.pooling != "class" or not alone or config.attention_pattern != "global":
        return 0
    return 2 if config.distillation else 1


def merge_schedule(config: ModelConfig, ratio: float) -> tuple[int, ...]:
    """How many patches to merge in each block: `ratio` of those that are left, from a quarter of the depth on."""
    if not isinstance(config, ViTConfig):
        raise ConfigError("A residual network has no tokens to merge.")
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
            raise ConfigError("A residual network has no tokens to merge.")
        self.model, self.config, self.num_read = model, model.config, num_read_tokens(model)
        self.merged = tuple(merged) or (0,) * self.config.depth
        if any(self.merged):
            self.check_merging()

    def check_merging(self) -> None:
        """Raises a ConfigError for a model whose tokens cannot be merged."""
        config = self.config
        if config.pos_embed in ("rotary", "relative") or config.attention_pattern != "global":
            raise ConfigError("Tokens can be merged only where attention does not ask which patch is where.")
        if config.post_norm:
            raise ConfigError("Tokens can be merged only in blocks that norm before they attend.")
        if len(self.merged) != config.depth or any(count < 0 for count in self.merged):
            raise ConfigError(f"merged takes a number for each of the {config.depth} blocks, 0 or more.")

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to logits (B, K)."""
        model, prefix = self.model, self.config.num_prefix
        x, sizes = model.embed_patches(images), None  # None: every token stands for itself
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
        """`ViT.forward_pool` for tokens that stand for several patches."""
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
            x = model.pool(tokens, size_bias(weights))
        if self.config.norm_after_pool:
            x = model.norm(x)
        return x if model.pre_logits is None else torch.tanh(model.pre_logits(x))


def merging_block(
    block: Block, x: Tensor, sizes: Tensor | None, count: int, prefix: int, num_read: int
) -> tuple[Tensor, Tensor | None]:
    """A block's tokens and their sizes, after its attention, merging and MLP."""
    if sizes is None and not count:
        return block(x), None
    q, k, v = block.attention.project(block.norm1(x))
    x = x + block.add1(attend(block.attention, q, k, v, sizes))
    if count:
        received = attention_received(q[:, :, :num_read], k, sizes) if num_read else None
        x, sizes = merge(x, sizes, k.mean(dim=1), count, prefix, received)
    return x + block.add2(block.mlp(block.norm2(x))), sizes


def last_block(block: Block, x: Tensor, sizes: Tensor | None, num_read: int) -> Tensor:
    """The first `num_read` tokens of a block's output: (B, num_read, D)."""
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
    """The attention of these queries, (B, n, D), where tokens stand for several patches."""
    x = attention.attend(q, k, v, None if sizes is None else size_bias(sizes))
    return attention.out(x.transpose(1, 2).flatten(2))


def size_bias(sizes: Tensor) -> Tensor:
    """What attention adds to the scores of tokens that stand for several patches: (B, N, 1) -> (B, 1, 1, N)."""
    return sizes.log().transpose(1, 2)[:, None]


def attention_received(q: Tensor, k: Tensor, sizes: Tensor | None) -> Tensor:
    """How much attention these queries pay to each token, the mean over queries and heads: (B, N)."""
    return attention_weights(q, k, None if sizes is None else size_bias(sizes)).mean(dim=(1, 2))


def merge(
    x: Tensor, sizes: Tensor | None, keys: Tensor, count: int, prefix: int, received: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`count` patches fewer, or as many as there are partners for. (B, N, D), (B, N, 1), (B, N, d), (B, N)."""
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
    # Whole rows are moved, which every engine does fast, out of all images' tokens in one list.
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
    """(B, N, D), (B, n) -> (B, n, D)."""
    starts = torch.arange(tokens.shape[0], device=tokens.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1).index_select(0, (starts + indices).flatten()).view(*indices.shape, tokens.shape[2])
