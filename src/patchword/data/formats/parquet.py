"""Parquet files with pictures in them.

Labels are read at once, pictures a row group at a time; the groups used last stay in memory. Data that fit into it are
thus read from disk once. Beyond that, random order costs a whole group for nearly every picture.
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

CACHE_BYTES = 4 * 2**30  # bytes of row groups in memory


class RowGroups:
    """The cells of one column in several files, as one long list."""

    def __init__(self, files: list[Path], column: str, keep: int = CACHE_BYTES) -> None:
        self.column, self.keep = column, keep
        self.groups: list[tuple[Path, int]] = []  # file, and the group's number in it
        counts = []
        for path in files:
            metadata = open_parquet_file(path).metadata
            self.groups += [(path, group) for group in range(metadata.num_row_groups)]
            counts += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.ends = np.cumsum(counts)
        self._kept: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._lock = Lock()

    def __call__(self, row: int) -> Any:
        group = int(np.searchsorted(self.ends, row, side="right"))
        start = self.ends[group - 1] if group else 0
        return self._cells(group)[int(row - start)].as_py()

    def _cells(self, group: int) -> "pa.ChunkedArray":
        with self._lock:  # held while reading, or threads that want the same group would each read it
            if group not in self._kept:
                path, number = self.groups[group]
                cells = open_parquet_file(path).read_row_group(number, columns=[self.column]).column(0)
                while self._kept and cells.nbytes + sum(each.nbytes for each in self._kept.values()) > self.keep:
                    self._kept.popitem(last=False)  # the one not used for longest
                self._kept[group] = cells
            self._kept.move_to_end(group)
            return self._kept[group]


def open_parquet_file(path: Path) -> "pq.ParquetFile":
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_package("pyarrow", f"Reading {path}") from error
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path}: it is no parquet file, or damaged ({error}).") from error


def open_parquet(parts: dict[str, list[Path]], multi_label: bool) -> ResolvedDataset:
    """The rows of parquet files, which are already sorted into parts."""
    found, notes = {}, []
    for name, files in parts.items():
        source = _part(name, files, multi_label)
        if source is None:
            text = f"The split {name!r} was left out: no row of {files[0]} has a label."
            notes.append(Note(text, "split_left_out"))
        else:
            found[name] = source
    return ResolvedDataset(found, tuple(notes))


def _part(name: str, files: list[Path], multi_label: bool) -> RowSource | None:
    image, label, names = find_columns(open_parquet_file(files[0]).schema_arrow, str(files[0]))
    values: list[Any] = []
    for path in files:
        table = open_parquet_file(path)
        if lacking := {image, label} - set(table.schema_arrow.names):
            raise DataError(f"{path} lacks the column {', '.join(sorted(lacking))}, which {files[0]} has.")
        try:
            values += table.read(columns=[label]).column(0).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(f"Cannot read the labels in {path}: it is damaged ({error}).") from error
    if not values:
        raise DataError(f"There are no rows in {files[0]}.")
    title = files[0].name if len(files) == 1 else name
    found = row_labels(values, names, multi_label, title)
    if found is None:
        return None
    return RowSource(RowGroups(files, image), *found, title, str(files[0].parent))
