"""Every model option against its definition, on small sizes."""

import dataclasses
import re
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.vit_options import BASE, OPTIONS, make_vit, random_images
from patchword.config import ResNetConfig, ViTConfig
from patchword.config.model import REGULARIZATION_FIELDS
from patchword.errors import ConfigError
from patchword.inspection.capture import attention_maps, features
from patchword.models import DistilledViT, ViT, adapt_model, build_model, create_model, patchify, unpatchify, vit
from patchword.models.adapt import adapt_channels
from patchword.models.attention import attention_weights
from patchword.models.pos_embed import resample_grid, sincos_2d
from patchword.models.resnet import StdConv2d, pad_same


def test_every_field_is_an_option() -> None:
    """A new field of the config needs an option here, so that the tests over all options cover it."""
    tested_below = {*REGULARIZATION_FIELDS, "local_attention_init", "pos_embed_prefix", "weight_standardization"}
    changed = {name for option in OPTIONS.values() for name in option}
    fields = {field.name for field in dataclasses.fields(ViTConfig)}
    differs_in_base = {name for name in fields if getattr(BASE, name) != getattr(ViTConfig(), name)}
    assert fields - changed - differs_in_base - tested_below == {"head_dim"}  # in the snapshots


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option: str) -> None:
    """Shapes, independence of the batch, gradients of all parameters, attention maps, and other image sizes."""
    model = make_vit(**OPTIONS[option])
    images = random_images(model)
    logits = model(images)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(torch.cat([model(images[:1]), model(images[1:])]), logits, rtol=1e-5, atol=2e-5)
    logits.square().sum().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert not unused
    check_maps(model, images)
    if option != "non-square":
        larger = adapt_model(model, image_size=(48, 64))
        assert larger(torch.randn(1, model.config.in_channels, 48, 64)).shape == (1, 5)


def check_maps(model: ViT, images: Tensor) -> None:
    """The maps equal the weights of the fused kernel in `forward`."""
    inputs = {}

    def record(module: nn.Module, args: tuple, output: Tensor) -> None:
        inputs[len(inputs)] = (module, args[0], output)

    for block in model.blocks:
        block.attention.register_forward_hook(record)
    with torch.no_grad():
        maps = attention_maps(model, images)
        for i, (attention, x, output) in inputs.items():
            torch.testing.assert_close(maps[i].sum(dim=-1), torch.ones(maps[i].shape[:-1]))
            mixed = maps[i] @ attention.project(x)[2]
            torch.testing.assert_close(attention.merge_heads(mixed), output, rtol=1e-4, atol=1e-5)
    assert len(inputs) == model.config.depth


def test_forward_matches_the_equations_of_the_paper() -> None:
    """Equations 1 to 4 of the ViT paper, in plain formulas."""
    model = make_vit()
    images, state = random_images(model), dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return y * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patches = F.unfold(images, 8, stride=8).transpose(1, 2)  # (B, N, C*P*P), channel first
    z = linear(patches, "patch_embed.proj")
    z = torch.cat([state["class_token"].expand(2, 1, -1), z], dim=1) + state["positions.table"]
    for i in range(3):
        q, k, v = linear(norm(z, f"blocks.{i}.norm1"), f"blocks.{i}.attention.qkv").chunk(3, dim=-1)
        heads = []
        for h in range(3):
            head = slice(16 * h, 16 * h + 16)
            weights = (q[..., head] @ k[..., head].transpose(1, 2) / 16**0.5).softmax(-1)
            heads.append(weights @ v[..., head])
        z = linear(torch.cat(heads, dim=-1), f"blocks.{i}.attention.out") + z
        hidden = linear(norm(z, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        z = linear(hidden, f"blocks.{i}.mlp.fc2") + z
    logits = linear(norm(z, "norm")[:, 0], "head")
    torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-4)


def test_vit_is_one_short_file() -> None:
    """vit.py explains ViT: it has no branches for devices, dtypes, hooks or speed."""
    source = Path(vit.__file__).read_text()
    assert len(source.splitlines()) <= 200
    assert not re.search(r"device|dtype|hook|bfloat16|autocast|grad_enabled|no_grad", source)


# Patches


@hypothesis.given(
    b=st.integers(1, 3), c=st.integers(1, 5), ph=st.integers(1, 9), pw=st.integers(1, 9),
    rows=st.integers(1, 5), columns=st.integers(1, 5),
)  # fmt: skip
def test_patchify_round_trip(b: int, c: int, ph: int, pw: int, rows: int, columns: int) -> None:
    images = torch.randn(b, c, rows * ph, columns * pw)
    patches = patchify(images, (ph, pw))
    assert patches.shape == (b, rows * columns, c * ph * pw)
    assert torch.equal(patches[0, -1], images[0, :, -ph:, -pw:].flatten())  # last patch: bottom right, channel first
    assert torch.equal(unpatchify(patches, (ph, pw), (rows, columns)), images)


def test_patchify_shape_of_16x16_patches() -> None:
    assert patchify(torch.zeros(1, 3, 48, 48), (16, 16)).shape == (1, 9, 768)


def test_patches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="33x32.*8x8"):
        patchify(torch.zeros(1, 3, 33, 32), (8, 8))
    with pytest.raises(ConfigError, match=r"16 .*192 .*4x5 grid.*8x8"):
        unpatchify(torch.zeros(1, 16, 192), (8, 8), (4, 5))


