"""Preprocessing of the original library, also for image sizes that are no multiple of the patch: the same pixels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.transformers_models import CLIP, MLP, random_model, their_output
from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from patchword.data.preprocess import Preprocess
from patchword.engines.export import ExportOptions, write_export
from patchword.evaluation.export_check import check_export
from patchword.inference.classifier import Classifier

PROCESSOR = {"do_resize": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
SQUASH = {**PROCESSOR, "size": {"height": 20, "width": 20}}
CROP = {**PROCESSOR, "size": {"shortest_edge": 25}, "crop_size": {"height": 20, "width": 20}, "do_center_crop": True}
ODD: dict[str, Any] = {"image_size": 20}  # with patches of 8
KINDS = {
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", {**MLP, **ODD}),
    "clip": ("CLIPVisionConfig", "CLIPVisionModelWithProjection", {**CLIP, **ODD}),
    "siglip classifier": ("SiglipConfig", "SiglipForImageClassification", {**MLP, **ODD}),
    "vit": ("ViTConfig", "ViTForImageClassification", {**MLP, **ODD}),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {"mlp_ratio": 2, **ODD}),
    "aimv2": ("Aimv2VisionConfig", "Aimv2VisionModel", {**MLP, "use_head": True, **ODD}),
}


def photo() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((44, 60), Image.Resampling.BICUBIC)


def save_theirs(kind: str, folder: Path, processor: dict[str, Any]) -> torch.nn.Module:
    """Save a small model of transformers, with a preprocessor_config.json."""
    theirs = random_model(kind, KINDS)
    theirs.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return theirs


def their_pixels(processor: dict[str, Any]) -> torch.Tensor:
    """Resize to all 20 pixels, by Pillow: the convolution drops the last four rows and columns by itself."""
    image = photo()
    if "crop_size" in processor:
        image = image.resize((25, int(25 * 60 / 44)), Image.Resampling.BICUBIC)
        top, left = round((image.height - 20) / 2), round((25 - 20) / 2)
        image = image.crop((left, top, left + 20, top + 20))
    else:
        image = image.resize((20, 20), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 127.5 - 1


@pytest.mark.parametrize("processor", [SQUASH, CROP], ids=["squash", "crop"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(kind: str, processor: dict[str, Any], tmp_path: Path) -> None:
    theirs = save_theirs(kind, tmp_path / "theirs", processor)
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.preprocess is not None
    assert (checkpoint.config.image_size, checkpoint.preprocess.trim) == ((16, 16), (4, 4))
    assert "keep the first 16x16" in checkpoint.preprocess.summary()
    expected = their_output(theirs, their_pixels(processor))
    with torch.no_grad():
        outputs = checkpoint.build_model()(checkpoint.preprocess(photo())[None])
    torch.testing.assert_close(outputs, expected, rtol=0.02, atol=0.02)  # two gray levels of Pillow's box
    whole = replace(checkpoint.preprocess, trim=(0, 0))
    with torch.no_grad():
        wrong = checkpoint.build_model()(whole(photo())[None])
    assert (wrong - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["transformers", "timm", "patchword"])
@pytest.mark.parametrize("kind", ["siglip", "clip", "aimv2", "vit"])
def test_written_back(kind: str, name: str, tmp_path: Path) -> None:
    """The files state 20 pixels again, and read as the same model."""
    theirs = save_theirs(kind, tmp_path / "theirs", SQUASH)
    checkpoint = read_checkpoint(tmp_path / "theirs")
    if kind == "aimv2" and name == "timm":
        pytest.skip("timm has no pooling by a query")
    notes = write_checkpoint(tmp_path / "back", checkpoint, name)
    assert "preprocess_not_stored" not in {note.code for note in notes}
    again = read_checkpoint(tmp_path / "back")
    assert again.preprocess == checkpoint.preprocess
    if name == "transformers":
        assert json.loads((tmp_path / "back/config.json").read_text())["image_size"] == 20
        model = type(theirs).from_pretrained(tmp_path / "back").eval()
        images = their_pixels(SQUASH)
        torch.testing.assert_close(their_output(model, images), their_output(theirs, images), rtol=0, atol=1e-5)
    if name == "timm":
        assert json.loads((tmp_path / "back/config.json").read_text())["model_args"]["img_size"] == [20, 20]


def test_size_in_the_name_of_a_timm_architecture(tmp_path: Path) -> None:
    """vit_so400m_patch14_siglip_384 has 27 x 27 patches, and takes images of 384 pixels."""
    config = read_checkpoint_config(tmp_path)
    assert config["pretrained_cfg"]["input_size"] == [3, 20, 20]
    config["architecture"] = "vit_base_patch8_siglip_20"
    del config["model_args"]["img_size"]
    (tmp_path / "back/config.json").write_text(json.dumps(config))
    preprocess = read_checkpoint(tmp_path / "back").preprocess
    assert preprocess is not None
    assert (preprocess.size, preprocess.trim) == ((16, 16), (4, 4))


def read_checkpoint_config(folder: Path) -> dict[str, Any]:
    """Write a SigLIP of odd size as timm does; return its config.json."""
    save_theirs("siglip", folder / "theirs", SQUASH)
    write_checkpoint(folder / "back", read_checkpoint(folder / "theirs"), "timm")
    return dict(json.loads((folder / "back/config.json").read_text()))


def test_a_bare_file_says_what_it_cannot_store(tmp_path: Path) -> None:
    save_theirs("vit", tmp_path / "theirs", SQUASH)
    notes = write_checkpoint(tmp_path / "bare.safetensors", read_checkpoint(tmp_path / "theirs"), "timm")
    assert any("keep the first 16x16" in note for note in notes if note.code == "metadata_not_stored")


def test_another_image_size_has_no_rest(tmp_path: Path) -> None:
    save_theirs("vit", tmp_path, SQUASH)
    for size, trim in (((16, 16), (4, 4)), ((24, 24), (0, 0))):
        preprocess = read_checkpoint(tmp_path, image_size=size).preprocess
        assert preprocess is not None
        assert (preprocess.size, preprocess.trim) == (size, trim)


def test_a_processor_that_does_not_normalize(tmp_path: Path) -> None:
    save_theirs("vit", tmp_path, {**SQUASH, "do_normalize": False})
    preprocess = read_checkpoint(tmp_path).preprocess
    assert preprocess is not None
    assert (preprocess.mean, preprocess.std) == ((0.0,) * 3, (1.0,) * 3)


def test_a_size_that_the_positions_contradict(tmp_path: Path) -> None:
    save_theirs("vit", tmp_path, SQUASH)
    document = json.loads((tmp_path / "config.json").read_text())
    assert "image_size_of_positions" not in {note.code for note in read_checkpoint(tmp_path).notes}
    (tmp_path / "config.json").write_text(json.dumps({**document, "image_size": 64}))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config.image_size == (16, 16)
    assert "image_size_of_positions" in {note.code for note in checkpoint.notes}


@pytest.mark.slow
def test_export_with_preprocessing(tmp_path: Path) -> None:
    save_theirs("vit", tmp_path / "theirs", CROP)
    checkpoint: Checkpoint = read_checkpoint(tmp_path / "theirs")
    options = ExportOptions(include_preprocessing=True)
    engine = write_export(checkpoint, tmp_path / "model.pt2", options)
    check = check_export(Classifier(checkpoint), engine, options)
    assert check.parity.kl_divergence < 1e-2


def test_the_region_that_the_model_sees() -> None:
    """What pages and explanations draw: the first 16 of 20 pixels, of images of twice that size."""
    preprocess = Preprocess((16, 16), resize="squash", mean=(0.5,) * 3, std=(0.5,) * 3, trim=(4, 4))
    assert preprocess.crop_box(40, 40) == (0, 0, 32, 32)
    assert Preprocess.from_json(preprocess.to_json()) == preprocess
    assert "trim" not in replace(preprocess, trim=(0, 0)).to_json()
