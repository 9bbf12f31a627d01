"""Pictures made worse: each way at each severity, and what is left of a real model's accuracy."""

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


def damage(pixels: np.ndarray, name: str, severity: int) -> float:
    worse = corrupt(pixels, name, severity, seed=1)
    return float(np.abs(worse.astype(float) - pixels).mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("pixels", [PHOTO, SMALL], ids=["photo", "small"])
def test_each_is_worse_by_severity_and_the_same_again(name: str, pixels: np.ndarray) -> None:
    worse = corrupt(pixels, name, 3, seed=7)
    assert worse.shape == pixels.shape
    assert worse.dtype == np.uint8
    assert np.array_equal(worse, corrupt(pixels, name, 3, seed=7))
    damages = [damage(pixels, name, severity) for severity in SEVERITIES]
    assert damages[0] > 0.5, "the mildest can be measured"
    if name != "saturation":  # fades at first, then glares
        assert all(a < b for a, b in itertools.pairwise(damages)), damages
    assert worse.std() > 1, "something is left to see"


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_one_channel_and_the_tiniest_picture(name: str) -> None:
    for pixels in (PHOTO[:, :, :1], SMALL[:1, :1], SMALL[:3, :9, :1]):
        assert corrupt(pixels, name, 5, seed=0).shape == pixels.shape


def test_random_ones_differ_from_picture_to_picture() -> None:
    for each in FAMILIES["noise"]:
        assert not np.array_equal(corrupt(PHOTO, each.__name__, 2, seed=0), corrupt(PHOTO, each.__name__, 2, seed=1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few real CIFAR-like classes are not at hand everywhere; tiles of two photographs are."""
    folder = tmp_path_factory.mktemp("photos")
    for label, name in (("airplane", "china.jpg"), ("frog", "flower.jpg")):
        (folder / label).mkdir()
        picture = Image.fromarray(load_sample_image(name))
        for i in range(4):
            picture.crop((100 * i, 50, 100 * i + 200, 250)).save(folder / label / f"{i}.png")
    (folder / "frog/broken.png").write_bytes(b"no picture")
    return folder


def test_robustness_counts_what_can_be_read(photos: Path) -> None:
    from patchword.inference.classifier import Classifier
    from patchword.inference.inputs import resolve_labeled_images

    classifier = Classifier.load("patchword:cifar10")
    pictures = resolve_labeled_images(photos)
    found = measure_robustness(classifier, pictures)
    assert found.n == 8
    assert set(found.accuracy) == set(CORRUPTIONS)
    said = [classifier(each.image).label == each.label for each in pictures if "broken" not in each.name]  # type: ignore[arg-type]
    assert found.clean == np.mean(said)
    pixels = [classifier.pixels(each.image).numpy() for each in pictures if "broken" not in each.name]  # type: ignore[arg-type]
    labels = [each.label for each in pictures if "broken" not in each.name]
    seeds = [i for i, each in enumerate(pictures) if "broken" not in each.name]
    worse = [Image.fromarray(corrupt(p, "fog", 4, seed)) for p, seed in zip(pixels, seeds, strict=True)]
    expected = np.mean([classifier(w).label == label for w, label in zip(worse, labels, strict=True)])
    assert found.accuracy["fog"][3] == expected
    assert found.families()["blur"][1] == pytest.approx(
        np.mean([found.accuracy[n][1] for n in ("defocus_blur", "motion_blur", "zoom_blur")])
    )


def test_the_command_writes_a_page(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "page"
    result = run("evaluate", "patchword:cifar10", photos, "--out", out, "--corruptions", "--json")
    assert result.returncode == 3
    assert "broken.png" in result.stderr
    found = json.loads(result.stdout)
    assert found["corruptions"]["n"] == 8
    assert len(found["corruptions"]["accuracy"]) == len(CORRUPTIONS)
    page = (out / "report.html").read_text()
    for words in ("Calibration", "Robustness to corruptions", "Confusion matrix", "gaussian noise"):
        assert words in page
    assert {p.name for p in out.iterdir()} == {"report.html"} | {
        f"{n}.{e}" for n in ("reliability", "corruptions") for e in ("png", "svg", "npz")
    }
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    again = run("evaluate", "patchword:cifar10", photos, "--out", out)
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_several_labels_from_a_table(photos: Path, tmp_path: Path) -> None:
    """A model for several labels and a table with several: figures, a page, and sentences for what cannot be."""
    checkpoint = dataclasses.replace(read_checkpoint("patchword:cifar10"), multi_label=True)
    write_checkpoint(tmp_path / "model", checkpoint)
    lines = [f"{photos}/airplane/{i}.png,airplane;ship" for i in range(4)]
    lines += [f"{photos}/frog/{i}.png,frog" for i in range(4)]
    (tmp_path / "table.csv").write_text("path,labels\n" + "\n".join(lines) + "\n")
    result = run("evaluate", tmp_path / "model", tmp_path / "table.csv", "--json", "--out", tmp_path / "page")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert 0 < found["map"] <= 1
    assert found["n"] == 8
    assert {each["label"] for each in found["per_class"]} == {"airplane", "ship", "frog"}
    assert "Mean average precision" in (tmp_path / "page/report.html").read_text()
    assert "mAP" in run("evaluate", tmp_path / "model", tmp_path / "table.csv").stdout
    for options in (("--compare-to", "patchword:cifar10"), ("--corruptions",)):
        refused = run("evaluate", tmp_path / "model", tmp_path / "table.csv", *options)
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr
