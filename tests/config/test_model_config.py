"""Model configs: derived sizes, and every validation rule."""

from typing import Any

import pytest

from patchword.config import ResNetConfig, ViTConfig
from patchword.errors import ConfigError

SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_dim": 96}


def test_defaults_are_vit_b16() -> None:
    config = ViTConfig()
    assert (config.grid, config.num_patches, config.num_prefix) == ((14, 14), 196, 1)
    assert (config.attention_dim, config.pooled_dim, config.map_channels) == (64, 768, 3)


def test_derived_sizes() -> None:
    config = ViTConfig(image_size=(64, 96), patch_size=8, num_registers=4, distillation=True)
    assert (config.grid, config.num_patches, config.num_prefix, config.num_positioned) == ((8, 12), 96, 6, 2)
    hybrid = ViTConfig(stem="resnet", stem_layers=(3, 4, 9), patch_size=1)
    assert (hybrid.stride, hybrid.grid, hybrid.map_channels) == ((16, 16), (14, 14), 1024)
    root_only = ViTConfig(stem="resnet", patch_size=8)
    assert (root_only.stem_stride, root_only.map_channels) == (4, 64)
    conv = ViTConfig(stem="conv", stem_layers=(32, 96), patch_size=(4, 8))
    assert (conv.stride, conv.grid, conv.map_channels) == ((16, 32), (14, 7), 96)
    assert ViTConfig(pooling="class+average").pooled_dim == 2 * 768
    assert ViTConfig(pos_embed="sincos").num_positioned == 0


def test_derived_sizes_of_resnets() -> None:
    assert ResNetConfig().pooled_dim == 2048
    assert ResNetConfig(width_factor=3).pooled_dim == 3 * 2048
    assert ResNetConfig(kind="cifar", layers=(3, 3, 3)).pooled_dim == 64


def test_replace_recomputes_derived_sizes() -> None:
    config = ViTConfig.from_json(SMALL).replace(embed_dim=96, class_token=False, pooling="average")
    assert (config.attention_dim, config.num_positioned) == (32, 0)


