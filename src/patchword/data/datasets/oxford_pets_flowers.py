"""Flowers-102 and Oxford-IIIT Pets, of Oxford's Visual Geometry Group: the split and class of each image."""

from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ..archives import extract


@dataclass(frozen=True)
class Sample:
    """One image: its split (train, val or test), its path relative to the folder, its class index."""

    split: str
    path: str
    label: int


def unpack_flowers(folder: Path, images: Path, splits: Path, labels: Path) -> list[Sample]:
    """Unpack Flowers-102. Images and classes are numbered from 1; a split is a list of image numbers."""
    from scipy.io import loadmat  # slow to import, and needed once

    extract(images, folder)
    try:
        classes = loadmat(labels)["labels"].ravel().astype(int)
        members = {split: loadmat(splits)[key].ravel().astype(int) for split, key in _FLOWER_SPLITS.items()}
        return [
            Sample(split, f"jpg/image_{number:05d}.jpg", int(classes[number - 1]) - 1)
            for split, numbers in members.items()
            for number in numbers
        ]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"{splits} and {labels} are not the tables of Flowers-102: {error}") from error


_FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def unpack_pets(folder: Path, images: Path, annotations: Path) -> list[Sample]:
    """Unpack Oxford-IIIT Pets. Each line of a list has an image name, its class from 1, and two unused numbers."""
    extract(images, folder)
    extract(annotations, folder)
    samples = []
    for split, file in {"train": "trainval.txt", "test": "test.txt"}.items():
        try:
            lines = (folder / "annotations" / file).read_text().splitlines()
            for line in lines:
                name, label, *_ = line.split()
                samples.append(Sample(split, f"images/{name}.jpg", int(label) - 1))
        except (OSError, ValueError) as error:
            raise DataError(f"{annotations} has no valid list {file}: {error}") from error
    return samples
