"""Parity with transformers for DINOv3, SigLIP, CLIP, BEiT, MAE, I-JEPA, MSN and AIMv2: random models, both ways."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.transformers_models import BEIT, FAMILIES, MLP, SMALL, random_model, their_output
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.errors import CheckpointError, UnknownArchitectureError

TOLERANCE = 3e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_to_ours(kind: str, tmp_path: Path) -> None:
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path)
    ours = read_checkpoint(tmp_path).build_model()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), their_output(theirs, images), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_ours_to_transformers(kind: str, tmp_path: Path) -> None:
    """Transformers loads our files without missing or unexpected tensors, and gives the same outputs."""
    theirs = random_model(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    write_checkpoint(tmp_path / "ours", read_checkpoint(tmp_path / "theirs"))
    write_checkpoint(tmp_path / "back", read_checkpoint(tmp_path / "ours"), "transformers")
    again, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    text_tower = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
    assert not [name for name in info["missing_keys"] if not name.startswith(text_tower)]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(their_output(theirs, images), their_output(again.eval(), images))


@pytest.mark.parametrize("kind", ["clip", "siglip", "dinov3", "mae", "aimv2"])
def test_without_config_json(kind: str, tmp_path: Path) -> None:
    """The tensors alone would be a guess, so the reader asks for what config.json states."""
    random_model(kind).save_pretrained(tmp_path)
    expected = read_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnknownArchitectureError, match=r"config\.json .*norm_eps") as error:
        read_checkpoint(tmp_path)
    given = {name: getattr(expected.config, name) for name in error.value.missing}
    again = read_checkpoint(tmp_path, num_heads=3, **{n: v for n, v in given.items() if n != "num_heads"})
    assert again.config.replace(image_size=32) == expected.config


def test_aimv2_files_of_apple(tmp_path: Path) -> None:
    """Apple's own files have other names, and queries, keys and values in one tensor."""
    theirs = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**SMALL, **MLP, use_head=False)).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, std=0.03 if "embedding" in name else 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    tensors, apple = load_file(tmp_path / "theirs/model.safetensors"), {}
    names = {"embeddings.patch_embed.": "preprocessor.patchifier.proj.", "rms_norm.": "trunk.post_trunk_norm."}
    names |= {"embeddings.rms_norm.": "preprocessor.patchifier.norm.", "encoder.layers.": "trunk.blocks."}
    parts = {"rms_norm": "norm_", "attention.out_proj": "attn.proj", "ffn.gate_proj": "mlp.fc1"}
    parts |= {"ffn.up_proj": "mlp.fc3", "ffn.down_proj": "mlp.fc2"}
    apple["preprocessor.pos_embed"] = tensors.pop("embeddings.position_embedding.weight")[None]
    for i in range(2):
        qkv = [tensors.pop(f"encoder.layers.{i}.attention.{part}_proj.weight") for part in ("q", "k", "v")]
        apple[f"trunk.blocks.{i}.attn.qkv.weight"] = torch.cat(qkv)
    for name, tensor in tensors.items():
        start = next(start for start in names if name.startswith(start))
        new = names[start] + name.removeprefix(start)
        if start == "encoder.layers.":
            for before, after in parts.items():
                new = new.replace(before, after)
        apple[new] = tensor
    (tmp_path / "apple").mkdir()
    save_file(apple, tmp_path / "apple/model.safetensors")
    config = {"model_type": "aimv2", "num_attention_heads": 3, "rms_norm_eps": 1e-5, "qkv_bias": False}
    (tmp_path / "apple/config.json").write_text(json.dumps({**config, "image_size": 32}))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = read_checkpoint(tmp_path / "apple").build_model()(images)
    torch.testing.assert_close(features, their_output(theirs, images), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["siglip", "clip", "beit", "dinov3", "aimv2", "msn"])
def test_missing_last_block(kind: str, tmp_path: Path) -> None:
    """config.json states the depth: a file without its last block is not a shallower model."""
    random_model(kind).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not re.search(r"layers?\.1\.", n)}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*\.1\."):
        read_checkpoint(tmp_path)


def test_tensors_of_another_model_than_config_json(tmp_path: Path) -> None:
    random_model("siglip").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "clip_vision_model"}))
    with pytest.raises(CheckpointError, match=r"config\.json .*CLIP"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["swin", "beit"])
def test_models_that_are_not_read(kind: str, tmp_path: Path) -> None:
    small = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2]}
    if kind == "swin":
        transformers.SwinModel(transformers.SwinConfig(**small, window_size=4)).save_pretrained(tmp_path)
    else:  # without relative positions
        transformers.BeitModel(transformers.BeitConfig(**SMALL, **BEIT)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="swin" if kind == "swin" else "no relative positions"):
        read_checkpoint(tmp_path)


def test_ijepa_with_a_pooler(tmp_path: Path) -> None:
    """The pooler would read the first patch; the features are the mean, as a note says."""
    config = transformers.IJepaConfig(**SMALL, **MLP)
    theirs = transformers.IJepaModel(config, add_pooling_layer=True).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(tmp_path / "theirs")
    notes = {note.code: note for note in checkpoint.notes}
    assert "pooling=average (this model does not pool)" in notes["architecture_assumed"]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        mean = theirs(images).last_hidden_state.mean(dim=1)
        torch.testing.assert_close(checkpoint.build_model()(images), mean, rtol=0, atol=TOLERANCE)
    write_checkpoint(tmp_path / "back", checkpoint, "transformers")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("kind", ["clip", "dinov3"])
def test_heads_that_do_not_divide_the_width(kind: str, tmp_path: Path) -> None:
    random_model(kind).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"num_heads=7 .* 48 .*--num-heads \(the file says 3\).*--head-dim"):
        read_checkpoint(tmp_path, num_heads=7)


@pytest.mark.parametrize("name", ["transformers", "timm"])
def test_heads_against_the_tables_of_beit(name: str, tmp_path: Path) -> None:
    """The error names a tensor as the file does."""
    random_model("beit").save_pretrained(tmp_path / "theirs")
    write_checkpoint(tmp_path / "model", read_checkpoint(tmp_path / "theirs"), name)
    stored = load_file(tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match="3 heads, but num_heads is 4: correct --num-heads") as error:
        read_checkpoint(tmp_path / "model", num_heads=4)
    assert any(f" {tensor} has a column" in str(error.value) for tensor in stored)


def test_defaults_are_those_of_a_plural(tmp_path: Path) -> None:
    random_model("dinov3").save_pretrained(tmp_path)
    assert any("assumed transformers' default" in note for note in read_checkpoint(tmp_path).notes)


@pytest.mark.parametrize(("kind", "summary"), [("dinov2", "resize to 36x36, crop 32x32"), ("deit", "squash to 36x36")])
def test_default_preprocessing_is_that_of_transformers(kind: str, summary: str, tmp_path: Path) -> None:
    classes = {"dinov2": ("Dinov2Config", "Dinov2Model"), "deit": ("DeiTConfig", "DeiTForImageClassification")}
    config, model = (getattr(transformers, name) for name in classes[kind])
    model(config(**SMALL)).save_pretrained(tmp_path)
    preprocess = read_checkpoint(tmp_path).preprocess
    assert preprocess is not None
    assert preprocess.summary().startswith(summary)
    assert preprocess.interpolation == "bicubic"
