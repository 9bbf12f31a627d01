"""Exports: parity with the model, use by other programs, and rejection of bad exports."""

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.command import run_in_process
from helpers.export_checkpoint import LABELS, TINY, make_checkpoint
from helpers.model_zoo import VITS
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.cli.main import main
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import engine as engine_module
from patchword.engines import onnx, open_engine
from patchword.engines.export import ExportOptions, write_export
from patchword.engines.exportable import ExportableModel, resize_and_crop
from patchword.engines.parity import sample_images, sample_photos
from patchword.errors import ConfigError, ExportError
from patchword.evaluation.export_check import check_export
from patchword.evaluation.tome_search import choose_tome_ratio, measure_accuracy
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import InputImage, resolve_labeled_images
from patchword.models.token_merging import merge_schedule

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("resize", ["cover", "squash"])
def test_resizing_in_tensors_matches_pillow(interpolation: str, resize: str) -> None:
    """Photographs of many shapes, shrunk and enlarged: few pixels differ, and by one gray level."""
    preprocess = Preprocess((48, 40), resize, 0.875, interpolation, mean=HALF, std=HALF)  # type: ignore[arg-type]
    images = [*sample_photos(6), Image.new("RGB", (3, 70), (9, 200, 90))]
    images.append(images[0].resize((31, 20)))
    for image in images:
        expected = preprocess.resize_and_crop(image).astype(int)
        planes = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        difference = np.abs(resize_and_crop(planes, preprocess)[0].permute(1, 2, 0).numpy() - expected)
        max_fraction = 0.2 if interpolation == "nearest" else 0.05  # at ties a neighboring row or column may be used
        assert (difference > 0).mean() < max_fraction, f"{(difference > 0).mean():.2%} of the pixels differ"
        assert interpolation == "nearest" or difference.max() <= 1


@pytest.mark.parametrize("name", ["class", "average", "probe", "distilled", "gray", "hybrid"])
def test_exportable_model_matches_the_classifier(name: str) -> None:
    config = VITS[name].replace(num_classes=5)
    checkpoint = make_checkpoint(config)
    pixels = sample_images(checkpoint.preprocess, 3)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = Classifier(checkpoint).logits(pixels)
        torch.testing.assert_close(ExportableModel(checkpoint)(pixels), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "include_preprocessing"), [(".onnx", False), (".pt2", True), (".xml", True)])
def test_every_format_is_readable(suffix: str, include_preprocessing: bool, tmp_path: Path) -> None:
    checkpoint, options = make_checkpoint(TINY), ExportOptions(include_preprocessing=include_preprocessing)
    engine = write_export(checkpoint, tmp_path / f"model{suffix}", options)
    check = check_export(Classifier(checkpoint), engine, options)
    assert check.parity.top1_agreement == 1.0
    assert check.parity.num_images == 48
    assert check.parity.kl_divergence < (1e-3 if include_preprocessing else 1e-6)


def test_broken_export_is_rejected() -> None:
    """One row of one weight matrix is wrong."""
    checkpoint = make_checkpoint(TINY)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    broken = ExportableModel(dataclasses.replace(checkpoint, tensors=tensors)).eval()
    with torch.no_grad():
        broken.get_parameter("model.model.blocks.0.mlp.fc1.weight")[3] += 0.5
    with pytest.raises(ExportError, match=r"\b48 images .*\d%"), torch.no_grad():
        check_export(Classifier(checkpoint), lambda pixels: broken(pixels).detach(), ExportOptions())


def write_labeled_folder(checkpoint: Checkpoint, folder: Path, count: int = 40) -> Path:
    """Photographs in folders named by the model's predictions: its accuracy is 100%."""
    classifier = Classifier(checkpoint)
    for number, image in enumerate(sample_photos(count)):
        class_folder = folder / classifier(image).label
        class_folder.mkdir(parents=True, exist_ok=True)
        image.save(class_folder / f"{number}.png")
    assert len(list(folder.iterdir())) > 2, "more than two classes are predicted"
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    checkpoint = make_checkpoint(TINY)
    write_checkpoint(folder / "model", checkpoint)
    write_labeled_folder(checkpoint, folder / "data")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(run_in_process, capsys)


RUN_WITHOUT_PATCHWORD = """
import json, sys
import numpy, onnxruntime
from PIL import Image
assert "torch" not in sys.modules and "patchword" not in sys.modules
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
metadata = json.loads(session.get_modelmeta().custom_metadata_map["patchword"])
image = numpy.asarray(Image.open(sys.argv[2]).convert("RGB"))[None]
output = session.run(None, {"pixels": image})[0][0]
print(json.dumps({"label": metadata["labels"][int(output.argmax())], "probability": float(output.max())}))
"""


