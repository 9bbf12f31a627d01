"""The sets of Oxford's Visual Geometry Group, Flowers-102 and Pets: which picture belongs to which part and class."""

from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError
from ..archives import extract


@dataclass(frozen=True)
class Sample:
    part: str  # train, val or test
    path: str  # relative to the folder
    label: int


def unpack_flowers(folder: Path, pictures: Path, parts: Path, labels: Path) -> list[Sample]:
    """Pictures are counted from 1, and so are classes; the parts are lists of pictures."""
    from scipy.io import loadmat  # late: it takes a while, and is needed once

    extract(pictures, folder)
    try:
        classes = loadmat(labels)["labels"].ravel().astype(int)
        members = {part: loadmat(parts)[key].ravel().astype(int) for part, key in _FLOWER_PARTS.items()}
        return [
            Sample(part, f"jpg/image_{number:05d}.jpg", int(classes[number - 1]) - 1)
            for part, numbers in members.items()
            for number in numbers
        ]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"{parts} and {labels} are not the tables of Flowers-102: {error}") from error


_FLOWER_PARTS = {"train": "trnid", "val": "valid", "test": "tstid"}


def unpack_pets(folder: Path, pictures: Path, annotations: Path) -> list[Sample]:
    """The lists have a line for each picture: its name, its class from 1, and two numbers that we do not need."""
    extract(pictures, folder)
    extract(annotations, folder)
    samples = []
    for part, file in {"train": "trainval.txt", "test": "test.txt"}.items():
        try:
            lines = (folder / "annotations" / file).read_text().splitlines()
            for line in lines:
                name, label, *_ = line.split()
                samples.append(Sample(part, f"images/{name}.jpg", int(label) - 1))
        except (OSError, ValueError) as error:
            raise DataError(f"{annotations} has no usable list {file}: {error}") from error
    return samples