def test_flattened_patches_as_input() -> None:
    """Flattened patches (x_p in the paper) give the same output as the image, and so does a convolution."""
    model = make_vit()
    images = random_images(model)
    patches = patchify(images, (8, 8))
    assert torch.equal(model(patches), model(images))
    kernel = model.patch_embed.proj.weight.view(48, 3, 8, 8)
    convolved = F.conv2d(images, kernel, model.patch_embed.proj.bias, stride=8).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.patch_embed(patches), convolved, rtol=1e-4, atol=1e-4)


def test_wrong_input_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(B, 3, 32, 32\).*\(1, 3, 40, 32\).*image_size"):
        make_vit()(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ConfigError, match=r"\(1, 1, 32, 32\).*in_channels"):
        make_vit()(torch.zeros(1, 1, 32, 32))
    with pytest.raises(ConfigError, match=r"\(B, 3, 32, 32\).*\(1, 16, 191\)"):
        make_vit()(torch.zeros(1, 16, 191))


# Position embeddings


@pytest.mark.parametrize("kind", ["learned", "learned_2d", "relative", "sincos", "rotary"])
def test_position_embeddings_break_permutation_invariance(kind: str) -> None:
    model = make_vit(pos_embed=kind, pooling="average")
    patches = patchify(random_images(model), (8, 8))
    assert (model(patches) - model(patches.flip(1))).abs().max() > 1e-3


def test_permutation_invariance_without_position_embeddings() -> None:
    model = make_vit(pos_embed="none")
    patches = patchify(random_images(model), (8, 8))
    torch.testing.assert_close(model(patches.flip(1)), model(patches), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["relative", "rotary"])
def test_relative_position_embeddings_depend_on_offsets_only(kind: str) -> None:
    """The score of two patches with the same content does not change if both move by the same offset."""
    model = make_vit(pos_embed=kind, class_token=False, pooling="average")
    attention = model.blocks[0].attention
    x = torch.randn(1, 1, 48).expand(1, 16, 48)  # the same content everywhere
    q, k, _ = attention.project(x)
    scores = q @ k.transpose(-2, -1) / 4
    bias = attention.bias()
    scores = (scores if bias is None else scores + bias)[0].detach().view(3, 4, 4, 4, 4)  # head, y, x, y', x'
    torch.testing.assert_close(scores[:, :3, :3, :3, :3], scores[:, 1:, 1:, 1:, 1:], rtol=1e-4, atol=1e-4)
    assert (scores[:, 0, 0, 0, 1] - scores[:, 0, 0, 1, 0]).abs().max() > 1e-3  # right differs from below


@pytest.mark.parametrize("attention", ["global", "local", "axial"])
def test_smaller_images_in_training(attention: str) -> None:
    """The same output as a model of that size whose table of offsets is the center of this one; larger ones fail."""
    kind = {
        "pos_embed": "relative",
        "pooling": "average",
        "attention_pattern": attention,
        "window_size": 3,
        "num_registers": 2,
    }
    model, small = make_vit(image_size=(40, 48), **kind), make_vit(seed=1, image_size=(24, 32), **kind)
    state = {n: t[:, 2:-2, 2:-2] if n.endswith("relative") else t for n, t in model.state_dict().items()}
    small.load_state_dict(state)
    images = random_images(small)
    torch.testing.assert_close(model.train()(images), small(images))
    with pytest.raises(ConfigError, match=r"\(1, 3, 48, 48\).*image_size"):
        model(torch.zeros(1, 3, 48, 48))
    with pytest.raises(ConfigError, match=r"\(2, 3, 24, 32\).*image_size"):
        model.eval()(images)


