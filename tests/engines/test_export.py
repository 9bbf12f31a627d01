"""Exports: they say what the model says, run without us, and are refused when they do not."""

import dataclasses
import hashlib
import json
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

from helpers.export_checkpoint import LABELS, TINY, make_checkpoint
from helpers.model_zoo import VITS
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.cli.main import main
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines import engine as engine_module
from patchword.engines import onnx, open_engine
from patchword.engines.export import ExportOptions, write_export
from patchword.engines.exportable import ExportableModel, resize_and_crop
from patchword.engines.parity import sample_photos, sample_images
from patchword.errors import ConfigError, ExportError
from patchword.evaluation.export_check import check_export
from patchword.evaluation.tome_search import choose_tome_ratio, measure_accuracy
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import InputImage, resolve_labeled_images
from patchword.models.token_merging import merge_schedule

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("resize", ["cover", "squash"])
def test_resizing_in_tensors_is_pillows(interpolation: str, resize: str) -> None:
    """Photographs of many shapes, shrunk and enlarged: hardly a pixel differs, and then by a grey level."""
    preprocess = Preprocess((48, 40), resize, 0.875, interpolation, mean=HALF, std=HALF)  # type: ignore[arg-type]
    pictures = [*sample_photos(6), Image.new("RGB", (3, 70), (9, 200, 90))]
    pictures.append(pictures[0].resize((31, 20)))
    for picture in pictures:
        wanted = preprocess.resize_and_crop(picture).astype(int)
        planes = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
        off = np.abs(resize_and_crop(planes, preprocess)[0].permute(1, 2, 0).numpy() - wanted)
        few = 0.2 if interpolation == "nearest" else 0.05  # at ties a row or column may be its neighbour's
        assert (off > 0).mean() < few, f"{(off > 0).mean():.2%} of the pixels differ"
        assert interpolation == "nearest" or off.max() <= 1


@pytest.mark.parametrize("name", ["class", "average", "probe", "distilled", "gray", "hybrid"])
def test_a_packed_model_is_the_classifier(name: str) -> None:
    config = VITS[name].replace(num_classes=5)
    checkpoint = make_checkpoint(config)
    pixels = sample_images(checkpoint.preprocess, 3)  # type: ignore[arg-type]
    with torch.no_grad():
        wanted = Classifier(checkpoint).logits(pixels)
        torch.testing.assert_close(ExportableModel(checkpoint)(pixels), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("ending", "whole"), [(".onnx", False), (".pt2", True), (".xml", True)])
