"""`patchword embed`, and what commands that classify say about a model without a head."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from helpers.color_classifier import write_color_folder
from helpers.command import run, run_in_process
from helpers.small_checkpoint import make_checkpoint
from patchword.checkpoints import write_checkpoint
from patchword.inference.embed import embed

Capture = pytest.CaptureFixture[str]
HEADLESS = make_checkpoint(None, num_classes=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", HEADLESS)
    return tmp_path / "model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


@pytest.mark.slow
def test_features_and_unreadable_images(model: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "features.npz"
    result = run("embed", model, folder, "--out", out, "--json")
    assert result.returncode == 3, result.stderr
    document = json.loads(result.stdout)  # nothing else on standard output
    broken = str(folder / "green/broken.jpg")
    assert document["out"] == str(out)
    assert (document["images"], document["feature_dim"]) == (13, 48)
    assert [(row["path"], sorted(row)) for row in document["errors"]] == [(broken, ["code", "error", "path"])]
    assert broken in result.stderr
    (chunk,) = embed(model, folder)
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["features"], chunk.features, rtol=1e-4, atol=1e-5)
        assert arrays["paths"].tolist() == list(chunk.names)


def test_model_with_a_head(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "features.csv"
    result = run_in_process(capsys, "embed", "patchword:cifar10", folder / "red", folder / "blue/0.png", "--out", out)
    assert (result.returncode, result.stdout) == (0, "")
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 6
    assert {len(row) for row in rows} == {1 + 160}
    assert rows[-1][0] == str(folder / "blue/0.png")


def test_list_without_labels_and_a_dataset(model: Path, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "list.csv").write_text(f"path\n{folder / 'red/0.png'}\n{folder / 'red/1.png'}\n")
    out = tmp_path / "features.npz"
    assert run_in_process(capsys, "embed", model, tmp_path / "list.csv", "--out", out).returncode == 0
    assert np.load(out)["features"].shape == (2, 48)


def test_existing_file_is_kept(model: Path, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "features.npz"
    out.write_text("old")
    arguments = ("embed", model, folder / "red", "--out", out)
    result = run_in_process(capsys, *arguments)
    assert result.returncode == 2
    assert "--overwrite" in result.stderr
    assert out.read_text() == "old"
    assert run_in_process(capsys, *arguments, "--overwrite").returncode == 0
    assert np.load(out)["features"].shape == (5, 48)


@pytest.mark.parametrize("out", ["features.npy", "features.pt"])
def test_unknown_suffix(out: str, folder: Path, capsys: Capture) -> None:
    result = run_in_process(capsys, "embed", "no-such-model", folder, "--out", out)  # refused before the model is read
    assert (result.returncode, result.stdout) == (2, "")
    assert all(suffix in result.stderr for suffix in (".npz", ".parquet", ".csv"))


def test_no_readable_image_writes_no_file(model: Path, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "features.npz"
    result = run_in_process(capsys, "embed", model, folder / "green/broken.jpg", "missing.png", "--out", out)
    assert result.returncode == 2
    assert "broken.jpg" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("command", ["predict", "evaluate", "serve"])
def test_commands_that_classify_say_what_a_headless_model_is_good_for(
    command: str, model: Path, folder: Path, capsys: Capture
) -> None:
    result = run_in_process(capsys, command, model, *(["--port", "0"] if command == "serve" else [folder]))
    assert (result.returncode, result.stdout) == (2, "")
    for advice in ("patchword embed", "patchword probe MODEL DATA", "patchword train DATA --init MODEL"):
        assert advice in result.stderr