@pytest.mark.slow
def test_file_runs_without_patchword(model: Path, run: Run) -> None:
    out = model / "with_preprocessing.onnx"
    done = run("export", model / "model", out, "--include-preprocessing", "--verify", model / "data")
    assert done.returncode == 0, done.stderr
    image = next((model / "data").rglob("*.png"))
    process = subprocess.run([sys.executable, "-c", RUN_WITHOUT_PATCHWORD, out, image], capture_output=True, text=True)
    output, expected = json.loads(process.stdout), Classifier.load(model / "model")(str(image))
    assert output["label"] == expected.label
    assert output["probability"] == pytest.approx(expected.probability, abs=0.01)
    check = json.loads((model / "with_preprocessing.onnx.check.json").read_text())
    assert check["accuracy"]["before"] == 1.0
    assert check["accuracy"]["after"] >= 0.97
    assert check["bytes"] > 10_000


@pytest.mark.slow
def test_int8_accuracy_is_measured(model: Path, run: Run) -> None:
    options = ("--int8", "--verify", model / "data", "--max-drop", 40)
    done = run("export", model / "model", model / "small.onnx", *options)
    assert done.returncode == 0, done.stderr
    assert (model / "small.onnx").exists()
    assert re.search(r"accuracy +100\.00%", done.stdout), done.stdout
    content = (model / "small.onnx").read_bytes()
    assert b"MatMulInteger" in content


