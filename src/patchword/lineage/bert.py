"""BERT (Devlin et al., 2019), whose encoder is ViT's: the same `Block`, with the norms after the sums.

    z_0 = LN(E_token + E_position + E_segment)        "Input Representation"   Bert.embed_tokens
    z_l = Block(z_{l-1}),  l = 1 ... L                "Model Architecture"     models/vit.py
    C   = tanh(W z_L^0 + b), the output of [CLS]      the pooler               Bert.forward_pool
    pre-training, Task #1: Masked LM                                           mask_tokens, MaskedLanguageModel
    fine-tuning: a new linear layer on C                                       BertClassifier

ViT took the [CLS] token, learned positions and pre-training from it. Task #2, next sentence prediction, is left out:
RoBERTa (Liu et al., 2019) does better without. bert_fit.py trains BERT; bert_checkpoint.py reads transformers' weights.

Shapes: B sequences, N tokens, D embed_dim, V vocab_size, K classes.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import JsonConfig, ViTConfig
from ..errors import ConfigError
from ..models.layers import activate
from ..models.vit import PostNormBlock

IGNORED = -100  # the label of a token that is not to be predicted


@dataclass(frozen=True)
class BertConfig(JsonConfig):
    """A BERT encoder. The defaults are the paper's BERT-base, uncased."""

    section = "bert"

    vocab_size: int = 30522  # V, special tokens such as [CLS] included
    max_length: int = 512  # positions are learned, so that no sequence can be longer
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_dim: int = 3072
    num_segments: int = 2  # the paper's inputs are pairs of sentences, A and B
    norm_eps: float = 1e-12
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # exact, or the tanh approximation of the authors' code
    dropout: float = 0.1
    attention_dropout: float = 0.1
    init_std: float = 0.02  # standard deviation of initial weights; narrow models need more, about D**-0.5
    pooler: bool = True  # masked language modeling needs none

    def validate(self) -> None:
        self.check_range(1, 2**24, "vocab_size", "max_length", "num_segments")
        _ = self.encoder  # which validates the rest

    @property
    def encoder(self) -> ViTConfig:
        """The same encoder in the terms of ViT: only the place and the epsilon of the norms are not its defaults."""
        same = ("embed_dim", "depth", "num_heads", "mlp_dim", "norm_eps", "activation", "dropout", "attention_dropout")
        return ViTConfig(post_norm=True, **{name: getattr(self, name) for name in same})


class KeyMask(nn.Module):
    """The `bias` of an Attention that is given to the block from outside.

    A block passes its second argument on to `Attention.bias`. In a ViT it is the grid of patches, which relative
    positions need. A text has padding instead of a grid: here the argument is the bias itself.
    """

    def forward(self, bias: Tensor | None = None) -> Tensor | None:
        """Returns the argument: (B, 1, 1, N), or None if no sequence is padded."""
        return bias


