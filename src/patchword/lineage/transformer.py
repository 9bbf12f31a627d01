"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017): encoder and decoder of attention alone.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d)) V                         (1)  section 3.2.1
    MultiHead(Q, K, V) = [head_1; ...; head_H] W^O                               section 3.2.2
    FFN(x) = max(0, x W_1 + b_1) W_2 + b_2                                  (2)  section 3.3
    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(...)              section 3.5

Self-attention takes queries, keys and values from one sequence; in cross-attention the target asks and the source
replies: queries come from the decoder, keys and values from the encoder. ViT keeps the encoder alone, with patches
instead of words.

Shapes: B sequences, S source tokens, T target tokens, N any of both, D width, H heads, d = D/H, V target vocabulary.
"""

import math

import torch
from torch import Tensor, nn

from ..models.attention import attention_weights
from .recurrent import source_mask


def sinusoids(length: int, dim: int) -> Tensor:
    """Position encodings (length, D): sines and cosines of wavelengths from 2 pi to 10000 * 2 pi."""
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)  # (length, D/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class MultiHeadAttention(nn.Module):
    """H attentions side by side, each on its own projection to d dimensions."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens x (B, T, D) attend to memory (B, S, D), where mask, broadcast to (B, H, T, S), is True.

        Returns:
            The new tokens (B, T, D), and the attention weights (B, H, T, S).
        """
        q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        weights = attention_weights(q, k, bias)  # (B, H, T, S)
        heads = weights @ v  # (B, H, T, d)
        return self.out(heads.transpose(1, 2).flatten(2)), weights

    def split(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, H, N, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Residual(nn.Module):
    """A residual branch with its LayerNorm: after the sum in the paper (post-norm), before the branch in pre-norm."""

    def __init__(self, dim: int, pre_norm: bool) -> None:
        super().__init__()
        self.norm, self.pre_norm = nn.LayerNorm(dim), pre_norm

    def before(self, x: Tensor) -> Tensor:
        """The input of the branch."""
        return self.norm(x) if self.pre_norm else x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        """LN(x + branch(x)) in the paper (5.4); x + branch(LN(x)) in pre-norm."""
        return x + branch if self.pre_norm else self.norm(x + branch)


def feed_forward(dim: int, mlp_dim: int) -> nn.Sequential:
    """FFN (2): the same two layers for each token."""
    return nn.Sequential(nn.Linear(dim, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, dim))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, pre_norm: bool) -> None:
        super().__init__()
        self.attention, self.mlp = MultiHeadAttention(dim, num_heads), feed_forward(dim, mlp_dim)
        self.add1, self.add2 = (Residual(dim, pre_norm) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        """`mask` (B, 1, 1, S) is True at real tokens."""
        y = self.add1.before(x)
        x = self.add1.after(x, self.attention(y, y, mask)[0])
        return self.add2.after(x, self.mlp(self.add2.before(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder, then a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, pre_norm: bool) -> None:
        super().__init__()
        self.attention, self.cross = (MultiHeadAttention(dim, num_heads) for _ in range(2))
        self.mlp = feed_forward(dim, mlp_dim)
        self.add1, self.add2, self.add3 = (Residual(dim, pre_norm) for _ in range(3))

    def forward(self, x: Tensor, causal: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens (B, T, D), and the weights (B, H, T, S) of the attention to the source."""
        y = self.add1.before(x)
        x = self.add1.after(x, self.attention(y, y, causal)[0])
        crossed, weights = self.cross(self.add2.before(x), memory, mask)
        x = self.add2.after(x, crossed)
        return self.add3.after(x, self.mlp(self.add3.before(x))), weights


class Transformer(nn.Module):
    """Encoder and decoder, with tied embeddings: the rows that embed target tokens also score them (section 3.4).

    Args:
        num_source: Size of the source vocabulary.
        num_target: Size of the target vocabulary, V.
        dim: Width of the tokens, D.
        depth: Number of layers of the encoder, and of the decoder.
        num_heads: Number of attention heads.
        mlp_dim: Hidden units of the feed-forward networks, by default 4D.
        pre_norm: Whether norms precede the branches, with one more after the last layer.
        positions: Whether position encodings are added.
    """

    def __init__(
        self,
        num_source: int,
        num_target: int,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        mlp_dim: int | None = None,
        pre_norm: bool = False,
        positions: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.positions = dim, positions
        self.embed_source, self.embed_target = nn.Embedding(num_source, dim), nn.Embedding(num_target, dim)
        sizes = dim, num_heads, mlp_dim or 4 * dim, pre_norm
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(depth))
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(dim) if pre_norm else nn.Identity() for _ in range(2))
        for name, parameter in self.named_parameters():
            if name.startswith("embed_"):
                nn.init.normal_(parameter, std=dim**-0.5)  # times sqrt(D): as large as the position encodings
            elif parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, tokens: Tensor, table: nn.Embedding) -> Tensor:
        """Tokens (B, N) -> embeddings times sqrt(D), plus position encodings: (B, N, D)."""
        x = table(tokens) * math.sqrt(self.dim)
        return x + sinusoids(tokens.shape[1], self.dim) if self.positions else x

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded tokens (B, S, D), and the mask of real tokens (B, 1, 1, S)."""
        mask = source_mask(source, lengths)[:, None, None]
        x = self.embed(source, self.embed_source)
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) of each next token, and the last layer's attention to the source, a mean of heads."""
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()  # no token sees later ones
        x, weights = self.embed(target, self.embed_target), torch.empty(0)
        for layer in self.decoder:
            x, weights = layer(x, causal, memory, mask)
        return self.decoder_norm(x) @ self.embed_target.weight.mT, weights.mean(dim=1)  # (B, T, V), (B, T, S)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) of each next token, given source (B, S) and the true tokens before it (B, T)."""
        return self.decode(target, *self.encode(source, lengths))[0]

    def start(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `step` needs: the encoded source, its mask, and the tokens written so far (B, 0)."""
        return *self.encode(source, lengths), source[:, :0]

    def step(
        self, token: Tensor, context: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Writes one token: the last one (B,) -> logits of the next (B, V), attention weights (B, S), new context."""
        memory, mask, written = context
        written = torch.cat([written, token[:, None]], dim=1)
        logits, weights = self.decode(written, memory, mask)
        return logits[:, -1], weights[:, -1], (memory, mask, written)
