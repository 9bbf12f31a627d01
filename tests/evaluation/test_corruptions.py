"""Image corruptions at each severity, and the accuracy of a real model on corrupted images."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from helpers.command import run
from patchword.checkpoints import read_checkpoint, write_checkpoint
from patchword.evaluation.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES, corrupt
from patchword.evaluation.robustness import measure_robustness

PHOTO = np.asarray(Image.fromarray(load_sample_image("china.jpg")).resize((96, 64)))
SMALL = np.asarray(Image.fromarray(load_sample_image("flower.jpg")).resize((32, 32)))


def mean_difference(pixels: np.ndarray, name: str, severity: int) -> float:
    corrupted = corrupt(pixels, name, severity, seed=1)
    return float(np.abs(corrupted.astype(float) - pixels).mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("pixels", [PHOTO, SMALL], ids=["photo", "small"])
def test_corruptions_increase_with_severity_and_are_reproducible(name: str, pixels: np.ndarray) -> None:
    corrupted = corrupt(pixels, name, 3, seed=7)
    assert corrupted.shape == pixels.shape
    assert corrupted.dtype == np.uint8
    assert np.array_equal(corrupted, corrupt(pixels, name, 3, seed=7))
    differences = [mean_difference(pixels, name, severity) for severity in SEVERITIES]
    assert differences[0] > 0.5, "the lowest severity has an effect"
    if name != "saturation":  # low severities reduce the saturation, high ones increase it
        assert all(a < b for a, b in itertools.pairwise(differences)), differences
    assert corrupted.std() > 1, "the image is not erased"


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_grayscale_and_tiny_images(name: str) -> None:
    for pixels in (PHOTO[:, :, :1], SMALL[:1, :1], SMALL[:3, :9, :1]):
        assert corrupt(pixels, name, 5, seed=0).shape == pixels.shape


def test_noise_depends_on_the_seed() -> None:
    for each in FAMILIES["noise"]:
        assert not np.array_equal(corrupt(PHOTO, each.__name__, 2, seed=0), corrupt(PHOTO, each.__name__, 2, seed=1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiles of two photos, because CIFAR-10 is not available everywhere; one file is unreadable."""
    folder = tmp_path_factory.mktemp("photos")
    for label, name in (("airplane", "china.jpg"), ("frog", "flower.jpg")):
        (folder / label).mkdir()
        photo = Image.fromarray(load_sample_image(name))
        for i in range(4):
            photo.crop((100 * i, 50, 100 * i + 200, 250)).save(folder / label / f"{i}.png")
    (folder / "frog/broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.slow
def test_robustness_skips_unreadable_images(photos: Path) -> None:
    from patchword.inference.classifier import Classifier
    from patchword.inference.inputs import resolve_labeled_images

    classifier = Classifier.load("patchword:cifar10")
    images = resolve_labeled_images(photos)
    found = measure_robustness(classifier, images)
    assert found.n == 8
    assert set(found.accuracy) == set(CORRUPTIONS)
    readable = {seed: image for seed, image in enumerate(images) if "broken" not in image.name}
    correct = [classifier(image.image).label == image.label for image in readable.values()]  # type: ignore[arg-type]
    assert found.clean == np.mean(correct)
    correct = []
    for seed, image in readable.items():
        corrupted = corrupt(classifier.pixels(image.image).numpy(), "fog", 4, seed)  # type: ignore[arg-type]
        correct.append(classifier(Image.fromarray(corrupted)).label == image.label)
    expected = np.mean(correct)
    assert found.accuracy["fog"][3] == expected
    assert found.families()["blur"][1] == pytest.approx(
        np.mean([found.accuracy[n][1] for n in ("defocus_blur", "motion_blur", "zoom_blur")])
    )


@pytest.mark.slow
def test_evaluate_command_writes_a_report(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    result = run("evaluate", "patchword:cifar10", photos, "--out", out, "--corruptions", "--json")
    assert result.returncode == 3
    assert "broken.png" in result.stderr
    found = json.loads(result.stdout)
    assert found["corruptions"]["n"] == 8
    assert len(found["corruptions"]["accuracy"]) == len(CORRUPTIONS)
    page = (out / "report.html").read_text()
    for title in ("Calibration", "Robustness to corruptions", "Confusion matrix", "gaussian noise"):
        assert title in page
    assert {p.name for p in out.iterdir()} == {"report.html"} | {
        f"{n}.{e}" for n in ("reliability", "corruptions") for e in ("png", "svg", "npz")
    }
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    again = run("evaluate", "patchword:cifar10", photos, "--out", out)
    assert again.returncode == 2
    assert str(out) in again.stderr
    assert "--overwrite" in again.stderr


@pytest.mark.slow
def test_multi_label_evaluation(photos: Path, tmp_path: Path) -> None:
    """Metrics, a report, and errors for options that need a single-label model."""
    checkpoint = dataclasses.replace(read_checkpoint("patchword:cifar10"), multi_label=True)
    write_checkpoint(tmp_path / "model", checkpoint)
    lines = [f"{photos}/airplane/{i}.png,airplane;ship" for i in range(4)]
    lines += [f"{photos}/frog/{i}.png,frog" for i in range(4)]
    (tmp_path / "table.csv").write_text("path,labels\n" + "\n".join(lines) + "\n")
    result = run("evaluate", tmp_path / "model", tmp_path / "table.csv", "--json", "--out", tmp_path / "report")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert 0 < found["map"] <= 1
    assert found["n"] == 8
    assert {each["label"] for each in found["per_class"]} == {"airplane", "ship", "frog"}
    assert "Mean average precision" in (tmp_path / "report/report.html").read_text()
    assert "mAP" in run("evaluate", tmp_path / "model", tmp_path / "table.csv").stdout
    for options in (("--compare-to", "patchword:cifar10"), ("--corruptions",)):
        refused = run("evaluate", tmp_path / "model", tmp_path / "table.csv", *options)
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr
