"""Resolve a dataset reference ("cifar10", "photos/", "photos.csv", "shards/*.tar") to its splits.

Owns which references are valid, which format reads them, and how the splits are made consistent: the same class
indices in every split, and a validation set in any case. File formats belong to `data.formats`.
"""

import dataclasses
import difflib
import glob
import os
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..core.progress import download_progress
from ..core.text import print_stderr
from ..errors import DataError, Note
from .class_labels import format_names
from .datasets.registry import DATASET_NAMES, open_named_dataset
from .formats.csv_list import open_table
from .formats.hf_datasets import PREFIX, is_saved_dataset, open_hub_dataset, open_saved_dataset
from .formats.image_folder import open_folder
from .formats.indexed_shards import DEFAULT_CACHE_GIB, IndexedSource, open_indexed
from .formats.parquet import open_parquet
from .formats.webdataset import open_shards
from .image_decoder import IMAGE_SUFFIXES
from .name_patterns import expand_numbers, split_pattern
from .shard_index import INDEX_FILE, is_index
from .sources import (
    SPLIT_ALIASES,
    SPLIT_TITLES,
    DatasetSplits,
    ResolvedDataset,
    Source,
    fingerprint,
    split_from_path,
)
from .split import apply_split, describe_split, stratified_split, stratified_subset
from .storage import is_remote

_TABLE_SUFFIXES = (".csv", ".tsv")
_CONTAINER_READERS = {".tar": open_shards, ".parquet": open_parquet}
_ACCEPTED = (
    "a folder with one subfolder per class, a .csv or .tsv file, .parquet files, .tar shards (also in an object store, "
    f"such as s3://bucket/shards), {PREFIX}OWNER/NAME, or a named dataset"
)


def open_data(config: DataConfig, seed: int, saved: dict[str, Any] | None = None) -> DatasetSplits:
    """Open a dataset; all splits have the same labels, and a validation set is split off if there is none.

    Args:
        config: The dataset and its splits.
        seed: The seed of the random choices: the validation set, and the images of `config.train_fraction`.
        saved: The `split_info` of an earlier call, to get exactly the same splits.

    Raises:
        DataError: There is no such dataset, it cannot be used, or it has changed since `saved`.

    Examples:
        ```python
        import patchword as pw

        splits = pw.open_data(pw.DataConfig(source="digits"), seed=0)
        print(len(splits.train), len(splits.val), len(splits.test))  # 1294 144 359
        ```
    """
    splits = with_validation(_load_splits(config), config.val_fraction, seed, saved)
    return subsample(splits, config.train_fraction, seed)


def subsample(splits: DatasetSplits, fraction: float, seed: int) -> DatasetSplits:
    """Keep about `fraction` of each class of the training set, at least one sample each."""
    if fraction == 1:
        return splits
    chosen = stratified_subset(splits.train.targets, fraction, seed)
    return dataclasses.replace(splits, train=splits.train.subset(chosen))


def with_validation(
    splits: DatasetSplits, fraction: float, seed: int, saved: dict[str, Any] | None = None
) -> DatasetSplits:
    """Unify the labels, fill in `split_info`, and split off a validation set if there is none.

    Args:
        splits: The splits.
        fraction: The size of the validation set, as a fraction of the training set.
        seed: The seed of the split.
        saved: See `open_data`.
    """
    splits = _unify_labels(splits)
    fingerprints = {name: fingerprint(source) for name, source in splits.as_dict().items()}
    if saved is not None:
        _require_unchanged(splits, fingerprints, saved)
    if splits.val is not None:
        return dataclasses.replace(splits, split_info={"kind": "given", "fingerprint": fingerprints})
    source = splits.train
    train, val = apply_split(source, saved) if saved is not None else stratified_split(source.targets, fraction, seed)
    split_info = saved or {
        "kind": "stratified",
        "seed": seed,
        "fraction": fraction,
        **describe_split(source, val),
        "fingerprint": fingerprints,
    }
    return dataclasses.replace(splits, train=source.subset(train), val=source.subset(val), split_info=split_info)


