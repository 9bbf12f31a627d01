"""Engines and exports of modern families: fp32 gives the model's logits, int8 agrees with them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.families import FAMILY_CONFIGS, family_model
from patchword.checkpoints import Checkpoint
from patchword.config import ViTConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import Engine, open_engine
from patchword.engines.export import ExportOptions, write_export
from patchword.engines.exportable import ExportableModel
from patchword.engines.int8_linear import Int8Linear, quantize_linear_layers
from patchword.engines.int8_quantization import prepare_for_int8, quantize_dynamic_int8
from patchword.engines.onnx import OnnxSession, export_onnx
from patchword.engines.openvino import OpenVinoSession, quantize_nncf, read_onnx
from patchword.engines.parity import Parity, measure_parity, sample_images
from patchword.errors import ConfigError
from patchword.evaluation.export_check import check_export
from patchword.evaluation.tome_search import choose_tome_ratio
from patchword.inference.classifier import Classifier

all_families = pytest.mark.parametrize("config", FAMILY_CONFIGS.values(), ids=FAMILY_CONFIGS.keys())
# Quantization takes seconds: the others are exported in fp32 only, and add no new operations to the graph.
QUANTIZED = ("dinov3 stored periods", "clip", "pe core", "rope mixed, learned", "beit, absolute", "aimv2")
NUM_IMAGES = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path / "cache"))


def make_checkpoint(config: ViTConfig) -> Checkpoint:
    """Random weights, and a head whose predictions differ between images."""
    preprocess = Preprocess(config.image_size, mean=HALF, std=HALF)
    labels = tuple(f"class {i}" for i in range(config.num_classes))
    checkpoint = Checkpoint(config, dict(family_model(config).state_dict()), preprocess, labels, temperature=1.3)
    logits = open_engine("torch", checkpoint)(sample_images(preprocess, NUM_IMAGES))
    checkpoint.tensors["head.bias"] -= 1.3 * logits.mean(dim=0)
    return checkpoint


def calibration(checkpoint: Checkpoint) -> Tensor:
    assert checkpoint.preprocess is not None
    return sample_images(checkpoint.preprocess, NUM_IMAGES)


def parity_with_torch(checkpoint: Checkpoint, engine: Engine) -> Parity:
    images = calibration(checkpoint)
    return measure_parity(open_engine("torch", checkpoint)(images), engine(images))


@all_families
def test_classifier(config: ViTConfig) -> None:
    """Labels and probabilities are those of the model's logits over the temperature."""
    checkpoint = make_checkpoint(config)
    classifier, pixels = Classifier(checkpoint), calibration(checkpoint)[0]
    with torch.no_grad():
        logits = family_model(config)(classifier.preprocess.normalize(pixels[None]))[0]
        logits += checkpoint.tensors["head.bias"] - family_model(config).head.bias
    probabilities = (logits / 1.3).softmax(dim=-1)
    prediction = classifier(pixels.numpy())
    assert prediction.label == f"class {int(probabilities.argmax())}"
    assert prediction.probability == pytest.approx(float(probabilities.max()), rel=1e-4)


@all_families
def test_int8_in_torch(config: ViTConfig) -> None:
    checkpoint = make_checkpoint(config)
    parity = parity_with_torch(checkpoint, open_engine("torch-int8", checkpoint))
    assert parity.max_abs_diff > 0
    assert parity.within_tolerance(exact=False), parity


@all_families
def test_preparation_for_int8_changes_no_output(config: ViTConfig) -> None:
    """SmoothQuant and row scaling move outliers into the weights, whatever the norm and its order."""
    checkpoint = make_checkpoint(config)
    prepared = prepare_for_int8(checkpoint, calibration(checkpoint))
    with torch.no_grad():
        parity = parity_with_torch(checkpoint, prepared)
    assert parity.within_tolerance(exact=True), parity
    smoothed = prepared.model.state_dict()
    name = next(n for n in smoothed if n.endswith("blocks.0.norm1.weight"))
    changed = not torch.equal(smoothed[name], checkpoint.tensors["blocks.0.norm1.weight"])
    assert changed == config.pre_norm


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if name not in QUANTIZED])
def test_onnx(name: str) -> None:
    """The graph computes the model, at any batch size."""
    checkpoint = make_checkpoint(FAMILY_CONFIGS[name].replace(depth=1))
    session = OnnxSession(export_onnx(ExportableModel(checkpoint)).SerializeToString())
    parity = parity_with_torch(checkpoint, session)
    assert parity.within_tolerance(exact=True), parity
    assert session(calibration(checkpoint)[:1]).shape == (1, 5), "the batch size is dynamic"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_onnx_and_openvino_int8(name: str) -> None:
    """One graph in both runtimes, in fp32 and in int8."""
    checkpoint = make_checkpoint(FAMILY_CONFIGS[name].replace(depth=1))
    images = calibration(checkpoint)
    content = export_onnx(prepare_for_int8(checkpoint, images))
    file = content.SerializeToString()
    for engine in (OnnxSession(file), OpenVinoSession(read_onnx(file))):
        parity = parity_with_torch(checkpoint, engine)
        assert parity.within_tolerance(exact=True), parity
        assert engine(images[:1]).shape == (1, 5), "the batch size is dynamic"
    for engine in (
        OnnxSession(quantize_dynamic_int8(content)),
        OpenVinoSession(quantize_nncf(read_onnx(file), images)),
    ):
        parity = parity_with_torch(checkpoint, engine)
        assert parity.max_abs_diff > 1e-4, "nothing was quantized"
        assert parity.within_tolerance(exact=False), parity
        assert parity.top1_agreement >= 0.9


def test_token_merging_is_refused_or_works() -> None:
    checkpoint = make_checkpoint(FAMILY_CONFIGS["aimv2"])
    merged = open_engine("torch", checkpoint, merge_counts=(4, 0))
    assert 1e-3 < parity_with_torch(checkpoint, merged).max_abs_diff < 1
    rotary = make_checkpoint(FAMILY_CONFIGS["dinov3"])
    with pytest.raises(ConfigError, match="Token merging .*rotary"):
        open_engine("onnx-int8-tome", rotary)
    with pytest.raises(ConfigError, match="Token merging .*rotary"):
        choose_tome_ratio(Classifier(rotary), (), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "include_preprocessing"), [("dinov3", True), ("beit", False)])
def test_export_is_checked(name: str, include_preprocessing: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(FAMILY_CONFIGS[name].replace(depth=1))
    options = ExportOptions(include_preprocessing=include_preprocessing)
    engine = write_export(checkpoint, tmp_path / "model.pt2", options)
    check = check_export(Classifier(checkpoint), engine, options)
    assert check.parity.num_images == 48
    assert check.parity.kl_divergence < (1e-2 if include_preprocessing else 1e-6)


def test_int8_layers_are_those_of_the_blocks() -> None:
    """Also the fused projection whose keys have no bias."""
    model = quantize_linear_layers(ExportableModel(make_checkpoint(FAMILY_CONFIGS["dinov3"])))
    found = {name.partition("blocks.")[2] for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    layers = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    assert found == {f"{block}.{layer}" for block in range(2) for layer in layers}
