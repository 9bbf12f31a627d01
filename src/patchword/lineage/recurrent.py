"""Sequence to sequence with recurrent networks: one fixed context vector, or dot-product attention.

    h_s = RNN(x_s, h_{s-1}),  s = 1 ... S                     the encoder reads the source (Sutskever et al., 2014)
    h_t = RNN(y_{t-1}, h_{t-1}),  h_0 = h_S                   the decoder writes the target, one token at a time
    p(y_t | y_<t, x) = softmax(W_o h_t)                       fixed context: h_S has to hold the whole source

    a_t(s) = softmax_s(h_t . h_s)                             attention (Luong et al., 2015, eq. 7 and 8, "dot")
    c_t    = sum_s a_t(s) h_s                                 the context of step t: a mean of all encoder states
    h~_t   = tanh(W_c [c_t; h_t])                             (5); then softmax(W_o h~_t) (6)

Training runs torch's recurrent layers, which read a whole sequence in one call. Writing one token at a time runs the
cells below with the same weights, so that each equation stands once in readable form.

Shapes: B sequences, S source tokens, T target tokens, D hidden units, V target vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Cell = Literal["rnn", "gru", "lstm"]
State = tuple[Tensor, ...]  # (h,), for the LSTM (h, c); each (B, D)
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def rnn_cell(x: Tensor, state: State, layer: nn.RNNBase) -> State:
    """One step of the simple recurrent network (Elman, 1990): x (B, E), h (B, D) -> h (B, D)."""
    from_input, from_state = cell_inputs(x, state[0], layer)
    return ((from_input + from_state).tanh(),)


def gru_cell(x: Tensor, state: State, layer: nn.RNNBase) -> State:
    """One step of the gated recurrent unit (Cho et al., 2014): gates decide how much of the state is replaced."""
    (h,) = state
    from_input, from_state = cell_inputs(x, h, layer)
    reset_x, update_x, new_x = from_input.chunk(3, dim=-1)  # (B, D) each
    reset_h, update_h, new_h = from_state.chunk(3, dim=-1)
    reset, update = (reset_x + reset_h).sigmoid(), (update_x + update_h).sigmoid()
    new = (new_x + reset * new_h).tanh()
    return ((1 - update) * new + update * h,)


def lstm_cell(x: Tensor, state: State, layer: nn.RNNBase) -> State:
    """One step of long short-term memory (Hochreiter and Schmidhuber, 1997; forget gate: Gers et al., 2000).

    The cell c is changed by sums only, so its gradient does not have to pass through a matrix at every step.
    """
    h, c = state
    from_input, from_state = cell_inputs(x, h, layer)
    write, forget, new, read = (from_input + from_state).chunk(4, dim=-1)  # (B, D) each
    c = forget.sigmoid() * c + write.sigmoid() * new.tanh()
    return read.sigmoid() * c.tanh(), c


CELLS = {"rnn": rnn_cell, "gru": gru_cell, "lstm": lstm_cell}


def cell_inputs(x: Tensor, h: Tensor, layer: nn.RNNBase) -> tuple[Tensor, Tensor]:
    """W x + b and U h + b', of all gates together: (B, gates * D) each."""
    from_input = F.linear(x, layer.weight_ih_l0, layer.bias_ih_l0)  # type: ignore[arg-type]
    return from_input, F.linear(h, layer.weight_hh_l0, layer.bias_hh_l0)  # type: ignore[arg-type]


def dot_attention(queries: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Context vectors and weights of Luong's dot-product attention.

    Args:
        queries: Decoder states (B, T, D).
        memory: Encoder states (B, S, D).
        mask: True at real source tokens (B, S). Padding gets the weight zero.
    """
    scores = queries @ memory.mT  # h_t . h_s: (B, T, S)
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(dim=-1)
    return weights @ memory, weights  # (B, T, D), (B, T, S)


class RecurrentSeq2Seq(nn.Module):
    """An encoder that reads in both directions, and a decoder that starts from its last states.

    A state of one direction knows only the tokens before it; both directions side by side describe a token in its
    context, without which alignments are a token late.

    Args:
        num_source: Size of the source vocabulary.
        num_target: Size of the target vocabulary, V.
        dim: Hidden units of the decoder, and of both directions of the encoder together, D.
        cell: "rnn", "gru" or "lstm".
        attention: Whether the decoder attends to all encoder states; else it has the fixed context vector only.
    """

    def __init__(self, num_source: int, num_target: int, dim: int = 128, cell: Cell = "lstm", attention: bool = True):
        super().__init__()
        self.cell, self.attention = cell, attention
        self.embed_source = nn.Embedding(num_source, dim // 2)
        self.embed_target = nn.Embedding(num_target, dim // 2)
        self.encoder = LAYERS[cell](dim // 2, dim // 2, batch_first=True, bidirectional=True)
        self.decoder = LAYERS[cell](dim // 2, dim, batch_first=True)
        self.combine = nn.Linear(2 * dim, dim, bias=False) if attention else None  # W_c
        self.out = nn.Linear(dim, num_target)  # W_o

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, State]:
        """Encoder states (B, S, D), and the decoder's first state, which is the fixed context vector.

        Packing stops each sequence at its length: without it, the last state would be that of the padding.
        """
        packed = pack_padded_sequence(self.embed_source(source), lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        last = last if isinstance(last, tuple) else (last,)
        return memory, tuple(torch.cat([forward, backward], dim=-1) for forward, backward in last)  # (B, D)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Logits of each next token, given the true tokens before it (teacher forcing).

        Args:
            source: Source tokens, padded (B, S).
            lengths: Number of source tokens (B,).
            target: Target tokens from <sos> on (B, T).

        Returns:
            Logits (B, T, V).
        """
        memory, state = self.encode(source, lengths)
        first = tuple(each[None].contiguous() for each in state)  # (1, B, D): torch's layers can be stacked
        hidden, _ = self.decoder(self.embed_target(target), first if self.cell == "lstm" else first[0])
        return self.predict(hidden, memory, source_mask(source, lengths))[0]

    def predict(self, hidden: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) of decoder states (B, T, D), and the attention weights (B, T, S) if there are any."""
        if self.combine is None:
            return self.out(hidden), None
        context, weights = dot_attention(hidden, memory, mask)
        return self.out(self.combine(torch.cat([context, hidden], dim=-1)).tanh()), weights

    def start(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, State]:
        """What `step` needs: encoder states, the mask of real source tokens, and the decoder's state."""
        memory, state = self.encode(source, lengths)
        return memory, source_mask(source, lengths), state

    def step(
        self, token: Tensor, context: tuple[Tensor, Tensor, State]
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, State]]:
        """Writes one token: the last one (B,) -> logits of the next (B, V), attention weights (B, S), new context."""
        memory, mask, state = context
        state = CELLS[self.cell](self.embed_target(token), state, self.decoder)
        logits, weights = self.predict(state[0][:, None], memory, mask)
        return logits[:, 0], None if weights is None else weights[:, 0], (memory, mask, state)


def source_mask(source: Tensor, lengths: Tensor) -> Tensor:
    """True at real tokens, False at padding: (B, S)."""
    return torch.arange(source.shape[1]) < lengths[:, None]