def test_learned_2d_concatenates_row_and_column() -> None:
    model = make_vit(pos_embed="learned_2d", image_size=(32, 64))
    _, table = model.positions.tables()
    expected = torch.cat([model.positions.rows[2], model.positions.columns[5]])
    assert torch.equal(table[0, 2 * 8 + 5], expected)


def test_sincos_is_fixed_and_two_dimensional() -> None:
    table = sincos_2d((3, 5), 16, steps=3).view(3, 5, 16)
    assert torch.equal(table[0, 2, :8], table[2, 2, :8])  # the first half depends on the column only
    assert torch.equal(table[1, 0, 8:], table[1, 4, 8:])  # the second half on the row
    torch.testing.assert_close(table[0, 1, 0], torch.tensor(1.0).sin())
    torch.testing.assert_close(table[2, 0, 15], torch.tensor(2e-4).cos())
    assert "positions.table" not in make_vit(pos_embed="sincos").state_dict()


@pytest.mark.parametrize("mode", ["google", "timm", "transformers", "torchvision", "dinov2"])
def test_resampling(mode: str) -> None:
    table = torch.randn(16, 6)
    assert resample_grid(table, (4, 4), (4, 4), mode) is table
    assert resample_grid(table, (4, 4), (2, 8), mode).shape == (16, 6)
    assert (resample_grid(table, (4, 4), (2, 8), mode) - table).abs().max() > 0.1  # the same count is not the same grid
    flat = resample_grid(torch.ones(16, 6), (4, 4), (7, 3), mode)
    torch.testing.assert_close(flat, torch.ones(21, 6))
    ramp = torch.arange(8.0)[:, None].expand(8, 4).reshape(32, 1)  # rows 0..7: rows must stay rows
    up = resample_grid(ramp, (8, 4), (16, 4), mode).view(16, 4)
    torch.testing.assert_close(up, up[:, :1].expand(16, 4))
    assert (up[1:] - up[:-1]).min() > 0 or mode in ("transformers", "timm", "dinov2")


def test_google_resampling_matches_scipy_zoom() -> None:
    scipy = pytest.importorskip("scipy.ndimage")
    table = torch.randn(12, 5)
    zoomed = scipy.zoom(table.view(3, 4, 5).numpy(), (7 / 3, 6 / 4, 1), order=1)
    torch.testing.assert_close(resample_grid(table, (3, 4), (7, 6), "google"), torch.from_numpy(zoomed).view(42, 5))


def test_resizing_keeps_prefix_position_embeddings() -> None:
    model = make_vit(num_registers=2, pos_embed_prefix=3)
    larger = adapt_model(model, image_size=48)
    assert torch.equal(larger.positions.table[:, :3], model.positions.table[:, :3])
    assert larger.positions.table.shape == (1, 3 + 36, 48)
    same = adapt_model(model, image_size=32)
    assert torch.equal(same(random_images(model)), model(random_images(model)))


# Pooling and heads


def test_average_pooling_excludes_prefix_tokens() -> None:
    model = make_vit(pooling="average", num_registers=3)
    tokens = torch.randn(2, 20, 48)
    torch.testing.assert_close(model.pool(tokens), tokens[:, 4:].mean(1))


def test_attention_pooling_matches_its_definition() -> None:
    pool = make_vit(pooling="attention").pool
    tokens = torch.randn(2, 17, 48)
    patches = tokens[:, 1:]
    q, (k, v) = pool.q(pool.probe)[0, 0], pool.kv(patches).chunk(2, dim=-1)
    heads = []
    for h in range(3):
        head = slice(16 * h, 16 * h + 16)
        weights = (k[..., head] @ q[head] / 4).softmax(-1)  # (B, N)
        torch.testing.assert_close(attention_weights(*pool.project(tokens)[:2])[:, h, 0], weights)
        heads.append((weights[..., None] * v[..., head]).sum(1))
    x = pool.out(torch.cat(heads, dim=-1))
    expected = x + pool.fc2(F.gelu(pool.fc1(pool.norm(x))))
    torch.testing.assert_close(pool(tokens), expected, rtol=1e-4, atol=1e-4)


