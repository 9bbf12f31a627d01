"""Inspection of every modern family: captured attention is the model's own, and methods read what the head reads."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from helpers.command import run_in_process
from helpers.families import FAMILY_CONFIGS, family_model
from patchword import inspection
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.config import ResNetConfig, ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.errors import ConfigError
from patchword.evaluation.frozen_features import read_layer
from patchword.inference.classifier import Classifier, Encoder
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images
from patchword.inspection import capture
from patchword.inspection.capture import attention_maps, features
from patchword.inspection.faithfulness import randomized_copies
from patchword.inspection.walkthrough import trace_walkthrough
from patchword.models import ViT, build_model, optimize_for_cpu
from patchword.models.pooling import AttentionPool
from patchword.plots.theme import LIGHT
from patchword.report.inspection_panels import NAMES, Subject
from patchword.report.inspection_report import inspect

all_families = pytest.mark.parametrize("config", FAMILY_CONFIGS.values(), ids=FAMILY_CONFIGS.keys())


def make_model(config: ViTConfig) -> ViT:
    model = family_model(config)
    assert isinstance(model, ViT)
    return model


def random_images(config: ViTConfig, count: int = 2) -> Tensor:
    return torch.randn(count, config.in_channels, *config.image_size, generator=torch.Generator().manual_seed(1))


def make_checkpoint(config: ViTConfig) -> Checkpoint:
    preprocess = Preprocess(config.image_size, mean=HALF, std=HALF)
    labels = tuple(f"class {i}" for i in range(config.num_classes)) or None
    return Checkpoint(config, dict(make_model(config).state_dict()), preprocess, labels)


VARIANTS = {
    "query and class token": FAMILY_CONFIGS["aimv2"].replace(class_token=True),
    "pool of fewer heads": FAMILY_CONFIGS["pe core"].replace(pool_heads=2),
}


# ---- captured attention


@all_families
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_captured_attention_gives_the_models_own_output(config: ViTConfig, fast: bool) -> None:
    """Rows sum to one; weights times values, merged by the layer itself, are what the fused kernel computed."""
    model, images = make_model(config), random_images(config)
    model = optimize_for_cpu(model) if fast else model
    calls: list[tuple[Any, Tensor, Tensor]] = []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda layer, inputs, output: calls.append((layer, inputs[0], output)))
    maps = attention_maps(model, images)
    count = config.num_prefix + config.num_patches
    for (layer, x, output), weights in zip(calls, maps.values(), strict=True):
        assert weights.shape == (2, config.num_heads, count, count)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
        values = layer.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (config.num_heads, -1)).transpose(1, 2)
        torch.testing.assert_close(layer.merge_heads(weights @ values), output, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(capture.forward_with_maps(model, images)[0], expected, rtol=1e-4, atol=1e-4)


@all_families
@torch.no_grad()
def test_captured_attention_of_the_pool(config: ViTConfig) -> None:
    model, images = make_model(config), random_images(config)
    tokens, maps = model.forward_features(images), capture.forward_with_maps(model, images)[1]
    if not isinstance(model.pool, AttentionPool):
        assert len(maps) == config.depth
        return
    weights, pool = maps[-1][:, :, 0], model.pool  # (B, H, n)
    read = tokens if config.pool_prefix else tokens[:, config.num_prefix :]
    assert weights.shape == (2, config.pool_heads or config.num_heads, read.shape[1])
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    values = pool.kv(read).chunk(2, dim=-1)[1].unflatten(-1, (pool.num_heads, -1))
    x = pool.out(torch.einsum("bhn,bnhd->bhd", weights, values).flatten(1))
    if config.pooling == "attention":
        x = x + pool.fc2(
            nn.functional.gelu(
                pool.fc1(pool.norm(x)), approximate="tanh" if config.activation == "gelu_tanh" else "none"
            )
        )
    torch.testing.assert_close(pool(tokens), x, rtol=1e-4, atol=1e-5)


# ---- what the head reads


def read_rows(model: ViT, images: Tensor, matrix: np.ndarray) -> np.ndarray:
    """The rows (N, N) of the tokens that the head of this model reads, weighted as it does: one row."""
    config, k = model.config, model.config.num_prefix
    if config.pooling == "class":
        return matrix[0]
    if config.pooling == "average":
        return matrix[k:].mean(axis=0)
    assert isinstance(model.pool, AttentionPool)
    with torch.no_grad():
        q, keys, _ = model.pool.project(model.forward_features(images))
        weights = (q @ keys.mT / q.shape[-1] ** 0.5).softmax(dim=-1)[0, :, 0].mean(dim=0).double().numpy()
    return weights @ matrix[0 if config.pool_prefix else k :]


@pytest.mark.parametrize("config", {**FAMILY_CONFIGS, **VARIANTS}.values(), ids={**FAMILY_CONFIGS, **VARIANTS}.keys())
def test_rollout_and_attention_read_what_the_head_reads(config: ViTConfig) -> None:
    model, images, k = make_model(config), random_images(config, 1), config.num_prefix
    maps = [weights[0].detach().double().numpy() for weights in attention_maps(model, images).values()]
    rolled = np.eye(k + config.num_patches)
    for weights in maps:
        rolled = (weights.mean(axis=0) + np.eye(len(rolled))) / 2 @ rolled
    found = inspection.rollout(model, images)[0].numpy().ravel()
    np.testing.assert_allclose(found, read_rows(model, images, rolled)[k:], atol=1e-6)
    heads = inspection.head_attention(model, images)[0].flatten(-2).numpy()  # (layers, heads, patches)
    for layer, weights in enumerate(maps):
        rows = weights[:, 0] if config.pooling == "class" else weights[:, k:].mean(axis=1)
        np.testing.assert_allclose(heads[layer, : config.num_heads], rows[:, k:], atol=1e-6)
        assert np.isnan(heads[layer, config.num_heads :]).all()
    attention = inspection.explain(model, images, torch.tensor([0]), "attention").ravel()
    last = maps[-1].mean(axis=0)
    if isinstance(model.pool, AttentionPool):
        last = np.tile(read_rows(model, images, np.eye(len(rolled))), (len(rolled), 1))
    np.testing.assert_allclose(attention, read_rows(model, images, last)[k:], atol=1e-6)


@all_families
def test_relevance_reads_what_the_head_reads(config: ViTConfig) -> None:
    """Chefer et al. in NumPy: products of attention and gradient, added up through the layers."""
    model, images, k = make_model(config), random_images(config, 1), config.num_prefix
    logits, maps = capture.forward_with_maps(model, images)
    products = [
        (m * g)[0].detach().clamp_min(0).mean(0).double().numpy()
        for m, g in zip(maps, torch.autograd.grad(logits[0, 3], maps), strict=True)
    ]
    total = identity = np.eye(k + config.num_patches)
    for layer in products[: config.depth]:
        total = total + layer @ total
    mixed = total - identity
    if isinstance(model.pool, AttentionPool):
        mixed = mixed / mixed.sum(axis=1, keepdims=True) + identity
        expected = products[-1][0] @ mixed[0 if config.pool_prefix else k :]
    else:
        expected = mixed[0] if config.pooling == "class" else mixed[k:].sum(axis=0)
    found = inspection.explain(model, images, torch.tensor([3]), "relevance")[0].ravel()
    assert found.max() > 0
    np.testing.assert_allclose(found, expected[k:], rtol=1e-3, atol=1e-7)


@all_families
def test_every_method_explains(config: ViTConfig) -> None:
    """Maps do not depend on the other images; those of a class depend on it, and those of attention do not."""
    model, images = make_model(config), random_images(config)
    for method in inspection.methods_for(config):
        first, second = (inspection.explain(model, images, torch.tensor(c), method) for c in ([0, 1], [2, 1]))
        assert first.shape == (2, 4, 4)
        assert np.isfinite(first).all()
        assert first.min() >= 0
        np.testing.assert_allclose(second[1], first[1], rtol=1e-4, atol=1e-6)
        by_class = method in ("relevance", "tokens", "gradcam")
        assert np.allclose(first[0], second[0], rtol=1e-4) != by_class
        if not by_class:
            np.testing.assert_array_equal(inspection.explain(model, images, None, method), first)
    curves = inspection.deletion_insertion(model, images, torch.tensor([0, 1]), first)
    with torch.no_grad():
        probabilities = model(images).softmax(dim=-1)
    np.testing.assert_allclose(curves.deletion[:, 0], [probabilities[0, 0], probabilities[1, 1]], rtol=1e-4)
    np.testing.assert_allclose(curves.insertion[:, -1], curves.deletion[:, 0])


@all_families
def test_distance_is_that_of_the_captured_maps(config: ViTConfig) -> None:
    model, images, k = make_model(config), random_images(config, 1), config.num_prefix
    measured = inspection.measure_attention_distance(model, [images])
    weights = torch.stack(list(attention_maps(model, images).values()))[:, 0, :, k:, k:].detach().double().numpy()
    weights /= weights.sum(axis=-1, keepdims=True)
    rows, columns = np.divmod(np.arange(16), 4)
    pixels = 8 * np.hypot(rows[:, None] - rows, columns[:, None] - columns)
    np.testing.assert_allclose(measured.distance, (weights * pixels).sum(axis=-1).mean(axis=-1), rtol=1e-4)


@all_families
@torch.no_grad()
def test_randomized_copies_are_models_of_the_family(config: ViTConfig) -> None:
    """Shuffled weights keep the keys without bias, so that a copy computes the same with and without gradients."""
    model, images = make_model(config), random_images(config, 1)
    for copy in randomized_copies(model, images):
        without = copy(images)
        with torch.enable_grad():
            torch.testing.assert_close(copy(images).detach(), without, rtol=1e-4, atol=1e-4)
        assert (without - model(images)).abs().max() > 1e-3


# ---- tokens and weights


@all_families
@torch.no_grad()
def test_tokens(config: ViTConfig) -> None:
    """The first stage is the input of the first block, after a norm before it."""
    model, images, k = make_model(config), random_images(config, 1), config.num_prefix
    entering: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    norms = inspection.token_norms(model, images[0])
    assert norms.shape == (config.depth + 1, 4, 4)
    np.testing.assert_allclose(norms[0].ravel(), entering[0][0, k:].norm(dim=-1), rtol=1e-5)
    walk = trace_walkthrough(model, np.zeros((32, 32, 3), np.uint8), images[0])
    np.testing.assert_array_equal(walk.tokens, entering[0][0])
    np.testing.assert_allclose(walk.logits, model(images)[0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(walk.attention).all()
    assert (walk.pos_embed is None) == (config.absolute_pos_embed == "none")
    assert inspection.patch_similarity(model, images[0], (1, 2)).argmax() == 6
    assert np.isfinite(inspection.patch_colors(model, images)).all()
    assert inspection.embedding_filters(model).raw.shape == (48, 3, 8, 8)


@all_families
@torch.no_grad()
def test_features_of_a_layer(config: ViTConfig) -> None:
    """What a probe reads after a block: the class token, or the mean of the patches."""
    model, images = make_model(config), random_images(config)
    tokens = features(model, images)["blocks.0"]
    expected = tokens[:, 0] if config.pooling == "class" else tokens[:, config.num_prefix :].mean(dim=1)
    torch.testing.assert_close(read_layer(model, 0, images), expected)


@all_families
def test_position_similarity(config: ViTConfig) -> None:
    model = make_model(config)
    if config.absolute_pos_embed == "none":
        with pytest.raises(ConfigError, match=r"The model uses .*: there is no vector per position\.$") as error:
            inspection.position_similarity(model)
        assert error.value.code == "unsupported_by_model"
    else:
        assert inspection.position_similarity(model)[1, 2, 1, 2] == pytest.approx(1)


# ---- models without a head


@pytest.mark.parametrize("name", ["dinov3", "siglip", "clip", "beit", "rpn", "aimv2", "pe spatial"])
def test_models_without_a_head(name: str) -> None:
    """Attention and weights can be inspected; what needs a class says so in one sentence."""
    config = FAMILY_CONFIGS[name].replace(num_classes=0)
    model, images = make_model(config), random_images(config)
    assert inspection.methods_for(config) == ("rollout", "attention")
    for method in ("rollout", "attention"):
        assert inspection.explain(model, images, None, method).shape == (2, 4, 4)
    for method in ("relevance", "tokens", "gradcam"):
        with pytest.raises(ConfigError, match=r"no head.*\brollout, attention\.$") as error:
            inspection.explain(model, images, torch.tensor([0, 0]), method)
        assert error.value.code == "unsupported_by_model"
    with pytest.raises(ConfigError, match=r"no head.*probability"):
        inspection.deletion_insertion(model, images, torch.tensor([0, 0]), np.ones((2, 4, 4)))
    correlations = inspection.parameter_randomization(model, images, None, ("rollout",))
    assert correlations["rollout"][2] < 0.9
    assert inspection.measure_attention_distance(model, [images]).distance.shape == (2, 3)


def test_methods_need_a_class_if_they_explain_one() -> None:
    model = make_model(FAMILY_CONFIGS["clip"])
    with pytest.raises(ConfigError, match="one class for each of the 2 images"):
        inspection.explain(model, random_images(model.config), None, "relevance")


def test_resnet_without_a_head() -> None:
    model = build_model(ResNetConfig(image_size=32, layers=(1, 1), kind="cifar", num_classes=0)).eval()
    assert inspection.methods_for(model.config) == ()
    with pytest.raises(ConfigError, match="no head"):
        inspection.explain(model, torch.randn(1, 3, 32, 32), torch.tensor([0]), "gradcam")


# ---- the report


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number, size in enumerate([(40, 60), (33, 33)]):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def inspected(config: ViTConfig, photos: Path) -> dict[str, Any]:
    checkpoint = make_checkpoint(config)
    encoder = Classifier(checkpoint) if config.num_classes else Encoder(checkpoint)
    found = inspect(Subject(encoder, load_image_batch(encoder, resolve_images([photos]), 2)))
    assert tuple(panel.name for panel in found.panels) == NAMES
    return {panel.name: panel for panel in found.panels}


@pytest.mark.slow
@all_families
def test_every_family_is_inspected(config: ViTConfig, photos: Path) -> None:
    """Every panel but that of positions, if there is no vector per position, has a figure."""
    panels = inspected(config, photos)
    absent = {name for name, panel in panels.items() if panel.draw is None}
    assert absent == ({"positions"} if config.absolute_pos_embed == "none" else set())
    for name in absent:
        assert re.fullmatch(r"The model uses [^.]*\.", panels[name].caption)
    assert {"relevance", "tokens", "gradcam", "rollout", "attention"} == panels["explanations"].arrays.keys()
    maps = panels["heads"].arrays["maps"]
    assert maps.shape == (
        config.depth + isinstance(make_model(config).pool, AttentionPool),
        max(3, config.pool_heads or 3),
        4,
        4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dinov3", "pe core", "clip"])
def test_figures_are_drawn(name: str, photos: Path) -> None:
    """Pooling with more heads than the blocks, a norm before them, and no head."""
    config = FAMILY_CONFIGS[name].replace(num_classes=0 if name == "clip" else 5)
    panels, names = inspected(config, photos), ["walkthrough", "heads", "explanations"]
    assert all(panels[each].draw is not None for each in names)
    for each in [*names, *(["positions"] if panels["positions"].draw is not None else [])]:
        panels[each].figure(LIGHT).canvas.draw()


@pytest.mark.slow
def test_inspect_command_without_a_head(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FAMILY_CONFIGS["clip"].replace(num_classes=0)
    write_checkpoint(tmp_path / "model", make_checkpoint(config))
    panels = inspected(config, photos)
    absent = {name: panel.caption for name, panel in panels.items() if panel.draw is None}
    assert absent.keys() == {"classes", "faithfulness"}
    assert all(re.fullmatch(r"The model has no head[^.]*\.", caption) for caption in absent.values())
    assert panels["walkthrough"].arrays.keys() == {"patch_embeddings", "tokens", "attention", "features"}
    assert panels["explanations"].arrays.keys() == {"rollout", "attention"}
    done = run_in_process(capsys, "inspect", tmp_path / "model", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"filters", "positions"}
    assert "without a head" in (tmp_path / "out/report.html").read_text()
    refused = run_in_process(capsys, "inspect", tmp_path / "model", photos, "--label", "0", "--out", tmp_path / "other")
    assert refused.returncode == 2
    assert "no head" in refused.stderr
