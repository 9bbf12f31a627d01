"""CLIP's image towers in timm: quick GELU that only a tag tells, and projections that are stored as heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import BEIT, CLIP, family_model
from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.errors import UnknownArchitectureError
from patchword.models import build_model

EXACT, QUICK = "vit_base_patch16_clip_224", "vit_base_patch16_clip_quickgelu_224"
NOTES = ["natively QuickGELU, use quickgelu model variant for original results"]


def write_clip(folder: Path, architecture: str = EXACT, **pretrained: Any) -> Path:
    """Write a small CLIP image tower as timm does, with a projection of 24 dimensions."""
    config = CLIP.replace(num_classes=0, activation="gelu")
    tensors = dict(family_model(config).state_dict())
    write_checkpoint(folder, Checkpoint(config, tensors, Preprocess(config.image_size, mean=HALF, std=HALF)), "timm")
    document = json.loads((folder / "config.json").read_text())
    document["architecture"] = architecture
    document["pretrained_cfg"] |= pretrained
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def codes(checkpoint: Checkpoint) -> set[str]:
    return {note.code for note in checkpoint.notes}


@pytest.mark.parametrize(
    ("architecture", "pretrained", "noted"),
    [
        (EXACT, {"tag": "openai"}, True),
        (EXACT, {"tag": "metaclip_2pt5b"}, True),
        (f"{EXACT}.openai", {}, True),
        (EXACT, {"tag": "mine", "notes": NOTES}, True),
        (EXACT, {"tag": "dfn2b"}, False),  # of ViT-B, whose weights were trained with exact GELU
        ("vit_large_patch14_clip_224", {"tag": "dfn2b"}, True),
        (EXACT, {"tag": "laion2b"}, False),
        (EXACT, {"tag": "openai_ft_in1k"}, False),  # fine-tuned with exact GELU
        (QUICK, {"tag": "openai", "notes": NOTES}, False),
    ],
)
def test_weights_trained_with_quick_gelu(architecture: str, pretrained: dict, noted: bool, tmp_path: Path) -> None:
    """The GELU is that of timm's entry point, with a note where the weights are made for the other one."""
    found = read_checkpoint(write_clip(tmp_path / "clip", architecture, **pretrained))
    assert isinstance(found.config, ViTConfig)
    assert found.config.activation == ("quick_gelu" if "quickgelu" in architecture else "gelu")
    assert ("trained_with_quick_gelu" in codes(found)) == noted
    if noted:
        again = read_checkpoint(tmp_path / "clip", activation="quick_gelu")
        assert again.config == found.config.replace(activation="quick_gelu")
        assert "trained_with_quick_gelu" not in codes(again)


def test_a_file_name_with_such_a_tag_is_refused(tmp_path: Path) -> None:
    """It is a name of two models: that of timm's entry point, and that of the weights."""
    file = tmp_path / f"{EXACT}.openai.safetensors"
    (write_clip(tmp_path / "clip") / "model.safetensors").rename(file)
    with pytest.raises(UnknownArchitectureError, match=f"trained with quick GELU.*{QUICK}.*--activation") as error:
        read_checkpoint(file, num_heads=3)
    assert error.value.missing == ("activation",)
    for activation in ("gelu", "quick_gelu"):
        config = read_checkpoint(file, num_heads=3, activation=activation).config
        assert isinstance(config, ViTConfig)
        assert config.activation == activation
    renamed = file.rename(tmp_path / f"{QUICK}.openai.safetensors")
    config = read_checkpoint(renamed, num_heads=3).config
    assert isinstance(config, ViTConfig)
    assert config.activation == "quick_gelu"


def test_a_projection_without_a_stated_width_is_noted(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "clip")
    found = read_checkpoint(folder)
    assert isinstance(found.config, ViTConfig)
    assert (found.config.projection_dim, found.config.num_classes) == (24, 0)
    note = next(note for note in found.notes if note.code == "projection_assumed")
    assert "num_classes=24" in note
    given = read_checkpoint(folder, num_classes=24)
    assert isinstance(given.config, ViTConfig)
    assert (given.config.projection_dim, given.config.num_classes) == (None, 24)
    assert not {"projection_assumed", "head_replaced"} & codes(given)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(given.build_model()(images), found.build_model()(images))


def test_a_new_head_of_another_width_is_a_classifier(tmp_path: Path) -> None:
    """The projection of published weights has a known width; the value of a bias does not decide."""
    config = CLIP.replace(num_classes=0, activation="gelu", projection_dim=10, embed_dim=768, num_heads=12, depth=1)
    tensors = dict(build_model(config).state_dict())
    tensors["pre_logits.weight"] = torch.randn(10, 768)
    checkpoint = Checkpoint(config, tensors, Preprocess(config.image_size, mean=HALF, std=HALF))
    write_checkpoint(tmp_path / "clip", checkpoint, "timm")
    path = tmp_path / "clip/config.json"
    document = json.loads(path.read_text())
    del document["model_args"]["embed_dim"]
    path.write_text(json.dumps(document))
    found = read_checkpoint(tmp_path / "clip")
    assert isinstance(found.config, ViTConfig)
    assert (found.config.projection_dim, found.config.num_classes) == (None, 10)
    assert "projection_assumed" not in codes(found)


def test_relative_positions_without_an_architecture(tmp_path: Path) -> None:
    """The tensors of BEiT are not those of an ordinary ViT: their GELU and epsilon are not assumed."""
    config = BEIT.replace(num_heads=3)
    checkpoint = Checkpoint(
        config, dict(family_model(config).state_dict()), Preprocess(config.image_size, mean=HALF, std=HALF)
    )
    write_checkpoint(tmp_path / "beit", checkpoint, "timm")
    expected = read_checkpoint(tmp_path / "beit").config
    bare = (tmp_path / "beit/model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(UnknownArchitectureError) as error:
        read_checkpoint(bare)
    assert error.value.missing == ("num_heads", "activation", "norm_eps", "res_post_norm")
    given = {name: getattr(config, name) for name in error.value.missing}
    assert read_checkpoint(bare, **given).config == expected
