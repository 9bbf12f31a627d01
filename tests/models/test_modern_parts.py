"""The parts of modern ViTs against their definitions: norms, activations, biases, pooling. RoPE is in test_rope.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.vit_options import make_vit, random_images
from patchword.inspection.capture import features
from patchword.models import ViT, build_model, patchify
from patchword.models.attention import attention_weights
from patchword.models.layers import NoKeyBiasLinear, activate


def tokens_of(count: int = 17, dim: int = 48) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, count, dim)


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


# Activations and norms


def test_quick_gelu() -> None:
    x = tokens_of()
    expected = x / (1 + (-1.702 * x).exp())
    torch.testing.assert_close(activate(x, "quick_gelu"), expected)
    assert (activate(x, "gelu") - expected).abs().max() > 0.01
    mlp = make_vit(activation="quick_gelu").blocks[0].mlp
    hidden = linear(x, mlp.fc1)
    torch.testing.assert_close(mlp(x), linear(hidden / (1 + (-1.702 * hidden).exp()), mlp.fc2), rtol=1e-4, atol=1e-5)


def test_rms_norm_is_everywhere() -> None:
    """RMSNorm is x / sqrt(mean(x^2) + eps) * weight: it has neither a mean nor a bias."""
    model = make_vit(
        norm_layer="rms_norm", norm_eps=0.01, norm_pre=True, norm_embed=True, qk_norm=True, attention_norm=True,
        mlp_norm=True, pooling="attention",
    )  # fmt: skip
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert all(isinstance(norm, nn.RMSNorm) for norm in norms)
    assert len(norms) == 2 + 3 * 6 + 1 + 1  # embed, pre; those of 3 blocks; final; pool
    x = tokens_of()
    expected = x / (x.square().mean(dim=-1, keepdim=True) + 0.01).sqrt() * model.norm.weight
    torch.testing.assert_close(model.norm(x), expected)


def test_sub_norm_precedes_the_output_of_attention() -> None:
    attention, x = make_vit(attention_norm=True).blocks[0].attention, tokens_of()
    q, k, v = attention.project(x)
    mixed = (attention_weights(q, k) @ v).transpose(1, 2).flatten(2)
    expected = linear(layer_norm(mixed, attention.norm), attention.out)
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_sub_norm_precedes_the_last_layer_of_the_mlp(activation: str) -> None:
    mlp, x = make_vit(mlp_norm=True, activation=activation).blocks[0].mlp, tokens_of()
    hidden = linear(x, mlp.fc1)
    if activation == "swiglu":
        gate, value = hidden.chunk(2, dim=-1)
        hidden = gate * gate.sigmoid() * value
    else:
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(mlp(x), linear(layer_norm(hidden, mlp.norm), mlp.fc2), rtol=1e-4, atol=1e-4)


def test_residual_post_norm() -> None:
    model, x = make_vit(res_post_norm=True, layer_scale=0.5), tokens_of()
    block = model.blocks[1]
    middle = x + block.add1.gamma * layer_norm(block.attention(x), block.norm1)
    expected = middle + block.add2.gamma * layer_norm(block.mlp(middle), block.norm2)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


def test_norms_around_the_position_embeddings() -> None:
    """norm_embed precedes positions and prefix tokens, norm_pre follows both."""
    model = make_vit(norm_embed=True, norm_pre=True, patch_bias=False)
    images = random_images(model)
    embedded = patchify(images, (8, 8)) @ model.patch_embed.proj.weight.T
    patches = layer_norm(embedded, model.patch_embed.norm_out) + model.positions.table[:, 1:]
    first = (model.class_token + model.positions.table[:, :1]).expand(2, -1, -1)
    expected = layer_norm(torch.cat([first, patches], dim=1), model.norm_pre)
    torch.testing.assert_close(model.embed_patches(images), expected, rtol=1e-4, atol=1e-4)
    found = features(model, images)
    torch.testing.assert_close(found["norm_pre"], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found["positions"], expected, atol=0.1)


def test_no_final_norm() -> None:
    model = make_vit(final_norm=False)
    found = features(model, random_images(model))
    assert torch.equal(found["norm"], found["blocks.2"])
    assert not [name for name in model.state_dict() if name.startswith("norm.")]


# Biases


def test_layers_without_bias() -> None:
    model = make_vit(qkv_bias=False, out_bias=False, mlp_bias=False, patch_bias=False, norm_layer="rms_norm")
    assert [name for name in model.state_dict() if name.endswith("bias")] == ["head.bias"]
    assert (
        make_vit(patch_bias=False, stem="conv", stem_layers=(8,), patch_size=4)(torch.randn(1, 3, 32, 32))
        .isfinite()
        .all()
    )


def test_keys_have_no_bias() -> None:
    """Its third of the bias is zero, gets no gradient, and no optimizer step moves it."""
    model = make_vit(key_bias=False, pos_embed="rotary")
    layers = [block.attention.qkv for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train()(random_images(model)).square().sum().backward()
    for layer in layers:
        assert isinstance(layer, NoKeyBiasLinear)
        queries, keys, values = layer.bias.grad.chunk(3)
        assert torch.equal(keys, torch.zeros(48))
        assert queries.abs().min() > 0
        assert values.abs().min() > 0
    optimizer.step()
    assert all(torch.equal(layer.bias.detach().chunk(3)[1], torch.zeros(48)) for layer in layers)
    assert all(layer.bias.detach().chunk(3)[0].abs().min() > 0 for layer in layers)


def test_keys_get_no_bias_with_gradients() -> None:
    """Even if something wrote into that third."""
    layer = make_vit(key_bias=False).blocks[0].attention.qkv
    x, expected = tokens_of(), layer(tokens_of())
    with torch.no_grad():
        layer.bias[48:96] = 5.0
    assert torch.equal(layer(x), expected)
    layer.clear_key_bias()
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


# Positions


def test_relative_positions_with_values_for_the_class_token() -> None:
    bias = make_vit(pos_embed="relative", relative_prefix=True, image_size=(16, 24)).blocks[0].attention.bias
    found = bias()
    assert found.shape == (3, 7, 7)
    for head in range(3):
        to_patches, to_class, itself = bias.prefix[head].tolist()
        for a in range(6):
            for b in range(6):
                dy, dx = a // 3 - b // 3, a % 3 - b % 3
                assert found[head, 1 + a, 1 + b] == bias.relative[head, dy + 1, dx + 2]
        assert found[head, 0, 1:].tolist() == [to_patches] * 6, "the class token attends to patches"
        assert found[head, 1:, 0].tolist() == [to_class] * 6, "patches attend to the class token"
        assert found[head, 0, 0] == itself
    smaller = bias((2, 2))
    rows = torch.tensor([0, 1, 2, 4, 5])  # the class token, and the top left corner
    assert torch.equal(smaller, found[:, rows][:, :, rows])


def test_relative_positions_without_values_for_the_class_token() -> None:
    found = make_vit(pos_embed="learned+relative").blocks[0].attention.bias()
    assert not found[:, 0].any()
    assert not found[:, :, 0].any()


def test_sine_cosine_positions_of_mae() -> None:
    """[sin x, cos x, sin y, cos y] at D/4 frequencies 10000^(-j/(D/4)), those of columns first."""
    table = make_vit(pos_embed="sincos_mae", image_size=(16, 24)).positions.table[0].view(2, 3, 48)
    for row in range(2):
        for column in range(3):
            expected = [
                f(position * 10_000 ** (-j / 12))
                for position in (column, row)
                for f in (math.sin, math.cos)
                for j in range(12)
            ]
            torch.testing.assert_close(table[row, column], torch.tensor(expected))


@pytest.mark.parametrize("second", ["rotary", "relative"])
def test_two_kinds_of_positions(second: str) -> None:
    """Each of the two matters; without the learned ones the model is that with the second kind alone."""
    both, alone = make_vit(pos_embed=f"learned+{second}"), make_vit(pos_embed=second)
    images, expected = random_images(both), both(random_images(both))
    nn.init.zeros_(both.positions.table)
    alone.load_state_dict({name: t for name, t in both.state_dict().items() if name != "positions.table"})
    torch.testing.assert_close(both(images), alone(images))
    assert (both(images) - expected).abs().max() > 1e-3


# Pooling and what follows it


def pooled_by_loops(pool: Any, tokens: Tensor) -> Tensor:
    """Attention of one query to tokens (n, D), head by head and token by token."""
    query, (keys, values) = pool.q(pool.probe)[0, 0], linear(tokens, pool.kv).chunk(2, dim=-1)
    width = tokens.shape[1] // pool.num_heads
    heads = []
    for head in range(pool.num_heads):
        part = slice(head * width, (head + 1) * width)
        scores = [float(query[part] @ key[part]) / width**0.5 for key in keys]
        weights = [math.exp(score - max(scores)) for score in scores]
        heads.append(sum(w / sum(weights) * value[part] for w, value in zip(weights, values, strict=True)))
    return linear(torch.cat(heads), pool.out)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["query", "attention"])
@pytest.mark.parametrize("prefix", [False, True], ids=["patches", "all tokens"])
def test_pooling_by_a_query(pooling: str, prefix: bool) -> None:
    """AIMv2's has no projection of the query and no MLP; pool_prefix includes class token and registers."""
    options = {"pool_mlp_dim": 20} if pooling == "attention" else {}
    model = make_vit(pooling=pooling, pool_prefix=prefix, pool_heads=4, num_registers=2, **options)
    pool, tokens = model.pool, tokens_of(3 + 16)
    expected = torch.stack([pooled_by_loops(pool, image[0 if prefix else 3 :]) for image in tokens])
    if pooling == "attention":
        expected = expected + linear(F.gelu(linear(layer_norm(expected, pool.norm), pool.fc1)), pool.fc2)
    else:
        assert {name.split(".")[0] for name, _ in pool.named_parameters()} == {"probe", "kv", "out"}
    torch.testing.assert_close(pool(tokens), expected, rtol=1e-4, atol=1e-4)


