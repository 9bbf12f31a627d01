"""`evaluate` on images whose predictions are known."""

import math
from pathlib import Path

import pytest
from torch import Tensor

from helpers.color_classifier import color_checkpoint, write_color_folder
from patchword.checkpoints import write_checkpoint
from patchword.errors import DataError
from patchword.evaluation.evaluate import evaluate
from patchword.inference.classifier import Classifier
from patchword.inference.inputs import InputImage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


def test_metrics_of_known_predictions(folder: Path) -> None:
    result = evaluate(Classifier(color_checkpoint()), folder)
    assert (result.metrics["n"], len(result.skipped)) == (13, 1)
    assert result.metrics["top1"] == pytest.approx(12 / 13)
    assert result.metrics["top5"] == 1
    probability = math.exp(3) / (math.exp(3) + 2 * math.exp(-3))
    wrong_loss = -math.log(math.exp(-3) / (math.exp(3) + 2 * math.exp(-3)))
    assert result.metrics["nll"] == pytest.approx((12 * -math.log(probability) + wrong_loss) / 13, abs=1e-5)
    assert result.metrics["ece"] == pytest.approx(probability - 12 / 13, abs=1e-5)
    assert {row["label"]: (row["n"], row["top1"]) for row in result.per_class} == {
        "red": (5, 0.8), "green": (4, 1.0), "blue": (4, 1.0),
    }  # fmt: skip
    assert Path(result.skipped[0].name).name == "broken.jpg"
    (mistake,) = (row for row in result.predictions if row["true"] != row["predicted"])
    assert (Path(mistake["name"]).name, mistake["true"], mistake["predicted"]) == ("wrong.png", "red", "blue")


def test_json_document(folder: Path) -> None:
    document = evaluate(Classifier(color_checkpoint()), folder).to_json()
    assert document["split"] == ""
    assert document["skipped"] == 1 == len(document["errors"])
    assert "comparison" not in document


def test_compare_to(folder: Path) -> None:
    classifier = Classifier(color_checkpoint())

    def always_blue(pixels: Tensor) -> Tensor:
        return pixels.new_zeros(len(pixels), 3).float() + pixels.new_tensor([0, 0, 1]).float()

    result = evaluate(classifier, folder, compare_to=Classifier(color_checkpoint(), always_blue))
    assert result.comparison is not None
    assert (result.comparison.first, result.comparison.second) == pytest.approx((4 / 13, 12 / 13))
    assert (result.comparison.only_first, result.comparison.only_second) == (0, 8)
    assert result.comparison.p_value == pytest.approx(2 * 0.5**8)


def test_no_readable_image(tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    (tmp_path / "red/a.jpg").write_bytes(b"no")
    with pytest.raises(DataError, match=r"\b1 images .*a\.jpg"):
        evaluate(Classifier(color_checkpoint()), tmp_path)


def test_unlabeled_images_cannot_be_evaluated(folder: Path) -> None:
    with pytest.raises(DataError, match="^Labeled"):
        evaluate(Classifier(color_checkpoint()), [InputImage("a", folder / "red/0.png")])
    with pytest.raises(DataError) as multi_label:
        evaluate(Classifier(color_checkpoint()), [InputImage("a", folder / "red/0.png", ("red", "blue"))])
    assert multi_label.value.code == "unsupported_by_model"


def test_models_by_reference(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", color_checkpoint())
    by_reference = evaluate(tmp_path / "model", folder, compare_to=str(tmp_path / "model"))
    assert by_reference.metrics == evaluate(Classifier(color_checkpoint()), folder).metrics
    assert by_reference.comparison is not None
    assert by_reference.comparison.p_value == 1
