"""Tokens and their indices, and batches of padded sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

PAD, SOS, EOS = 0, 1, 2  # padding, start and end of a sequence
SPECIAL = ("<pad>", "<sos>", "<eos>")


class Vocabulary:
    """Tokens and their indices; the special tokens come first."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = (*SPECIAL, *tokens)
        self.index = {token: index for index, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, sequences: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        """Indices of sequences, each with <eos> at its end, padded to the longest: (B, T), and lengths (B,)."""
        rows = [torch.tensor([*(self.index[token] for token in tokens), EOS]) for tokens in sequences]
        return torch.nn.utils.rnn.pad_sequence(rows, True, PAD), torch.tensor([len(row) for row in rows])

    def decode(self, indices: Sequence[int]) -> tuple[str, ...]:
        """The tokens before the first <eos>."""
        end = list(indices).index(EOS) if EOS in indices else len(indices)
        return tuple(self.tokens[index] for index in indices[:end])
