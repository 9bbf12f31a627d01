"""Token merging: outputs do not change if nothing, or only identical tokens, are merged."""

import pytest
import torch

from helpers.model_zoo import VITS, random_model
from patchword.config import ResNetConfig
from patchword.errors import ConfigError
from patchword.models.token_merging import TokenMergingViT, merge, merge_schedule, num_read_tokens, reduce_tokens

MERGEABLE = {
    name: config
    for name, config in VITS.items()
    if not config.has_rope and not config.has_relative and config.attention_pattern == "global" and config.pre_norm
}


@pytest.mark.parametrize("name", VITS)
def test_no_merging_gives_the_same_output(name: str) -> None:
    model = random_model(VITS[name])
    images = torch.randn(3, model.config.in_channels, *model.config.image_size)
    with torch.no_grad():
        torch.testing.assert_close(TokenMergingViT(model)(images), model(images), atol=1e-5, rtol=1e-4)


def test_tokens_that_the_head_ignores_are_not_computed() -> None:
    """The last MLP gets the class token only, or all tokens with average pooling."""
    for name, expected in (("class", 1), ("average", None)):
        model, rows = random_model(VITS[name]), []
        model.blocks[-1].mlp.register_forward_pre_hook(lambda module, args, rows=rows: rows.append(args[0].shape[1]))
        with torch.no_grad():
            reduce_tokens(model)(torch.randn(1, 3, *model.config.image_size))
        assert rows == [expected or model.config.num_patches + model.config.num_prefix]
        assert (reduce_tokens(model) is model) == (num_read_tokens(model) == 0)


@pytest.mark.parametrize("name", MERGEABLE)
def test_merging_identical_patches_does_not_change_the_output(name: str) -> None:
    """Every patch occurs several times, and there are no position embeddings."""
    config = MERGEABLE[name].replace(pos_embed="none")
    if config.stem != "linear":
        pytest.skip("after convolutions, identical patches differ at the borders")
    model = random_model(config)
    w = config.grid[1]
    colors = torch.randn(2, config.in_channels, 1, w)
    images = colors.repeat(1, 1, config.image_size[0], 1).repeat_interleave(config.image_size[1] // w, dim=3)
    merged = [config.num_patches // 4] + [0] * (config.depth - 1)
    with torch.no_grad():
        torch.testing.assert_close(TokenMergingViT(model, merged)(images), model(images), atol=1e-4, rtol=1e-3)


def test_most_similar_tokens_are_merged_by_weight() -> None:
    keys = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.1], [0.1, 1.0]]])  # a prefix token, four patches
    x = torch.tensor([[[5.0], [1.0], [2.0], [30.0], [4.0]]])
    sizes = torch.tensor([[[1.0], [1.0], [1.0], [1.0], [3.0]]])
    # First half: patches 0 and 2, second: 1 and 3. Nearest of 0 (1, 0) is 3 (0.1), of 2 (-1, 0.1) is 1 (0.1) ...
    found, weights = merge(x, sizes, keys, 1, 1)
    assert found.shape == (1, 4, 1)
    assert weights.sum() == sizes.sum(), "no patch is lost"
    torch.testing.assert_close((found * weights).sum(), (x * sizes).sum())
    assert found[0, 0, 0] == 5.0, "prefix tokens do not change"
    assert weights.max() == 4.0
    assert found[0, weights[0, :, 0].argmax(), 0] == pytest.approx((1.0 + 3 * 4.0) / 4)


def test_tokens_that_the_class_token_attends_to_are_kept() -> None:
    """Both pairs are equally similar; the one with less attention is merged."""
    keys = torch.tensor([[[9.0, 9.0], [1.0, 0.2], [1.0, 0.0], [-1.0, 0.2], [-1.0, 0.0]]])
    x, sizes = torch.arange(5.0)[None, :, None], torch.ones(1, 5, 1)
    for attention, kept in (([0.2, 0.6, 0.0, 0.1, 0.1], 1.0), ([0.2, 0.1, 0.1, 0.6, 0.0], 3.0)):
        found, _ = merge(x, sizes, keys, 1, 1, torch.tensor([attention]))
        assert kept in found[0, :, 0].tolist(), attention


def test_first_quarter_of_blocks_merges_nothing() -> None:
    config = VITS["class"].replace(depth=8, image_size=(64, 64))
    counts = merge_schedule(config, 0.25)
    assert counts[:2] == (0, 0)
    assert counts[2] == config.num_patches // 4
    assert list(counts[2:]) == sorted(counts[2:])[::-1]
    assert sum(counts) < config.num_patches
    assert sum(merge_schedule(config, 0.0)) == 0


def test_merge_counts_above_the_number_of_tokens() -> None:
    """Blocks merge down to one patch, and no further."""
    model = random_model(VITS["class"].replace(depth=12))
    images = torch.randn(1, 3, *model.config.image_size)
    with torch.no_grad():
        assert TokenMergingViT(model, [1000] * model.config.depth)(images).isfinite().all()


def test_resnets_have_no_tokens() -> None:
    with pytest.raises(ConfigError, match="ResNet"):
        reduce_tokens(
            random_model(ResNetConfig(image_size=(32, 32), layers=(1, 1, 1), kind="cifar", num_classes=3)), [1]
        )


@pytest.mark.parametrize("name", sorted(VITS.keys() - MERGEABLE.keys()))
def test_unsupported_models_are_refused(name: str) -> None:
    model = random_model(VITS[name])
    norms = {"sin-cos, normed": r"model\.post_norm", "res_post_norm": r"model\.res_post_norm"}
    expected = norms.get(name, f"{model.config.attention_pattern} .*pos_embed")
    with pytest.raises(ConfigError, match=f"Token merging .*{expected}"):
        TokenMergingViT(model, [1] * model.config.depth)


def test_one_number_per_block() -> None:
    with pytest.raises(ConfigError, match=r"merged .*\b3 .*\(4,\)"):
        TokenMergingViT(random_model(VITS["class"]), [4])
