"""From a picture to an answer, on real photographs and with a model whose answers are known."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from sklearn.metrics import log_loss, top_k_accuracy_score

from helpers.color_classifier import COLOURS, colour_checkpoint
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.data.prefetch import prefetch
from patchword.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from patchword.errors import ConfigError, DataError, ImageError
from patchword.evaluation.evaluate import evaluate
from patchword.inference.classifier import Classifier, find_class
from patchword.metrics.classification import ClassificationMetrics, expected_calibration_error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures of plain colours in class folders, one of them under the wrong name, and one broken file."""
    for name, colour in COLOURS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20 + i, 30), colour).save(tmp_path / "data" / name / f"{i}.png")
    Image.new("RGB", (9, 9), COLOURS["blue"]).save(tmp_path / "data/red/wrong.png")
    (tmp_path / "data/green/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0nothing")
    return tmp_path / "data"


def test_a_picture_in_any_form(folder: Path) -> None:
    classifier = Classifier(colour_checkpoint())
    path = folder / "green/1.png"
    pillow = Image.open(path)
    for image in (path, str(path), path.read_bytes(), pillow, pillow.convert("RGBA"), pillow.convert("P")):
        prediction = classifier(image)
        assert (prediction.label, len(prediction.scores)) == ("green", 3)
    expected = math.exp(3) / (math.exp(3) + 2 * math.exp(-3))
    assert prediction.probability == pytest.approx(expected, abs=1e-5)
    assert sum(score.probability for score in prediction.scores) == pytest.approx(1)


def test_temperature_softens_the_probability_and_not_the_answer(folder: Path) -> None:
    hot = Classifier(colour_checkpoint(temperature=3.0))(folder / "red/0.png")
    assert hot.label == "red"
    assert hot.probability == pytest.approx(math.e / (math.e + 2 / math.e), abs=1e-5)


def test_what_cannot_be_read_is_an_image_error(folder: Path) -> None:
    with pytest.raises(ImageError, match="broken.jpg"):
        Classifier(colour_checkpoint())(folder / "green/broken.jpg")


def test_stream_keeps_the_order_and_reports_what_it_cannot_read(folder: Path) -> None:
    classifier = Classifier(colour_checkpoint())
    files = sorted(folder.rglob("*.*"))
    for batch_size in (1, 2, 5, 100):
        results = list(classifier.stream(iter(files), batch_size))
        assert len(results) == len(files)
        for file, result in zip(files, results, strict=True):
            if file.name == "broken.jpg":
                assert isinstance(result, ImageError)
                assert "broken.jpg" in str(result)
            else:
                assert isinstance(result, torch.Tensor)
                with torch.no_grad():
                    torch.testing.assert_close(result, classifier.logits(classifier.pixels(file)[None])[0])


def test_stream_gives_the_threads_back(folder: Path) -> None:
    before = torch.get_num_threads()
    stream = Classifier(colour_checkpoint()).stream(sorted(folder.rglob("*.png")), 1)
    next(stream)
    stream.close()  # abandoned half way
    assert torch.get_num_threads() == before


def test_work_runs_ahead_only_a_little() -> None:
    started = []
    results = prefetch(lambda i: started.append(i) or i * i, iter(range(1000)), num_workers=2)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(started) <= 8
    results.close()


