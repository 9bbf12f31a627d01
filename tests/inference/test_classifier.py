"""From an image to a prediction, with a model whose predictions are known and on real photos."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from helpers.color_classifier import color_checkpoint, write_color_folder
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.data.prefetch import prefetch
from patchword.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from patchword.errors import ConfigError, ImageError
from patchword.inference.classifier import Classifier, find_class
from patchword.inference.predictions import class_labels, to_probabilities, top_predictions

TOP_PROBABILITY = math.exp(3) / (math.exp(3) + 2 * math.exp(-3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


def test_all_types_of_image_input(folder: Path) -> None:
    classifier = Classifier(color_checkpoint())
    path = folder / "green/1.png"
    pillow = Image.open(path)
    modes = (pillow, pillow.convert("RGBA"), pillow.convert("P"))
    for image in (path, str(path), path.read_bytes(), np.asarray(pillow), *modes):
        prediction = classifier(image)
        assert (prediction.label, prediction.index, len(prediction.scores)) == ("green", 1, 3)
        assert prediction.probability == pytest.approx(TOP_PROBABILITY, abs=1e-5)
        assert sum(score.probability for score in prediction.scores) == pytest.approx(1)


def test_temperature_changes_the_probability_but_not_the_class(folder: Path) -> None:
    prediction = Classifier(color_checkpoint(temperature=3.0))(folder / "red/0.png")
    assert prediction.label == "red"
    assert prediction.probability == pytest.approx(math.e / (math.e + 2 / math.e), abs=1e-5)


def test_unreadable_image_raises_an_image_error(folder: Path) -> None:
    with pytest.raises(ImageError) as refused:
        Classifier(color_checkpoint())(folder / "green/broken.jpg")
    assert refused.value.code == "image_damaged"
    assert "broken.jpg" in str(refused.value)


def test_stream_keeps_the_order_and_returns_errors(folder: Path) -> None:
    classifier = Classifier(color_checkpoint())
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


def test_stream_restores_the_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    stream = Classifier(color_checkpoint()).stream(sorted(folder.rglob("*.png")), 1)
    next(stream)
    stream.close()  # abandoned
    assert torch.get_num_threads() == before


def test_prefetch_is_bounded() -> None:
    started = []
    results = prefetch(lambda i: started.append(i) or i * i, iter(range(1000)), num_workers=2)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(started) <= 8
    results.close()


def test_prefetch_raises_internal_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        list(prefetch(lambda i: 1 // i, [1, 0, 1], num_workers=2))


@pytest.mark.parametrize("image", [np.zeros((8, 8, 3)), np.zeros((8, 8, 2), np.uint8), 3.5])
def test_unsupported_inputs(image: Any) -> None:
    with pytest.raises(ImageError) as refused:
        Classifier(color_checkpoint())(image)
    assert refused.value.code == "image_unsupported"


def test_top_must_be_positive() -> None:
    classifier = Classifier(color_checkpoint())
    with pytest.raises(ConfigError, match=r"\btop\b.*\b1\b.*\b0\b"):
        classifier(Image.new("RGB", (8, 8)), top=0)
    assert repr(classifier) == "Classifier(ViT, 3 classes, 16x16)"


def test_models_that_cannot_classify() -> None:
    checkpoint = color_checkpoint()
    for unusable in (checkpoint.adapt(num_classes=0), checkpoint.adapt(in_channels=4)):
        with pytest.raises(ConfigError) as refused:
            Classifier(unusable)
        assert refused.value.code == "unsupported_by_model"


def test_grayscale_model_reads_color_images(folder: Path) -> None:
    gray = Classifier(color_checkpoint().adapt(in_channels=1))
    assert gray.pixels(folder / "green/0.png").shape == (16, 16, 1)
    assert len(gray(folder / "green/0.png").scores) == 3


def test_probabilities_and_default_labels() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    torch.testing.assert_close(to_probabilities(logits, multi_label=False), logits.softmax(-1))
    torch.testing.assert_close(to_probabilities(logits, multi_label=True), logits.sigmoid())
    tied = top_predictions(torch.tensor([0.2, 0.4, 0.4]), ("a", "b", "c"), top=2)
    assert [score.label for score in tied.scores] == ["b", "c"]
    unlabeled = color_checkpoint()
    assert class_labels(unlabeled) == ("red", "green", "blue")
    assert class_labels(unlabeled.adapt(num_classes=2)) == ("0", "1")


def test_real_photo_with_real_weights(ti16: Path) -> None:
    classifier = Classifier.load(ti16)
    flower = classifier(Image.fromarray(load_sample_image("flower.jpg")))
    assert "daisy" in [score.label for score in flower.scores]


@pytest.mark.slow
def test_wrong_channel_statistics_cost_a_third_of_the_accuracy(ti16: Path, imagenet: Path) -> None:
    """A common silent mistake: ImageNet's mean and std for weights that were trained with 0.5."""
    files = sorted(imagenet.glob("*/*.jpg"))[::5]
    targets = torch.tensor([int(file.parent.name) for file in files])
    correct = read_checkpoint(ti16)
    accuracy = []
    for checkpoint in (correct, correct.with_metadata(mean=IMAGENET_MEAN, std=IMAGENET_STD)):
        logits = torch.stack([r for r in Classifier(checkpoint).stream(files) if isinstance(r, torch.Tensor)])
        accuracy.append((logits.argmax(-1) == targets).float().mean().item())
    assert accuracy[0] > 0.7
    assert accuracy[1] < 0.5


