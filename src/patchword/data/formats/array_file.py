"""A small data set as four arrays, and its copy in the cache.

The copy is written once, checked against the digest of the original set whichever way it came, and opens in a fraction
of a second.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...core.io import sync
from ...errors import DataError
from ..sources import ArraySource, DatasetSplits

KEYS = ("train-images", "train-targets", "test-images", "test-targets")

Arrays = dict[str, np.ndarray]  # for each of KEYS: images uint8 (N, H, W, C), targets int64 (N,)


def compute_digest(arrays: Arrays) -> str:
    """SHA-256 of pixels and classes, in their order."""
    result = hashlib.sha256()
    for key in KEYS:
        result.update(np.ascontiguousarray(arrays[key]).astype(arrays[key].dtype.newbyteorder("<"), copy=False).data)
    return result.hexdigest()


def save_arrays(folder: Path, arrays: Arrays) -> None:
    for key in KEYS:
        np.save(folder / f"{key}.npy", arrays[key], allow_pickle=False)
        sync(folder / f"{key}.npy")  # the folder is about to get its final name, which says that it is complete


def load_splits(folder: Path, name: str, labels: Sequence[str]) -> DatasetSplits:
    try:
        arrays = {key: np.load(folder / f"{key}.npy", allow_pickle=False) for key in KEYS}
        check_arrays(arrays, len(labels))
    except (OSError, ValueError, EOFError, DataError) as error:
        raise DataError(f"The copy of {name} in {folder} is damaged ({error}): delete it, and run again.") from error
    sources = [
        ArraySource(arrays[f"{part}-images"], labels, arrays[f"{part}-targets"], title=f"{name} {part}")
        for part in ("train", "test")
    ]
    return DatasetSplits(sources[0], test=sources[1])


def check_arrays(arrays: Arrays, num_classes: int) -> None:
    """Refuse what cannot be a data set of so many classes."""
    for part in ("train", "test"):
        images, targets = arrays[f"{part}-images"], arrays[f"{part}-targets"]
        if images.dtype != np.uint8 or images.ndim != 4 or targets.dtype != np.int64:
            raise DataError(f"the {part} part has {images.dtype} {images.shape} and {targets.dtype}")
        if targets.shape != (len(images),) or not len(targets):
            raise DataError(f"the {part} part has {len(images)} pictures and {len(targets)} classes for them")
        if targets.min() < 0 or targets.max() >= num_classes:
            raise DataError(f"the {part} part has the classes {targets.min()} to {targets.max()}, not {num_classes}")
