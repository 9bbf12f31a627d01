"""What a training run asks of its data: one part of a data set as a row of pictures with their classes.

Owns the interface `Source`, the two kinds that need nothing further (files and arrays), and `Parts`. It does not know
where parts come from (`data.open` and the readers it calls), nor what becomes of a picture.
"""

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from ..errors import DataError, Note
from .class_labels import as_several, listed, matched_targets
from .images import Mode, load_image, to_mode

# What the parts of a data set are called in folders, file names and tables; case does not matter.
PART_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
PART_NAMES |= {"val": "val", "valid": "val", "validation": "val"}


class Source:
    """Pictures and their classes. Subclasses say where the bytes come from: they define `key`, `name` and `read`.

    Attributes:
        labels: the names of the classes, in the order of their indices.
        targets: int64 (N,), the class of each sample; or float32 (N, K) of zeros and ones, where there may be several.
        rows: int64 (N,), where each sample stands in the whole that this source was taken from.
    """

    def __init__(self, labels: Sequence[str], targets: np.ndarray) -> None:
        self.labels = tuple(labels)
        self.targets = targets
        self.rows = np.arange(len(targets))

    def __len__(self) -> int:
        return len(self.targets)

    def key(self, index: int) -> str:
        """What tells the sample from all others, and stays the same when the data are moved elsewhere."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """How messages and reports call the sample."""
        return self.key(index)

    def read(self, index: int, *, mode: Mode, at_least: tuple[int, int] | None = None) -> Image.Image:
        """The picture, decoded, upright, 8 bits; see `load_image`. Raises only `ImageError`; safe from many threads."""
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> Self:
        """Fewer samples, or the same in another order; the labels stay."""
        part = copy.copy(self)
        part.rows, part.targets = self.rows[indices], self.targets[indices]
        return part

    def relabelled(self, labels: Sequence[str], what: str = "The data") -> Self:
        """The same samples with their classes counted as in `labels`, where they are found by name."""
        if self.labels == tuple(labels):
            return self
        part = copy.copy(self)
        part.targets = matched_targets(self.targets, self.labels, labels, what)
        part.labels = tuple(labels)
        return part

    def as_multi_label(self) -> Self:
        """The same samples, each with a row of zeros and ones instead of a class."""
        part = copy.copy(self)
        part.targets = as_several(self.targets, len(self.labels))
        return part

    @property
    def multi_label(self) -> bool:
        return self.targets.ndim == 2


class FileSource(Source):
    """One file for each picture; `paths` are relative to `root`, or absolute."""

    def __init__(self, paths: Sequence[str], labels: Sequence[str], targets: np.ndarray, root: str | Path = "") -> None:
        super().__init__(labels, targets)
        self.paths = paths
        self.root = str(root)

    def key(self, index: int) -> str:
        return self.paths[self.rows[index]]

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.key(index))

    def read(self, index: int, *, mode: Mode, at_least: tuple[int, int] | None = None) -> Image.Image:
        return load_image(self.name(index), mode=mode, at_least=at_least)


class ArraySource(Source):
    """Decoded and in memory: `images` is uint8 (N, H, W, C), C 1 or 3. `title` begins the names: "cifar10 train"."""

    def __init__(self, images: np.ndarray, labels: Sequence[str], targets: np.ndarray, title: str = "array") -> None:
        super().__init__(labels, targets)
        self.images = images
        self.title = title

    def key(self, index: int) -> str:
        return f"{self.title} {self.rows[index]}"

    def read(self, index: int, *, mode: Mode, at_least: tuple[int, int] | None = None) -> Image.Image:
        pixels = self.images[index]
        return to_mode(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels), mode)

    def subset(self, indices: np.ndarray) -> Self:
        part = super().subset(indices)
        part.images = self.images[indices]
        return part


@dataclass(frozen=True)
class DatasetSplits:
    """A data set as a run uses it.

    Attributes:
        split: how the parts came about, as JSON; `open_data` makes exactly the same of it again.
        notes: what the user should be told about the data, such as files that had to be left out.
    """

    train: Source
    val: Source | None = None
    test: Source | None = None
    split: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def present(self) -> dict[str, Source]:
        """The parts that there are, by name."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class Found:
    """What a reader found at a reference: parts by name, each with classes of its own, and notes as in `Parts`."""

    parts: Mapping[str, Source]
    notes: tuple[Note, ...] = ()


def decode(data: bytes, name: str, mode: Mode, at_least: tuple[int, int] | None) -> Image.Image:
    """The image in the bytes of a file; a message calls it `name`."""
    return load_image(data, mode=mode, at_least=at_least, name=name)


def from_arrays(images: np.ndarray, targets: np.ndarray, labels: Sequence[str] | None = None) -> ArraySource:
    """A source out of arrays that are in memory already.

    Args:
        images: uint8, (N, H, W, 3) colour, or (N, H, W, 1) or (N, H, W) grey.
        targets: whole numbers (N,), the class of each picture; or zeros and ones (N, K), for several labels.
        labels: the names of the classes; without it they are called "0", "1" and so on.
    """
    images, targets = np.asarray(images), np.asarray(targets)
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8:
        raise DataError(f"Pictures must be arrays of uint8 (0..255), not {images.dtype}: scale and convert them.")
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise DataError(f"Pictures must have the shape (N, H, W), (N, H, W, 1) or (N, H, W, 3), not {images.shape}.")
    if targets.ndim not in (1, 2) or len(targets) != len(images):
        raise DataError(f"There are {len(images)} pictures, but targets have the shape {targets.shape}: give one each.")
    multi_label = targets.ndim == 2
    if multi_label and not np.isin(targets, (0, 1)).all():
        raise DataError("Targets in two dimensions must be zeros and ones: a column for each class.")
    if not multi_label and not np.issubdtype(targets.dtype, np.integer):
        raise DataError(f"Targets must be whole numbers, the classes' indices, not {targets.dtype}.")
    if not multi_label and targets.min() < 0:
        raise DataError(f"Targets must not be negative, and the smallest is {targets.min()}.")
    count = targets.shape[1] if multi_label else int(targets.max()) + 1
    labels = [str(index) for index in range(count)] if labels is None else labels
    if len(set(labels)) < len(labels) or len(labels) < count or (multi_label and len(labels) > count):
        raise DataError(f"The targets have {count} classes, and the labels {listed(labels)} are not one for each.")
    return ArraySource(images, labels, targets.astype(np.float32 if multi_label else np.int64))


def fingerprint(source: Source) -> str:
    """Changes when samples are added, taken away, renamed or put into other classes; not when the data are moved."""
    digest = hashlib.sha256("\0".join(source.labels).encode("utf-8", "surrogatepass"))
    for index in range(len(source)):
        digest.update(source.key(index).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(np.ascontiguousarray(source.targets).tobytes())
    return digest.hexdigest()