class Bert(nn.Module):
    """The encoder: tokens -> embeddings -> blocks -> the pooled output of [CLS]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config, dim, encoder = config, config.embed_dim, config.encoder
        self.token_embed = nn.Embedding(config.vocab_size, dim)
        self.position_embed = nn.Embedding(config.max_length, dim)
        self.segment_embed = nn.Embedding(config.num_segments, dim)
        self.embed_norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.drop = nn.Dropout(config.dropout)
        blocks = [PostNormBlock(encoder, layer) for layer in range(config.depth)]
        for block in blocks:
            block.attention.bias = KeyMask()
            block.mlp.drop = nn.Identity()  # ViT drops hidden units of the MLP, too; BERT does not
        self.blocks = nn.ModuleList(blocks)
        self.pooler = nn.Linear(dim, dim) if config.pooler else None
        self.apply(lambda module: init_bert(module, config.init_std))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Returns the pooled output of [CLS] (B, D); arguments as in `forward_features`."""
        return self.forward_pool(self.forward_features(tokens, mask, segments))

    def forward_features(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Returns all tokens (B, N, D) after the last block.

        Args:
            tokens: Token ids (B, N), [CLS] first.
            mask: True (or 1) at tokens, False at padding (B, N); by default there is no padding.
            segments: 0 in sentence A and 1 in sentence B (B, N); by default all 0.
        """
        z, bias = self.embed_tokens(tokens, segments), None  # (B, N, D)
        if mask is not None:  # minus infinity at padding, for all heads and queries: (B, 1, 1, N)
            bias = z.new_zeros(mask.shape).masked_fill(~mask.bool(), float("-inf"))[:, None, None]
        for block in self.blocks:
            z = block(z, bias)
        return z

    def embed_tokens(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Returns z_0 (B, N, D), the sum of three embeddings, normalized."""
        n = tokens.shape[1]
        if n > self.config.max_length:
            raise ConfigError(f"A sequence of {n} tokens is longer than bert.max_length, {self.config.max_length}.")
        segments = torch.zeros_like(tokens) if segments is None else segments
        z = self.token_embed(tokens) + self.position_embed.weight[:n] + self.segment_embed(segments)
        return self.drop(self.embed_norm(z))

    def forward_pool(self, features: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        """Pools the tokens: a tanh layer on that of [CLS]."""
        if self.pooler is None:
            raise ConfigError("This BERT has no pooler (bert.pooler is false).")
        return self.pooler(features[:, 0]).tanh()


class MaskedLanguageModel(nn.Module):
    """BERT with the head of its pre-training, which predicts masked tokens from the tokens on both sides."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.transform = nn.Linear(config.embed_dim, config.embed_dim)
        self.transform_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.decoder_bias = nn.Parameter(torch.zeros(config.vocab_size))
        init_bert(self.transform, config.init_std)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Returns logits over the vocabulary (B, N, V); arguments as in `Bert.forward_features`."""
        return self.predict_tokens(self.bert.forward_features(tokens, mask, segments))

    def predict_tokens(self, features: Tensor) -> Tensor:  # (..., D) -> (..., V)
        """Compares transformed tokens with all token embeddings, which are the decoder's matrix (tied weights)."""
        x = self.transform_norm(activate(self.transform(features), self.bert.config.activation))
        return F.linear(x, self.bert.token_embed.weight, self.decoder_bias)


class BertClassifier(nn.Module):
    """BERT with a linear layer on the pooled output of [CLS]; that layer starts at zero, like ViT's head."""

    def __init__(self, config: BertConfig, num_classes: int) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.drop, self.head = nn.Dropout(config.dropout), nn.Linear(config.embed_dim, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Returns the logits (B, K); arguments as in `Bert.forward_features`."""
        return self.head(self.drop(self.bert(tokens, mask, segments)))


def init_bert(module: nn.Module, std: float) -> None:
    """Initializes weights by a normal distribution cut off at two standard deviations, and biases by zero."""
    if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def mask_tokens(
    tokens: Tensor,
    *,
    mask_token: int,
    special: Collection[int],
    vocab_size: int,
    generator: torch.Generator,
    rate: float = 0.15,
) -> tuple[Tensor, Tensor]:
    """Chooses tokens to predict, and hides most of them: (B, N) -> inputs and labels (B, N).

    Each token is chosen with probability `rate`. Of the chosen ones 80 % become [MASK], 10 % a random token, and 10 %
    stay, because [MASK] never occurs in fine-tuning. Labels are the chosen tokens, and -100 (`IGNORED`) elsewhere.
    `special` tokens ([PAD], [CLS], [SEP], [MASK]) are neither chosen nor drawn.
    """
    reserved = torch.tensor([*special, mask_token])
    ordinary = torch.tensor([token for token in range(vocab_size) if token not in {*special, mask_token}])
    chosen = (torch.rand(tokens.shape, generator=generator) < rate) & ~torch.isin(tokens, reserved)
    fate = torch.rand(tokens.shape, generator=generator)
    drawn = ordinary[torch.randint(len(ordinary), tokens.shape, generator=generator)]
    inputs = torch.where(chosen & (fate < 0.8), mask_token, tokens)
    inputs = torch.where(chosen & (fate >= 0.9), drawn, inputs)
    return inputs, torch.where(chosen, tokens, IGNORED)


def masked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the chosen tokens; 0 if there are none."""
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)