def test_every_format_comes_back(ending: str, whole: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(TINY)
    engine = write_export(checkpoint, tmp_path / f"model{ending}", ExportOptions(include_preprocessing=whole))
    proof = check_export(Classifier(checkpoint), engine, ExportOptions(include_preprocessing=whole))
    assert proof.parity.top1_agreement == 1.0
    assert proof.parity.num_images == 48
    assert proof.parity.kl_divergence < (1e-3 if whole else 1e-6)


def test_a_broken_export_is_refused() -> None:
    """One weight of thousands is off."""
    checkpoint = make_checkpoint(TINY)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    broken = ExportableModel(dataclasses.replace(checkpoint, tensors=tensors)).eval()
    with torch.no_grad():
        broken.get_parameter("model.model.blocks.0.mlp.fc1.weight")[3] += 0.5
    with pytest.raises(ExportError, match="does not say what the model says"), torch.no_grad():
        check_export(Classifier(checkpoint), lambda pixels: broken(pixels).detach(), ExportOptions())


def labelled_folder(checkpoint: Checkpoint, folder: Path, count: int = 40) -> Path:
    """Photographs in folders named by what the model says to them: it is right about all."""
    classifier = Classifier(checkpoint)
    for number, picture in enumerate(sample_photos(count)):
        place = folder / classifier(picture).label
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{number}.png")
    assert len(list(folder.iterdir())) > 2, "several classes"
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    checkpoint = make_checkpoint(TINY)
    write_checkpoint(folder / "model", checkpoint)
    labelled_folder(checkpoint, folder / "data")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command in this process: libraries for export take seconds to import."""

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as left:
            main([str(each) for each in arguments])
        out, error = capsys.readouterr()
        return subprocess.CompletedProcess([], int(left.value.code or 0), out, error)

    return command


RUN_ALONE = """
import json, sys
import numpy, onnxruntime
from PIL import Image
assert "torch" not in sys.modules and "patchword" not in sys.modules
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["patchword"])
picture = numpy.asarray(Image.open(sys.argv[2]).convert("RGB"))[None]
said = session.run(None, {"pixels": picture})[0][0]
print(json.dumps({"label": about["labels"][int(said.argmax())], "probability": float(said.max())}))
"""


def test_another_program_runs_it_without_us(model: Path, run: Run) -> None:
    out = model / "whole.onnx"
    done = run("export", model / "model", out, "--whole", "--verify", model / "data")
    assert done.returncode == 0, done.stderr
    picture = next((model / "data").rglob("*.png"))
    alone = subprocess.run([sys.executable, "-c", RUN_ALONE, out, picture], capture_output=True, text=True)
    said, wanted = json.loads(alone.stdout), Classifier.load(model / "model")(str(picture))
    assert said["label"] == wanted.label
    assert said["probability"] == pytest.approx(wanted.probability, abs=0.01)
    proof = json.loads((model / "whole.onnx.proof.json").read_text())
    assert proof["accuracy"]["before"] == 1.0
    assert proof["accuracy"]["after"] >= 0.97
    assert proof["bytes"] > 10_000


def test_int8_is_measured_before_it_is_written(model: Path, run: Run) -> None:
    asked = ("--int8", "--verify", model / "data", "--max-drop", 40)
    done = run("export", model / "model", model / "small.onnx", *asked)
    assert done.returncode == 0, done.stderr
    assert (model / "small.onnx").exists()
    assert "accuracy   100.00% before" in done.stdout
    content = (model / "small.onnx").read_bytes()
    assert b"MatMulInteger" in content


def test_what_loses_too_much_is_not_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened by an engine that always says the same."""
    always = torch.tensor([[9.0, 0.0, 0.0, 0.0, 0.0]])
    monkeypatch.setattr(onnx, "OnnxSession", lambda content: lambda pixels: always.expand(len(pixels), -1))
    out, arguments = model / "lossy.onnx", ("--int8", "--verify", str(model / "data"))
    with pytest.raises(SystemExit) as left:
        main(["export", str(model / "model"), str(out), *arguments])
    assert left.value.code == 2
    assert not list(model.glob(".lossy*"))
    assert not list(model.glob("lossy*"))


def test_openvino_has_two_files_that_belong_together(model: Path, run: Run) -> None:
    (model / "ov.bin").write_text("mine")
    done = run("export", model / "model", model / "ov.xml")
    assert done.returncode == 2
    assert "ov.bin exists already" in done.stderr
    assert (model / "ov.bin").read_text() == "mine"
    (model / "ov.xml").write_text("an older one")
    done = run("export", model / "model", model / "ov.xml", "--overwrite")
    assert done.returncode == 0, done.stderr
    proof = json.loads((model / "ov.xml.proof.json").read_text())
    for key, name in (("sha256", "ov.xml"), ("sha256_of_weights", "ov.bin")):
        assert proof[key] == hashlib.sha256((model / name).read_bytes()).hexdigest()
    assert proof["bytes"] > (model / "ov.bin").stat().st_size > 10_000