def test_class_and_average_pooling_are_concatenated() -> None:
    tokens = torch.randn(2, 17, 48)
    pooled = make_vit(pooling="class+average").pool(tokens)
    torch.testing.assert_close(pooled, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1))


def test_distillation_heads_are_averaged() -> None:
    model = make_vit(distillation=True)
    first, second = model.forward_distilled(random_images(model))
    assert (first - second).abs().max() > 0.01
    torch.testing.assert_close(model(random_images(model)), (first + second) / 2)


def test_build_model_returns_a_distilled_vit() -> None:
    """A ViT would ignore the distillation token, so it refuses the config."""
    config = BASE.replace(distillation=True)
    assert type(build_model(config)) is DistilledViT
    assert type(build_model(BASE)) is ViT
    with pytest.raises(ConfigError, match="DistilledViT"):
        ViT(config)


def test_pre_logits_is_a_tanh_layer() -> None:
    model = make_vit(pre_logits=20)
    tokens = model.forward_features(random_images(model))
    layer = model.pre_logits
    expected = torch.tanh(F.linear(tokens[:, 0], layer.weight, layer.bias))
    torch.testing.assert_close(model.forward_pool(tokens), expected)


def test_new_head_is_zero() -> None:
    model = create_model("Ti/16", image_size=32, num_classes=7, depth=1)
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.zeros(2, 7))


def test_replacing_the_head_keeps_the_backbone() -> None:
    model = make_vit(pre_logits=20)
    adapted = adapt_model(model, num_classes=9)
    assert not list(adapted.pre_logits.parameters())
    assert adapted.config.pre_logits is None
    assert torch.equal(adapted(random_images(model)), torch.zeros(2, 9))
    assert torch.equal(adapted.forward_features(random_images(model)), model.forward_features(random_images(model)))
    assert adapt_model(adapted, num_classes=0)(random_images(model)).shape == (2, 48)


# Blocks


def test_post_norm() -> None:
    block = make_vit(post_norm=True).blocks[0]
    x = torch.randn(2, 17, 48)
    middle = block.norm1(x + block.attention(x))
    torch.testing.assert_close(block(x), block.norm2(middle + block.mlp(middle)))


def test_layer_scale() -> None:
    model = make_vit(layer_scale=0.1)
    block, x = model.blocks[0], torch.randn(2, 17, 48)
    middle = x + block.add1.gamma * block.attention(block.norm1(x))
    torch.testing.assert_close(block(x), middle + block.add2.gamma * block.mlp(block.norm2(middle)))
    assert torch.equal(build_model(BASE.replace(layer_scale=0.1)).blocks[1].add2.gamma.detach(), torch.full((48,), 0.1))


def test_query_key_norm() -> None:
    attention = make_vit(qk_norm=True).blocks[0].attention
    x = torch.randn(1, 17, 48)
    raw = attention.qkv(x)[..., :48].view(1, 17, 3, 16).transpose(1, 2)
    torch.testing.assert_close(attention.project(x)[0], attention.q_norm(raw))


def test_swiglu() -> None:
    mlp, x = make_vit(activation="swiglu").blocks[0].mlp, torch.randn(2, 3, 48)
    gate, value = mlp.fc1(x).chunk(2, dim=-1)
    torch.testing.assert_close(mlp(x), mlp.fc2(gate * gate.sigmoid() * value))


def test_axial_attention_alternates_rows_and_columns() -> None:
    maps = attention_maps(make_vit(attention_pattern="axial"), torch.randn(1, 3, 32, 32))
    attended = (maps[0][0, 0, 1:, 1:] > 0).view(4, 4, 4, 4)  # from (y, x) to (y', x')
    assert torch.equal(attended[1, 2], torch.tensor([[0] * 4, [1] * 4, [0] * 4, [0] * 4]).bool())
    attended = (maps[1][0, 0, 1:, 1:] > 0).view(4, 4, 4, 4)
    assert torch.equal(attended[1, 2], torch.tensor([[0, 0, 1, 0]] * 4).bool())
    assert (maps[0][0, :, 0] > 0).all()
    assert (maps[0][0, :, :, 0] > 0).all()


