"""Every modern family: adapting its weights, training on it, and fewer tokens."""

import copy

import pytest
import torch
from torch import Tensor

from helpers.families import FAMILY_CONFIGS, family_model
from patchword.config import ViTConfig
from patchword.config.model import REGULARIZATION_FIELDS
from patchword.engines.capabilities import probe_capabilities
from patchword.errors import ConfigError
from patchword.models import ViT, adapt_model, optimize_for_cpu
from patchword.models.layers import NoKeyBiasLinear
from patchword.models.pos_embed import resample_grid
from patchword.models.token_merging import TokenMergingViT

all_families = pytest.mark.parametrize("config", FAMILY_CONFIGS.values(), ids=FAMILY_CONFIGS.keys())
needs_bf16 = pytest.mark.skipif(not probe_capabilities().bf16_works, reason="this processor cannot compute in bf16")
MERGEABLE = {n for n, c in FAMILY_CONFIGS.items() if not c.has_rope and not c.has_relative and c.pre_norm}


def make_model(config: ViTConfig) -> ViT:
    model = family_model(config)
    assert isinstance(model, ViT)
    return model


def random_images(height: int = 32, width: int = 32, batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, height, width)


@all_families
@torch.no_grad()
def test_weights_are_adapted(config: ViTConfig) -> None:
    """Other classes get a zero head on the same features; another image size and back is nearly the same model."""
    model, images = make_model(config), random_images()
    headless = adapt_model(model, num_classes=0)
    assert headless.config.projection_dim is None
    features = headless(images)
    assert features.shape == (2, config.pooled_dim)
    if not config.projection_dim:
        assert torch.equal(features, model.embed_images(images))
    other = adapt_model(model, num_classes=3)
    assert torch.equal(other(images), torch.zeros(2, 3))
    assert torch.equal(other.forward_features(images), model.forward_features(images))
    for size in ((48, 64), (16, 24)):
        resized = adapt_model(model, image_size=size)
        assert resized(random_images(*size)).isfinite().all()
        changed = {n for n, t in model.state_dict().items() if t.shape != resized.state_dict()[n].shape}
        assert changed == {n for n in model.state_dict() if n == "positions.table" or n.endswith("bias.relative")}
    same = adapt_model(adapt_model(model, image_size=32), num_classes=config.num_classes)
    assert torch.equal(same(images), model(images))
    gray = adapt_model(model, in_channels=1)
    one = random_images()[:, :1]
    torch.testing.assert_close(gray(one), model(one.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


@all_families
@torch.no_grad()
def test_smaller_images_in_training(config: ViTConfig) -> None:
    """Progressive resizing: the output is that of the model adapted to the size of the images.

    Relative positions are not resampled: the smaller image uses the small offsets of the table. Fixed positions are
    resampled like learned ones, while an adapted model computes them anew.
    """
    model, images = make_model(config), random_images(16, 24)
    expected = adapt_model(model, image_size=(16, 24))
    if config.has_relative:
        table = expected.state_dict() | {
            n: t[:, 2:5, 1:6] for n, t in model.state_dict().items() if n.endswith("relative")
        }
        expected.load_state_dict(table)
    if config.absolute_pos_embed.startswith("sincos"):
        expected.positions.table = resample_grid(model.positions.table[0], (4, 4), (2, 3), "google")[None]
    torch.testing.assert_close(model.train()(images), expected(images), rtol=1e-4, atol=1e-5)


@all_families
def test_every_parameter_gets_a_gradient(config: ViTConfig) -> None:
    """Exceptions: the keys' third of a bias, and in the last block what only tokens that the head ignores would use."""
    model = make_model(config).train()
    model(random_images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        unread = config.pooling == "class" and name == f"blocks.{config.depth - 1}.attention.bias.relative"
        assert bool(parameter.grad.any()) != unread, name
    for module in model.modules():
        if isinstance(module, NoKeyBiasLinear):
            assert not module.bias.grad.chunk(3)[1].any()
            assert all(part.any() for part in module.bias.grad.chunk(3)[::2])


@all_families
def test_regularization_and_checkpointing(config: ViTConfig) -> None:
    """Off in evaluation, on in training, where the config allows it; recomputing blocks changes no gradient."""
    plain, images = make_model(config), random_images()
    changes = {"dropout": 0.5, "attention_dropout": 0.5, "drop_path": 0.5, "patch_dropout": 0.5}
    assert changes.keys() | {"grad_checkpointing"} == set(REGULARIZATION_FIELDS)
    if config.has_rope or config.has_relative:
        with pytest.raises(ConfigError, match="patch_dropout"):
            config.replace(**changes)
        del changes["patch_dropout"]
    regularized = adapt_model(plain, **changes)
    with torch.no_grad():
        assert torch.equal(regularized(images), plain(images))
        tokens = regularized.train().forward_features(images)
        assert tokens.shape[1] == config.num_prefix + config.num_patches // (2 if "patch_dropout" in changes else 1)
        assert not torch.equal(regularized(images), regularized(images))
    recomputed = adapt_model(plain, grad_checkpointing=True).train()
    for model in (plain.train(), recomputed):
        model(images).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@all_families
def test_optimized_equals_plain(config: ViTConfig) -> None:
    plain, images = make_model(config), random_images()
    fast = optimize_for_cpu(copy.deepcopy(plain))
    with torch.no_grad():
        torch.testing.assert_close(fast(images), plain(images), rtol=1e-5, atol=2e-5)
    for model in (plain.train(), fast.train()):
        model(images).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        assert name == b[0]
        assert torch.equal(a.grad, b[1].grad), name


@needs_bf16
@all_families
def test_training_in_bf16(config: ViTConfig) -> None:
    """Attention takes its fast path (its queries are bf16), and outputs and gradients agree with fp32."""
    plain = make_model(config).train()
    fast, dtypes = optimize_for_cpu(copy.deepcopy(plain)), set()
    for block in fast.blocks:
        block.attention.attend.register_forward_pre_hook(
            lambda module, inputs: dtypes.update(t.dtype for t in inputs[:3])
        )
    found = []
    for model, enabled in ((plain, False), (fast, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(random_images())
        logits.float().square().mean().backward()
        found.append(
            [
                logits.detach().float(),
                *(model.get_parameter(n).grad for n in ("patch_embed.proj.weight", "head.weight")),
            ]
        )
    assert dtypes == {torch.bfloat16}
    for expected, rounded in zip(*found, strict=True):
        assert (rounded - expected).norm() < 0.1 * expected.norm()


# Fewer tokens


@all_families
@torch.no_grad()
def test_no_merging_gives_the_same_output(config: ViTConfig) -> None:
    model, images = make_model(config), random_images()
    torch.testing.assert_close(TokenMergingViT(model)(images), model(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(MERGEABLE))
@torch.no_grad()
def test_merging_identical_patches_does_not_change_the_output(name: str) -> None:
    """Every patch occurs four times, and there are no position embeddings."""
    model = make_model(FAMILY_CONFIGS[name].replace(pos_embed="none", image_size=(32, 40)))
    images = torch.randn(2, 3, 1, 40).repeat(1, 1, 32, 1)
    merged = TokenMergingViT(model, (5, 0))
    torch.testing.assert_close(merged(images), model(images), atol=1e-4, rtol=1e-3)
    different = random_images(32, 40)
    assert (merged(different) - model(different)).abs().max() > 1e-4


@pytest.mark.parametrize("name", sorted(FAMILY_CONFIGS.keys() - MERGEABLE))
def test_tokens_with_positions_inside_attention_are_not_merged(name: str) -> None:
    config = FAMILY_CONFIGS[name]
    reason = "rotary positions.*" + config.pos_embed.replace("+", r"\+") if config.pre_norm else r"model\.res_post_norm"
    with pytest.raises(ConfigError, match=f"Token merging needs .*{reason}"):
        TokenMergingViT(make_model(config), (4, 4))
