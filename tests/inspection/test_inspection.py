"""Inspection on cases with known results, and on every kind of model."""

import copy
import itertools
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.command import run
from helpers.model_zoo import BASE, RESNETS, VITS, make_checkpoint, random_model
from patchword import inspection
from patchword.checkpoints import write_checkpoint
from patchword.config import ResNetConfig, ViTConfig
from patchword.data.preprocess import Preprocess
from patchword.engines.capabilities import probe_capabilities
from patchword.errors import ConfigError
from patchword.inference.classifier import Classifier, find_class
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images, sample_evenly
from patchword.inspection import attention_distance, attention_rollout, capture, faithfulness, pos_embed_similarity
from patchword.inspection.capture import attention_maps, features
from patchword.inspection.faithfulness import RANDOM_ORDER
from patchword.models import ViT, build_model, optimize_for_cpu
from patchword.models.attention import attention_weights
from patchword.plots.attention_plot import plot_heads
from patchword.plots.filter_plot import plot_pos_embed_similarity
from patchword.plots.overlay import overlay_heatmap, resize_to_image
from patchword.plots.theme import mosaic
from patchword.report.inspection_panels import NAMES, NUM_ORIGINALS, Subject, faithfulness_verdict
from patchword.report.inspection_report import inspect


def random_images(config: ViTConfig | ResNetConfig, count: int = 2) -> Tensor:
    return torch.randn(count, config.in_channels, *config.image_size, generator=torch.Generator().manual_seed(1))


def vit(config: ViTConfig) -> ViT:
    model = random_model(config)
    assert isinstance(model, ViT)
    return model


# ---- attention maps


@pytest.mark.slow
@pytest.mark.parametrize("config", VITS.values(), ids=VITS.keys())
def test_captured_maps_match_recomputed_maps(config: ViTConfig) -> None:
    model, images = vit(config), random_images(config)
    logits, maps = capture.forward_with_maps(model, images)
    torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-5)
    reduced: dict[int, Tensor] = {}
    capture.reduce_maps(model, images, lambda layer, rows, heads, weights: reduced.__setitem__(layer, weights.clone()))
    recomputed = attention_maps(model, images)
    for layer in range(config.depth):
        torch.testing.assert_close(reduced[layer], recomputed[layer], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(maps[layer], recomputed[layer], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", VITS.values(), ids=VITS.keys())
def test_every_code_path_gives_the_same_maps(config: ViTConfig) -> None:
    """Plain and optimized for CPUs, with and without gradients, in fp32 and, if supported, in bf16."""
    plain, images = vit(config), random_images(config)
    fast = optimize_for_cpu(copy.deepcopy(plain))
    expected = attention_maps(plain, images)
    for model, gradients, bf16 in itertools.product((plain, fast), (True, False), (True, False)):
        if bf16 and not probe_capabilities().bf16_works:
            continue
        tolerance = 0.03 if bf16 else 1e-5
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found = attention_maps(model, images)
            logits, maps = capture.forward_with_maps(model, images)
            torch.testing.assert_close(logits.float(), model(images).float(), atol=10 * tolerance, rtol=0)
        for layer in range(config.depth):
            for weights in (found[layer], maps[layer]):
                torch.testing.assert_close(weights.float(), expected[layer], atol=tolerance, rtol=0)


def test_maps_of_a_smaller_grid_in_training() -> None:
    """Progressive resizing: the maps cover the patches of the smaller image, with their relative positions."""
    config = VITS["relative"]
    model = vit(config).train()
    images = random_images(config)[..., :16, :12]  # 2 x 3 patches
    maps = attention_maps(model, images, [0])[0]
    assert maps.shape == (2, 3, 6, 6)
    logits, captured = capture.forward_with_maps(model, images)
    torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(captured[0], maps)


def test_other_threads_are_not_captured() -> None:
    """One thread may classify with a model while another explains with it."""
    config = VITS["class"]
    model, images = vit(config), random_images(config, 1)
    layers: list[int] = []
    with capture.observe_attention(model, lambda layer, q, k, v, bias: layers.append(layer)):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, images).result()
        assert layers == []
        model(images)
    assert layers == [0, 1, 2]
    model(images)
    assert layers == [0, 1, 2]
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("config", [VITS["registers"], VITS["relative"]], ids=["registers", "relative"])
def test_chunks_give_the_same_result(config: ViTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = vit(config), random_images(config, 5)
    expected = attention_distance.measure_attention_distance(model, [images])
    tokens = config.num_prefix + config.num_patches
    monkeypatch.setattr(capture, "MAX_MAP_BYTES", capture.MAP_COPIES * 4 * tokens**2 * 2)  # two maps
    sizes: list[int] = []
    capture.reduce_maps(model, images, lambda layer, rows, heads, maps: sizes.append(maps.shape[0] * maps.shape[1]))
    assert max(sizes) == 2
    assert sum(sizes) == 5 * config.num_heads * config.depth
    chunked = attention_distance.measure_attention_distance(model, [images[:2], images[2:]])
    np.testing.assert_allclose(chunked.distance, expected.distance, rtol=1e-5)
    np.testing.assert_allclose(chunked.entropy, expected.entropy, rtol=1e-5)


# ---- attention distance


@pytest.mark.slow
@pytest.mark.parametrize("config", [VITS["class"], VITS["average"], VITS["registers"]], ids=["class", "average", "reg"])
def test_distance_of_uniform_attention_is_the_mean_of_the_grid(config: ViTConfig) -> None:
    model = vit(config)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    cells = list(itertools.product(range(4), range(9)))
    pairs = [math.hypot(8 * (a - c), 4 * (b - d)) for (a, b), (c, d) in itertools.product(cells, cells)]
    measured = inspection.measure_attention_distance(model, [random_images(config)])
    np.testing.assert_allclose(measured.distance, np.mean(pairs), rtol=1e-5)
    np.testing.assert_allclose(measured.entropy, math.log2(36), rtol=1e-5)


def test_identity_attention_has_distance_zero() -> None:
    identity = torch.eye(36).expand(1, 2, 36, 36)
    assert (
        attention_distance.mean_distance(identity, attention_distance.patch_distances((4, 9), (8, 4))).abs().max() == 0
    )
    assert attention_distance.mean_entropy(identity).abs().max() == 0
    rolled = attention_rollout.compose_maps([identity[:, 0]] * 5)
    torch.testing.assert_close(rolled[0], torch.eye(36))


def test_distance_ignores_prefix_tokens() -> None:
    weights = torch.rand(1, 1, 7, 7).softmax(dim=-1)
    weights[..., 2, :] = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0])  # a patch that attends to prefix tokens only
    between = attention_distance.between_patches(weights, 2)
    torch.testing.assert_close(between.sum(dim=-1), torch.ones(1, 1, 5))
    expected = weights[0, 0, 3, 2:] / weights[0, 0, 3, 2:].sum()
    torch.testing.assert_close(between[0, 0, 1], expected)
    torch.testing.assert_close(between[0, 0, 0], torch.full((5,), 0.2))


