"""A small dataset as four arrays, and its copy in the cache directory.

The copy is written once, after a check against the digest of the original dataset, and opens in a fraction of a second.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.io import sync
from ...errors import DataError
from ..sources import SPLIT_TITLES, ArraySource, DatasetSplits

KEYS = ("train-images", "train-targets", "test-images", "test-targets")

Arrays = dict[str, np.ndarray]  # one per key in KEYS: images uint8 (N, H, W, C), targets int64 (N,)


def compute_digest(arrays: Arrays) -> str:
    """SHA-256 of all pixels and targets, in order."""
    result = hashlib.sha256()
    for key in KEYS:
        result.update(np.ascontiguousarray(arrays[key]).astype(arrays[key].dtype.newbyteorder("<"), copy=False).data)
    return result.hexdigest()


def save_arrays(folder: Path, arrays: Arrays) -> None:
    """Write one .npy file per array."""
    for key in KEYS:
        np.save(folder / f"{key}.npy", arrays[key], allow_pickle=False)
        sync(folder / f"{key}.npy")  # the caller renames the folder, which marks it as complete


def load_splits(folder: Path, name: str, labels: Sequence[str]) -> DatasetSplits:
    """Load the arrays that `save_arrays` wrote as a training and a test set."""
    try:
        arrays = {key: np.load(folder / f"{key}.npy", allow_pickle=False) for key in KEYS}
        check_arrays(arrays, len(labels))
    except (OSError, ValueError, EOFError, DataError) as error:
        raise DataError(
            f"The cached copy of {name} in {folder} is damaged ({error}): delete it and run again."
        ) from error
    sources = [
        ArraySource(arrays[f"{split}-images"], labels, arrays[f"{split}-targets"], title=f"{name} {split}")
        for split in ("train", "test")
    ]
    return DatasetSplits(sources[0], test=sources[1])


def check_arrays(arrays: Arrays, num_classes: int) -> None:
    """Raise `DataError` if the arrays cannot be a dataset with that many classes."""
    for split in ("train", "test"):
        images, targets = arrays[f"{split}-images"], arrays[f"{split}-targets"]
        title = SPLIT_TITLES[split]
        if images.dtype != np.uint8 or images.ndim != 4 or targets.dtype != np.int64:
            raise DataError(f"the {title} has images of {images.dtype} {images.shape} and targets of {targets.dtype}")
        if targets.shape != (len(images),) or not len(targets):
            raise DataError(f"the {title} has {len(images)} images and {len(targets)} targets")
        if targets.min() < 0 or targets.max() >= num_classes:
            raise DataError(
                f"the {title} has class indices {targets.min()} to {targets.max()}, expected 0 to {num_classes - 1}"
            )
