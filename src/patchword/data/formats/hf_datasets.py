"""Hugging Face datasets: from the hub by name, or from a folder written by `save_to_disk`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import DataError, HubError, Note
from ..sources import SPLIT_ALIASES, ResolvedDataset
from .arrow_rows import RowSource, find_columns, missing_package, row_labels

if TYPE_CHECKING:
    import datasets

PREFIX = "hf-datasets:"


def open_hub_dataset(name: str, multi_label: bool) -> ResolvedDataset:
    """Open a dataset of the hub, "owner/name"; it is downloaded unless it is in the cache of `datasets`."""
    library = _import_datasets(f"{PREFIX}{name}")
    try:
        dataset = library.load_dataset(name)
    except Exception as error:  # errors come from half a dozen libraries
        raise HubError(f"Cannot load the dataset {name!r} from the Hugging Face hub: {error}") from error
    return _open_splits(dataset, name, multi_label)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def open_saved_dataset(folder: Path, multi_label: bool) -> ResolvedDataset:
    """Open a folder written by `save_to_disk`."""
    library = _import_datasets(str(folder))
    try:
        dataset = library.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"Cannot read the dataset saved in {folder}: {error}") from error
    return _open_splits(dataset, str(folder), multi_label)


def _import_datasets(reference: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("datasets", f"Reading {reference}") from error
    return datasets


def _open_splits(dataset: Any, what: str, multi_label: bool) -> ResolvedDataset:
    tables = dataset if isinstance(dataset, dict) else {str(dataset.split or "train"): dataset}
    splits, notes = {}, []
    for title, table in tables.items():
        name = SPLIT_ALIASES.get(title.lower())
        source = _make_source(table, title, what, multi_label) if name else None
        if name is None or source is None:
            reason = "its rows have no labels" if name else f"its name is none of {', '.join(SPLIT_ALIASES)}"
            notes.append(Note(f"The split {title!r} of {what} was left out: {reason}.", "split_left_out"))
        else:
            splits[name] = source
    if not splits:
        raise DataError(f"{what} has no usable split. {' '.join(notes)}")
    return ResolvedDataset(splits, tuple(notes))


def _make_source(table: "datasets.Dataset", split: str, what: str, multi_label: bool) -> RowSource | None:
    import datasets

    image, label, class_names = find_columns(table.features.arrow_schema, what)
    values = table.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    encoded = row_labels(values, class_names, multi_label, f"{what} {split}")
    if encoded is None:
        return None
    raw = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    return RowSource(lambda row: raw[row][image], *encoded, split, what)
