"""The same answers from less work, for inference: nothing is computed that no head reads, and fewer tokens.

Where the head reads the class token alone, the last block's queries, its MLP and its norms are needed for that token
only: a twelfth of ViT-B's arithmetic less, with the same result.

Merging (Bolya et al., 2023, "ToMe") changes the result a little: after the attention of a block the most similar
patches become one. Patches are dealt into two halves by turns; each of the first half finds its most similar one in the
second, by the cosine of their keys; the pairs that cost least are merged into their mean, weighted by how many patches
each stands for. Attention adds the logarithm of that number to a key's score, so that a token that stands for five is
looked at like five: patches that are exactly alike can be merged without any change of the result. Weights stay as they
are.

Two things are ours. What a merger costs is the distance of the two times how much the class token looks at the one that
goes: where it does not look, much can go. And the first quarter of the blocks merges nothing, for what is lost early is
lost to all; behind it each block merges the same part of what is left. For ViT-Ti/16, at two thirds of the arithmetic,
that is a third of the divergence of ToMe's equal numbers by similarity alone (LOG.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError
from .pooling import AttentionPool
from .vit import Attention, Block, ViT


def lean(model: nn.Module, merged: Sequence[int] = ()) -> nn.Module:
    """The model with what can be left out left out; `merged` are patches to merge in each block.

    Without merging, models that have nothing to leave out come back as they are.
    """
    if merged or isinstance(model, ViT) and read_tokens(model):
        return LeanViT(model, merged)
    return model


def read_tokens(model: ViT) -> int:
    """How many tokens of the last block are read, if they come first and can be had alone; else 0: all."""
    config = model.config
    alone = config.depth and not config.post_norm and config.positions not in ("rotary", "relative")
    if config.pooling != "class" or not alone or config.attention != "global":
        return 0
    return 2 if config.distillation else 1


def merging(config: ModelConfig, part: float) -> tuple[int, ...]:
    """How many patches to merge in each block: `part` of those that are left, from a quarter of the depth on."""
    if not isinstance(config, ViTConfig):
        raise ConfigError("A residual network has no tokens to merge.")
    counts, left = [0] * config.depth, config.num_patches
    for number in range(config.depth // 4, config.depth):
        counts[number] = int(part * left)
        left -= counts[number]
    return tuple(counts)


class LeanViT(nn.Module):
    """A trained ViT that merges `merged[i]` patches in block i; the same inputs and outputs."""

    def __init__(self, model: nn.Module, merged: Sequence[int] = ()) -> None:
        super().__init__()
        if not isinstance(model, ViT):
            raise ConfigError("A residual network has no tokens to merge.")
        self.model, self.config, self.read = model, model.config, read_tokens(model)
        self.merged = tuple(merged) or (0,) * self.config.depth
        if any(self.merged):
            self.check_merging()

    def check_merging(self) -> None:
        config = self.config
        if config.positions in ("rotary", "relative") or config.attention != "global":
            raise ConfigError("Tokens can be merged only where attention does not ask which patch is where.")
        if config.post_norm:
            raise ConfigError("Tokens can be merged only in blocks that norm before they attend.")
        if len(self.merged) != config.depth or any(count < 0 for count in self.merged):
            raise ConfigError(f"merged takes a number for each of the {config.depth} blocks, 0 or more.")

    def forward(self, images: Tensor) -> Tensor:
        model, prefix = self.model, self.config.num_prefix
        x, sizes = model.embed(images), None  # None: every token stands for itself
        for block, count in zip(model.blocks[:-1] if self.read else model.blocks, self.merged, strict=False):
            x, sizes = advanced(block, x, sizes, count, prefix, self.read)  # type: ignore[arg-type]
        if self.read:
            x = last(model.blocks[-1], x, sizes, self.read)  # type: ignore[arg-type]
        tokens = x if self.config.norm_after_pool else model.norm(x)
        logits = model.head(self.represent(tokens, sizes))
        if model.distillation_token is not None:
            logits = (logits + model.classify_distilled(tokens)) / 2
        return logits

    def represent(self, tokens: Tensor, sizes: Tensor | None) -> Tensor:
        """As `ViT.represent`, with tokens that stand for several patches."""
        model, prefix, pooling = self.model, self.config.num_prefix, self.config.pooling
        if sizes is None or pooling == "class":
            return model.represent(tokens)
        patches, weights = tokens[:, prefix:], sizes[:, prefix:]
        mean = (patches * weights).sum(dim=1) / weights.sum(dim=1)
        if pooling == "average":
            x = mean
        elif pooling == "class+average":
            x = torch.cat([tokens[:, 0], mean], dim=1)
        else:
            x = probed(model.pool, tokens, weights)  # type: ignore[arg-type]
        if self.config.norm_after_pool:
            x = model.norm(x)
        return x if model.pre_logits is None else torch.tanh(model.pre_logits(x))


def advanced(
    block: Block, x: Tensor, sizes: Tensor | None, count: int, prefix: int, read: int
) -> tuple[Tensor, Tensor | None]:
    """A block's tokens and their sizes, after its attention and merging and MLP."""
    if sizes is None and not count:
        return block(x), None
    q, k, v = block.attention.project(block.norm1(x))
    x = block.add1(x, attended(block.attention, q, k, v, sizes))
    if count:
        seen = attention_of(q[:, :, :read], k, sizes) if read else None
        x, sizes = merge(x, sizes, k.mean(dim=1), count, prefix, seen)
    return block.add2(x, block.mlp(block.norm2(x))), sizes


