"""Resolution of inputs: files, folders, patterns, datasets and images in memory."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.color_classifier import color_checkpoint, write_color_folder
from patchword.errors import DataError
from patchword.inference.classifier import Classifier
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images, resolve_labeled_images, sample_evenly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_color_folder(tmp_path / "data")


def test_files_folders_and_patterns(folder: Path) -> None:
    file, missing = folder / "red/0.png", folder / "red/missing.png"
    images = resolve_images([file, str(missing), folder / "blue", str(folder / "gr*/*.png")])
    names = [Path(image.name).relative_to(folder).as_posix() for image in images]
    assert names[:2] == ["red/0.png", "red/missing.png"]
    assert names[2:] == [f"{color}/{i}.png" for color in ("blue", "green") for i in range(4)]
    assert all(image.label is None and image.labels == () for image in images)


@pytest.mark.parametrize("reference", ["*.png", "missing-folder"])
def test_references_that_match_nothing(reference: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        resolve_images([str(tmp_path / reference)])


def test_no_images() -> None:
    with pytest.raises(DataError) as refused:
        resolve_images([])
    assert refused.value.code == "no_image"


def test_images_in_memory(folder: Path) -> None:
    path = folder / "blue/0.png"
    pillow = Image.open(path)
    array = np.asarray(pillow)
    images = resolve_images([path.read_bytes(), pillow, array, np.stack([array, array])])
    assert [image.name for image in images] == [f"image {i}" for i in range(5)]
    classifier = Classifier(color_checkpoint())
    assert {classifier(image.image).label for image in images} == {"blue"}


def test_named_dataset_has_labels_and_a_split() -> None:
    unlabeled, labeled = resolve_images(["digits"]), resolve_labeled_images("digits")
    assert [image.name for image in unlabeled] == [image.name for image in labeled]
    assert {image.split for image in labeled} == {"test"}
    assert {image.label for image in labeled} == set("0123456789")


def test_csv_list(folder: Path) -> None:
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), ("red/0.png", "red"), ("blue/1.png", "blue")])
    for images in (resolve_images([folder / "list.csv"]), resolve_labeled_images(folder / "list.csv")):
        assert [image.label for image in images] == ["red", "blue"]


def test_csv_list_without_labels(folder: Path) -> None:
    (folder / "list.csv").write_text("path,note\nred/0.png,a\nblue/1.png,b\nred/0.png,c\n")
    images = resolve_images([folder / "list.csv"])
    assert [(image.image, image.label) for image in images] == [
        (folder / "red/0.png", None),
        (folder / "blue/1.png", None),
    ]
    with pytest.raises(DataError) as refused:
        resolve_labeled_images(folder / "list.csv")
    assert refused.value.code == "no_label_column"


def test_class_folders(folder: Path) -> None:
    images = resolve_labeled_images(folder)
    assert len(images) == 14
    assert all(image.labels == (Path(image.name).parent.name,) and image.split == "" for image in images)


@pytest.mark.parametrize(("limit", "expected"), [(3, [0, 4, 9]), (10, list(range(10))), (20, list(range(10)))])
def test_sample_evenly(limit: int, expected: list[int]) -> None:
    assert sample_evenly(range(10), limit) == expected


def test_image_batch_lists_unreadable_images(folder: Path) -> None:
    batch = load_image_batch(Classifier(color_checkpoint()), resolve_images([folder / "green"]), num_originals=2)
    assert batch.pixels.shape == (4, 16, 16, 3)
    assert len(batch.names) == 4
    assert [original.size for original in batch.originals] == [(20, 30), (21, 30)]
    assert [Path(each.name).name for each in batch.unreadable] == ["broken.jpg"]
    empty: Any = load_image_batch(Classifier(color_checkpoint()), [])
    assert empty.pixels.shape == (0, 16, 16, 3)