@pytest.mark.slow
def test_inaccurate_export_is_not_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened by an engine that always predicts the same class."""
    constant = torch.tensor([[9.0, 0.0, 0.0, 0.0, 0.0]])
    monkeypatch.setattr(onnx, "OnnxSession", lambda content: lambda pixels: constant.expand(len(pixels), -1))
    out, arguments = model / "lossy.onnx", ("--int8", "--verify", str(model / "data"))
    with pytest.raises(SystemExit) as exit_info:
        main(["export", str(model / "model"), str(out), *arguments])
    assert exit_info.value.code == 2
    assert not list(model.glob(".lossy*"))
    assert not list(model.glob("lossy*"))


@pytest.mark.slow
def test_openvino_writes_two_files(model: Path, run: Run) -> None:
    (model / "ov.bin").write_text("existing")
    done = run("export", model / "model", model / "ov.xml")
    assert done.returncode == 2
    assert re.search(r"ov\.bin .*--overwrite", done.stderr), done.stderr
    assert (model / "ov.bin").read_text() == "existing"
    (model / "ov.xml").write_text("existing")
    done = run("export", model / "model", model / "ov.xml", "--overwrite")
    assert done.returncode == 0, done.stderr
    check = json.loads((model / "ov.xml.check.json").read_text())
    for key, name in (("sha256", "ov.xml"), ("sha256_of_weights", "ov.bin")):
        assert check[key] == hashlib.sha256((model / name).read_bytes()).hexdigest()
    assert check["bytes"] > (model / "ov.bin").stat().st_size > 10_000


@pytest.mark.slow
def test_multi_label_export(model: Path) -> None:
    checkpoint = dataclasses.replace(make_checkpoint(TINY), multi_label=True)
    classifier = Classifier(checkpoint)
    images = [
        InputImage(
            str(k),
            image,
            tuple(LABELS[i] for i in range(5) if predicted_labels(classifier, image)[i]),
        )
        for k, image in enumerate(sample_photos(12))
    ]
    engine = write_export(checkpoint, model / "multi_label.onnx", ExportOptions(include_preprocessing=True))
    check = check_export(classifier, engine, ExportOptions(include_preprocessing=True), images)
    assert check.parity.top1_agreement > 0.9
    assert check.accuracy is not None
    assert check.accuracy["after"] > 0.98


def predicted_labels(classifier: Classifier, image: Image.Image) -> list[bool]:
    with torch.no_grad():
        return (classifier.logits(classifier.pixels(image)[None])[0] > 0).tolist()


def test_missing_libraries_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.onnx .*onnx, onnxscript, onnxruntime.*'\.\[export\]'"):
        write_export(make_checkpoint(TINY), model / "none.onnx", ExportOptions())


@pytest.mark.slow
def test_tome_ratio_is_the_largest_allowed(model: Path) -> None:
    classifier = Classifier.load(model / "model")
    images = resolve_labeled_images(model / "data")
    largest, smallest = choose_tome_ratio(classifier, images, 1.0), choose_tome_ratio(classifier, images, -0.01)
    assert largest == 0.5
    assert smallest == 0
    ratio = choose_tome_ratio(classifier, images, 0.04)

    def accuracy_at(ratio: float) -> float:
        checkpoint = classifier.checkpoint
        engine = open_engine("torch", checkpoint, merge_counts=merge_schedule(checkpoint.config, ratio))
        return measure_accuracy(Classifier(checkpoint, engine), images)

    assert accuracy_at(ratio) >= 0.96
    assert ratio == 0.5 or accuracy_at(ratio + 0.01) < 0.96


@pytest.mark.slow
def test_tome_flags(model: Path, run: Run) -> None:
    arguments = ["--verify", model / "data", "--max-drop", 100, "--overwrite"]
    for option in (["--tome-ratio", 0.3], ["--tome-max-drop", 100]):
        done = run("export", model / "model", model / "merged.onnx", *option, *arguments)
        assert done.returncode == 0, done.stderr
        check = json.loads((model / "merged.onnx.check.json").read_text())
        assert any(check["merge_counts"])
        assert check["accuracy"]["n"]
    done = run("export", model / "model", model / "less.onnx", "--tome-ratio", 0.01, *arguments)
    assert done.returncode == 2
    assert "--tome-ratio 0.01" in done.stderr
    assert not (model / "less.onnx").exists()


def invalid_requests(model: Path) -> dict[str, tuple[list[object], str]]:
    single = model / "single/0"
    single.mkdir(parents=True, exist_ok=True)
    shutil.copy(next((model / "data").rglob("*.png")), single / "one.png")
    return {
        "one image": (
            [model / "model", model / "x.onnx", "--tome-max-drop", 1, "--verify", single.parent],
            r"^patchword: --tome-max-drop .*--verify",
        ),
        "suffix": ([model / "model", model / "x.tflite"], r"x\.tflite: .*\*\.onnx, \*\.pt2"),
        "int8 unverified": ([model / "model", model / "x.onnx", "--int8"], "--verify DATA"),
        "int8 pt2": ([model / "model", model / "x.pt2", "--int8", "--verify", model / "data"], r"--int8 .*\.pt2"),
        "two ToMe flags": (
            [model / "model", model / "x.onnx", "--tome-ratio", 0.1, "--tome-max-drop", 1, "--verify", model],
            r"^patchword: --tome-ratio .*--tome-max-drop",
        ),
        "calibrate": ([model / "model", model / "x.onnx", "--calibration-data", model], "--calibration-data .*--int8"),
        "exists": ([model / "model", model / "taken.onnx"], r"taken\.onnx .*--overwrite"),
        "int8 xml with preprocessing": (
            [model / "model", model / "x.xml", "--int8", "--include-preprocessing", "--verify", model],
            r"\.xml .*--include-preprocessing.*\.onnx",
        ),
    }


CASES = ("suffix", "int8 unverified", "int8 pt2", "two ToMe flags", "calibrate", "exists")
CASES += ("int8 xml with preprocessing", "one image")


@pytest.mark.parametrize("case", CASES)
def test_invalid_requests_exit_with_2(case: str, model: Path, run: Run) -> None:
    arguments, message = invalid_requests(model)[case]
    (model / "taken.onnx").touch()
    done = run("export", *arguments)
    assert done.returncode == 2
    assert re.search(message, done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(model.glob("x.*"))


@pytest.mark.slow
def test_unreadable_calibration_images_are_listed(model: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(model / "data", tmp_path / "data")
    broken = next((tmp_path / "data").rglob("*.png"))
    broken.write_bytes(b"no image")
    options = ("--int8", "--verify", model / "data", "--max-drop", 100, "--calibration-data", tmp_path / "data")
    result = run("export", model / "model", tmp_path / "calibrated.onnx", *options)
    assert result.returncode == 3, result.stderr
    assert (tmp_path / "calibrated.onnx").exists()
    assert broken.name in result.stderr


def test_calibration_data_without_readable_images(model: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/broken.png").write_bytes(b"no image")
    options = ("--int8", "--verify", model / "data", "--calibration-data", tmp_path / "data")
    result = run("export", model / "model", tmp_path / "calibrated.onnx", *options)
    assert result.returncode == 2
    assert "--calibration-data" in result.stderr
    assert not (tmp_path / "calibrated.onnx").exists()


@pytest.mark.slow
def test_unreadable_verify_images_are_listed(model: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(model / "data", tmp_path / "data")
    broken = next((tmp_path / "data").rglob("*.png"))
    broken.write_bytes(b"no image")
    result = run("export", model / "model", tmp_path / "checked.onnx", "--verify", tmp_path / "data")
    assert result.returncode == 3, result.stderr
    assert broken.name in result.stderr
    check = json.loads((tmp_path / "checked.onnx.check.json").read_text())
    assert [Path(row["path"]).name for row in check["unreadable"]] == [broken.name]
