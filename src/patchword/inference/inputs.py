"""The one resolver of inputs: from what a user gives to a list of images, labeled or not, none of them read yet."""

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from ..data.datasets.registry import DATASET_NAMES
from ..data.formats.csv_list import list_table_images
from ..data.formats.image_folder import list_labeled_images
from ..data.image_decoder import IMAGE_SUFFIXES, list_images
from ..data.resolve import is_plain_folder, resolve_dataset
from ..data.sources import Source
from ..data.storage import is_remote
from ..errors import DataError
from .entry_reader import EntryReader
from .input_listing import CONTAINER_SUFFIXES, InputListing
from .open_image import ImageInput

SPLIT_ORDER = ("test", "val", "train")  # the first split that a dataset has is used
DATASET_SUFFIXES = frozenset({".csv", ".tsv", ".tar", ".parquet"})

Item = TypeVar("Item")


class UnreadableImage(NamedTuple):
    """An image that could not be read.

    Attributes:
        name: The path of the image, or its name in a dataset.
        reason: Why it could not be read.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class InputImage:
    """An image that has not been read yet.

    Attributes:
        name: The path of the image, or its name in a dataset.
        image: The image.
        label: The class name; a tuple if images can have more than one label, None if the image has no label.
        split: The split of the dataset that the image is from; "" if it is not from a dataset.
    """

    name: str
    image: ImageInput
    label: str | tuple[str, ...] | None = None
    split: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels of the image."""
        if self.label is None:
            return ()
        return (self.label,) if isinstance(self.label, str) else self.label


def resolve_images(references: Iterable[ImageInput]) -> list[InputImage]:
    """All images that the references stand for, in their order.

    A reference is a file, a folder (searched recursively), a glob pattern, a dataset reference such as "cifar10",
    "photos.csv" or "hf:owner/name" (its test split, else validation, else training), the URL of an image, a folder or
    shards in an object store, the bytes of a file, a uint8 array, a batch of them (N, H, W, C), or a Pillow image.
    Images need no labels; those of a dataset keep theirs.
    """
    images: list[InputImage] = []
    for reference in references:
        images += resolve_reference(reference, first=len(images))
    if not images:
        raise DataError("No images were given. Give files, folders or a dataset.", code="no_image")
    return images


def resolve_reference(reference: ImageInput, first: int = 0) -> list[InputImage]:
    """The images of one reference; images in memory are named by their number, counted from `first`."""
    if isinstance(reference, str | Path):
        return resolve_path(str(reference))
    if isinstance(reference, np.ndarray) and reference.ndim == 4:
        return [InputImage(f"image {first + i}", pixels) for i, pixels in enumerate(reference)]
    if isinstance(reference, bytes | np.ndarray | Image.Image) or callable(reference):
        return [InputImage(f"image {first}", reference)]
    kind = type(reference).__name__
    raise DataError(f"An input is a path, a dataset, bytes, a uint8 array or a Pillow image, not {kind}.")


def resolve_path(reference: str) -> list[InputImage]:
    """A file, a folder, a glob pattern or a dataset. A file that is missing is reported when it is read."""
    path = Path(reference).expanduser()
    if is_remote(reference):
        return listed_images(reference)
    if reference in DATASET_NAMES:
        return dataset_images(reference)
    if path.is_dir():
        return folder_images(path)
    suffix = path.suffix.lower()
    if not path.exists() and glob.has_magic(str(path)) and suffix not in DATASET_SUFFIXES:
        return glob_images(str(path))
    if suffix in IMAGE_SUFFIXES or (path.is_file() and suffix not in DATASET_SUFFIXES):
        return [InputImage(reference, path)]
    try:
        return dataset_images(reference)
    except DataError as error:
        if error.code == "no_label_column":
            return [InputImage(str(file), file) for file in list_table_images(path)]
        return unlabeled_images(path, error)


def folder_images(folder: Path) -> list[InputImage]:
    """All image files below a folder, or the images of a dataset in another format that is stored there."""
    try:
        files = list_images(folder)
    except DataError:
        if is_plain_folder(folder):
            raise
        try:
            return dataset_images(str(folder))
        except DataError as error:
            return unlabeled_images(folder, error)
    return [InputImage(str(file), file) for file in files]


def unlabeled_images(path: Path, error: DataError) -> list[InputImage]:
    """The images in tar and Parquet files without labels; raises `error` if there are none."""
    is_container = path.is_dir() or (path.is_file() and path.suffix.lower() in CONTAINER_SUFFIXES)
    if not is_container:
        raise error
    try:
        return listed_images(str(path))
    except DataError:
        raise error from None


def listed_images(reference: str) -> list[InputImage]:
    """The images of a URL, or of files that a large job would take, each read when it is needed."""
    listing = InputListing([reference])
    entries = list(listing)
    if not entries:
        raise DataError(f"There are no images in {reference}.", code="no_image")
    reader = EntryReader(listing.roots)
    return [InputImage(reader.name(entry), partial(reader.decode, entry)) for entry in entries]


def glob_images(pattern: str) -> list[InputImage]:
    """The image files that match a pattern, sorted."""
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [match for match in matches if Path(match).suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise DataError(f"No image file matches {pattern}. Check the pattern.", code="no_image")
    return [InputImage(file, Path(file)) for file in files]


def resolve_labeled_images(data: str | Path, multi_label: bool = False) -> list[InputImage]:
    """The labeled images of a folder with one folder per class, or of a dataset.

    Args:
        data: the folder, or a dataset reference: its test split is used, else validation, else training.
        multi_label: an image can have more than one label.
    """
    folder = Path(data).expanduser()
    if folder.is_dir() and is_plain_folder(folder):
        return [InputImage(str(file), file, label) for file, label in list_labeled_images(folder)]
    return dataset_images(str(data), multi_label)


def dataset_images(reference: str, multi_label: bool = False) -> list[InputImage]:
    """The images of the first split of a dataset in `SPLIT_ORDER`, with their labels."""
    splits = resolve_dataset(reference, multi_label).splits
    split = next((name for name in SPLIT_ORDER if name in splits), None)
    if split is None or not len(splits[split]):
        raise DataError(f"{reference} has no images.", code="no_image")
    source = splits[split]
    return [
        InputImage(source.name(i), partial(source.read, i), label, split)
        for i, label in enumerate(source_labels(source))
    ]


def source_labels(source: Source) -> list[Any]:
    """The label of each sample, or a tuple of its labels."""
    if source.multi_label:
        return [tuple(source.labels[k] for k in row.nonzero()[0]) for row in source.targets]
    return [source.labels[target] for target in source.targets]


def sample_evenly(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` items, evenly spaced, so that a list sorted by class gives some of every class."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, limit).round().astype(int)]