def test_an_error_of_ours_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        list(prefetch(lambda i: 1 // i, [1, 0, 1], num_workers=2))


def test_evaluate(folder: Path) -> None:
    result = evaluate(Classifier(colour_checkpoint()), folder)
    assert (result.figures["n"], len(result.skipped)) == (13, 1)
    assert result.figures["top1"] == pytest.approx(12 / 13)
    assert result.figures["top5"] == 1
    right = math.exp(3) / (math.exp(3) + 2 * math.exp(-3))
    wrong = -math.log(math.exp(-3) / (math.exp(3) + 2 * math.exp(-3)))
    assert result.figures["nll"] == pytest.approx((12 * -math.log(right) + wrong) / 13, abs=1e-5)
    assert result.figures["ece"] == pytest.approx(right - 12 / 13, abs=1e-5)
    assert {c["label"]: (c["n"], c["top1"]) for c in result.per_class} == {
        "red": (5, 0.8), "green": (4, 1.0), "blue": (4, 1.0),
    }  # fmt: skip
    assert "broken.jpg" in result.skipped[0][1]


def test_a_folder_in_which_nothing_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    (tmp_path / "red/a.jpg").write_bytes(b"no")
    with pytest.raises(DataError, match=r"None of the 1 pictures .*a\.jpg"):
        evaluate(Classifier(colour_checkpoint()), tmp_path)


def test_what_is_no_picture() -> None:
    classifier = Classifier(colour_checkpoint())
    with pytest.raises(ImageError, match="Image.fromarray.*not ndarray"):
        classifier(np.zeros((8, 8, 3)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="top must be at least 1"):
        classifier(Image.new("RGB", (8, 8)), top=0)
    assert repr(classifier) == "Classifier(ViT, 3 classes, 16x16)"


def test_models_that_cannot_classify() -> None:
    good = colour_checkpoint()
    with pytest.raises(ConfigError, match="no head"):
        Classifier(good.adapt(num_classes=0))
    with pytest.raises(ConfigError, match="4 channels"):
        Classifier(good.adapt(in_channels=4))


def test_a_grey_model_reads_colour_pictures(folder: Path) -> None:
    grey = Classifier(colour_checkpoint().adapt(in_channels=1))
    assert grey.pixels(folder / "green/0.png").shape == (16, 16, 1)
    assert len(grey(folder / "green/0.png").scores) == 3


def test_figures_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(500, 12)) * 2, rng.integers(12, size=500)
    tally = ClassificationMetrics()
    for row, target in zip(torch.from_numpy(logits), targets.tolist(), strict=True):
        tally.add(row[None], [target])
    figures = tally.figures()
    probabilities = torch.from_numpy(logits).softmax(-1).numpy()
    assert figures["top1"] == pytest.approx(top_k_accuracy_score(targets, logits, k=1))
    assert figures["top5"] == pytest.approx(top_k_accuracy_score(targets, logits, k=5))
    assert figures["nll"] == pytest.approx(log_loss(targets, probabilities, labels=range(12)))


def test_calibration_error_by_hand() -> None:
    confidences, right = np.array([0.95, 0.95, 0.55, 0.55, 1.0]), np.array([1, 0, 1, 1, 1])
    # bins of width 1/10: (0.9, 1.0] holds 0.95, 0.95, 1.0 with two of three right; (0.5, 0.6] holds both 0.55
    expected = (abs(2.9 - 2) + abs(1.1 - 2)) / 5
    assert expected_calibration_error(confidences, right, bins=10) == pytest.approx(expected)
    assert expected_calibration_error(np.array([0.0]), np.array([0])) == 0


def test_a_real_photograph_with_real_weights(ti16: Path) -> None:
    classifier = Classifier.load(ti16)
    flower = classifier(Image.fromarray(load_sample_image("flower.jpg")))
    assert "daisy" in [score.label for score in flower.scores]


def test_wrong_statistics_cost_a_third_of_the_accuracy(ti16: Path, imagenet: Path) -> None:
    """Peers' silent mistake: ImageNet's mean and std for weights that were trained with 0.5."""
    files = sorted(imagenet.glob("*/*.jpg"))[::5]
    targets = torch.tensor([int(file.parent.name) for file in files])
    right = read_checkpoint(ti16)
    accuracy = []
    for checkpoint in (right, right.with_metadata(mean=IMAGENET_MEAN, std=IMAGENET_STD)):
        logits = torch.stack([r for r in Classifier(checkpoint).stream(files) if isinstance(r, torch.Tensor)])
        accuracy.append((logits.argmax(-1) == targets).float().mean().item())
    assert accuracy[0] > 0.7
    assert accuracy[1] < 0.5


def test_the_same_weights_in_every_format_give_the_same_answers(ti16: Path, imagenet: Path, tmp_path: Path) -> None:
    files = sorted(imagenet.glob("*/*.jpg"))[::50]
    original = Classifier.load(ti16)
    expected = torch.stack([r for r in original.stream(files) if isinstance(r, torch.Tensor)])
    names = {"patchword": "m", "google": "m.npz", "big_vision": "b.npz", "timm": "t", "transformers": "h"}
    names |= {"torchvision": "v.pth", "deit": "d.pth"}
    same = original.preprocess.to_json()
    del same["size"]
    for family, name in names.items():
        write_checkpoint(tmp_path / name, original.checkpoint, family)
        stated = {} if family in ("patchword", "timm", "transformers") else {"activation": "gelu"}
        again = Classifier(read_checkpoint(tmp_path / name, **stated).with_metadata(**same))
        logits = torch.stack([r for r in again.stream(files) if isinstance(r, torch.Tensor)])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4, msg=family)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_classes_that_differ_in_case_only() -> None:
    assert [find_class(["a", "A", "b"], said) for said in ("a", "A", "B")] == [0, 1, 2]
    with pytest.raises(ConfigError, match="Give its index"):
        find_class(["Aa", "aA"], "AA")


def test_data_sets_are_decoded_no_larger_than_needed(folder: Path) -> None:
    """As single files are, so that a picture has the same answer by every way."""
    classifier, asked = Classifier(colour_checkpoint()), []

    def read(mode: Any, min_size: tuple[int, int] | None = None) -> Image.Image:
        asked.append(min_size)
        return Image.open(folder / "red/0.png").convert(mode)

    classifier.pixels(read)
    assert asked == [classifier.preprocess.resize_size]
