"""From a reference, as users write it, to the parts of a data set: "cifar10", "photos/", "photos.csv", "shards/*.tar".

Owns what a reference may be, which reader it goes to, and how the parts are made to fit each other: labels counted the
same everywhere, and a validation part in any case. Formats are the readers' own.
"""

import dataclasses
import difflib
import glob
import os
import re
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..core.text import tell
from ..errors import DataError, Note
from .class_labels import listed
from .datasets.registry import NAMED, open_named_dataset
from .formats.csv_list import open_table
from .formats.hf_datasets import PREFIX, is_saved_dataset, open_hub_dataset, open_saved_dataset
from .formats.image_folder import open_folder
from .formats.parquet import open_parquet
from .formats.webdataset import open_shards
from .images import SUFFIXES
from .sources import PART_NAMES, DatasetSplits, Found, Source, fingerprint
from .split import apply_split, stratified_part, stratified_split

_TABLES = (".csv", ".tsv")
_READERS = {".tar": open_shards, ".parquet": open_parquet}
_MOST_FILES = 1_000_000  # in one pattern
_KINDS = (
    "a folder with a folder for each class, a .csv or .tsv file, .parquet files, .tar shards, "
    f"{PREFIX}OWNER/NAME, or a named data set"
)


def open_data(config: DataConfig, seed: int, saved: dict[str, Any] | None = None) -> DatasetSplits:
    """The parts of the data: with labels that agree, and with a validation part, split off by `seed` if need be.

    Args:
        saved: the `split` of parts that were opened before, to get exactly those again. If the data have changed
            since, `DataError` says so.
    """
    return subsample(with_validation(_parts(config), config.val_fraction, seed, saved), config.train_fraction, seed)


def subsample(parts: DatasetSplits, fraction: float, seed: int) -> DatasetSplits:
    """The same parts with fewer pictures to learn from; of each class about that fraction, and one at least."""
    if fraction == 1:
        return parts
    return dataclasses.replace(parts, train=parts.train.subset(stratified_part(parts.train.targets, fraction, seed)))


def with_validation(
    parts: DatasetSplits, fraction: float, seed: int, saved: dict[str, Any] | None = None
) -> DatasetSplits:
    """The parts with `split` filled in, labels that agree, and a validation part; for `saved` see `open_data`."""
    parts = _agreeing(parts)
    prints = {name: fingerprint(part) for name, part in parts.present().items()}
    if saved is not None:
        _require_same(prints, saved)
    if parts.val is not None:
        return dataclasses.replace(parts, split={"kind": "given", "fingerprint": prints})
    whole = parts.train
    train, val = apply_split(whole, saved) if saved is not None else stratified_split(whole.targets, fraction, seed)
    split = saved or {
        "kind": "stratified",
        "seed": seed,
        "fraction": fraction,
        "val": [whole.key(int(index)) for index in val],
        "fingerprint": prints,
    }
    return dataclasses.replace(parts, train=whole.subset(train), val=whole.subset(val), split=split)


def _require_same(prints: dict[str, str], saved: dict[str, Any]) -> None:
    old = saved.get("fingerprint")
    if not isinstance(old, dict):
        raise DataError("The saved split has no 'fingerprint', so nothing tells whether the data are still the same.")
    if changed := [name for name in sorted({*old, *prints}) if old.get(name) != prints.get(name)]:
        raise DataError(
            f"The data have changed since the run began: the part {listed(changed)} has other samples or other labels "
            f"than then. Put them back as they were, or begin a new run."
        )


def _parts(config: DataConfig) -> DatasetSplits:
    found = resolve_dataset(config.source, config.multi_label)
    train = _part_called("train", found, config.source)
    chosen, notes = {}, list(found.notes)
    for name, reference in (("val", config.val), ("test", config.test)):
        if reference is not None:
            other = resolve_dataset(reference, config.multi_label)
            chosen[name] = _part_called(name, other, reference)
            notes += other.notes
        elif found.parts.get(name) not in (None, train):
            chosen[name] = found.parts[name]
    if config.multi_label:
        train, chosen = train.as_multi_label(), {name: part.as_multi_label() for name, part in chosen.items()}
    _require_classes(train, config)
    parts = DatasetSplits(train, chosen.get("val"), chosen.get("test"), notes=tuple(notes))
    _require_apart(parts, config)
    return parts


def _agreeing(parts: DatasetSplits) -> DatasetSplits:
    """With the classes of all parts counted as the training part counts them."""

    def fitting(name: str, part: Source | None) -> Source | None:
        return None if part is None else part.relabelled(parts.train.labels, f"The part {name!r}")

    return dataclasses.replace(parts, val=fitting("val", parts.val), test=fitting("test", parts.test))


def _require_apart(parts: DatasetSplits, config: DataConfig) -> None:
    """Pictures that were asked for as another part must not be learnt from, too: figures of them would mean nothing."""
    for name, reference in (("val", config.val), ("test", config.test)):
        part = getattr(parts, name)
        if reference is None or part is None:
            continue
        learnt = {os.path.abspath(parts.train.name(index)) for index in range(len(parts.train))}
        shared = [each for index in range(len(part)) if os.path.abspath(each := part.name(index)) in learnt]
        if shared:
            raise DataError(
                f"data.{name}, {reference}: {len(shared)} of its {len(part)} pictures are learnt from, {shared[0]} for "
                f"one, so what is measured on it would mean nothing. Give other pictures, or leave it out."
            )


