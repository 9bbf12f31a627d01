"""The Transformer: against nn.Transformer and MarianMT with the same weights, causality, padding, positions."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from patchword.lineage.recurrent import source_mask
from patchword.lineage.transformer import MultiHeadAttention, Transformer, sinusoids

LENGTHS = torch.tensor([6, 4, 2])


def tokens(size: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, size, (3, count), generator=torch.Generator().manual_seed(seed))


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Also norms and biases, which start as ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


@torch.no_grad()
def to_torch(ours: Transformer, pre_norm: bool) -> nn.Transformer:
    """nn.Transformer with the weights of ours; its post-norm form has final norms that the paper's has not."""
    theirs = nn.Transformer(
        32, 4, len(ours.encoder), len(ours.decoder), 64, dropout=0.0, norm_first=pre_norm, batch_first=True
    ).eval()
    for mine, other in zip(
        [*ours.encoder, *ours.decoder], [*theirs.encoder.layers, *theirs.decoder.layers], strict=True
    ):
        copy_attention(other.self_attn, mine.attention)
        other.linear1.load_state_dict(mine.mlp[0].state_dict())
        other.linear2.load_state_dict(mine.mlp[2].state_dict())
        adds = [mine.add1, mine.add2] + ([mine.add3] if hasattr(mine, "cross") else [])
        for add, norm in zip(adds, [other.norm1, other.norm2, getattr(other, "norm3", None)], strict=False):
            norm.load_state_dict(add.norm.state_dict())
        if hasattr(mine, "cross"):
            copy_attention(other.multihead_attn, mine.cross)
    for stack, norm in ((theirs.encoder, ours.encoder_norm), (theirs.decoder, ours.decoder_norm)):
        if pre_norm:
            stack.norm.load_state_dict(norm.state_dict())
        else:
            stack.norm = None
    return theirs


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_equals_nn_transformer(pre_norm: bool) -> None:
    torch.manual_seed(0)
    ours = Transformer(20, 15, dim=32, depth=2, num_heads=4, mlp_dim=64, pre_norm=pre_norm).eval()
    randomize(ours)
    source, target = tokens(20, 6), tokens(15, 5, seed=1)
    padding = ~source_mask(source, LENGTHS)
    hidden = to_torch(ours, pre_norm)(
        ours.embed(source, ours.embed_source), ours.embed(target, ours.embed_target),
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),  # torch's True hides
        src_key_padding_mask=padding, memory_key_padding_mask=padding,
    )  # fmt: skip
    assert_close(ours(source, LENGTHS, target), hidden @ ours.embed_target.weight.mT, atol=1e-5, rtol=0)


