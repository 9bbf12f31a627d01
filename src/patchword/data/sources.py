"""`Source`: the images and labels of one split, as training reads them.

Owns the interface `Source`, its two simplest implementations (image files and arrays in memory) and `DatasetSplits`.
It does not know how splits are found (`data.resolve` and the formats) or how images are transformed (`data.loader`).
"""

import copy
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from ..errors import DataError, Note
from .class_labels import format_names, remap_targets, to_multi_hot
from .image_decoder import Mode, load_image, to_mode

# Names of splits in folders, file names and tables (case-insensitive), and the canonical name of each.
SPLIT_ALIASES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "val",
    "valid": "val",
    "validation": "val",
}
SPLIT_TITLES = {"train": "training set", "val": "validation set", "test": "test set"}


class Source:
    """The images and labels of one split; `len(source)` is the number of images.

    `open_data` and `from_arrays` return sources. To read images from elsewhere, define a subclass with `key`, `read`
    and, if messages need other names, `name`.

    Args:
        labels: The class names, in the order of the class indices.
        targets: The target of each image, as in the attribute.

    Attributes:
        labels (tuple[str, ...]): The class names, in the order of the class indices.
        targets (np.ndarray): The class indices, int64 (N,); for multi-label data a multi-hot matrix, float32 (N, K).
        rows (np.ndarray): The row of each image in the dataset before any `subset`, int64 (N,).
    """

    def __init__(self, labels: Sequence[str], targets: np.ndarray) -> None:
        self.labels = tuple(labels)
        self.targets = targets
        self.rows = np.arange(len(targets))

    def __len__(self) -> int:
        return len(self.targets)

    def key(self, index: int) -> str:
        """Return a unique identifier of an image, which does not change when the dataset is moved."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the name of an image in messages and reports; by default its key."""
        return self.key(index)

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        """Decode one image; must be thread-safe.

        Args:
            index: The position of the image in the source.
            mode: "RGB" or "L" (grayscale).
            min_size: (height, width) to which the caller will shrink the image. A large JPEG may then be decoded at
                1/2, 1/4 or 1/8 of its size, which is faster.

        Raises:
            ImageError: The image cannot be read.
            StorageError: The object store cannot be read, or the data have changed: this stops a run.
        """
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> Self:
        """Return a source of the images at these indices, in their order; the labels stay the same."""
        selected = copy.copy(self)
        selected.rows, selected.targets = self.rows[indices], self.targets[indices]
        return selected

    def relabel(self, labels: Sequence[str], what: str = "The data") -> Self:
        """Return a source with the class indices of another list of labels; classes are matched by name.

        Args:
            labels: The class names, in their new order.
            what: The subject of the error message.

        Raises:
            DataError: A class that has images is not in `labels`.
        """
        if self.labels == tuple(labels):
            return self
        relabeled = copy.copy(self)
        relabeled.targets = remap_targets(self.targets, self.labels, labels, what)
        relabeled.labels = tuple(labels)
        return relabeled

    def as_multi_label(self) -> Self:
        """Return a source whose targets are a multi-hot matrix."""
        converted = copy.copy(self)
        converted.targets = to_multi_hot(self.targets, len(self.labels))
        return converted

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the images and their order: by default, their keys."""
        for index in range(len(self)):
            yield self.key(index).encode("utf-8", "surrogatepass") + b"\0"

    @property
    def multi_label(self) -> bool:
        """Whether `targets` is a multi-hot matrix."""
        return self.targets.ndim == 2


class FileSource(Source):
    """One file per image. `paths` are absolute or relative to `root`."""

    def __init__(self, paths: Sequence[str], labels: Sequence[str], targets: np.ndarray, root: str | Path = "") -> None:
        super().__init__(labels, targets)
        self.paths = paths
        self.root = str(root)

    def key(self, index: int) -> str:
        return self.paths[int(self.rows[index])]

    def name(self, index: int) -> str:
        return os.path.join(self.root, self.key(index))

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        return load_image(self.name(index), mode=mode, min_size=min_size)


class ArraySource(Source):
    """Images in memory, as `from_arrays` returns them.

    Args:
        images: The images, uint8 (N, H, W, C) with 1 or 3 channels.
        labels: The class names, in the order of the class indices.
        targets: The targets, as in `Source`.
        title: A prefix of the names of the images.
    """

    def __init__(self, images: np.ndarray, labels: Sequence[str], targets: np.ndarray, title: str = "array") -> None:
        super().__init__(labels, targets)
        self.images = images
        self.title = title

    def key(self, index: int) -> str:
        return f"{self.title} {self.rows[index]}"

    def read(self, index: int, *, mode: Mode, min_size: tuple[int, int] | None = None) -> Image.Image:
        pixels = self.images[index]
        return to_mode(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels), mode)

    def subset(self, indices: np.ndarray) -> Self:
        selected = super().subset(indices)
        selected.images = self.images[indices]
        return selected


@dataclass(frozen=True)
class DatasetSplits:
    """The training, validation and test sets of a run.

    Attributes:
        train: The training set.
        val: The validation set, which selects the best model. If it is None, `train` and `probe` split one off the
            training set.
        test: The test set, if there is one.
        split_info: How the splits were made, as JSON; `open_data` fills it in and takes it as `saved`.
        notes: What the user should know about the data, such as files that were left out.

    Examples:
        ```python
        import numpy as np
        import patchword as pw

        images = np.zeros((100, 32, 32, 3), np.uint8)
        source = pw.from_arrays(images, np.arange(100) % 4)
        splits = pw.DatasetSplits(train=source.subset(np.arange(80)), test=source.subset(np.arange(80, 100)))
        ```
    """

    train: Source
    val: Source | None = None
    test: Source | None = None
    split_info: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def as_dict(self) -> dict[str, Source]:
        """Return the splits that are not None by their names "train", "val" and "test"."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: source for name, source in splits.items() if source is not None}


