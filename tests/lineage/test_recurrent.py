"""Recurrent encoder-decoders: cells against torch's layers, attention against joeynmt, padding, teacher forcing."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from patchword.lineage.recurrent import CELLS, LAYERS, Cell, RecurrentSeq2Seq, dot_attention, source_mask
from patchword.lineage.vocabulary import SOS

LENGTHS = torch.tensor([5, 3, 1])


def padded_batch(seed: int = 0) -> torch.Tensor:
    """Three sequences of 5, 3 and 1 tokens."""
    source = torch.randint(3, 20, (3, 5), generator=torch.Generator().manual_seed(seed))
    return source.masked_fill(~source_mask(source, LENGTHS), 0)


@pytest.mark.parametrize("cell", LAYERS)
def test_cells_equal_torch(cell: Cell) -> None:
    torch.manual_seed(0)
    layer = LAYERS[cell](6, 8, batch_first=True)
    x = torch.randn(4, 7, 6)
    expected, last = layer(x)
    state = tuple(torch.zeros(4, 8) for _ in range(2 if cell == "lstm" else 1))
    outputs = []
    for step in range(7):
        state = CELLS[cell](x[:, step], state, layer)
        outputs.append(state[0])
    assert_close(torch.stack(outputs, dim=1), expected, atol=1e-6, rtol=0)
    if cell == "lstm":
        assert_close(state[1], last[1][0], atol=1e-6, rtol=0)


def test_dot_attention_equals_joeynmt() -> None:
    attention = pytest.importorskip("joeynmt.attention").LuongAttention(hidden_size=8, key_size=8)
    nn.init.eye_(attention.key_layer.weight)
    torch.manual_seed(0)
    queries, memory, mask = torch.randn(3, 4, 8), torch.randn(3, 5, 8), source_mask(torch.zeros(3, 5), LENGTHS)
    contexts, weights = dot_attention(queries, memory, mask)
    attention.compute_proj_keys(memory)
    for step in range(4):
        context, alphas = attention(queries[:, step : step + 1], mask[:, None], memory)
        assert_close(contexts[:, step : step + 1], context, atol=1e-6, rtol=0)
        assert_close(weights[:, step : step + 1], alphas, atol=1e-6, rtol=0)


def test_padding_gets_no_attention() -> None:
    mask = source_mask(torch.zeros(3, 5), LENGTHS)
    _, weights = dot_attention(torch.randn(3, 4, 8), torch.randn(3, 5, 8), mask)
    assert (weights[~mask[:, None].expand_as(weights)] == 0).all()
    assert_close(weights.sum(-1), torch.ones(3, 4))


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("cell", LAYERS)
def test_padded_batch_equals_single_sequences(cell: Cell, attention: bool) -> None:
    torch.manual_seed(0)
    model = RecurrentSeq2Seq(20, 12, dim=16, cell=cell, attention=attention)
    source, target = padded_batch(), torch.randint(3, 12, (3, 4))
    together = model(source, LENGTHS, target)
    for i, n in enumerate(LENGTHS.tolist()):
        alone = model(source[i : i + 1, :n], LENGTHS[i : i + 1], target[i : i + 1])
        assert_close(together[i : i + 1], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("cell", LAYERS)
def test_step_by_step_equals_teacher_forcing(cell: Cell, attention: bool) -> None:
    """Writing runs the cells above, training torch's layers: both must compute the same."""
    torch.manual_seed(0)
    model = RecurrentSeq2Seq(20, 12, dim=16, cell=cell, attention=attention)
    source, target = padded_batch(), torch.randint(3, 12, (3, 4))
    target[:, 0] = SOS
    context, outputs = model.start(source, LENGTHS), []
    for step in range(4):
        logits, weights, context = model.step(target[:, step], context)
        outputs.append(logits)
        assert (weights is None) == (not attention)
    assert_close(torch.stack(outputs, dim=1), model(source, LENGTHS, target), atol=1e-6, rtol=0)


def test_fixed_context_has_one_vector_for_the_source() -> None:
    """Two sources with the same last states give the same output: nothing else reaches the decoder."""
    torch.manual_seed(0)
    model = RecurrentSeq2Seq(20, 12, dim=16, cell="gru", attention=False)
    memory, mask, state = model.start(padded_batch(), LENGTHS)
    token = torch.full((3,), SOS)
    expected, _, _ = model.step(token, (memory, mask, state))
    changed, _, _ = model.step(token, (torch.randn_like(memory), mask, state))
    assert torch.equal(expected, changed)