def test_permuted_heads_give_permuted_distances() -> None:
    config = VITS["class"]
    model, images = vit(config), random_images(config)
    before = inspection.measure_attention_distance(model, [images]).distance
    order = [2, 0, 1]
    for block in model.blocks:
        attention = block.attention
        for tensor in (attention.qkv.weight, attention.qkv.bias):
            by_head = tensor.data.view(3, config.num_heads, -1, *tensor.shape[1:])
            by_head.copy_(by_head[:, order].clone())
        columns = attention.out.weight.data.view(config.embed_dim, config.num_heads, -1)
        columns.copy_(columns[:, order].clone())
    np.testing.assert_allclose(
        inspection.measure_attention_distance(model, [images]).distance, before[:, order], rtol=1e-4
    )


def test_depth_correlation() -> None:
    values = np.array([[1.0, 3.0], [2.0, 4.0], [9.0, 9.0]])
    assert attention_distance.AttentionDistance(values, values, 1, 9).depth_correlation == pytest.approx(1)
    assert attention_distance.AttentionDistance(values[::-1], values, 1, 9).depth_correlation == pytest.approx(-1)


# ---- rollout and explanations


def reference_rollout(maps: list[np.ndarray], fusion: str, discard: float) -> np.ndarray:
    """A scalar implementation."""
    size = maps[0].shape[-1]
    rolled = np.eye(size)
    for weights in maps:
        fused = {"mean": weights.mean(0), "max": weights.max(0), "min": weights.min(0)}[fusion]
        layer = np.zeros((size, size))
        for i in range(size):
            kept = sorted(range(size), key=lambda j, i=i: fused[i, j])[int(discard * size) :]  # type: ignore[misc]
            total = sum(fused[i, j] for j in kept)
            for j in kept:
                layer[i, j] = 0.5 * fused[i, j] / total
            layer[i, i] += 0.5
        rolled = layer @ rolled
    return rolled


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard", [0.0, 0.6])
def test_rollout_matches_the_reference(fusion: Any, discard: float) -> None:
    config = VITS["class"]
    model, images = vit(config), random_images(config, 1)
    maps = [m[0].detach().double().numpy() for m in attention_maps(model, images).values()]
    expected = reference_rollout(maps, fusion, discard)
    np.testing.assert_allclose(expected.sum(axis=1), 1)
    found = inspection.rollout(model, images, fusion, discard)[0].numpy()
    assert found.shape == (4, 9)
    np.testing.assert_allclose(found.ravel(), expected[0, 1:], atol=1e-6)


