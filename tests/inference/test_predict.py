"""Many images: results, the resumable table, and explanations of exactly the predicted class."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.color_classifier import color_checkpoint, write_color_folder
from patchword.errors import DataError, OutputError
from patchword.inference import open_image as decode_module
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import InputImage, resolve_images
from patchword.inference.open_image import DecodedImage
from patchword.inference.predict import predict_images, write_prediction_table
from patchword.inference.predictions import Prediction
from patchword.report import explanation_images
from patchword.report.explanation_images import ExplanationWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


def reversed_classifier() -> Classifier:
    """Runs in an engine whose top class differs from PyTorch's: the class order is reversed."""
    torch_classifier = Classifier(color_checkpoint(depth=1))

    def engine(pixels: Tensor) -> Tensor:
        return torch_classifier.logits(pixels).flip(-1)

    return Classifier(color_checkpoint(depth=1), engine)


def test_results_of_readable_and_unreadable_images(folder: Path) -> None:
    results = list(predict_images(Classifier(color_checkpoint()), resolve_images([folder]), top=2))
    errors = [result["path"] for result in results if "error" in result]
    assert errors == [str(folder / "green/broken.jpg")]
    assert all(len(result["predictions"]) == 2 for result in results if "error" not in result)
    assert results[0]["predictions"][0]["label"] == "blue"


def test_predicted_class_is_explained_and_images_are_decoded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's top class is blue for red images, PyTorch's is red: the explanation is of blue."""
    decoded, explained = [], []
    load_image, explain = decode_module.load_image, explanation_images.explain

    def count_decoding(source: Path, **options: object) -> object:
        decoded.append(source)
        return load_image(source, **options)

    def record_class(model: object, images: Tensor, classes: Tensor, method: object) -> object:
        explained.append(int(classes))
        return explain(model, images, classes, method)

    monkeypatch.setattr(decode_module, "load_image", count_decoding)
    monkeypatch.setattr(explanation_images, "explain", record_class)
    classifier = reversed_classifier()
    images = resolve_images([folder / "red/0.png", folder / "blue/0.png", folder / "green/broken.jpg"])
    writer = ExplanationWriter(classifier, images, tmp_path / "explanations")
    results = list(predict_images(classifier, images, 1, writer))
    assert [result["predictions"][0]["label"] for result in results[:2]] == ["blue", "red"]
    assert explained == [result["predictions"][0]["index"] for result in results[:2]] == [2, 0]
    assert "error" in results[2]
    assert sorted(map(str, decoded)) == sorted(str(image.image) for image in images)
    assert sorted(path.name for path in (tmp_path / "explanations").iterdir()) == ["0-2.png", "0.png"]
    assert writer.num_written == 2


def test_explanations_do_not_overwrite(folder: Path, tmp_path: Path) -> None:
    classifier, images = Classifier(color_checkpoint(depth=1)), resolve_images([folder / "red"])
    with pytest.raises(OutputError) as refused:
        ExplanationWriter(classifier, images, folder / "red")
    assert refused.value.code == "output_exists"
    with pytest.raises(OutputError, match=r"red/\w+\.png .*input images") as refused:
        ExplanationWriter(classifier, images, folder / "red", overwrite=True)
    assert refused.value.code == "output_exists"
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as refused:
        ExplanationWriter(classifier, images, tmp_path / "file/explanations")


def test_on_prediction_gets_the_full_image(folder: Path) -> None:
    recorded = []

    def record(image: InputImage, decoded: DecodedImage, prediction: Prediction) -> None:
        recorded.append((decoded.image.size, decoded.pixels.shape, prediction.label))

    list(predict_images(Classifier(color_checkpoint()), resolve_images([folder / "blue/3.png"]), 1, record))
    assert recorded == [((23, 30), (16, 16, 3), "blue")]


def test_table_resumes_after_an_interrupt(folder: Path, tmp_path: Path) -> None:
    classifier, images, table = Classifier(color_checkpoint()), resolve_images([folder]), tmp_path / "t.csv"
    calls = iter(range(100))

    def interrupt() -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prediction_table(classifier, images, 2, table, interrupt)
    assert not table.exists()
    with pytest.raises(DataError) as mismatch:
        write_prediction_table(classifier, images, 1, table)
    assert mismatch.value.code == "table_mismatch"
    written = write_prediction_table(classifier, images, 2, table)
    assert written.num_resumed == 6
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["path"] for row in rows] == [image.name for image in images]
    assert len([row for row in rows if row["error"]]) == 1 == len(written.unreadable) + written.num_resumed_unreadable
    assert not list(tmp_path.glob("*.partial*"))


def test_full_and_reduced_decoding_agree(tmp_path: Path) -> None:
    """A large JPEG is decoded at reduced scale unless it is to be shown."""
    Image.linear_gradient("L").resize((640, 640)).convert("RGB").save(tmp_path / "a.jpg", quality=95)
    classifier = Classifier(color_checkpoint())
    reduced, full = (classifier.decode(tmp_path / "a.jpg", full=each) for each in (False, True))
    assert full.image.size == (640, 640)
    assert reduced.image.size == (80, 80)
    difference = torch.from_numpy(reduced.pixels).int() - torch.from_numpy(full.pixels).int()
    assert difference.abs().float().mean() < 2