def last(block: Block, x: Tensor, sizes: Tensor | None, read: int) -> Tensor:
    """The first `read` tokens of a block's result: (B, read, D)."""
    attention, normed = block.attention, block.norm1(x)
    if type(attention.qkv) is nn.Linear and not attention.qkv._forward_hooks:
        weights = attention.qkv.weight.chunk(3)
        biases = (None,) * 3 if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
        q, k, v = (
            F.linear(tokens, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for tokens, weight, bias in zip((normed[:, :read], normed, normed), weights, biases, strict=True)
        )
        q, k = attention.q_norm(q), attention.k_norm(k)
    else:  # a layer in another precision, or one that is watched, gives all three at once
        q, k, v = attention.project(normed)
        q = q[:, :, :read]
    x = block.add1(x[:, :read], attended(attention, q, k, v, sizes))
    return block.add2(x, block.mlp(block.norm2(x)))


def attention_of(q: Tensor, k: Tensor, sizes: Tensor | None) -> Tensor:
    """How much these queries look at each token, the mean over queries and heads: (B, N)."""
    scores = k @ q.transpose(-2, -1) / k.shape[-1] ** 0.5  # (B, H, N, n): the small one is turned, not the keys
    return (scores if sizes is None else scores + sizes.log()[:, None]).softmax(dim=2).mean(dim=(1, 3))


def attended(attention: Attention, q: Tensor, k: Tensor, v: Tensor, sizes: Tensor | None) -> Tensor:
    mask = None if sizes is None else sizes.log().transpose(1, 2)[:, None]
    return attention.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def merge(
    x: Tensor, sizes: Tensor | None, keys: Tensor, count: int, prefix: int, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`count` patches fewer, or as many as there are partners for. (B, N, D), (B, N, 1), (B, N, d), (B, N)."""
    if sizes is None:
        sizes = torch.ones_like(x[..., :1])
    if x.shape[1] - prefix < 2:
        return x, sizes
    keys = F.normalize(keys[:, prefix:], dim=-1)
    alike, partners = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(dim=-1)  # (B, N/2)
    count = min(count, alike.shape[1])
    costs = 1 - alike if seen is None else (1 - alike) * seen[:, prefix::2]
    order = costs.argsort(dim=-1)
    gone, kept = order[:, :count], order[:, count:]
    # Whole rows are moved, which every engine does fast, out of all pictures' tokens in one list.
    carried = torch.cat([x * sizes, sizes], dim=-1)  # sums can be added; the mean comes at the end
    batch, length, width = carried.shape
    front, second = torch.arange(prefix, device=x.device), torch.arange(prefix + 1, length, 2, device=x.device)
    stays = torch.cat([front.expand(batch, -1), prefix + 2 * kept, second.expand(batch, -1)], dim=1)
    rest = taken(carried, stays).flatten(0, 1)
    starts = torch.arange(batch, device=x.device)[:, None] * stays.shape[1]
    goals = starts + prefix + kept.shape[1] + partners.gather(1, gone)
    rest = rest.index_put((goals.flatten(),), taken(carried, prefix + 2 * gone).flatten(0, 1), accumulate=True)
    whole = rest.view(batch, -1, width)
    return whole[..., :-1] / whole[..., -1:], whole[..., -1:]


def taken(tokens: Tensor, places: Tensor) -> Tensor:
    """(B, N, D), (B, n) to (B, n, D)."""
    starts = torch.arange(tokens.shape[0], device=tokens.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1).index_select(0, (starts + places).flatten()).view(*places.shape, tokens.shape[2])


def probed(pool: AttentionPool, tokens: Tensor, sizes: Tensor) -> Tensor:
    """An attention pool's vector, where tokens stand for several patches."""
    q, k, v = pool.project(tokens)
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=sizes.log().transpose(1, 2)[:, None])
    x = pool.out(x.transpose(1, 2).flatten(2))[:, 0]
    return x + pool.fc2(F.gelu(pool.fc1(pool.norm(x)), approximate=pool.approximate))