def _require_unchanged(splits: DatasetSplits, fingerprints: dict[str, str], saved: dict[str, Any]) -> None:
    expected = saved.get("fingerprint")
    if not isinstance(expected, dict):
        raise DataError("The saved split has no 'fingerprint', so a change of the data cannot be detected.")
    names = sorted({*expected, *fingerprints})
    if changed := [name for name in names if expected.get(name) != fingerprints.get(name)]:
        titles = " and the ".join(SPLIT_TITLES.get(name, name) for name in changed)
        has_index = any(isinstance(source, IndexedSource) for source in splits.as_dict().values())
        hint = f" If the run started before {INDEX_FILE} was written, move that file away." if has_index else ""
        raise DataError(
            f"The data have changed since the run started: the {titles} has other samples or other labels. "
            f"Restore the data, or start a new run.{hint}"
        )


def _load_splits(config: DataConfig) -> DatasetSplits:
    dataset = resolve_dataset(config.source, config.multi_label, config.shard_cache_gib)
    train = _select_split("train", dataset, config.source)
    held_out, notes = {}, list(dataset.notes)
    for name, reference in (("val", config.val), ("test", config.test)):
        if reference is not None:
            other = resolve_dataset(reference, config.multi_label, config.shard_cache_gib)
            held_out[name] = _select_split(name, other, reference)
            notes += other.notes
        elif dataset.splits.get(name) not in (None, train):
            held_out[name] = dataset.splits[name]
    if config.multi_label:
        train = train.as_multi_label()
        held_out = {name: source.as_multi_label() for name, source in held_out.items()}
    _require_classes(train, config)
    splits = DatasetSplits(train, held_out.get("val"), held_out.get("test"), notes=tuple(notes))
    _require_disjoint(splits, config)
    return splits


def _unify_labels(splits: DatasetSplits) -> DatasetSplits:
    """Use the class indices of the training set in every split."""

    def relabel(name: str, source: Source | None) -> Source | None:
        return None if source is None else source.relabel(splits.train.labels, f"The {SPLIT_TITLES[name]}")

    return dataclasses.replace(splits, val=relabel("val", splits.val), test=relabel("test", splits.test))


def _require_disjoint(splits: DatasetSplits, config: DataConfig) -> None:
    """Refuse data.val or data.test images that are also training images: their metrics would be meaningless."""
    for name, reference in (("val", config.val), ("test", config.test)):
        source = getattr(splits, name)
        if reference is None or source is None:
            continue
        if shared := _shared_names(splits.train, source):
            raise DataError(
                f"data.{name}={reference}: {len(shared)} of its {len(source)} images are also in the training set, "
                f"for example {shared[0]}, so metrics on it would be meaningless. Use other images, or leave it out."
            )


def _shared_names(train: Source, source: Source) -> list[str]:
    """Return the names of the images of a source that are also in the training set."""
    if isinstance(train, IndexedSource):
        return train.shared_names(source)
    trained = {os.path.abspath(train.name(index)) for index in range(len(train))}
    return [name for name in map(source.name, range(len(source))) if os.path.abspath(name) in trained]


def _select_split(name: str, dataset: ResolvedDataset, reference: str) -> Source:
    """Return the split of that name, else the training set, else the only split."""
    for wanted in (name, "train"):
        if wanted in dataset.splits:
            return dataset.splits[wanted]
    if len(dataset.splits) == 1:
        return next(iter(dataset.splits.values()))
    available = f"only {format_names(dataset.splits)}" if dataset.splits else "and no other split"
    raise DataError(" ".join([f"{reference} has no training set, {available}.", *dataset.notes]))


def _require_classes(train: Source, config: DataConfig) -> None:
    min_classes = 1 if config.multi_label else 2
    if len(train.labels) >= min_classes:
        return
    tables = sorted(path.name for path in Path(config.source).glob("*.csv"))
    hint = f" If {format_names(tables)} in it lists the labels, use that file as the dataset." if tables else ""
    classes = f"only one class, {train.labels[0]!r}" if train.labels else "no labels"
    raise DataError(f"{config.source} has {classes}; training needs at least {min_classes}.{hint}")


