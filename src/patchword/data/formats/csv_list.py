"""CSV and TSV files that list images and their labels, one image per line.

Owns the accepted columns and the errors about a line. Images are not opened, so a million lines are read in seconds; a
missing image file is reported when it is decoded, like a damaged one.
"""

import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError, Note
from ..class_labels import encode_labels, format_names
from ..sources import SPLIT_ALIASES, SPLIT_TITLES, FileSource, ResolvedDataset

# In order of preference; case-insensitive.
PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
SPLIT_COLUMNS = ("split", "part")

_SEPARATORS = re.compile(r"[;|]")
_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


@dataclass(frozen=True)
class _Table:
    """The cells of a file, with their line numbers for error messages."""

    name: str  # in messages
    columns: list[str]
    lines: list[int]  # last line of each row
    rows: list[list[str]]

    @property
    def path(self) -> Path:
        """The file, if it is not an object of a store."""
        return Path(self.name)

    def where(self, row: int) -> str:
        """File and line of a row."""
        return f"{self.name}, line {self.lines[row]}"

    def column(self, names: Sequence[str]) -> int | None:
        """Index of the column with the first of these names that exists."""
        lower = [column.lower() for column in self.columns]
        return next((lower.index(name) for name in names if name in lower), None)


def open_table(path: str | Path, multi_label: bool) -> ResolvedDataset:
    """Open a CSV file (or a tab-separated .tsv file) that lists images.

    Columns: `path`, relative to the folder of the file; `label`; and optionally `split`. With `multi_label`, the label
    column has labels separated by ; or |, or there is one 0/1 column per class instead.
    """
    table = _read_table(Path(path))
    path_column, paths = _read_paths(table)
    split_column = table.column(SPLIT_COLUMNS)
    sample_labels, classes = _read_labels(table, {path_column, split_column}, multi_label)
    row_splits = _read_splits(table, split_column)
    kept, sample_labels, notes = _merge_duplicates(table, paths, sample_labels, row_splits, multi_label)
    _require_any_file(table, paths)
    splits = {}
    for name in dict.fromkeys(row_splits):
        rows = [row for row in kept if row_splits[row] == name]
        split_labels = [sample_labels[row] for row in rows]
        labels, targets = encode_labels(split_labels, multi_label, _describe_rows(table, rows), classes)
        splits[name] = FileSource([paths[row] for row in rows], labels, targets, table.path.parent)
    return ResolvedDataset(splits, tuple(notes))


def list_table_images(path: str | Path) -> list[Path]:
    """The image files that a table lists, each once; labels are not needed."""
    table = _read_table(Path(path))
    _, paths = _read_paths(table)
    _require_any_file(table, paths)
    return [table.path.parent / name for name in dict.fromkeys(paths)]


def parse_paths(data: bytes, name: str) -> list[str]:
    """Return the cells of the column `path` of a CSV file, each once; `name` is that of the file."""
    return list(dict.fromkeys(_read_paths(_parse_table(_decode(data, name), name))[1]))


def _read_paths(table: _Table) -> tuple[int, list[str]]:
    """Return the index of the column with the paths, and its cells."""
    column = table.column(PATH_COLUMNS)
    if column is None:
        raise DataError(
            f"{table.name} has no column 'path'. The first line must name the columns; it has {_format_columns(table)}."
        )
    paths = [row[column].strip() for row in table.rows]
    if "" in paths:
        raise DataError(f"{table.where(paths.index(''))}: the column {table.columns[column]!r} is empty.")
    return column, paths


def _describe_rows(table: _Table, rows: list[int]) -> Callable[[int], str]:
    return lambda index: table.where(rows[index])


def _read_table(path: Path) -> _Table:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    return _parse_table(_decode(data, str(path)), str(path))


def _parse_table(text: str, path: str) -> _Table:
    header = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else ";" if ";" in header and "," not in header else ","
    # newline="": the csv module needs the original line ends inside quoted cells.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines, rows = [], []
    try:
        columns = [column.strip() for column in next(reader, [])]
        for row in reader:
            if row:
                if len(row) != len(columns):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} cells, but there are {len(columns)} columns."
                    )
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}. Check the quotes.") from error
    if len(set(columns)) < len(columns):
        raise DataError(f"{path} has duplicate column names: {', '.join(map(repr, columns))}.")
    if not rows:
        raise DataError(f"{path} has no rows below its header.")
    return _Table(path, columns, lines, rows)


