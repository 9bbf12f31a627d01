"""Directories written by patchword 0.1.0 (tests/fixtures/format1) load, predict and resume as before."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import rows
from helpers.snapshots import cpu_kind
from patchword.checkpoints import read_checkpoint
from patchword.config.format_v1 import upgrade_model, upgrade_run
from patchword.errors import ConfigError
from patchword.inference.classifier import Classifier
from patchword.training import resume
from patchword.training.run_dir import read_config

FORMAT1 = Path(__file__).parents[1] / "fixtures/format1"
EXPECTED: dict[str, Any] = json.loads((FORMAT1 / "expected.json").read_text())
WRITTEN_ON = "AuthenticAMD 26 2, AVX512, torch 2.13.0+cpu"  # the kind of CPU that gives the same bits
TOLERANCE = 1e-5


def images(mode: str) -> list[Image.Image]:
    return [Image.fromarray(np.array(pixels, np.uint8)) for pixels in EXPECTED["images"][mode]]


@pytest.mark.parametrize("name", EXPECTED["models"])
def test_predictions(name: str) -> None:
    expected, classifier = EXPECTED["models"][name], Classifier(read_checkpoint(FORMAT1 / name))
    inputs = images(expected["mode"])
    with torch.inference_mode():
        logits = classifier.logits(torch.stack([classifier.pixels(image) for image in inputs]))
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=TOLERANCE, rtol=TOLERANCE)
    for image, scores in zip(inputs, expected["scores"], strict=True):
        found = classifier(image, top=3).scores
        assert [score.label for score in found] == [label for label, _ in scores]
        np.testing.assert_allclose([s.probability for s in found], [p for _, p in scores], atol=TOLERANCE)


def test_metadata_of_a_model() -> None:
    found = read_checkpoint(FORMAT1 / "model")
    assert found.labels == ("a", "b", "c", "dé", "e")
    assert found.temperature == 1.7
    assert found.preprocess is not None
    assert found.preprocess.crop == 0.8
    assert found.preprocess.resize == "squash"
    assert found.preprocess.interpolation == "bilinear"
    assert found.preprocess.std == (0.2, 0.25, 0.3)
    assert found.provenance["metrics"]["val"]["top1"] == 0.9
    assert found.provenance["versions"]["torch"] == "2.13.0"
    assert (found.family, found.quirks) == ("timm", {"prefix": "module."})
    assert found.extras["head_aux.weight"].tolist() == torch.ones(2, 3).tolist()
    assert not found.multi_label
    assert read_checkpoint(FORMAT1 / "multi_label").multi_label


def test_finished_run_is_not_resumed(tmp_path: Path) -> None:
    shutil.copytree(FORMAT1 / "run_finished", tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        resume(tmp_path / "run")
    assert error.value.code == "run_finished"


def test_config_keeps_every_stored_value() -> None:
    """No value of an old config.json is lost, although fields were renamed."""
    config = read_config(FORMAT1 / "run_unfinished")
    stored = json.loads((FORMAT1 / "run_unfinished/config.json").read_text())["config"]
    assert config.wise_ft_alpha == 1 - stored.pop("start_share")
    assert not leaves(stored) - leaves(config.to_json())


def leaves(value: Any) -> Counter[str]:
    """Counts the leaf values of nested objects, whatever their keys are."""
    if isinstance(value, dict):
        return sum(map(leaves, value.values()), Counter())
    return Counter([json.dumps(value)])


def test_unfinished_run_resumes(tmp_path: Path) -> None:
    """It gives the same metrics and the same model as the uninterrupted run."""
    run = tmp_path / "run"
    shutil.copytree(FORMAT1 / "run_unfinished", run)
    result = resume(run)
    assert result is not None
    assert result.steps == 24
    found, expected = rows(run), EXPECTED["rows"]
    assert [(row["kind"], row["step"]) for row in found] == [(row["kind"], row["step"]) for row in expected]
    for new, old in zip(found, expected, strict=True):
        if cpu_kind() == WRITTEN_ON:
            assert list(new.values()) == list(old.values())
        elif new["kind"] == "train":
            assert new["loss"] == pytest.approx(old["loss"], rel=1e-3)
    if cpu_kind() == WRITTEN_ON:
        then, now = (read_checkpoint(path).tensors for path in (FORMAT1 / "run_finished", run))
        assert list(then) == list(now)
        assert all(torch.equal(then[name], now[name]) for name in then)


def test_dropout_of_version_1_includes_attention_weights() -> None:
    assert upgrade_run({"model": {"dropout": 0.1}})["model"] == {"dropout": 0.1, "attention_dropout": 0.1}
    assert upgrade_model({"config": {"dropout": 0.2}})["config"] == {"dropout": 0.2, "attention_dropout": 0.2}
    assert upgrade_run({"model": {}})["model"] == {}