@pytest.mark.slow
def test_rollout_follows_the_pooling_of_the_head() -> None:
    for name in ("average", "distilled", "both", "probe"):
        config = VITS[name]
        model, images = vit(config), random_images(config, 1)
        maps = [m[0].detach().double().numpy() for m in attention_maps(model, images).values()]
        rolled, k = reference_rollout(maps, "mean", 0.0), config.num_prefix
        rows = {"average": rolled.mean(0), "distilled": rolled[:2].mean(0)}
        rows["both"] = (rolled[0] + rolled[k:].mean(0)) / 2
        with torch.no_grad():
            tokens = model.forward_features(images)
            if name == "probe":
                q, keys, _ = model.pool.project(tokens)
                rows["probe"] = attention_weights(q, keys)[0, :, 0].mean(0).double().numpy() @ rolled[k:]
        np.testing.assert_allclose(inspection.rollout(model, images)[0].numpy().ravel(), rows[name][k:], atol=1e-6)


def test_relevance_matches_the_reference() -> None:
    config = VITS["class"]
    model, images = vit(config), random_images(config, 1)
    logits, maps = capture.forward_with_maps(model, images)
    gradients = torch.autograd.grad(logits[0, 3], maps)
    size = maps[0].shape[-1]
    summed = np.eye(size)
    for weights, gradient in zip(maps, gradients, strict=True):
        product = (weights * gradient)[0].detach().double().numpy()
        summed = summed + np.maximum(product, 0).mean(0) @ summed
    found = inspection.explain(model, images, torch.tensor([3]), "relevance")[0]
    np.testing.assert_allclose(found.ravel(), summed[0, 1:], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", inspection.METHODS)
@pytest.mark.parametrize("config", VITS.values(), ids=VITS.keys())
def test_every_model_is_explained(config: ViTConfig, method: Any) -> None:
    """Maps have the shape of the grid, are not negative, and do not depend on the other images in the batch."""
    model, images = vit(config), random_images(config, 3)
    classes = torch.tensor([0, 1, 2])
    maps = inspection.explain(model, images, classes, method)
    assert maps.shape == (3, *config.grid)
    assert (maps >= 0).all()
    assert np.isfinite(maps).all()
    assert maps.max() > 0 or method in ("tokens", "gradcam")  # zero if all contributions are negative
    alone = inspection.explain(model, images[1:2], classes[1:2], method)
    np.testing.assert_allclose(alone[0], maps[1], atol=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_relevance_follows_the_pooling_of_the_head() -> None:
    """One block: the positive part of gradient times attention, summed over the rows that the head reads."""
    for name in ("both", "average", "distilled"):
        config = VITS[name].replace(depth=1)
        model, images = vit(config), random_images(config, 1)
        logits, (weights,) = capture.forward_with_maps(model, images)
        (gradient,) = torch.autograd.grad(logits[0, 3], weights)
        positive = (weights * gradient)[0].detach().clamp_min(0).mean(0).double().numpy()
        rows = {"both": [0, *range(1, 37)], "average": range(36), "distilled": [0, 1]}[name]
        expected = sum(positive[row] for row in rows)[config.num_prefix :]
        found = inspection.explain(model, images, torch.tensor([3]), "relevance")[0]
        np.testing.assert_allclose(found.ravel(), expected, rtol=1e-4, atol=1e-7)


def test_relevance_with_attention_pooling() -> None:
    config = VITS["probe"].replace(depth=1)
    model, images = vit(config), random_images(config, 1)
    logits, maps = capture.forward_with_maps(model, images)
    block, pool = (
        (m * g)[0].detach().clamp_min(0).mean(0).double().numpy()
        for m, g in zip(maps, torch.autograd.grad(logits[0, 3], maps), strict=True)
    )
    expected = pool[0] @ (block / block.sum(axis=1, keepdims=True) + np.eye(36))
    found = inspection.explain(model, images, torch.tensor([3]), "relevance")[0]
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_maps_depend_on_the_class() -> None:
    model, images = vit(VITS["class"]), random_images(VITS["class"], 1)
    for method in ("relevance", "tokens", "gradcam"):
        first, second = (inspection.explain(model, images, torch.tensor([c]), method)[0] for c in (0, 1))
        assert np.abs(first - second).max() > 1e-3 * first.max()
    for method in ("rollout", "attention"):
        first, second = (inspection.explain(model, images, torch.tensor([c]), method)[0] for c in (0, 1))
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("config", RESNETS.values(), ids=RESNETS.keys())
def test_gradcam_of_resnets_uses_the_last_feature_map(config: ResNetConfig) -> None:
    model, images = random_model(config), random_images(config)
    values = model.feature_map(images)  # type: ignore[union-attr]
    assert model.head.weight.shape[1] == values.shape[1]  # type: ignore[union-attr]
    expected = torch.einsum("bchw,c->bhw", values, model.head.weight[2]).relu().detach().numpy()  # type: ignore
    found = inspection.explain(model, images, torch.tensor([2, 2]), "gradcam")
    cells = values.shape[-1] * values.shape[-2]
    np.testing.assert_allclose(found * cells, expected, rtol=1e-3, atol=1e-4)  # the gradient is the head's row / cells
    with pytest.raises(ConfigError, match=r"'rollout'.*\bgradcam\b"):
        inspection.explain(model, images, torch.tensor([0, 0]), "rollout")


# ---- a model that attends to one patch only

BRIGHT_PATCH = (2, 7)


def one_patch_model() -> tuple[ViT, Tensor]:
    """The class token attends to the brightest patch, and the logit of class 1 is its brightness."""
    config = ViTConfig(
        image_size=(32, 36), patch_size=(8, 4), in_channels=1, embed_dim=8, depth=1, num_heads=1, mlp_dim=4,
        num_classes=2, pos_embed="none",
    )  # fmt: skip
    model = build_model(config).eval()
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        block = model.blocks[0]
        block.norm1.weight.fill_(1)
        model.norm.weight.fill_(1)
        model.patch_embed.proj.weight[0].fill_(1 / 32)  # brightness
        model.patch_embed.proj.bias[1] = 0.1
        block.attention.qkv.bias[0] = 40.0  # all queries match brightness ...
        block.attention.qkv.weight[8] = torch.eye(8)[0]  # ... which is in the keys ...
        block.attention.qkv.weight[16] = torch.eye(8)[0]  # ... and in the values
        block.attention.out.weight[2] = torch.eye(8)[0]
        model.head.weight[1] = 4 * torch.eye(8)[2]
    images = torch.zeros(1, 1, 32, 36)
    row, column = BRIGHT_PATCH
    images[:, :, 8 * row : 8 * row + 8, 4 * column : 4 * column + 4] = 1.0
    return model, images


def argmax_cell(heat: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(heat.argmax(), heat.shape))


@pytest.mark.parametrize("method", inspection.METHODS)
def test_every_method_finds_the_one_relevant_patch(method: Any) -> None:
    model, images = one_patch_model()
    heat = inspection.explain(model, images, torch.tensor([1]), method)[0]
    assert argmax_cell(heat) == BRIGHT_PATCH
    assert heat[BRIGHT_PATCH] > 0.9 * heat.sum()
    assert argmax_cell(inspection.head_attention(model, images)[0, 0, 0].numpy()) == BRIGHT_PATCH


def test_deletion_and_insertion_distinguish_right_from_wrong_maps() -> None:
    model, images = one_patch_model()
    right_map = np.zeros((1, 4, 9))
    right_map[0][BRIGHT_PATCH] = 1
    maps = (right_map, 1 - right_map)
    right, wrong = (faithfulness.deletion_insertion(model, images, torch.tensor([1]), m) for m in maps)
    full = model(images).softmax(dim=-1)[0, 1].item()
    blank = model(torch.zeros_like(images)).softmax(dim=-1)[0, 1].item()
    assert full > blank + 0.2
    for curves in (right, wrong):  # they start and end with the full and the blank image
        np.testing.assert_allclose(curves.deletion[0, [0, -1]], [full, blank], rtol=1e-5)
        np.testing.assert_allclose(curves.insertion[0, [0, -1]], [blank, full], rtol=1e-5)
    np.testing.assert_allclose(right.deletion[0, 1:], blank, rtol=1e-5)  # hidden in the first step
    np.testing.assert_allclose(wrong.deletion[0, :-1], full, rtol=1e-5)  # hidden in the last step
    deletion, insertion = right.areas
    assert deletion < wrong.areas[0]
    assert insertion > wrong.areas[1]
    assert faithfulness.area_under_curve(np.array([[1.0, 1.0, 1.0]])) == 1
    assert faithfulness.area_under_curve(np.array([[1.0, 0.0, 0.0]])) == 0.25


def test_ties_are_hidden_in_random_order() -> None:
    """The score of a constant map must not depend on the position of its cells."""
    hidden = faithfulness.hidden_pixels(np.zeros((4, 9)), (4, 9))[5, 0].numpy()
    assert hidden.sum() == 18
    assert 0 < hidden[:2].sum() < 18


def test_cells_are_hidden_in_the_order_of_the_map() -> None:
    heat = np.arange(36.0).reshape(4, 9)
    hidden = faithfulness.hidden_pixels(heat, (32, 36))
    assert hidden.shape == (faithfulness.STEPS + 1, 1, 32, 36)
    assert not hidden[0].any()
    assert hidden[-1].all()
    assert (hidden[1:] >= hidden[:-1]).all()
    first = hidden[1, 0].nonzero()
    assert first[:, 0].min() == 24
    assert first[:, 1].min() == 4 * 5
    assert hidden[1].sum() == 4 * 8 * 4


@pytest.mark.slow
def test_parameter_randomization() -> None:
    """Attention does not depend on the head, so shuffling the head does not change it; relevance changes."""
    model, images = vit(VITS["class"]), random_images(VITS["class"])
    before = [p.clone() for p in model.parameters()]
    found = inspection.parameter_randomization(
        model, images, torch.tensor([0, 1]), ("attention", "rollout", "relevance")
    )
    assert found["attention"][0] == pytest.approx(1)
    assert found["rollout"][0] == pytest.approx(1)
    assert found["relevance"][0] < 0.999
    assert all(-1 <= value < 0.9 for value in (found["attention"][2], found["relevance"][2]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the model must not change"


# ---- weights and tokens


def test_components_of_filters_of_known_rank() -> None:
    config = BASE.replace(embed_dim=48, patch_size=(4, 4))
    model = vit(config)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.linalg.qr(torch.randn(48, 3, generator=generator)).Q.T
    model.patch_embed.proj.weight.data = torch.randn(48, 3, generator=generator) @ patterns
    filters = inspection.embedding_filters(model)
    assert filters.raw.shape == (48, 3, 4, 4)
    assert filters.components.shape == (28, 3, 4, 4)
    assert filters.explained[:3].sum() == pytest.approx(1)
    assert filters.explained[3:].max() < 1e-9
    span = filters.components[:3].reshape(3, -1) @ patterns.numpy().T  # the same three directions
    np.testing.assert_allclose(np.linalg.svd(span)[1], 1, rtol=1e-5)


def test_filters_of_stems_and_resnets_are_the_first_convolution() -> None:
    shapes = {"convolutions": (8, 3, 3, 3), "hybrid": (32, 3, 7, 7), "ResNet": (16, 3, 3, 3), "BiT": (64, 3, 7, 7)}
    for name, shape in shapes.items():
        filters = inspection.embedding_filters(random_model({**VITS, **RESNETS}[name]))
        assert filters.raw.shape == shape
        assert filters.place == "first convolution"
    raw = inspection.embedding_filters(random_model(VITS["hybrid"])).raw  # standardized, as in the forward pass
    np.testing.assert_allclose(raw.mean(axis=(1, 2, 3)), 0, atol=1e-5)


def test_position_similarity() -> None:
    model = vit(VITS["sin-cos, normed"])
    similarity = inspection.position_similarity(model)
    assert similarity.shape == (4, 9, 4, 9)
    np.testing.assert_allclose([similarity[i, j, i, j] for i, j in itertools.product(range(4), range(9))], 1, rtol=1e-5)
    # The sin-cos product depends on the offset only.
    np.testing.assert_allclose(similarity[0, 0, 1, 3], similarity[2, 4, 3, 7], rtol=1e-4)
    table = vit(VITS["class"])
    vectors = table.positions.table[0, 1:].detach().numpy()
    one, other = vectors[2 * 9 + 5], vectors[3 * 9 + 1]
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert inspection.position_similarity(table)[2, 5, 3, 1] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="position embeddings"):
        inspection.position_similarity(vit(VITS["no positions"]))


def test_token_norms_similarity_and_colors() -> None:
    config = VITS["registers"]
    model, images = vit(config), random_images(config)
    found = features(model, images[:1])
    norms = inspection.token_norms(model, images[0])
    assert norms.shape == (4, 4, 9)
    expected = found["blocks.1"][0, 4 + 2 * 9 + 3].norm().item()
    assert norms[2, 2, 3] == pytest.approx(expected, rel=1e-5)
    similarity = inspection.patch_similarity(model, images[0], (2, 3))
    assert similarity.shape == (4, 9)
    assert argmax_cell(similarity) == (2, 3)
    assert similarity.max() == pytest.approx(1, abs=1e-5)
    colors = inspection.patch_colors(model, images)
    assert colors.shape == (2, 4, 9, 3)
    assert colors.min() >= 0
    assert colors.max() <= 1
    assert np.ptp(colors) > 0.5


# ---- geometry


def test_plots_of_non_square_grids() -> None:
    heat = np.zeros((4, 9))
    heat[2, 7] = 1
    tile = mosaic(np.stack([heat, heat.T.reshape(4, 9)]), 1, gap=1)
    assert tile.shape == (9, 9)
    assert tile[2, 7] == 1
    assert np.isnan(tile[4]).all()
    figure = plot_heads(np.tile(heat, (3, 2, 1, 1)), ["1", "2", "3"])
    drawn = figure.axes[0].get_images()[0].get_array()
    assert drawn.shape == (2 * 4 + 1, 3 * 9 + 2)
    assert drawn[5 + 2, 20 + 7] == 1
    assert np.nansum(drawn) == 6
    assert plot_heads(np.tile(heat, (2, 3, 1, 1)), ["1", "2"]).axes[0].get_xlabel() == "head"
    similarity = np.random.default_rng(0).random((4, 9, 4, 9))
    panels = plot_pos_embed_similarity({"positions": similarity}).axes[0].get_images()[0].get_array()
    assert panels.shape == (4 * 5 - 1, 9 * 10 - 1)
    assert panels[5 * 2 + 1, 10 * 6 + 3] == pytest.approx(similarity[2, 6, 1, 3], rel=1e-6)


PREPROCESS = Preprocess(size=(32, 72), crop=0.8, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("size", [(300, 400), (400, 100), (72, 32), (5, 7)], ids=str)
@pytest.mark.parametrize("resize", ["cover", "squash"])
def test_maps_are_aligned_with_the_crop(size: tuple[int, int], resize: Any) -> None:
    """The overlay colors the pixels that the model sees in the cell."""
    preprocess = PREPROCESS.replace(resize=resize)
    width, height = size
    left, top, right, bottom = preprocess.crop_box(height, width)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    image = Image.new("RGB", size, "black")
    cell = (bottom - top) / 4, (right - left) / 9
    box = (left + 7 * cell[1], top + 2 * cell[0], left + 8 * cell[1], top + 3 * cell[0])
    image.paste((255, 255, 255), tuple(round(v) for v in box))  # type: ignore[arg-type]
    heat = preprocess.resize_and_crop(image)[..., 0].reshape(4, 8, 9, 8).mean(axis=(1, 3))
    if min(size) > 50:
        assert argmax_cell(heat) == (2, 7)
    spread = resize_to_image(heat, (height, width), preprocess)
    assert spread.shape == (height, width)
    inside = np.isfinite(spread)
    assert inside.any()
    if min(size) > 50:  # otherwise a pixel is larger than a cell
        assert inside.sum() == pytest.approx((right - left) * (bottom - top), rel=0.02)
        row, column = argmax_cell(np.nan_to_num(spread))
        assert box[1] - 1 <= row <= box[3] + 1
        assert box[0] - 1 <= column <= box[2] + 1


def test_overlay_keeps_the_size_and_darkens_the_border() -> None:
    image = Image.new("RGB", (300, 100), (100, 150, 200))
    preprocess = Preprocess(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
    heat = np.zeros((4, 4))
    heat[1, 1] = 1
    drawn = np.asarray(overlay_heatmap(image, heat, preprocess))
    assert drawn.shape == (100, 300, 3)
    np.testing.assert_array_equal(drawn[50, 10], [35, 52, 70])  # outside the crop
    np.testing.assert_array_equal(drawn[90, 190], [100, 150, 200])  # low: unchanged
    assert drawn[37, 137, 0] > 200  # high
    flat = np.asarray(overlay_heatmap(image, np.ones((4, 4)), preprocess))
    np.testing.assert_array_equal(flat[50, 150], [100, 150, 200])


# ---- the report and the commands


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number, size in enumerate([(40, 60), (90, 30), (33, 33)]):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


NO_BLOCKS = {"no blocks": BASE.replace(depth=0, class_token=False, pooling="average")}
ALL_MODELS = {**VITS, **NO_BLOCKS, **RESNETS}


@pytest.mark.slow
@pytest.mark.parametrize("config", ALL_MODELS.values(), ids=ALL_MODELS.keys())
def test_every_model_is_inspected(config: ViTConfig | ResNetConfig, photos: Path) -> None:
    """Every panel is present: drawn, or absent with a caption that says why."""
    classifier = Classifier(make_checkpoint(config))
    found = inspect(Subject(classifier, load_image_batch(classifier, resolve_images([photos]), NUM_ORIGINALS)))
    names = [each.name for each in found.panels]
    assert tuple(names) == NAMES
    absent = {each.name for each in found.panels if each.draw is None}
    for each in found.panels:
        assert each.caption.endswith(".")
        assert each.draw is None or each.arrays
    if isinstance(config, ResNetConfig):
        drawn = {"filters", "positions", "explanations", "classes", "faithfulness"}
        tokens = set(NAMES) - drawn
        assert absent == {"positions"} | tokens
    elif not config.depth:
        assert absent == set(names) - {"filters", "positions"}
        assert all("without blocks" in each.caption for each in found.panels if each.draw is None)
    else:
        assert absent == ({"positions"} if config.pos_embed in ("none", "rotary", "relative") else set())


@pytest.mark.slow
def test_inspect_command(photos: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_checkpoint(model, make_checkpoint(VITS["registers"]))
    (photos / "broken.png").write_bytes(b"\x89PNG")
    result = run("inspect", model, photos, "--out", out, "--label", "class 3", "--image-size", 48, 36)
    assert result.returncode == 3, result.stderr
    assert "broken.png" in result.stderr
    assert "Traceback" not in result.stderr
    names = {path.stem for path in out.glob("*.png")}
    assert names == {path.stem for path in out.glob("*.svg")} == {path.stem for path in out.glob("*.npz")}
    assert len(names) == 11
    assert not list(out.glob(".*"))
    with np.load(out / "positions.npz") as arrays:  # before and after resampling
        assert sorted(a.shape for a in arrays.values()) == [(4, 9, 4, 9), (6, 9, 6, 9)]
    page = (out / "report.html").read_text()
    assert "Spearman" in page
    assert not re.search(r"""(src|href|srcset)=["'](?!data:)""", page)
    again = run("inspect", model, "--out", out)
    assert again.returncode == 2
    assert str(out) in again.stderr
    assert "--overwrite" in again.stderr
    assert run("inspect", model, "--out", out, "--overwrite").returncode == 0
    assert {path.stem for path in out.glob("*.png")} == {"filters", "positions"}  # the old figures are deleted


@pytest.mark.slow
def test_invalid_requests_are_refused(photos: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(model, make_checkpoint(VITS["class"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_bytes(b"nothing")
    cases = [
        ([photos, "--label", "dog"], "class 'dog'"),
        ([tmp_path / "empty"], r"images .*/empty\..*\.jpg"),
        ([tmp_path / "bad.png"], r"bad\.png: .*\n1 of 1 images"),
        (["cifar"], "cifar.*'cifar10'"),
        ([photos, "--max-images", "0"], r"--max-images .*\b1\b.*\b0\b"),
    ]
    for arguments, message in cases:
        result = run("inspect", model, *arguments, "--out", tmp_path / "out")
        assert result.returncode == 2, result.stderr
        assert re.search(message, result.stderr), result.stderr
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_predict_with_explanations(photos: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "explanations"
    write_checkpoint(model, make_checkpoint(VITS["average"]))
    (photos / "more").mkdir()
    (photos / "0.png").rename(photos / "more/1.png")  # a second 1.png
    (photos / "broken.jpg").write_bytes(b"\xff\xd8")
    refused = run("predict", model, photos, "--json", "--explain", photos)
    assert refused.returncode == 2
    assert str(photos) in refused.stderr
    assert "--overwrite" in refused.stderr
    assert not refused.stdout
    result = run("predict", model, photos / "2.png", "--explain", photos, "--overwrite")
    assert result.returncode == 2
    assert str(photos / "2.png") in result.stderr  # an input image, which must not be overwritten
    assert "--overwrite" not in result.stderr
    result = run("predict", model, photos, "--json", "--explain", out)
    assert result.returncode == 3
    assert len(json.loads(result.stdout)) == 4
    sizes = {path.name: read_image(path).size for path in out.iterdir()}
    assert sizes == {"1.png": (30, 90), "1-2.png": (60, 40), "2.png": (33, 33)}


def read_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


@pytest.mark.slow
def test_matplotlib_is_imported_lazily() -> None:
    script = "import sys, patchword.inspection; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_pretrained_weights_reproduce_the_paper(ti16: Path, imagenet: Path) -> None:
    classifier = Classifier.load(ti16)
    batch = load_image_batch(classifier, sample_evenly(resolve_images([imagenet]), 8))
    images = classifier.preprocess.normalize(batch.pixels)
    assert isinstance(classifier.model, ViT)
    measured = inspection.measure_attention_distance(classifier.model, [images])
    assert measured.depth_correlation > 0.7
    assert measured.distance.min() < 40 < 90 < measured.distance.max()
    near, far = pos_embed_similarity.cross_strength(inspection.position_similarity(classifier.model))
    assert near > far + 0.1


def test_randomizing_the_head_changes_nothing_else() -> None:
    """Methods that do not use the head keep their maps, also if a stem has batch norms with running statistics."""
    stem = BASE.replace(
        stem="conv", stem_layers=(8, 16), patch_size=(2, 1), class_token=False, pooling="average", norm_after_pool=True
    )
    model = random_model(stem)
    model.train()
    with torch.no_grad():  # running statistics of other images than the explained ones
        for _ in range(5):
            model(2 * torch.randn(8, 3, 32, 36) + 1)
    model.eval()
    correlations = faithfulness.parameter_randomization(
        model, torch.randn(2, 3, 32, 36), torch.tensor([0, 1]), ["rollout", "attention"]
    )
    for method in ("rollout", "attention"):
        assert correlations[method][0] == pytest.approx(1.0)
        assert correlations[method][2] < 0.9


def test_invalid_arguments_are_refused() -> None:
    model, images = random_model(VITS["class"]), torch.randn(2, 3, 32, 36)
    with pytest.raises(ConfigError, match="fusion .*mean, max, min.*'median'"):
        inspection.rollout(model, images, fusion="median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"class .*\b2 images"):
        inspection.explain(model, images, torch.tensor([3]), "relevance")
    with pytest.raises(ConfigError, match=r"\b0 to 4\b.*\[3, 50\]"):
        inspection.explain(model, images, torch.tensor([3, 50]), "relevance")
    with pytest.raises(ConfigError, match=r"torch\.uint8.*preprocess\.normalize"):
        inspection.explain(model, images.to(torch.uint8), torch.tensor([3, 4]), "relevance")
    with pytest.raises(ConfigError, match="images .*attention"):
        inspection.measure_attention_distance(model, [])


def test_faithfulness_verdict() -> None:
    flat = faithfulness.FaithfulnessCurves(np.full((1, 11), 1e-4), np.full((1, 11), 1e-4))
    high = faithfulness.FaithfulnessCurves(np.linspace(0.9, 0.0, 11)[None], np.linspace(0.0, 0.9, 11)[None])
    low = faithfulness.FaithfulnessCurves(np.full((1, 11), 0.9), np.full((1, 11), 0.1))
    chance = faithfulness.FaithfulnessCurves(np.full((1, 11), 0.5), np.full((1, 11), 0.5))
    assert "too low to judge" in faithfulness_verdict({"gradcam": flat, RANDOM_ORDER: flat}, ["gradcam"], 1, 1)
    verdict = faithfulness_verdict(
        {"relevance": chance, "tokens": low, RANDOM_ORDER: low}, ["relevance", "tokens"], 2, 2
    )
    assert "relevance is the most faithful method" in verdict
    assert "Not clearly better than a random order: tokens" in verdict
    assert "With so few images" in verdict
    assert "do not rely on these maps" in faithfulness_verdict({"tokens": low, RANDOM_ORDER: high}, ["tokens"], 2, 2)
    noise = np.array([0.9, -0.8, 0.7, -0.6, 0.5, -0.3])[:, None]  # better on average, but not significantly
    noisy = faithfulness.FaithfulnessCurves(np.full((6, 11), 0.5) - noise / 2, np.full((6, 11), 0.5) + noise / 2)
    even = faithfulness.FaithfulnessCurves(np.full((6, 11), 0.5), np.full((6, 11), 0.5))
    assert "do not rely on these maps" in faithfulness_verdict({"tokens": noisy, RANDOM_ORDER: even}, ["tokens"], 6, 2)


def test_label_of_two_classes() -> None:
    labels = ["tench, Tinca tinca", "crane", "goose", "crane"]
    assert find_class(labels, "tinca tinca") == 0
    assert find_class(labels, "2") == 2
    assert find_class(labels, "Goose") == 2
    with pytest.raises(ConfigError, match=r"1 \(crane\) .*3 \(crane\)") as error:
        find_class(labels, "crane")
    assert error.value.code == "ambiguous_class"
    with pytest.raises(ConfigError, match=r"'tensh'.*\btench\b.*\btench\b") as error:
        find_class(labels, "tensh")
    assert error.value.code == "unknown_class"