def test_local_attention_attends_to_a_window() -> None:
    maps = attention_maps(
        make_vit(attention_pattern="local", window_size=3, image_size=(32, 48)), torch.randn(1, 3, 32, 48)
    )
    attended = (maps[0][0, 0, 1:, 1:] > 0).view(4, 6, 4, 6)
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[0:3, 3:6] = True
    assert torch.equal(attended[1, 4], expected)


def test_local_attention_init_attends_to_one_neighbor_per_head() -> None:
    """With zero queries and keys, each head of a new model attends to one neighbor; three layers cover all nine."""
    config = BASE.replace(
        pos_embed="relative", pooling="average", class_token=False, local_attention_init=1.5, image_size=40
    )
    model = build_model(config)
    for block in model.blocks:
        nn.init.zeros_(block.attention.qkv.weight)
    maps = attention_maps(model, torch.randn(1, 3, 40, 40))
    from_center = torch.cat([maps[layer][0, :, 12] for layer in range(3)])  # (9, 25), on a grid of 5 x 5
    positions = from_center.argmax(dim=1).tolist()
    assert sorted(positions) == [6, 7, 8, 11, 12, 13, 16, 17, 18]
    assert from_center.max(dim=1).values.min() > 0.4
    assert from_center.min() > 1e-7, "distant patches must still get gradients"


def test_blocks_are_initialized_differently() -> None:
    model = build_model(BASE)
    assert not torch.equal(model.blocks[0].attention.qkv.weight, model.blocks[1].attention.qkv.weight)
    limit = (6 / 96) ** 0.5  # Xavier for each of the three projections, not for the packed matrix
    assert 0.95 * limit < model.blocks[0].attention.qkv.weight.abs().max() <= limit


# Regularization


def test_regularization_is_off_in_eval_mode() -> None:
    model = make_vit(dropout=0.5, drop_path=0.5, patch_dropout=0.5)
    plain = build_model(BASE).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(random_images(model)), plain(random_images(model)))
    images = random_images(model)
    model.train()
    assert not torch.equal(model(images), model(images))


def test_patch_dropout_keeps_the_order_and_positions_of_patches() -> None:
    model = make_vit(patch_dropout=0.75).train()
    images = random_images(model)
    tokens, all_tokens = model.embed_patches(images), model.eval().embed_patches(images)
    assert tokens.shape == (2, 1 + 4, 48)
    for image in range(2):
        matches = (tokens[image, 1:, None] == all_tokens[image, None, 1:]).all(-1)  # (kept, all)
        positions = matches.int().argmax(1)
        assert matches.any(1).all()
        assert (positions[1:] > positions[:-1]).all()


def test_drop_path_drops_whole_branches_and_keeps_the_mean() -> None:
    add = make_vit(drop_path=0.5).blocks[2].add1.train()
    out = add(torch.ones(4000, 2, 48))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert (out == out[:, :1, :1]).all()
    assert 0.45 < (out[:, 0, 0] == 0).float().mean() < 0.55
    assert make_vit(drop_path=0.5).blocks[0].add1.drop_path == 0  # the first block is never dropped


def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, checkpointed = make_vit().train(), make_vit(grad_checkpointing=True).train()
    for model in (plain, checkpointed):
        model(random_images(model)).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


# Features, attention maps and export


def test_features_are_named() -> None:
    model = make_vit(pre_logits=20)
    found = features(model, random_images(model), layers=[0, -1])
    blocks = [f"blocks.{i}{suffix}" for i in (0, 2) for suffix in ("", ".attention", ".mlp")]
    assert set(found) == {"stem", "patch_embed", "positions", "norm_pre", *blocks, "norm", "pool", "pre_logits", "head"}
    torch.testing.assert_close(found["norm"], model.forward_features(random_images(model)))
    torch.testing.assert_close(found["head"], model(random_images(model)))
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(ConfigError, match=r"\b0 to 2\b.*\blayer 3\b"):
        features(model, random_images(model), layers=[3])


def test_attention_maps_of_selected_layers() -> None:
    model = make_vit(num_registers=2)
    maps = attention_maps(model, random_images(model), layers=[-1])
    assert list(maps) == [2]
    assert maps[2].shape == (2, 3, 19, 19)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.export warns about its own internals
