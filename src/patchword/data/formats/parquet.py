"""Parquet files that contain images.

Labels are read at once, images one row group at a time. Recently used row groups stay in memory (LRU), so a dataset
that fits is read from disk once. For a larger one, random access reads a whole row group for nearly every image.
"""

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError, Note
from ..sources import ResolvedDataset
from .arrow_rows import RowSource, find_columns, missing_package, row_labels

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_CACHE_BYTES = 4 * 2**30  # of row groups in memory


class RowGroups:
    """One column of several files as a single sequence of cells, with an LRU cache of row groups."""

    def __init__(self, files: list[Path], column: str, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.column, self.max_bytes = column, max_bytes
        self.groups: list[tuple[Path, int]] = []  # file, and index of the row group in it
        counts = []
        for path in files:
            metadata = open_parquet_file(path).metadata
            self.groups += [(path, group) for group in range(metadata.num_row_groups)]
            counts += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.ends = np.cumsum(counts)
        self._cache: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._lock = Lock()

    def __call__(self, row: int) -> Any:
        group = int(np.searchsorted(self.ends, row, side="right"))
        start = self.ends[group - 1] if group else 0
        return self._cells(group)[int(row - start)].as_py()

    def _cells(self, group: int) -> "pa.ChunkedArray":
        with self._lock:  # held while reading, so that threads do not read the same group twice
            if group not in self._cache:
                path, number = self.groups[group]
                cells = open_parquet_file(path).read_row_group(number, columns=[self.column]).column(0)
                while self._cache and cells.nbytes + sum(c.nbytes for c in self._cache.values()) > self.max_bytes:
                    self._cache.popitem(last=False)  # the least recently used
                self._cache[group] = cells
            self._cache.move_to_end(group)
            return self._cache[group]


def open_parquet_file(path: Path) -> "pq.ParquetFile":
    """Open a Parquet file. Raises `ConfigError` without pyarrow and `DataError` for an invalid file."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("pyarrow", f"Reading {path}") from error
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path}: it is damaged or not a Parquet file ({error}).") from error


def open_parquet(files_by_split: dict[str, list[Path]], multi_label: bool) -> ResolvedDataset:
    """Open the Parquet files of each split."""
    splits, notes = {}, []
    for name, files in files_by_split.items():
        source = _open_split(name, files, multi_label)
        if source is None:
            text = f"The split {name!r} was left out: no row of {files[0]} has a label."
            notes.append(Note(text, "split_left_out"))
        else:
            splits[name] = source
    return ResolvedDataset(splits, tuple(notes))


def _open_split(name: str, files: list[Path], multi_label: bool) -> RowSource | None:
    image, label, class_names = find_columns(open_parquet_file(files[0]).schema_arrow, str(files[0]))
    values: list[Any] = []
    for path in files:
        table = open_parquet_file(path)
        if missing := {image, label} - set(table.schema_arrow.names):
            raise DataError(f"{path} lacks the column {', '.join(sorted(missing))}, which {files[0]} has.")
        try:
            values += table.read(columns=[label]).column(0).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(f"Cannot read the labels in {path}: the file is damaged ({error}).") from error
    if not values:
        raise DataError(f"{files[0]} has no rows.")
    title = files[0].name if len(files) == 1 else name
    encoded = row_labels(values, class_names, multi_label, title)
    if encoded is None:
        return None
    return RowSource(RowGroups(files, image), *encoded, title, str(files[0].parent))
