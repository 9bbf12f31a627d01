"""The bundled CIFAR-10 model: small, accurate, and a better initialization than random weights."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import patchword as pw
from helpers.command import run
from helpers.small_checkpoint import make_checkpoint
from patchword.checkpoints import BUNDLED_DIR, read_checkpoint, write_checkpoint
from patchword.config import AugmentConfig, DataConfig, ProgressiveResizeConfig
from patchword.errors import CheckpointError, ConfigError, PatchwordError
from patchword.recipes import load_recipe


def test_bundled_model_is_small() -> None:
    shipped = sorted(path.name for path in BUNDLED_DIR.iterdir())
    assert shipped == ["cifar10"]
    assert sum(path.stat().st_size for path in (BUNDLED_DIR / "cifar10").iterdir()) < 5 * 2**20
    bundled = read_checkpoint("patchword:cifar10")
    assert bundled.labels is not None
    assert bundled.labels[3] == "cat"
    assert bundled.config.image_size == (32, 32)
    assert bundled.provenance
    with pytest.raises(CheckpointError, match="patchword:cifar10"):
        read_checkpoint("patchword:imagenet")


@pytest.mark.slow
def test_bundled_model_is_accurate() -> None:
    """Accuracy on 500 test images; needs CIFAR-10."""
    try:
        test = pw.open_data(DataConfig(source="cifar10"), seed=0).test
    except PatchwordError as error:
        pytest.skip(f"needs CIFAR-10: {error}")
    assert test is not None
    classifier = pw.Classifier.load("patchword:cifar10")
    rows = range(0, len(test), 20)
    pixels = torch.stack([classifier.pixels(test.read(i, mode="RGB")) for i in rows])
    with torch.inference_mode():
        predicted = torch.cat([classifier.logits(batch) for batch in pixels.split(50)]).argmax(dim=1).numpy()
    assert (predicted == test.targets[np.array(rows)]).mean() > 0.9


def few_digits() -> pw.DatasetSplits:
    """Ten training images per digit, enlarged to 32 pixels, and 300 validation images."""
    digits = load_digits()
    images = np.repeat(np.repeat((digits.images * 15.9).astype(np.uint8), 4, axis=1), 4, axis=2)[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    chosen = np.concatenate([order[digits.target[order] == label][:10] for label in range(10)])
    rest = np.setdiff1d(order, chosen)[:300]
    labels = [str(i) for i in range(10)]
    train, val = (pw.from_arrays(images[rows], digits.target[rows], labels=labels) for rows in (chosen, rest))
    return pw.DatasetSplits(train, val)


@pytest.mark.slow
def test_bundled_weights_beat_random_ones(tmp_path: Path) -> None:
    """Train on a hundred digits for twenty steps, from the bundled weights and from scratch."""
    recipe = load_recipe("cifar10_scratch")
    changes = {"steps": 20, "budget": None, "batch_size": 50, "ema": 0.0, "tta_flip": False, "eval_every": 100.0}
    # Pretrained weights start at full size.
    full_size = {"augment": AugmentConfig(crop="shift"), "progressive_resize": ProgressiveResizeConfig()}
    scratch = recipe.replace(**changes, **full_size, data=DataConfig())
    pretrained = scratch.replace(init="patchword:cifar10", head_init="probe")
    found = {
        name: pw.train(config, tmp_path / name, splits=few_digits()).metrics["val"]["top1"]
        for name, config in {"scratch": scratch, "pretrained": pretrained}.items()
    }
    assert found["pretrained"] > found["scratch"] + 0.02, found


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    full = make_checkpoint()
    write_checkpoint(tmp_path / "full", full)
    result = run("convert", tmp_path / "full", tmp_path / "half", "--to", "patchword", "--half")
    assert result.returncode == 0, result.stderr
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    half = read_checkpoint(tmp_path / "half").build_model()
    assert next(half.parameters()).dtype == torch.float32
    images = torch.randn(2, full.config.in_channels, *full.config.image_size)
    torch.testing.assert_close(half(images), full.build_model()(images), atol=2e-2, rtol=2e-2)
    refused = run("convert", tmp_path / "full", tmp_path / "x", "--to", "transformers", "--half")
    assert refused.returncode == 2
    assert "--to patchword" in refused.stderr
    large = dataclasses.replace(full, tensors={**full.tensors, "norm.bias": full.tensors["norm.bias"] + 1e5})
    with pytest.raises(ConfigError, match=r"norm\.bias .*65504"):
        large.to_half()