@pytest.mark.parametrize("option", ["plain", "relative", "rotary", "rope mixed", "map", "hybrid", "conv stem"])
def test_torch_export(option: str) -> None:
    model = make_vit(**OPTIONS[option])
    images = random_images(model)
    with torch.no_grad():
        exported = torch.export.export(model, (images,)).module()
        torch.testing.assert_close(exported(images), model(images), rtol=1e-5, atol=1e-5)


# Channels


@hypothesis.given(old=st.integers(1, 12), new=st.integers(1, 12))
def test_adapt_channels_keeps_the_sum(old: int, new: int) -> None:
    weight = torch.randn(5, old, 7, dtype=torch.float64)
    adapted = adapt_channels(weight, new)
    assert adapted.shape == (5, new, 7)
    torch.testing.assert_close(adapted.sum(1), weight.sum(1))
    assert (adapted.abs().sum((0, 2)) > 0).all()  # no channel is ignored


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "conv stem"])
def test_grayscale_image_gives_the_same_output_for_any_number_of_channels(option: str) -> None:
    model = make_vit(**OPTIONS[option])
    gray = torch.randn(2, 1, 32, 32)
    for channels in (1, 2, 4, 6):
        adapted = adapt_model(model, in_channels=channels)
        torch.testing.assert_close(
            adapted(gray.expand(-1, channels, -1, -1)), model(gray.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4
        )


def test_other_fields_cannot_be_adapted() -> None:
    with pytest.raises(ConfigError, match="depth.*image_size"):
        adapt_model(make_vit(), depth=2)
    with pytest.raises(ConfigError, match="pre_logits.*image_size"):
        adapt_model(make_vit(), pre_logits=10)


# Residual networks


def test_standardized_convolution() -> None:
    conv = StdConv2d(8, 16, 3, rule="bit")
    weights = conv.standardized_weight()
    torch.testing.assert_close(weights.mean((1, 2, 3)), torch.zeros(16), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.var((1, 2, 3), correction=0), torch.ones(16), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (224, 7, 2), (5, 1, 2), (6, 3, 1)])
def test_same_padding(size: int, kernel: int, stride: int) -> None:
    x = pad_same(torch.ones(1, 1, size, size), kernel, stride)
    out = F.conv2d(x, torch.ones(1, 1, kernel, kernel), stride=stride)
    assert out.shape[-1] == -(-size // stride)
    before = int((x[0, 0, x.shape[-2] // 2] == 0).float().argmin())
    assert 0 <= (x.shape[-1] - size) - 2 * before <= 1  # the odd pixel comes last


@pytest.mark.slow
def test_small_resnet() -> None:
    """ResNet-20 has 0.27 M parameters (He et al., table 6), here with projections in two shortcuts."""
    model = build_model(ResNetConfig(image_size=32, layers=(3, 3, 3), num_classes=10, kind="cifar")).eval()
    assert sum(p.numel() for p in model.parameters()) == 269_722 + 2_560
    images = torch.randn(2, 3, 32, 32)
    assert model.feature_map(images).shape == (2, 64, 8, 8)
    assert torch.equal(model(images), torch.zeros(2, 10))
    gray = adapt_model(model, in_channels=1, num_classes=0)
    assert gray(images[:, :1]).shape == (2, 64)
    assert adapt_model(gray, num_classes=3)(images[:, :1]).shape == (2, 3)


def test_bit_resnet() -> None:
    torch.manual_seed(0)
    model = build_model(ResNetConfig(image_size=64, layers=(1, 2), num_classes=4)).eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(images), torch.zeros(2, 4))  # zero head
    assert model.feature_map(images).shape == (2, 512, 8, 8)
    gray = adapt_model(model, in_channels=1, num_classes=0)
    assert gray(images[:, :1]).shape == (2, 512)


def test_dropout_leaves_attention_weights_alone() -> None:
    """As in the paper (B.1): dropout follows dense layers and position embeddings; attention weights have their own."""
    model = make_vit(dropout=0.5)
    assert {block.attention.attend.dropout for block in model.blocks} == {0.0}
    assert {block.attention.attend.dropout for block in make_vit(attention_dropout=0.5).blocks} == {0.5}


def test_single_image_is_refused() -> None:
    model = make_vit()
    with pytest.raises(ConfigError, match=r"images\[None\]"):
        model(random_images(model)[0])