def test_bias_of_query_pooling_follows_the_blocks() -> None:
    assert make_vit(pooling="query").pool.kv.bias is not None
    assert make_vit(pooling="query", qkv_bias=False).pool.kv.bias is None


def test_projection() -> None:
    """CLIP: the norm of the pooled class token, then a linear layer without bias, then a head if there is one."""
    model = make_vit(norm_after_pool=True, projection_dim=20, num_classes=0)
    images = random_images(model)
    class_token = features(model, images)["blocks.2"][:, 0]
    expected = layer_norm(class_token, model.norm) @ model.pre_logits.weight.T
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    assert model.pre_logits.bias is None
    classifier = make_vit(norm_after_pool=True, projection_dim=20)
    assert classifier.head.in_features == 20
    assert classifier(images).shape == (2, 5)


def test_new_parts_are_initialized() -> None:
    """Nothing that would stop gradients, and every norm starts as the identity."""
    torch.manual_seed(0)
    model = build_model(
        make_vit(
            pos_embed="relative",
            relative_prefix=True,
            attention_norm=True,
            mlp_norm=True,
            norm_pre=True,
            key_bias=False,
        ).config
    )
    assert isinstance(model, ViT)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        elif name.endswith((".relative", ".bias.prefix")):
            assert 0.001 < parameter.std() < 0.05, name
    query = build_model(make_vit(pooling="query", projection_dim=20).config)
    assert 0.05 < query.pool.probe.std() < 0.3
    assert query.pre_logits.weight.std() > 0.05
