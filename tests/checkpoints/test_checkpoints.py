"""Model directories, conversion to and from every format, errors of readers, and adaptation by the caller."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.small_checkpoint import LABELS, make_checkpoint
from patchword.checkpoints import WRITABLE, Checkpoint, load_model, read_checkpoint, write_checkpoint
from patchword.checkpoints.detect_format import load_source
from patchword.checkpoints.formats.transformers import parse_preprocess
from patchword.checkpoints.tensor_files import write_tensors
from patchword.config import ResNetConfig
from patchword.data.preprocess import HALF, IMAGENET_MEAN, Preprocess
from patchword.errors import CheckpointError, ConfigError, ConversionError, OutputError
from patchword.models import build_model

SUFFIX = {"google": ".npz", "big_vision": ".npz"}
SUFFIX |= dict.fromkeys(("torchvision", "deit", "dinov2", "dinov3", "mae"), ".pth")


def rewrite(source: Path, target: Path, change: dict[str, Tensor | None]) -> Path:
    """Copy a tensor file with some tensors replaced, added or (None) removed."""
    tensors = {**load_source(source).tensors, **change}
    write_tensors(target, {n: t for n, t in tensors.items() if t is not None})
    return target


# Model directories


@pytest.mark.parametrize("changes", [{}, {"pos_embed": "relative"}, {"stem": "conv", "stem_layers": (8, 8)}])
def test_model_dir_round_trip(changes: dict, tmp_path: Path) -> None:
    before = make_checkpoint(**changes, **({"patch_size": 2} if changes.get("stem") else {}))
    write_checkpoint(tmp_path / "model", before)
    after = read_checkpoint(tmp_path / "model")
    assert after.config == before.config
    assert after.preprocess == before.preprocess
    assert (after.labels, after.temperature, after.provenance) == (LABELS, 1.5, {"seed": 0})
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(t, after.tensors[n]) for n, t in before.tensors.items())
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["model", "model.json", "model.safetensors"]


def test_model_dir_of_a_resnet(tmp_path: Path) -> None:
    config = ResNetConfig(image_size=32, layers=(1,), num_classes=2)
    model = build_model(config).eval()
    images = torch.randn(1, 3, 32, 32)
    preprocess = Preprocess(size=(32, 32), mean=HALF, std=HALF)
    write_checkpoint(tmp_path / "model", Checkpoint(config, dict(model.state_dict()), preprocess))
    assert torch.equal(load_model(tmp_path / "model")(images), model(images))
    with pytest.raises(ConversionError, match="google.*ResNet"):
        write_checkpoint(tmp_path / "x.npz", read_checkpoint(tmp_path / "model"), "google")


def test_changed_byte_is_detected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    weights = tmp_path / "model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*checksum.*model\.json"):
        read_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("format", 3, r"model\.json .*\bformat 3\b"),
        ("labels", ["one"], r"labels: .*\b4 classes"),
        ("temperature", 0, "temperature"),
        ("temperature", "hot", "temperature"),
        ("architecture", "vgg", "vgg"),
        ("config", {"depth": "two"}, "depth"),
        ("preprocess", {"size": [32, 32]}, r"preprocess .*\bcrop\b"),
        ("preprocess", Preprocess(size=(16, 16), mean=HALF, std=HALF).to_json(), r"preprocess: .*\b3 .*\(32, 32\)"),
        ("preprocess", Preprocess(size=(32, 32), mean=(0.5,), std=(0.5,)).to_json(), r"preprocess: .*\b3 .*\(32, 32\)"),
        ("sha256", "0", r"model\.safetensors .*checksum"),
    ],
)
def test_invalid_model_json(key: str, value: object, named: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    path = tmp_path / "model/model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=named):
        read_checkpoint(tmp_path / "model")


def test_existing_output_is_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    with pytest.raises(OutputError) as error:
        write_checkpoint(tmp_path / "model", make_checkpoint(num_classes=5, labels=None))
    assert error.value.code == "output_exists"
    write_checkpoint(tmp_path / "model", make_checkpoint(num_classes=5, labels=None), overwrite=True)
    assert read_checkpoint(tmp_path / "model").config.num_classes == 5
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# Every format

NO_HEAD: dict[str, Any] = {"num_classes": 0, "labels": None}
# Models for the formats that cannot store the plain one.
OWN_MODELS: dict[str, dict[str, Any]] = {
    "dinov2": {**NO_HEAD, "layer_scale": 1.0},
    "dinov3": {**NO_HEAD, "layer_scale": 1.0, "pos_embed": "rotary", "rope": "dinov3", "norm_eps": 1e-5},
    "mae": {"pooling": "average", "norm_after_pool": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", WRITABLE)
def test_every_format_round_trip(family: str, tmp_path: Path) -> None:
    before = make_checkpoint(**OWN_MODELS.get(family, {}))
    out = tmp_path / ("model" + SUFFIX.get(family, ""))
    write_checkpoint(out, before, family)
    overrides: dict[str, Any] = {"num_heads": 3, "activation": "gelu", "norm_eps": before.config.norm_eps}
    overrides |= {"image_size": 32} if family == "dinov3" else {}
    after = read_checkpoint(out, **overrides)
    assert after.family == family
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(after.build_model()(images), before.build_model()(images), rtol=0, atol=3e-5)
    if family in ("timm", "transformers"):
        assert after.labels == LABELS
        assert after.preprocess is not None
        assert before.preprocess is not None
        assert after.preprocess.resize_size == before.preprocess.resize_size == (35, 35)
        assert after.preprocess.replace(crop=1.0) == before.preprocess.replace(crop=1.0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("google", {"num_registers": 2}),
        ("google", {"layer_scale": 1.0}),
        ("google", {"attention_pattern": "axial"}),
        ("big_vision", {"qk_norm": True}),
        ("timm", {"pooling": "class+average"}),
        ("timm", {"pre_logits": 20}),
        ("timm", {"pos_embed": "sincos"}),
        ("timm", {"post_norm": True}),
        ("transformers", {"pooling": "average"}),
        ("transformers", {"pre_logits": 20}),
        ("transformers", {"layer_scale": 1.0}),  # its DINOv2 classifier has another pooling
        ("transformers", {"num_registers": 3}),
        ("transformers", {"activation": "swiglu"}),
        ("torchvision", {"distillation": True}),
        ("torchvision", {"pos_embed": "rotary"}),
        ("torchvision", {"class_token": False, "pooling": "average"}),
        ("deit", {"num_registers": 1}),
        ("deit", {"class_token": False, "pooling": "average"}),
        ("deit", {"activation": "swiglu"}),
        ("dinov2", {}),  # has no head
    ],
)
def test_unsupported_models_are_refused(family: str, changes: dict, tmp_path: Path) -> None:
    out = tmp_path / ("model" + SUFFIX.get(family, ""))
    with pytest.raises(ConversionError, match=family):
        write_checkpoint(out, make_checkpoint(**changes), family)
    assert not list(tmp_path.iterdir())


def test_position_of_the_class_token_is_folded(tmp_path: Path) -> None:
    """big_vision has no position for the class token; adding it to the token gives the same outputs."""
    before = make_checkpoint(activation="gelu_tanh")
    write_checkpoint(tmp_path / "model.npz", before, "big_vision")
    after = read_checkpoint(tmp_path / "model.npz")
    assert after.config.num_positioned == 0
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(after.build_model()(images), before.build_model()(images), rtol=0, atol=1e-5)


def test_notes_on_metadata_that_is_not_stored(tmp_path: Path) -> None:
    notes = write_checkpoint(tmp_path / "model.npz", make_checkpoint(), "google")
    assert any(note.code == "numerics_differ" and "activation=gelu_tanh" in note for note in notes)
    notes = write_checkpoint(tmp_path / "model.pth", make_checkpoint(), "torchvision")
    assert notes[-1].code == "metadata_not_stored"
    assert "--num-heads 3" in notes[-1]
    assert "--mean 0.5 0.5 0.5" in notes[-1]
    assert "--crop 0.9" in notes[-1]
    notes = write_checkpoint(tmp_path / "wide.npz", make_checkpoint(image_size=(32, 64)), "google")
    assert "--image-size 32 64" in notes[-1]
    for family in ("timm", "transformers"):
        multi_label = dataclasses.replace(make_checkpoint(), multi_label=True)
        notes = write_checkpoint(tmp_path / family, multi_label, family)
        by_code = {note.code: note for note in notes}
        assert "1.5" in by_code["temperature_not_stored"]
        assert "sigmoid" in by_code["multi_label_not_stored"]
        plain = dataclasses.replace(make_checkpoint(), temperature=1.0)
        assert write_checkpoint(tmp_path / f"{family} plain", plain, family) == []


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["cover", "squash"])
@pytest.mark.parametrize("crop", [1.0, 0.875, 384 / 450])
@pytest.mark.parametrize("family", ["timm", "transformers"])
def test_preprocessing_is_stored_in_directories(family: str, crop: float, resize: Any, tmp_path: Path) -> None:
    before = make_checkpoint(image_size=384, patch_size=96).with_metadata(crop=crop, resize=resize)
    before = dataclasses.replace(before, temperature=1.0)
    assert write_checkpoint(tmp_path / "model", before, family) == []
    after = read_checkpoint(tmp_path / "model").preprocess
    assert after is not None
    assert before.preprocess is not None
    assert (after.resize, after.size, after.resize_size) == (resize, (384, 384), before.preprocess.resize_size)


def test_note_on_preprocessing_that_is_not_stored(tmp_path: Path) -> None:
    notes = write_checkpoint(tmp_path / "wide", make_checkpoint(image_size=(32, 64)), "transformers")
    note = next(note for note in notes if note.code == "preprocess_not_stored")
    assert "resize to 35x71, crop 32x64" in note


@pytest.mark.parametrize(
    ("values", "resize", "resized"),
    [
        ({"size": {"height": 256, "width": 256}, "crop_size": {"height": 224, "width": 224}}, "squash", (256, 256)),
        ({"size": 256, "crop_size": 224}, "squash", (256, 256)),
        ({"size": {"shortest_edge": 256}, "crop_size": 224}, "cover", (256, 256)),
        ({"size": 224, "do_center_crop": False}, "squash", (224, 224)),
    ],
)
def test_preprocessor_configs_of_transformers(values: dict[str, Any], resize: str, resized: tuple[int, int]) -> None:
    """As in transformers: with a height and a width, both sides are resized, whatever the aspect ratio."""
    fields = parse_preprocess({"do_center_crop": True, **values})
    preprocess = Preprocess(size=(224, 224), mean=HALF, std=HALF, **fields)
    assert (preprocess.resize, preprocess.resize_size) == (resize, resized)


@pytest.mark.parametrize("family", ["google", "timm", "deit"])
def test_grid_that_is_square_only_with_its_class_token(family: str, tmp_path: Path) -> None:
    """3x8 patches and a class token are 25 positions, which also look like 5x5 without one."""
    out = tmp_path / ("m" + SUFFIX.get(family, ".safetensors"))
    before = make_checkpoint(image_size=(24, 64))
    notes = write_checkpoint(out, before, family)
    assert "--image-size 24 64" in notes[-1]
    after = read_checkpoint(out, num_heads=3, image_size=(24, 64))
    assert (after.config.grid, after.config.num_positioned) == ((3, 8), 1)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/precious.jpg").write_bytes(b"me")
    with pytest.raises(OutputError, match=r"precious\.jpg") as error:
        write_checkpoint(tmp_path / "photos", make_checkpoint(), overwrite=True)
    assert error.value.code == "output_exists"
    (tmp_path / "file").write_text("text")
    with pytest.raises(OutputError, match=r"/file .*format") as error:
        write_checkpoint(tmp_path / "file", make_checkpoint(), overwrite=True)
    assert error.value.code == "output_exists"
    assert (tmp_path / "photos/precious.jpg").read_bytes() == b"me"
    assert (tmp_path / "file").read_text() == "text"
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_checkpoint(tmp_path / "link", make_checkpoint())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/model.json").exists()


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_training_wrappers_are_removed(wrapper: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m.safetensors", make_checkpoint(), "timm")
    tensors = {wrapper + n: t for n, t in load_source(tmp_path / "m.safetensors").tensors.items()}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "wrapped.pth")
    assert torch.equal(
        read_checkpoint(tmp_path / "wrapped.pth", num_heads=3).tensors["head.weight"],
        make_checkpoint().tensors["head.weight"],
    )


def test_note_on_a_replaced_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    (note,) = read_checkpoint(tmp_path / "model", num_classes=9).notes
    assert note.code == "head_replaced"
    assert "9 classes" in note
    assert not read_checkpoint(tmp_path / "model", num_classes=4).notes


def test_preprocess_note_describes_the_preprocessing_in_use(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m.npz", make_checkpoint(), "google")
    note = read_checkpoint(tmp_path / "m.npz", image_size=64).notes[0]
    assert note.code == "preprocess_assumed"
    assert "squash to 64x64" in note
    stated = read_checkpoint(tmp_path / "m.npz").with_metadata(crop=0.5, resize="cover")
    assert [note.code for note in stated.notes] == ["preprocess_stated"]
    assert "resize to 64x64, crop 32x32" in stated.notes[0]


def test_output_name_must_fit_the_format(tmp_path: Path) -> None:
    names = {"model.pth": "google", "model.npz": "torchvision", "model": "deit", "m.npz": "timm"}
    for name, family in {**names, "m.pth": "patchword", "m.safetensors": "transformers"}.items():
        with pytest.raises(ConversionError, match=rf"{re.escape(name)}: .*{family}"):
            write_checkpoint(tmp_path / name, make_checkpoint(), family)


# Errors of readers


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "good.safetensors", make_checkpoint(), "timm")
    change = {"blocks.1.norm2.bias": None, "norm_post.weight": torch.ones(48), "head.bias": torch.ones(5)}
    bad = rewrite(tmp_path / "good.safetensors", tmp_path / "bad.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(bad, num_heads=3)
    for pattern in (
        r"bad\.safetensors \(timm\)",
        r"missing: blocks\.1\.norm2\.bias",
        r"unexpected: norm_post\.weight",
        r"head\.bias .*\(5,\).*\(4,\)",
    ):
        assert re.search(pattern, str(error.value))


def test_backbone_without_head_returns_features(tmp_path: Path) -> None:
    """Without a head the model returns features, unless the caller gives num_classes."""
    write_checkpoint(tmp_path / "full.safetensors", make_checkpoint(), "timm")
    change: dict[str, Tensor | None] = {"head.weight": None, "head.bias": None}
    backbone = rewrite(tmp_path / "full.safetensors", tmp_path / "backbone.safetensors", change)
    assert load_model(backbone, num_heads=3)(torch.zeros(1, 3, 32, 32)).shape == (1, 48)
    assert torch.equal(load_model(backbone, num_heads=3, num_classes=6)(torch.zeros(1, 3, 32, 32)), torch.zeros(1, 6))


def test_unknown_number_of_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.pth", make_checkpoint(), "torchvision")
    with pytest.raises(CheckpointError, match=r"num_heads=8 .*--num-heads 8"):
        read_checkpoint(tmp_path / "model.pth")
    assert read_checkpoint(tmp_path / "model.pth", num_heads=6).config.num_heads == 6


def test_number_of_heads_of_standard_widths(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.pth", make_checkpoint(embed_dim=192), "torchvision")
    assert read_checkpoint(tmp_path / "model.pth").config.num_heads == 3


def test_unknown_grid(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.pth", make_checkpoint(image_size=(32, 64)), "torchvision")
    with pytest.raises(CheckpointError, match=r"\b32 .*image_size=.*--image-size "):
        read_checkpoint(tmp_path / "model.pth", num_heads=3)
    assert read_checkpoint(tmp_path / "model.pth", num_heads=3, image_size=(32, 64)).config.grid == (4, 8)


def test_override_that_contradicts_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.pth", make_checkpoint(), "torchvision")
    with pytest.raises(CheckpointError, match=r"unexpected: encoder\.layers\.encoder_layer_1"):
        read_checkpoint(tmp_path / "model.pth", num_heads=3, depth=1)
    with pytest.raises(ConfigError, match="dpeth") as error:
        read_checkpoint(tmp_path / "model.pth", num_heads=3, dpeth=1)
    assert error.value.code == "unknown_field"


@pytest.mark.parametrize("name", ["no_such_model", "folder", "text.txt", "empty.pth"])
def test_not_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty.pth").touch()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(tmp_path / name)


def test_unknown_format(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"layer1.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"layer1\.weight"):
        read_checkpoint(tmp_path / "x.safetensors")


# Adaptation and metadata given by the caller


def test_adapting_on_load(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    adapted = read_checkpoint(tmp_path / "model", image_size=64, in_channels=1, num_classes=9)
    assert adapted.build_model()(torch.randn(2, 1, 64, 64)).shape == (2, 9)
    assert adapted.labels is None  # the old labels would be wrong
    assert adapted.preprocess is not None
    assert (adapted.preprocess.size, adapted.preprocess.mean) == ((64, 64), (0.5,))
    assert read_checkpoint(tmp_path / "model", in_channels=5).preprocess is None


def test_adapted_model_drops_its_metrics() -> None:
    before = dataclasses.replace(make_checkpoint(), provenance={"seed": 0, "metrics": {"test": {"top1": 0.9}}})
    larger, other = before.adapt(image_size=(64, 64)), before.adapt(num_classes=9)
    assert larger.provenance == other.provenance == {"seed": 0}
    assert (larger.temperature, other.temperature) == (1.5, 1.0)
    assert before.adapt(num_classes=4).provenance == before.provenance, "the config is the same"


def test_note_on_a_removed_projection() -> None:
    before = make_checkpoint(projection_dim=20, num_classes=0, labels=None)
    notes = before.adapt(num_classes=5).notes
    assert [note.code for note in notes] == ["head_replaced", "projection_removed"]
    assert [note.code for note in before.adapt(projection_dim=None).notes] == ["projection_removed"]
    assert not before.adapt(image_size=64).notes


def test_head_of_the_same_size_is_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())
    assert torch.equal(
        read_checkpoint(tmp_path / "model", num_classes=4).tensors["head.weight"],
        make_checkpoint().tensors["head.weight"],
    )


def test_with_metadata() -> None:
    stated = make_checkpoint().with_metadata(["a", "b", "c", "d"], mean=IMAGENET_MEAN, crop=1.0)
    assert stated.labels == ("a", "b", "c", "d")
    assert stated.preprocess is not None
    assert (stated.preprocess.mean, stated.preprocess.crop, stated.preprocess.std) == (IMAGENET_MEAN, 1.0, HALF)
    with pytest.raises(ConfigError, match=r"\b2 labels .*\b4 classes"):
        make_checkpoint().with_metadata(["a", "b"])


def test_assumptions_are_noted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.npz", make_checkpoint(num_classes=1000, labels=None), "google")
    read = read_checkpoint(tmp_path / "model.npz")
    notes = {note.code: note for note in read.notes}
    assert "google" in notes["preprocess_assumed"]
    assert "squash" in notes["preprocess_assumed"]
    assert "ImageNet-1k" in notes["labels_assumed"]
    assert read.labels is not None
    assert "tench" in read.labels[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_dtypes_are_stored_and_models_computed_in_float32(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    half = make_checkpoint(activation="gelu_tanh")
    half.tensors.update({n: t.to(dtype) for n, t in half.tensors.items()})
    write_checkpoint(tmp_path / f"m{suffix}", half, "google" if suffix == ".npz" else "timm")
    again = read_checkpoint(tmp_path / f"m{suffix}", num_heads=3)
    assert {t.dtype for t in again.tensors.values()} == {dtype}
    assert {p.dtype for p in again.build_model().parameters()} == {torch.float32}
    assert torch.equal(again.tensors["head.weight"], half.tensors["head.weight"])


# Codes of errors


def test_error_codes_survive_wrapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A specific code of an error inside a reader is kept when the name of the file is added."""
    write_checkpoint(tmp_path / "model.safetensors", make_checkpoint(), "timm")
    write_checkpoint(tmp_path / "model", make_checkpoint())

    def fail(error: Exception) -> None:
        def raise_error(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("patchword.checkpoints.detect_format.from_foreign", raise_error)
        monkeypatch.setattr("patchword.checkpoints.model_dir.parse_preprocess", raise_error)

    expected = {
        CheckpointError("x", code="unsafe_pickle"): "unsafe_pickle",
        ConfigError("x", code="unknown_field"): "unknown_field",
        ConfigError("x"): "invalid_checkpoint",
    }
    for error, code in expected.items():
        fail(error)
        with pytest.raises(CheckpointError, match="timm") as caught:
            read_checkpoint(tmp_path / "model.safetensors", num_heads=3)
        assert caught.value.code == code
        if isinstance(error, ConfigError):
            with pytest.raises(CheckpointError, match=r"model\.json") as caught:
                read_checkpoint(tmp_path / "model")
            assert caught.value.code == code


def test_options_of_training_scripts_are_skipped(tmp_path: Path) -> None:
    """Checkpoints of DeiT's and MAE's training scripts hold an argparse.Namespace next to the weights."""
    write_checkpoint(tmp_path / "model.pth", make_checkpoint(), "deit")
    content = torch.load(tmp_path / "model.pth", weights_only=True)
    torch.save({**content, "args": argparse.Namespace(lr=1e-3, data=["a"]), "epoch": 3}, tmp_path / "full.pth")
    again = read_checkpoint(tmp_path / "full.pth", num_heads=3)
    assert again.config == read_checkpoint(tmp_path / "model.pth", num_heads=3).config
    assert torch.equal(again.tensors["head.weight"], make_checkpoint().tensors["head.weight"])


def test_pickles_with_objects_have_their_own_code(tmp_path: Path) -> None:
    torch.save({"model": object}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "model.pth")
    assert error.value.code == "unsafe_pickle"
