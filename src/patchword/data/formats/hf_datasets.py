"""Data sets that Hugging Face's `datasets` loads: from the hub by name, or from a folder that it has saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError, HubError, Note
from ..sources import SPLIT_ALIASES, ResolvedDataset
from .arrow_rows import RowSource, find_columns, missing_package, row_labels

if TYPE_CHECKING:
    import datasets

PREFIX = "hf-datasets:"


def open_hub_dataset(name: str, multi_label: bool) -> ResolvedDataset:
    """A data set of the hub, "owner/name", downloaded if need be."""
    library = _library(f"{PREFIX}{name}")
    try:
        loaded = library.load_dataset(name)
    except Exception as error:  # what goes wrong on the way here comes from half a dozen libraries
        raise HubError(f"Cannot load the data set {name!r} from the Hugging Face hub: {error}") from error
    return _found(loaded, name, multi_label)


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def open_saved_dataset(folder: Path, multi_label: bool) -> ResolvedDataset:
    """A folder written by `save_to_disk`."""
    library = _library(str(folder))
    try:
        loaded = library.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"Cannot read the data set saved in {folder}: {error}") from error
    return _found(loaded, str(folder), multi_label)


def _library(reference: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", f"Reading {reference}") from error
    return datasets


def _found(loaded: Any, what: str, multi_label: bool) -> ResolvedDataset:
    tables = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    parts, notes = {}, []
    for split, table in tables.items():
        part = SPLIT_ALIASES.get(split.lower())
        source = _source(table, split, what, multi_label) if part else None
        if part is None or source is None:
            reason = "its rows have no labels" if part else f"it is none of {', '.join(SPLIT_ALIASES)}"
            notes.append(Note(f"The split {split!r} of {what} was left out: {reason}.", "split_left_out"))
        else:
            parts[part] = source
    if not parts:
        raise DataError(f"{what} has no split that can be used. {' '.join(notes)}")
    return ResolvedDataset(parts, tuple(notes))


def _source(table: "datasets.Dataset", split: str, what: str, multi_label: bool) -> RowSource | None:
    import datasets

    image, label, names = find_columns(table.features.arrow_schema, what)
    values = table.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    found = row_labels(values, names, multi_label, f"{what} {split}")
    if found is None:
        return None
    undecoded = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    return RowSource(lambda row: undecoded[row][image], *found, split, what)
