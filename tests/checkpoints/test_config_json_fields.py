"""Every field of transformers' config.json: another value is computed as transformers does, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.transformers_models import FAMILIES, MLP, SMALL, random_model, their_output
from patchword.checkpoints import read_checkpoint
from patchword.errors import CheckpointError, ConfigError

# Shapes of tensors, what only training or masking uses, and names.
WITHOUT_EFFECT = ("image_size", "patch_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_channels")
WITHOUT_EFFECT += ("mask_ratio", "use_mask_token", "add_fpn", "model_type", "architectures", "dtype", "num_patches")
WITHOUT_EFFECT += ("id2label", "label2id", "vision_config", "text_config", "projection_dim", "mlp_ratio")
WITHOUT_EFFECT += ("pooler_output_size", "num_register_tokens", "pos_embed_shift", "pos_embed_jitter")
ACTIVATIONS = ("gelu", "quick_gelu", "gelu_pytorch_tanh", "relu", "silu")
VIT_CLASSES = {"vit": ("ViTConfig", "ViTModel", MLP), "deit": ("DeiTConfig", "DeiTModel", MLP)}
VIT_CLASSES |= {"vit classifier": ("ViTConfig", "ViTForImageClassification", MLP)}
VIT_CLASSES |= {"dinov2": ("Dinov2Config", "Dinov2Model", {"mlp_ratio": 2})}
KINDS = {**FAMILIES, **VIT_CLASSES}
OF_EVERY_CLASS = tuple(transformers.PretrainedConfig().to_dict())  # names, and how outputs are returned


def other_values(name: str, value: Any) -> list[Any]:
    """Return values of a field that could change what the model computes."""
    if name in WITHOUT_EFFECT + OF_EVERY_CLASS:
        return []
    if isinstance(value, bool):
        return [not value]
    if name in ("hidden_act", "pooler_act"):
        return [act for act in ACTIVATIONS if act != value]
    if name == "num_attention_heads":
        return [2]
    if isinstance(value, dict):  # of rotary positions
        return [{key: 0.1 * entry if isinstance(entry, float) else entry for key, entry in value.items()}]
    return [2 * value + 0.1] if isinstance(value, float) else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_ignored(kind: str, tmp_path: Path) -> None:
    theirs = random_model(kind, KINDS)
    theirs.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    tower = "vision_config" if "vision_config" in document else None
    config = theirs.config.vision_config if tower else theirs.config
    images, num_changes = torch.randn(2, 3, 32, 32), 0
    for name, value in {**type(config)().to_dict(), **(document[tower] if tower else document)}.items():
        for other in other_values(name, value):
            changed = json.loads(json.dumps(document))
            (changed[tower] if tower else changed)[name] = other
            (tmp_path / "config.json").write_text(json.dumps(changed))
            num_changes += 1
            try:
                ours = read_checkpoint(tmp_path).build_model()
            except (CheckpointError, ConfigError):
                continue
            expected = their_output(type(theirs).from_pretrained(tmp_path).eval(), images)
            with torch.no_grad():
                torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-4, msg=f"{name}={other}")
    assert num_changes >= 3


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_poolers_without_tanh_are_refused(act: str, tmp_path: Path) -> None:
    transformers.ViTModel(transformers.ViTConfig(**SMALL, **MLP, pooler_act=act)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"pooler_act '{act}'; supported: tanh"):
        read_checkpoint(tmp_path)


def test_an_unused_pooler_may_have_any_activation(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SMALL, **MLP, pooler_act="gelu")
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    assert read_checkpoint(tmp_path).config.num_classes == 2


@pytest.mark.parametrize("switches", [{"value_bias": False}, {"query_bias": False}])
def test_biases_that_dinov3_cannot_mix(switches: dict[str, bool], tmp_path: Path) -> None:
    config = transformers.DINOv3ViTConfig(**SMALL, **MLP, **switches)
    transformers.DINOv3ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"query_bias=\w+ and value_bias=\w+; patchword reads"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "switch"),
    [("beit", "use_relative_position_bias"), ("vit", "qkv_bias"), ("dinov3 gated", "use_gated_mlp")],
)
def test_switches_against_the_tensors_are_refused(kind: str, switch: str, tmp_path: Path) -> None:
    """Transformers would ignore the tensors that such a switch turns off."""
    random_model(kind, KINDS).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, switch: False}))
    with pytest.raises(CheckpointError, match=f"{switch}=False, but the tensors are those of {switch}=True"):
        read_checkpoint(tmp_path)
