"""`patchword show`: what was recognized, and what was assumed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.command import run_in_process
from helpers.model_zoo import RESNETS
from helpers.model_zoo import make_checkpoint as zoo_checkpoint
from helpers.small_checkpoint import LABELS, make_checkpoint
from patchword.checkpoints import Checkpoint, read_checkpoint, write_checkpoint

Capture = pytest.CaptureFixture[str]


def test_bundled_model(capsys: Capture) -> None:
    result = run_in_process(capsys, "show", "patchword:cifar10")
    assert (result.returncode, result.stderr) == (0, "")
    for text in ("1,348,956", "32x32 RGB", "10 classes: airplane;", "0.7238", "learned relative positions", "cifar10"):
        assert text in result.stdout
    assert "accuracy 0.9296" in result.stdout
    assert result.stdout.endswith("Nothing was assumed.\n")


def test_foreign_file_lists_what_was_assumed(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "vit.npz", make_checkpoint(activation="gelu_tanh"), "google")
    result = run_in_process(capsys, "show", tmp_path / "vit.npz")
    assert result.returncode == 0
    assert result.stdout.startswith("Format        google\n")
    assert "4 classes without labels" in result.stdout
    assert "tanh GELU" in result.stdout
    _, assumed = result.stdout.split("Assumed:\n")
    assert "preprocessing" in assumed
    assert result.stderr == ""  # notes are part of the output, and printed once


def test_stated_values_are_not_called_assumptions(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "vit.npz", make_checkpoint(activation="gelu_tanh"), "google")
    arguments = ("--mean", "0.4", "0.4", "0.4", "--image-size", "64")
    page = run_in_process(capsys, "show", tmp_path / "vit.npz", *arguments).stdout
    assert "64x64 RGB" in page
    assert "0.4, 0.4, 0.4" in " ".join(page.split("Notes:\n")[1].split())
    assert page.endswith("Nothing was assumed.\n")


@pytest.mark.parametrize("columns", ["80", "120"])
def test_output_fits(columns: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(tmp_path)
    write_checkpoint("model", make_checkpoint(num_registers=2, pooling="average"))
    assert max(map(len, run_in_process(capsys, "show", "model").stdout.splitlines())) <= int(columns)


def test_model_without_a_head(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "model", replace(make_checkpoint(None, num_classes=0), temperature=1.0))
    page = " ".join(run_in_process(capsys, "show", tmp_path / "model").stdout.split())
    assert "no head: returns 48 features" in page
    assert "Temperature" not in page


def test_json_has_config_labels_and_notes(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = make_checkpoint(num_registers=2)
    write_checkpoint(tmp_path / "model", checkpoint)
    document = json.loads(run_in_process(capsys, "show", tmp_path / "model", "--json").stdout)
    assert document["config"] == json.loads(json.dumps(checkpoint.config.to_json()))
    assert document["labels"] == list(LABELS)
    assert document["preprocess"]["crop"] == 0.9
    assert document["differences"]["num_registers"] == "2 register tokens"
    assert document["parameters"] == sum(tensor.numel() for tensor in checkpoint.tensors.values())
    assert document["feature_dim"] == 48
    assert document["files"] == ["model.safetensors"]
    assert document["bytes"] == (tmp_path / "model/model.safetensors").stat().st_size
    assert document["notes"] == []


def test_converted_model_keeps_its_origin_and_what_was_assumed(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "vit.npz", make_checkpoint(activation="gelu_tanh"), "google")
    write_checkpoint(tmp_path / "model", read_checkpoint(tmp_path / "vit.npz"))
    page = run_in_process(capsys, "show", tmp_path / "model").stdout
    assert page.startswith("Format        patchword, originally google\n")
    assert "preprocessing" in page.split("Noted when it was converted:\n")[1]
    assert "Nothing was assumed" not in page
    document = json.loads(run_in_process(capsys, "show", tmp_path / "model", "--json").stdout)
    assert (document["format"], document["family"], document["notes"]) == ("patchword", "google", [])


def test_name_of_the_architecture_is_shown(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = replace(make_checkpoint(), provenance={"architecture": "vit_tiny_patch8_32"}, family="timm")
    write_checkpoint(tmp_path / "model", checkpoint)
    page = run_in_process(capsys, "show", tmp_path / "model").stdout
    assert page.startswith("Format        patchword, originally timm, vit_tiny_patch8_32\n")
    document = json.loads(run_in_process(capsys, "show", tmp_path / "model", "--json").stdout)
    assert document["architecture"] == "vit_tiny_patch8_32"


def test_resnet(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "model", zoo_checkpoint(RESNETS["BiT"]))
    assert "ResNet with 1, 1, 1, 1 units per stage" in run_in_process(capsys, "show", tmp_path / "model").stdout


def test_unfinished_run_and_sharded_model(tmp_path: Path, capsys: Capture) -> None:
    write_checkpoint(tmp_path / "run/checkpoints/step-00000001", make_checkpoint())
    page = run_in_process(capsys, "show", tmp_path / "run").stdout
    assert f"{tmp_path / 'run'}\n" in page
    assert "is not finished" in " ".join(page.split("Notes:\n")[1].split())


def test_untrusted_names_are_escaped(tmp_path: Path, capsys: Capture) -> None:
    labels = ("\x1b[31mant", "bee", "cat", "dog")
    write_checkpoint(tmp_path / "model", make_checkpoint(labels))
    assert "\x1b" not in run_in_process(capsys, "show", tmp_path / "model").stdout


def test_model_is_not_built(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint())

    def refuse(self: Checkpoint) -> torch.nn.Module:
        raise AssertionError("show needs the config and the tensors only")

    monkeypatch.setattr(Checkpoint, "build_model", refuse)
    assert run_in_process(capsys, "show", tmp_path / "model").returncode == 0


def test_missing_model_exits_with_2(capsys: Capture) -> None:
    result = run_in_process(capsys, "show", "no-such-model", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no-such-model" in result.stderr