def _decode(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")  # with or without the byte order mark that Excel writes
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line} is not UTF-8. Save the file as 'CSV UTF-8'.") from error


def _read_labels(
    table: _Table, other_columns: set[int | None], multi_label: bool
) -> tuple[list[tuple[str, ...]], list[str] | None]:
    """Return the labels of each row, and the list of all classes if there is one column per class."""
    column = table.column(LABEL_COLUMNS)
    if column is None:
        if not multi_label:
            raise DataError(
                f"{table.path} has no column 'label'; it has {_format_columns(table)}. "
                f"If it has one 0/1 column per class, set data.multi_label=true.",
                code="no_label_column",
            )
        return _read_class_columns(table, [i for i in range(len(table.columns)) if i not in other_columns])
    cells = [row[column].strip() for row in table.rows]
    if multi_label or table.columns[column].lower() == "labels":
        return [tuple(label for item in _SEPARATORS.split(cell) if (label := item.strip())) for cell in cells], None
    return [(cell,) if cell else () for cell in cells], None


def _read_class_columns(table: _Table, columns: list[int]) -> tuple[list[tuple[str, ...]], list[str]]:
    if not columns:
        raise DataError(
            f"{table.path} has neither a column 'labels' nor class columns; it has {_format_columns(table)}."
        )
    names = [table.columns[column] for column in columns]
    sample_labels = []
    for number, row in enumerate(table.rows):
        bits = [_BITS.get(row[column].strip()) for column in columns]
        if None in bits:
            invalid = bits.index(None)
            raise DataError(
                f"{table.where(number)}: the column {names[invalid]!r} has {row[columns[invalid]]!r}, which is "
                f"neither 0 nor 1. All columns except path and split must be classes; remove the others."
            )
        sample_labels.append(tuple(name for name, bit in zip(names, bits, strict=True) if bit))
    return sample_labels, names


def _read_splits(table: _Table, column: int | None) -> list[str]:
    """Return the canonical split name of each row."""
    if column is None:
        return ["train"] * len(table.rows)
    names = [row[column].strip() for row in table.rows]
    for row, name in enumerate(names):
        if name.lower() not in SPLIT_ALIASES:
            raise DataError(f"{table.where(row)}: the split {name!r} is none of {', '.join(SPLIT_ALIASES)}.")
    return [SPLIT_ALIASES[name.lower()] for name in names]


def _merge_duplicates(
    table: _Table, paths: list[str], sample_labels: list[tuple[str, ...]], row_splits: list[str], multi_label: bool
) -> tuple[list[int], list[tuple[str, ...]], list[Note]]:
    """Keep one row per image, so that no image is in two splits.

    A multi-label table may have one line per label of an image; these labels are merged.

    Returns:
        The rows to keep, the labels of all rows, and notes.
    """
    first: dict[str, int] = {}
    merged = list(sample_labels)
    for row, path in enumerate(paths):
        earlier = first.setdefault(path, row)
        if earlier == row:
            continue
        if row_splits[earlier] != row_splits[row]:
            raise DataError(
                f"{table.where(row)}: {path} is in the {SPLIT_TITLES[row_splits[row]]}, but in line "
                f"{table.lines[earlier]} it is in the {SPLIT_TITLES[row_splits[earlier]]}. Remove one of the lines."
            )
        if multi_label:
            merged[earlier] = tuple(dict.fromkeys(merged[earlier] + merged[row]))
        elif merged[earlier] != merged[row]:
            raise DataError(
                f"{table.where(row)}: {path} has the label {format_names(merged[row])}, but in line "
                f"{table.lines[earlier]} {format_names(merged[earlier])}. Correct one, or set data.multi_label=true."
            )
    num_duplicates = len(paths) - len(first)
    notes = []
    if num_duplicates and not multi_label:
        text = f"{table.path} has {num_duplicates} duplicate lines, which were left out."
        notes.append(Note(text, "duplicate_rows_left_out"))
    return list(first.values()), merged, notes


def _require_any_file(table: _Table, paths: list[str]) -> None:
    if not any(os.path.exists(os.path.join(table.path.parent, path)) for path in paths):
        first = os.path.join(table.path.parent, paths[0])
        raise DataError(
            f"None of the {len(paths):,} images listed in {table.path} exists; the first would be {first}. "
            f"Paths are relative to the folder of the file."
        )


def _format_columns(table: _Table) -> str:
    return format_names(table.columns, max_shown=12)