def test_single_number_is_a_square_size() -> None:
    assert ViTConfig(image_size=64, patch_size=(8, 16)).image_size == (64, 64)
    assert ResNetConfig(image_size=[32, 64]).image_size == (32, 64)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"image_size": 33}, ["model.image_size", "height 33", "32", "40"]),
        ({"image_size": [32, 33]}, ["model.image_size", "width 33", "32", "40"]),
        ({"image_size": 0}, ["model.image_size", "(0, 0)"]),
        ({"image_size": 32768}, ["model.image_size", "32768"]),
        ({"patch_size": 0}, ["model.patch_size", "(0, 0)"]),
        ({"image_size": [32]}, ["model.image_size", "[32]"]),
        ({"depth": 2.5}, ["model.depth", "2.5"]),
        ({"depth": -1}, ["model.depth", "-1"]),
        ({"depth": 10**9}, ["model.depth", "1000000000"]),
        ({"depth": True}, ["model.depth", "True"]),
        ({"num_heads": 0}, ["model.num_heads", " 0."]),
        ({"num_heads": 5}, ["model.embed_dim 48", "5 heads", "model.head_dim"]),
        ({"embed_dim": 0}, ["model.embed_dim", " 0."]),
        ({"head_dim": 0}, ["model.head_dim", " 0."]),
        ({"mlp_dim": 0}, ["model.mlp_dim", " 0."]),
        ({"in_channels": 0}, ["model.in_channels", " 0."]),
        ({"num_classes": -1}, ["model.num_classes", "-1"]),
        ({"num_registers": -1}, ["model.num_registers", "-1"]),
        ({"window_size": 0}, ["model.window_size", " 0."]),
        ({"local_attention_init": 11}, ["model.local_attention_init", "11"]),
        ({"pooling": "max"}, ["model.pooling", "'average'", "'max'"]),
        ({"pooling": "class", "class_token": False}, ["model.pooling 'class'", "model.class_token"]),
        ({"class_token": 1}, ["model.class_token", " 1."]),
        ({"dropout": 1.0}, ["model.dropout", "1.0"]),
        ({"drop_path": -0.1}, ["model.drop_path", "-0.1"]),
        ({"patch_dropout": 1.5}, ["model.patch_dropout", "1.5"]),
        ({"norm_eps": 0.0}, ["model.norm_eps", "0.0"]),
        ({"norm_eps": float("nan")}, ["model.norm_eps", "nan"]),
        ({"pos_embed": "rotary", "head_dim": 6}, ["model.head_dim", "'rotary'", " 6."]),
        ({"pos_embed": "sincos", "embed_dim": 6}, ["model.embed_dim", "'sincos'", " 6."]),
        ({"pos_embed": "sincos", "embed_dim": 4, "num_heads": 1}, ["model.embed_dim", " 8", " 4."]),
        ({"pos_embed": "learned_2d", "embed_dim": 9}, ["model.embed_dim", "'learned_2d'", " 9."]),
        ({"pos_embed": "rotary", "patch_dropout": 0.5}, ["model.patch_dropout", "0.5"]),
        ({"attention_pattern": "axial", "patch_dropout": 0.5}, ["model.patch_dropout", "0.5"]),
        ({"pos_embed_prefix": 2}, ["model.pos_embed_prefix", " 2."]),
        ({"pos_embed_prefix": -1}, ["model.pos_embed_prefix", "-1"]),
        ({"pos_embed": "sincos", "pos_embed_prefix": 1}, ["model.pos_embed_prefix", "'sincos'", " 1."]),
        ({"distillation": True, "pooling": "average"}, ["model.distillation"]),
        ({"distillation": True, "pre_logits": 8}, ["model.distillation"]),
        ({"stem": "conv"}, ["model.stem_layers", "[64, 128]"]),
        ({"stem": "conv", "stem_layers": [0]}, ["model.stem_layers", "(0,)"]),
        ({"stem": "conv", "stem_layers": [8] * 9}, ["model.stem_layers", " 8 "]),
        ({"stem": "conv", "stem_layers": [8], "stem_convs": 0}, ["model.stem_convs", " 0."]),
        ({"stem": "resnet", "stem_width": 48}, ["model.stem_width", "32", "48"]),
        ({"stem": "resnet", "stem_layers": [400, 400], "patch_size": 1}, ["model.stem_layers", " 512 "]),
        ({"stem_layers": [8]}, ["model.stem_layers", "linear", "(8,)"]),
        ({"post_norm": True, "norm_after_pool": True}, ["model.post_norm", "model.norm_after_pool"]),
        ({"pre_logits": 0}, ["model.pre_logits", " 0."]),
        ({"projection_dim": 8, "pre_logits": 8}, ["model.projection_dim", "pre_logits"]),
        ({"post_norm": True, "res_post_norm": True}, ["model.post_norm", "model.res_post_norm"]),
        ({"final_norm": False, "norm_after_pool": True}, ["model.norm_after_pool", "final_norm"]),
        ({"qkv_bias": False, "key_bias": False}, ["model.key_bias", "qkv_bias"]),
        ({"relative_prefix": True}, ["model.relative_prefix", "relative"]),
        (
            {"relative_prefix": True, "pos_embed": "relative", "num_registers": 1},
            ["model.relative_prefix", "one prefix"],
        ),
        ({"rope": "pe"}, ["model.rope", " pe."]),
        ({"rope_reference": 4, "pos_embed": "rotary"}, ["model.rope_reference", "'patchword'"]),
        ({"rope_base": 5.0, "pos_embed": "rotary", "rope": "mixed"}, ["model.rope_base", "'mixed'"]),
        ({"rope_base": 0.0, "pos_embed": "rotary"}, ["model.rope_base", " 0.0"]),
        ({"rope_periods": [1.0], "pos_embed": "rotary"}, ["model.rope_periods", " 4 ", "(1.0,)"]),
        ({"patch_dropout": 0.5, "pos_embed": "learned+rotary"}, ["model.patch_dropout", "'learned+rotary'"]),
        ({"pool_heads": 4}, ["model.pool_heads", "'class'"]),
        ({"pool_heads": 5, "pooling": "attention"}, ["model.embed_dim 48", "5 heads", "model.pool_heads"]),
        ({"pool_prefix": True}, ["model.pool_prefix", "'class'"]),
        ({"pool_mlp_dim": 8, "pooling": "query"}, ["model.pool_mlp_dim", "'query'"]),
        ({"pos_embed": "relative", "image_size": 4096, "patch_size": 4}, ["GiB", "model.image_size"]),
    ],
    ids=str,
)
def test_invalid_vit_config(change: dict[str, Any], expected: list[str]) -> None:
    """The error names the field by its full path, and the value."""
    with pytest.raises(ConfigError) as error:
        ViTConfig.from_json({**SMALL, **change})
    assert error.value.code == "invalid_config"
    assert not [text for text in expected if text not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layers": []}, ["model.layers", " 8 ", " ()."]),
        ({"layers": [1] * 9}, ["model.layers", " 8 ", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"]),
        ({"layers": [1, 0]}, ["model.layers", " 1,", " (1, 0)."]),
        ({"layers": [300, 300]}, ["model.layers", " 512 ", " (300, 300)."]),
        ({"width_factor": 17}, ["model.width_factor", " 1 ", " 16,", " 17."]),
        ({"in_channels": 0}, ["model.in_channels", " 1 ", " 1,024,", " 0."]),
        ({"num_classes": -1}, ["model.num_classes", " 0 ", " 1,000,000,", " -1."]),
        ({"image_size": 0}, ["model.image_size", " 1 ", " 16,384,", " (0, 0)."]),
        ({"kind": "wide"}, ["model.kind", "'bit', 'cifar'", "'wide'"]),
    ],
)
def test_invalid_resnet_config(change: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ResNetConfig.from_json(change)
    assert error.value.code == "invalid_config"
    assert not [text for text in expected if text not in str(error.value)], str(error.value)
