"""Configurations: validated once, JSON both ways, every mistake named."""

import json

import pytest

from patchword.config import ResNetConfig, ViTConfig
from patchword.errors import ConfigError

SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_dim": 96}


def test_json_both_ways() -> None:
    config = ViTConfig.from_json({**SMALL, "layer_scale": 0.1, "stem": "conv", "stem_layers": [8, 16], "patch_size": 2})
    assert ViTConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    resnet = ResNetConfig(layers=(1, 2))
    assert ResNetConfig.from_json(json.loads(json.dumps(resnet.to_json()))) == resnet


def test_derived_sizes() -> None:
    config = ViTConfig(image_size=(64, 96), patch_size=8, num_registers=4, distillation=True)
    assert (config.grid, config.num_patches, config.num_prefix, config.num_positioned) == ((8, 12), 96, 6, 2)
    hybrid = ViTConfig(stem="resnet", stem_layers=(3, 4, 9), patch_size=1)
    assert (hybrid.stride, hybrid.grid, hybrid.map_channels) == ((16, 16), (14, 14), 1024)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image_size": 33}, "32 or 40"),
        ({"image_size": [32, 33]}, "width 33"),
        ({"image_size": "32"}, "image_size"),
        ({"image_size": [32]}, "image_size"),
        ({"depth": 2.5}, "depth"),
        ({"depth": -1}, "depth"),
        ({"depth": 10**9}, "depth"),
        ({"depth": True}, "depth"),
        ({"num_heads": 5}, "5 heads"),
        ({"embed_dim": 0}, "embed_dim"),
        ({"pooling": "max"}, "'average'"),
        ({"pooling": "class", "class_token": False}, "class_token"),
        ({"class_token": 1}, "class_token"),
        ({"dropout": 1.0}, "dropout"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"pos_embed": "rotary", "head_dim": 6}, "rotary"),
        ({"pos_embed": "sincos", "embed_dim": 6}, "sincos"),
        ({"pos_embed": "rotary", "patch_dropout": 0.5}, "patch_dropout"),
        ({"attention_pattern": "axial", "patch_dropout": 0.5}, "patch_dropout"),
        ({"distillation": True, "pooling": "average"}, "distillation"),
        ({"stem": "conv"}, "stem_layers"),
        ({"stem": "resnet", "stem_width": 48}, "32"),
        ({"pos_embed_prefix": 2}, "prefix tokens"),
        ({"post_norm": True, "norm_after_pool": True}, "post_norm"),
        ({"pre_logits": 0}, "pre_logits"),
        ({"widht": 3}, "widht"),
    ],
)
def test_mistakes_are_named(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ViTConfig.from_json({**SMALL, **change})


def test_replace_keeps_what_follows() -> None:
    """A changed width changes the width of the heads: derived values are not frozen in."""
    config = ViTConfig.from_json(SMALL).replace(embed_dim=96, class_token=False, pooling="average")
    assert (config.attention_dim, config.num_positioned) == (32, 0)
