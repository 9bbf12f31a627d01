"""The architecture in words."""

import dataclasses
import typing

import pytest

from patchword.config import ResNetConfig, ViTConfig
from patchword.config.describe_model import DETAILS, PHRASES, SIZE_FIELDS, describe_differences
from patchword.config.model import REGULARIZATION_FIELDS
from patchword.config.presets import preset

FIELDS = {field.name for field in dataclasses.fields(ViTConfig)}


@pytest.mark.parametrize("name", ["Ti/16", "S/16", "B/32", "L/16", "H/14"])
def test_sizes_of_the_paper_do_not_differ(name: str) -> None:
    assert describe_differences(preset(name, image_size=448, num_classes=0)) == {}


def test_every_option_is_named_once() -> None:
    config = ViTConfig(
        pos_embed="rotary",
        rope="dinov3",
        rope_base=50.0,
        num_registers=4,
        key_bias=False,
        activation="swiglu",
        mlp_dim=2048,
        layer_scale=1.0,
        norm_eps=1e-5,
        class_token=False,
        pooling="attention",
        pool_heads=8,
        dropout=0.1,
    )
    phrases = describe_differences(config)
    assert set(phrases) == {
        *("pos_embed", "rope_base", "num_registers", "key_bias", "activation", "mlp_dim", "layer_scale"),
        *("norm_eps", "class_token", "pooling", "pool_heads", "dropout"),
    }
    assert phrases["num_registers"] == "4 register tokens"
    assert "50" in phrases["rope_base"]
    assert phrases["pos_embed"] == "rotary positions (RoPE of DINOv3)"
    assert "1e-05" in phrases["norm_eps"]
    assert phrases["dropout"] == "dropout 0.1"


def test_values_that_the_sizes_imply_are_left_out() -> None:
    config = ViTConfig(head_dim=64, pos_embed_prefix=1, pooling="attention", pool_heads=12)
    assert set(describe_differences(config)) == {"pooling"}
    assert set(describe_differences(ViTConfig(num_registers=2, pos_embed_prefix=3))) == {
        "num_registers",
        "pos_embed_prefix",
    }


def test_stems_name_their_layers() -> None:
    assert "3, 4, 9 units" in describe_differences(preset("R50+B/16"))["stem"]
    config = ViTConfig(stem="conv", stem_layers=(64, 128), patch_size=(4, 4))
    assert "64, 128 channels" in describe_differences(config)["stem"]


def test_resnets_have_no_differences() -> None:
    assert describe_differences(ResNetConfig()) == {}


def test_every_field_and_value_has_words() -> None:
    """Regularization, which matters in training only, is printed by the names of its fields."""
    assert {*PHRASES, *SIZE_FIELDS, *DETAILS, *REGULARIZATION_FIELDS} == FIELDS
    hints = typing.get_type_hints(ViTConfig)
    for name, phrases in PHRASES.items():
        if isinstance(phrases, dict):
            assert {*phrases, getattr(ViTConfig(), name)} == set(typing.get_args(hints[name])), name