@torch.no_grad()
def test_equals_marian() -> None:
    """MarianMT is a post-norm Transformer whose sinusoids come as [sines, cosines] instead of in turn."""
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    config = MarianConfig(
        vocab_size=20, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, activation_function="relu", dropout=0.0,
        attention_dropout=0.0, scale_embedding=True, max_position_embeddings=16, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=2, forced_eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    marian = MarianMTModel(config).eval()
    randomize(marian)
    for stack in (marian.model.encoder, marian.model.decoder):  # computed, not learned
        halves = sinusoids(16, 32).unflatten(1, (16, 2))
        stack.embed_positions.weight.copy_(torch.cat([halves[..., 0], halves[..., 1]], dim=1))
    marian.tie_weights()
    ours = Transformer(20, 20, dim=32, depth=2, num_heads=4, mlp_dim=64).eval()
    # Marian's channel order of positions is ours after this permutation, so all of ours is permuted at its input.
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])  # our channel at Marian's place
    inverse = order.argsort()
    copy_marian(ours, marian, inverse)
    source, target = tokens(20, 6), tokens(20, 5, seed=1)
    mask = source_mask(source, LENGTHS).long()
    expected = marian(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    assert_close(ours(source, LENGTHS, target), expected - marian.final_logits_bias, atol=1e-5, rtol=0)


def copy_marian(ours: Transformer, marian: nn.Module, inverse: Tensor) -> None:
    """Copies Marian's weights, with the channels of the residual stream in our order."""
    model = marian.model
    for table, stack in ((ours.embed_source, model.encoder), (ours.embed_target, model.decoder)):
        table.weight.copy_(stack.embed_tokens.weight[:, inverse])

    def attention(mine: MultiHeadAttention, other: nn.Module) -> None:
        for linear, name in ((mine.query, "q_proj"), (mine.key, "k_proj"), (mine.value, "v_proj")):
            linear.weight.copy_(getattr(other, name).weight[:, inverse])
            linear.bias.copy_(getattr(other, name).bias)
        mine.out.weight.copy_(other.out_proj.weight[inverse])
        mine.out.bias.copy_(other.out_proj.bias[inverse])

    def norm(mine: nn.LayerNorm, other: nn.LayerNorm) -> None:
        mine.weight.copy_(other.weight[inverse])
        mine.bias.copy_(other.bias[inverse])

    pairs = [
        *zip(ours.encoder, model.encoder.layers, strict=True),
        *zip(ours.decoder, model.decoder.layers, strict=True),
    ]
    for mine, other in pairs:
        attention(mine.attention, other.self_attn)
        norm(mine.add1.norm, other.self_attn_layer_norm)
        last = mine.add2
        if hasattr(mine, "cross"):
            attention(mine.cross, other.encoder_attn)
            norm(mine.add2.norm, other.encoder_attn_layer_norm)
            last = mine.add3
        norm(last.norm, other.final_layer_norm)
        mine.mlp[0].weight.copy_(other.fc1.weight[:, inverse])
        mine.mlp[0].bias.copy_(other.fc1.bias)
        mine.mlp[2].weight.copy_(other.fc2.weight[inverse])
        mine.mlp[2].bias.copy_(other.fc2.bias[inverse])


@pytest.mark.parametrize("pre_norm", [False, True])
def test_future_tokens_change_nothing(pre_norm: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(20, 15, dim=32, pre_norm=pre_norm).eval()
    source, target = tokens(20, 6), tokens(15, 8, seed=1)
    changed = target.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 15
    before, after = model(source, LENGTHS, target), model(source, LENGTHS, changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_padded_batch_equals_single_sequences() -> None:
    torch.manual_seed(0)
    model = Transformer(20, 15, dim=32).eval()
    source, target = tokens(20, 6), tokens(15, 5, seed=1)
    together = model(source, LENGTHS, target)
    for i, n in enumerate(LENGTHS.tolist()):
        alone = model(source[i : i + 1, :n], LENGTHS[i : i + 1], target[i : i + 1])
        assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)


def test_step_by_step_equals_teacher_forcing() -> None:
    torch.manual_seed(0)
    model = Transformer(20, 15, dim=32).eval()
    source, target = tokens(20, 6), tokens(15, 5, seed=1)
    context, outputs = model.start(source, LENGTHS), []
    for step in range(5):
        logits, weights, context = model.step(target[:, step], context)
        outputs.append(logits)
        assert_close(weights.sum(-1), torch.ones(3))
        assert (weights[~source_mask(source, LENGTHS)] == 0).all()
    assert_close(torch.stack(outputs, dim=1), model(source, LENGTHS, target), atol=1e-5, rtol=0)


def test_without_positions_the_encoder_ignores_order() -> None:
    torch.manual_seed(0)
    source, lengths, order = tokens(20, 6), torch.tensor([6, 6, 6]), torch.tensor([3, 0, 5, 1, 4, 2])
    for positions, changes in ((False, False), (True, True)):
        model = Transformer(20, 15, dim=32, positions=positions).eval()
        memory, _ = model.encode(source, lengths)
        permuted, _ = model.encode(source[:, order], lengths)
        difference = (memory[:, order] - permuted).abs().max()
        assert (difference > 0.1) == changes
        assert changes or difference < 1e-5


def test_sinusoids_are_those_of_the_paper() -> None:
    table = sinusoids(7, 8)
    for position in range(7):
        for i in range(4):
            angle = torch.tensor(position / 10_000 ** (2 * i / 8))
            assert_close(table[position, 2 * i : 2 * i + 2], torch.stack([angle.sin(), angle.cos()]))