@pytest.mark.slow
def test_same_weights_in_every_format_give_the_same_logits(ti16: Path, imagenet: Path, tmp_path: Path) -> None:
    files = sorted(imagenet.glob("*/*.jpg"))[::50]
    original = Classifier.load(ti16)
    expected = torch.stack([r for r in original.stream(files) if isinstance(r, torch.Tensor)])
    names = {"patchword": "m", "google": "m.npz", "big_vision": "b.npz", "timm": "t", "transformers": "h"}
    names |= {"torchvision": "v.pth", "deit": "d.pth"}
    preprocess = original.preprocess.to_json()
    del preprocess["size"]
    for family, name in names.items():
        write_checkpoint(tmp_path / name, original.checkpoint, family)
        fields = {} if family in ("patchword", "timm", "transformers") else {"activation": "gelu"}
        converted = Classifier(read_checkpoint(tmp_path / name, **fields).with_metadata(**preprocess))
        logits = torch.stack([r for r in converted.stream(files) if isinstance(r, torch.Tensor)])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4, msg=family)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_find_class() -> None:
    assert [find_class(["a", "A", "b"], name) for name in ("a", "A", "B")] == [0, 1, 2]
    labels = ["tench, Tinca tinca", "goldfish"]
    assert [find_class(labels, name) for name in ("tinca TINCA", "goldfish", "1")] == [0, 1, 1]
    with pytest.raises(ConfigError) as ambiguous:
        find_class(["Aa", "aA"], "AA")
    assert ambiguous.value.code == "ambiguous_class"
    with pytest.raises(ConfigError, match=r"'goldfich'.*\bgoldfish\?") as unknown:
        find_class(labels, "goldfich")
    assert unknown.value.code == "unknown_class"


def test_samples_of_datasets_are_decoded_no_larger_than_needed(folder: Path) -> None:
    """As files are, so that the pixels of an image do not depend on how it is given."""
    classifier, requested = Classifier(color_checkpoint()), []

    def read(mode: Any, min_size: tuple[int, int] | None = None) -> Image.Image:
        requested.append(min_size)
        return Image.open(folder / "red/0.png").convert(mode)

    classifier.pixels(read)
    classifier.pixels(read, full=True)
    assert requested == [classifier.preprocess.resize_size, None]