def test_several_labels_go_out_too(model: Path) -> None:
    checkpoint = dataclasses.replace(make_checkpoint(TINY), multi_label=True)
    classifier = Classifier(checkpoint)
    pictures = [
        InputImage(
            str(k),
            picture,
            tuple(LABELS[i] for i in range(5) if classifier_says(classifier, picture)[i]),
        )
        for k, picture in enumerate(sample_photos(12))
    ]
    engine = write_export(checkpoint, model / "several.onnx", ExportOptions(include_preprocessing=True))
    proof = check_export(classifier, engine, ExportOptions(include_preprocessing=True), pictures)
    assert proof.parity.top1_agreement > 0.9
    assert proof.accuracy is not None
    assert proof.accuracy["after"] > 0.98


def classifier_says(classifier: Classifier, picture: Image.Image) -> list[bool]:
    with torch.no_grad():
        return (classifier.logits(classifier.pixels(picture)[None])[0] > 0).tolist()


def test_without_the_libraries_it_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx, onnxscript, onnxruntime: in a clone .* '\.\[export\]'"):
        write_export(make_checkpoint(TINY), model / "none.onnx", ExportOptions())


def test_as_many_are_merged_as_the_loss_allows(model: Path) -> None:
    classifier = Classifier.load(model / "model")
    pictures = resolve_labeled_images(model / "data")
    everything, nothing = choose_tome_ratio(classifier, pictures, 1.0), choose_tome_ratio(classifier, pictures, -0.01)
    assert everything == 0.5
    assert nothing == 0
    some = choose_tome_ratio(classifier, pictures, 0.04)

    def kept(part: float) -> float:
        engine = open_engine("torch", classifier.checkpoint, merge_counts=merge_schedule(classifier.checkpoint.config, part))
        return measure_accuracy(Classifier(classifier.checkpoint, engine), pictures)

    assert kept(some) >= 0.96 and (some == 0.5 or kept(some + 0.01) < 0.96), some


def test_merging_through_the_command(model: Path, run: Run) -> None:
    arguments = ["--verify", model / "data", "--max-drop", 100, "--overwrite"]
    for option in (["--merge", 0.3], ["--merge-drop", 100]):
        done = run("export", model / "model", model / "merged.onnx", *option, *arguments)
        assert done.returncode == 0, done.stderr
        proof = json.loads((model / "merged.onnx.proof.json").read_text())
        assert any(proof["merged"])
        assert proof["accuracy"]["n"]
    done = run("export", model / "model", model / "less.onnx", "--merge", 0.01, *arguments)
    assert done.returncode == 2
    assert "less than one patch" in done.stderr
    assert not (model / "less.onnx").exists()


def wrong(model: Path) -> dict[str, tuple[list[object], str]]:
    single = model / "single/0"
    single.mkdir(parents=True, exist_ok=True)
    shutil.copy(next((model / "data").rglob("*.png")), single / "one.png")
    return {
        "one picture": (
            [model / "model", model / "x.onnx", "--merge-drop", 1, "--verify", single.parent],
            "proves on the others",
        ),
        "ending": ([model / "model", model / "x.tflite"], "*.onnx, *.pt2"),
        "int8 unverified": ([model / "model", model / "x.onnx", "--int8"], "--verify DATA"),
        "int8 pt2": ([model / "model", model / "x.pt2", "--int8", "--verify", model / "data"], "written in fp32"),
        "merge twice": (
            [model / "model", model / "x.onnx", "--merge", 0.1, "--merge-drop", 1, "--verify", model],
            "not both",
        ),
        "calibrate": ([model / "model", model / "x.onnx", "--calibrate", model], "goes with --int8"),
        "exists": ([model / "model", model / "taken.onnx"], "exists already"),
        "whole int8 xml": (
            [model / "model", model / "x.xml", "--int8", "--whole", "--verify", model],
            "leave out --whole",
        ),
    }


@pytest.mark.parametrize(
    "case",
    ["ending", "int8 unverified", "int8 pt2", "merge twice", "calibrate", "exists", "whole int8 xml", "one picture"],
)
def test_wrong_requests(case: str, model: Path, run: Run) -> None:
    arguments, message = wrong(model)[case]
    (model / "taken.onnx").touch()
    done = run("export", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(model.glob("x.*"))