def _part_called(name: str, found: Found, reference: str) -> Source:
    """The part of that name; else the training part; else, where there is one only, that."""
    for wanted in (name, "train"):
        if wanted in found.parts:
            return found.parts[wanted]
    if len(found.parts) == 1:
        return next(iter(found.parts.values()))
    have = f"only {listed(found.parts)}" if found.parts else "and no other"
    raise DataError(" ".join([f"{reference} has no part for training, {have}.", *found.notes]))


def _require_classes(train: Source, config: DataConfig) -> None:
    least = 1 if config.multi_label else 2
    if len(train.labels) >= least:
        return
    tables = sorted(path.name for path in Path(config.source).glob("*.csv"))
    hint = f" If {listed(tables)} in it says what the pictures show, give that file." if tables else ""
    have = f"only one class, {train.labels[0]!r}" if train.labels else "no labels"
    raise DataError(f"{config.source} has {have}; there is nothing to learn with fewer than {least}.{hint}")


def resolve_dataset(reference: str, multi_label: bool = False) -> Found:
    """Whatever a reference stands for. A bare word that names a data set means that, even beside a folder so called."""
    if not reference:
        raise DataError(f"No data are given. They may be {_KINDS}.")
    if reference.startswith(PREFIX):
        return open_hub_dataset(reference.removeprefix(PREFIX), multi_label)
    if reference in NAMED:
        if Path(reference).is_dir():
            tell(f"note: {reference} is taken for the data set of that name; for the folder write ./{reference}")
        parts = open_named_dataset(reference)
        return Found(parts.present(), parts.notes)
    path = Path(reference).expanduser()
    if path.is_dir():
        return _in_folder(path, multi_label)
    if path.is_file() and path.suffix.lower() in _TABLES:
        return open_table(path, multi_label)
    if files := [path] if path.is_file() else _expanded(str(path)):
        return _in_files(files, multi_label, reference)
    raise DataError(_unknown(reference))


def is_plain_folder(folder: Path) -> bool:
    """Whether it holds class folders itself: no parts, no containers, no saved data set."""
    try:
        parts = any(child.is_dir() and child.name.lower() in PART_NAMES for child in folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error.strerror or error}).") from None
    return not (parts or is_saved_dataset(folder) or _containers(folder))


def _in_folder(folder: Path, multi_label: bool) -> Found:
    if is_saved_dataset(folder):
        return open_saved_dataset(folder, multi_label)
    if files := _containers(folder):
        return _in_files(files, multi_label, str(folder))
    return open_folder(folder)


def _containers(folder: Path) -> list[Path]:
    """The .tar or .parquet files below a folder; none if it has folders of pictures, for then those are the data."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        suffixes = {name: os.path.splitext(name)[1].lower() for name in files if not name.startswith(".")}
        if Path(parent) != folder and not SUFFIXES.isdisjoint(suffixes.values()):
            return []
        found += [Path(parent, name) for name, suffix in suffixes.items() if suffix in _READERS]
    return sorted(found)


def _in_files(files: list[Path], multi_label: bool, reference: str) -> Found:
    suffixes = {file.suffix.lower() for file in files}
    if len(suffixes) > 1 or not suffixes <= set(_READERS):
        raise DataError(f"{reference} cannot be read as data. Data may be {_KINDS}; unpack other archives first.")
    root = os.path.commonpath([file.absolute().parent for file in files])
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(_part_of(os.path.relpath(file, root)), []).append(file)
    unnamed = parts.pop("", [])
    if not parts:
        return _READERS[suffixes.pop()]({"train": unnamed}, multi_label)
    found = _READERS[suffixes.pop()](parts, multi_label)
    text = f"Left out, as their names do not name a split: {listed(map(str, unnamed))}."
    notes = [Note(text, "files_left_out")] if unnamed else []
    return Found(found.parts, (*found.notes, *notes))


def _part_of(path: str) -> str:
    """The part that a file's name tells, as in "train-00000-of-00002.parquet", or that of its folder; else nothing."""
    for name in reversed(Path(path).parts):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in PART_NAMES:
                return PART_NAMES[word]
    return ""


def _expanded(pattern: str) -> list[Path]:
    """The files that a pattern stands for: * and ? as in a shell, and {000..012} for numbers, all of which must be."""
    numbers = re.search(r"\{(\d{1,9})\.\.(\d{1,9})\}", pattern)
    if numbers is None:
        return sorted(map(Path, glob.glob(pattern)))
    first, last = numbers.groups()
    if not 0 <= int(last) - int(first) < _MOST_FILES:
        raise DataError(f"{numbers[0]} in {pattern} must count upwards, and at most {_MOST_FILES:,} files.")
    files = []
    for number in range(int(first), int(last) + 1):
        each = pattern[: numbers.start()] + str(number).zfill(len(first)) + pattern[numbers.end() :]
        found = _expanded(each)
        if not found:
            raise DataError(f"There is no file {each}, which {pattern} counts in.")
        files += found
    return files


def _unknown(reference: str) -> str:
    near = difflib.get_close_matches(Path(reference).name.lower(), NAMED, n=1)
    guess = f" Did you mean the named data set {near[0]!r}?" if near else ""
    return (
        f"There is no file or folder {reference}, and no data set of that name; the named ones are "
        f"{', '.join(NAMED)}.{guess} Data may be {_KINDS}."
    )