@dataclass(frozen=True)
class ResolvedDataset:
    """What a format reader found at a reference.

    Attributes:
        splits: The sources by split name. Their labels need not agree yet.
        notes: As in `DatasetSplits`.
    """

    splits: Mapping[str, Source]
    notes: tuple[Note, ...] = ()


def decode_image(data: bytes, name: str, mode: Mode, min_size: tuple[int, int] | None) -> Image.Image:
    """Decode the bytes of an image file; error messages call it `name`."""
    return load_image(data, mode=mode, min_size=min_size, name=name)


def split_from_path(path: str) -> str:
    """Return the split in a file's name ("train-00000-of-00002.parquet") or in that of its folder; else ""."""
    for name in reversed(Path(path).parts):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in SPLIT_ALIASES:
                return SPLIT_ALIASES[word]
    return ""


def from_arrays(images: np.ndarray, targets: np.ndarray, labels: Sequence[str] | None = None) -> ArraySource:
    """Make a source from arrays in memory.

    Args:
        images: The images, uint8: (N, H, W, 3) for RGB, (N, H, W, 1) or (N, H, W) for grayscale.
        targets: The class indices, integers (N,), or a multi-hot matrix of zeros and ones (N, K) for multi-label data.
        labels: The class names, in the order of the class indices; "0", "1", ... by default.

    Raises:
        DataError: An array has the wrong type or shape, or a class has no label.

    Examples:
        ```python
        import numpy as np
        import patchword as pw

        images = np.zeros((100, 32, 32, 3), np.uint8)
        source = pw.from_arrays(images, np.arange(100) % 2, labels=("cat", "dog"))
        ```
    """
    images, targets = np.asarray(images), np.asarray(targets)
    images = images[..., None] if images.ndim == 3 else images
    _check_images(images)
    num_classes = _check_targets(targets, len(images))
    multi_label = targets.ndim == 2
    labels = [str(index) for index in range(num_classes)] if labels is None else labels
    if len(set(labels)) < len(labels) or len(labels) < num_classes or (multi_label and len(labels) > num_classes):
        raise DataError(
            f"labels must have one distinct name per class: the targets have {num_classes} classes, "
            f"the {len(labels)} labels are {format_names(labels)}."
        )
    return ArraySource(images, labels, targets.astype(np.float32 if multi_label else np.int64))


def _check_images(images: np.ndarray) -> None:
    if images.dtype != np.uint8:
        raise DataError(f"images must be uint8 (0..255), not {images.dtype}: scale and convert them.")
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise DataError(f"images must have the shape (N, H, W), (N, H, W, 1) or (N, H, W, 3), not {images.shape}.")


def _check_targets(targets: np.ndarray, num_images: int) -> int:
    """Validate the targets and return the number of classes."""
    if targets.ndim not in (1, 2) or len(targets) != num_images:
        raise DataError(f"targets must have one row per image: {num_images} images, targets of shape {targets.shape}.")
    if targets.ndim == 2:
        if not np.isin(targets, (0, 1)).all():
            raise DataError("Two-dimensional targets must contain only 0 and 1: one column per class.")
        return int(targets.shape[1])
    if not np.issubdtype(targets.dtype, np.integer):
        raise DataError(f"targets must be integer class indices, not {targets.dtype}.")
    if targets.min() < 0:
        raise DataError(f"targets must not be negative; the smallest is {targets.min()}.")
    return int(targets.max()) + 1


def fingerprint(source: Source) -> str:
    """SHA-256 of labels, sample keys and targets.

    It changes when samples are added, removed, renamed or relabeled, but not when the dataset is moved.
    """
    digest = hashlib.sha256("\0".join(source.labels).encode("utf-8", "surrogatepass"))
    for part in source.identity():
        digest.update(part)
    digest.update(np.ascontiguousarray(source.targets).tobytes())
    return digest.hexdigest()