def resolve_dataset(
    reference: str, multi_label: bool = False, shard_cache_gib: float = DEFAULT_CACHE_GIB
) -> ResolvedDataset:
    """Open whatever a reference names. The name of a known dataset takes precedence over a folder of that name."""
    if not reference:
        raise DataError(f"No dataset is given. Use {_ACCEPTED}.")
    if reference.startswith(PREFIX):
        return open_hub_dataset(reference.removeprefix(PREFIX), multi_label)
    if reference in DATASET_NAMES:
        if Path(reference).is_dir():
            print_stderr(f"note: {reference} is read as the dataset of that name; for the folder, write ./{reference}")
        with download_progress(reference) as on_progress:
            splits = open_named_dataset(reference, on_progress=on_progress)
        return ResolvedDataset(splits.as_dict(), splits.notes)
    if is_remote(reference):
        url, pattern = split_pattern(reference)
        return open_indexed(url, multi_label, shard_cache_gib, pattern)
    path = Path(reference).expanduser()
    folder, pattern = (str(path), "") if path.is_dir() else split_pattern(path.as_posix())
    if is_index(Path(folder, INDEX_FILE)) and not is_saved_dataset(Path(folder)):
        return open_indexed(str(Path(folder).absolute()), multi_label, pattern=pattern)
    if path.is_dir():
        return _open_directory(path, multi_label)
    if path.is_file() and path.suffix.lower() in _TABLE_SUFFIXES:
        return open_table(path, multi_label)
    if files := [path] if path.is_file() else _expand_pattern(str(path)):
        return _open_containers(files, multi_label, reference)
    raise DataError(_unknown_reference(reference))


def is_plain_folder(folder: Path) -> bool:
    """Whether the folder directly contains class folders: no split folders, no containers, no saved dataset."""
    try:
        has_splits = any(child.is_dir() and child.name.lower() in SPLIT_ALIASES for child in folder.iterdir())
    except OSError as error:
        raise DataError(f"Cannot read {folder}: {error.strerror or error}.") from None
    return not (has_splits or is_saved_dataset(folder) or _find_containers(folder))


def _open_directory(folder: Path, multi_label: bool) -> ResolvedDataset:
    if is_saved_dataset(folder):
        return open_saved_dataset(folder, multi_label)
    if files := _find_containers(folder):
        return _open_containers(files, multi_label, str(folder))
    return open_folder(folder)


def _find_containers(folder: Path) -> list[Path]:
    """List the .tar or .parquet files below a folder; none if a subfolder has images, which are then the data."""
    containers = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        suffixes = {name: os.path.splitext(name)[1].lower() for name in files if not name.startswith(".")}
        if Path(parent) != folder and not IMAGE_SUFFIXES.isdisjoint(suffixes.values()):
            return []
        containers += [Path(parent, name) for name, suffix in suffixes.items() if suffix in _CONTAINER_READERS]
    return sorted(containers)


def _open_containers(files: list[Path], multi_label: bool, reference: str) -> ResolvedDataset:
    suffixes = {file.suffix.lower() for file in files}
    if len(suffixes) > 1 or not suffixes <= set(_CONTAINER_READERS):
        raise DataError(f"{reference} is not a supported dataset. Use {_ACCEPTED}; unpack other archives first.")
    read = _CONTAINER_READERS[suffixes.pop()]
    root = os.path.commonpath([file.absolute().parent for file in files])
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_from_path(os.path.relpath(file, root)), []).append(file)
    unnamed = by_split.pop("", [])
    if not by_split:
        return read({"train": unnamed}, multi_label)
    dataset = read(by_split, multi_label)
    if not unnamed:
        return dataset
    text = f"Left out, because their names do not contain a split: {format_names(map(str, unnamed))}."
    return ResolvedDataset(dataset.splits, (*dataset.notes, Note(text, "files_left_out")))


def _expand_pattern(pattern: str) -> list[Path]:
    """Expand * and ? as a shell does, and {000..012} to numbered files, all of which must exist."""
    files = []
    for each in expand_numbers(pattern):
        matches = sorted(map(Path, glob.glob(each)))
        if not matches and each != pattern:
            raise DataError(f"{pattern}: the file {each} does not exist.")
        files += matches
    return files


def _unknown_reference(reference: str) -> str:
    matches = difflib.get_close_matches(Path(reference).name.lower(), DATASET_NAMES, n=1)
    suggestion = f" Did you mean the named dataset {matches[0]!r}?" if matches else ""
    return (
        f"There is no file, folder or named dataset {reference}.{suggestion} "
        f"Named datasets: {', '.join(DATASET_NAMES)}. Use {_ACCEPTED}."
    )
