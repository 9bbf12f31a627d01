"""CSV and TSV files that list pictures and their labels, one picture in a line.

Owns the columns such a file may have and the messages for what is wrong in a line. Pictures are not opened, so a
million lines are read in seconds; a file that is missing is noticed when it is read, like one that is damaged.
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
from ..sources import SPLIT_ALIASES, FileSource, ResolvedDataset

# In order of preference; case does not matter.
PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
SPLIT_COLUMNS = ("split", "part")

_SEPARATORS = re.compile(r"[;|]")
_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}


@dataclass(frozen=True)
class _Table:
    """A file's cells, and for messages where they stand."""

    path: Path
    columns: list[str]
    lines: list[int]  # the line in which each row ends
    rows: list[list[str]]

    def where(self, row: int) -> str:
        return f"{self.path}, line {self.lines[row]}"

    def column(self, names: Sequence[str]) -> int | None:
        """The index of the column that has one of these names, the first that there is."""
        lower = [column.lower() for column in self.columns]
        return next((lower.index(name) for name in names if name in lower), None)


def open_table(path: str | Path, multi_label: bool) -> ResolvedDataset:
    """The pictures of a CSV (or, ending in .tsv, tab-separated) file, by parts if it has a column "split".

    Columns: path, relative to the file's folder; label, or with `several`: labels separated by ; or |, or instead of
    them a column of zeros and ones for each class.
    """
    table = _read(Path(path))
    path_column, split_column = table.column(PATH_COLUMNS), table.column(SPLIT_COLUMNS)
    if path_column is None:
        raise DataError(f"{path} has no column 'path'. Its first line must name the columns; it has {_shown(table)}.")
    paths = [row[path_column].strip() for row in table.rows]
    if "" in paths:
        raise DataError(f"{table.where(paths.index(''))}: the column {table.columns[path_column]!r} is empty.")
    words, labels = _words(table, {path_column, split_column}, multi_label)
    split = _split(table, split_column)
    keep, words, notes = _merged(table, paths, words, split, multi_label)
    _require_a_file(table, paths)
    parts = {}
    for name in dict.fromkeys(split):
        rows = [row for row in keep if split[row] == name]
        names, targets = encode_labels([words[row] for row in rows], multi_label, _namer(table, rows), labels)
        parts[name] = FileSource([paths[row] for row in rows], names, targets, table.path.parent)
    return ResolvedDataset(parts, tuple(notes))


def _namer(table: _Table, rows: list[int]) -> Callable[[int], str]:
    return lambda index: table.where(rows[index])


def _read(path: Path) -> _Table:
    text = _text(path)
    header = text.partition("\n")[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in header and "," not in header else ","
    # newline="": the csv module wants line ends inside quoted cells untouched.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines, rows = [], []
    try:
        columns = [column.strip() for column in next(reader, [])]
        for row in reader:
            if row:
                if len(row) != len(columns):
                    raise DataError(f"{path}, line {reader.line_num}: {len(row)} cells for {len(columns)} columns.")
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}. Check the quotes.") from error
    if len(set(columns)) < len(columns):
        raise DataError(f"{path} has two columns of the same name: {', '.join(map(repr, columns))}.")
    if not rows:
        raise DataError(f"{path} has no lines below the names of its columns.")
    return _Table(path, columns, lines, rows)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        return data.decode("utf-8-sig")  # with or without the mark that Excel begins its files with
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line} is not UTF-8. Save the file as 'CSV UTF-8'.") from error


def _words(table: _Table, taken: set[int | None], multi_label: bool) -> tuple[list[tuple[str, ...]], list[str] | None]:
    """The labels of each row, and all labels there are where the columns say so."""
    column = table.column(LABEL_COLUMNS)
    if column is None:
        if not multi_label:
            raise DataError(
                f"{table.path} has no column 'label'; it has {_shown(table)}. "
                f"If its columns are classes with zeros and ones, set data.multi_label to true."
            )
        return _bit_words(table, [i for i in range(len(table.columns)) if i not in taken])
    cells = [row[column].strip() for row in table.rows]
    if multi_label or table.columns[column].lower() == "labels":
        return [tuple(w for part in _SEPARATORS.split(cell) if (w := part.strip())) for cell in cells], None
    return [(cell,) if cell else () for cell in cells], None


def _bit_words(table: _Table, columns: list[int]) -> tuple[list[tuple[str, ...]], list[str]]:
    if not columns:
        raise DataError(f"{table.path} has neither a column 'labels' nor one for each class; it has {_shown(table)}.")
    names = [table.columns[column] for column in columns]
    words = []
    for number, row in enumerate(table.rows):
        bits = [_BITS.get(row[column].strip()) for column in columns]
        if None in bits:
            wrong = bits.index(None)
            raise DataError(
                f"{table.where(number)}: the column {names[wrong]!r} has {row[columns[wrong]]!r}, which is neither 0 "
                f"nor 1. All columns but path and split must be classes; leave out those that are not."
            )
        words.append(tuple(name for name, bit in zip(names, bits, strict=True) if bit))
    return words, names


def _split(table: _Table, column: int | None) -> list[str]:
    """The part that each row belongs to."""
    if column is None:
        return ["train"] * len(table.rows)
    words = [row[column].strip() for row in table.rows]
    for row, word in enumerate(words):
        if word.lower() not in SPLIT_ALIASES:
            raise DataError(f"{table.where(row)}: the split {word!r} is none of {', '.join(SPLIT_ALIASES)}.")
    return [SPLIT_ALIASES[word.lower()] for word in words]


def _merged(
    table: _Table, paths: list[str], words: list[tuple[str, ...]], split: list[str], multi_label: bool
) -> tuple[list[int], list[tuple[str, ...]], list[Note]]:
    """The rows that stay, one for each picture, the labels of all rows, and what to tell.

    A picture that stayed twice could be learnt from and tested with. Where several labels are allowed, tables may have
    a line for each of a picture's labels, and those are put together.
    """
    first: dict[str, int] = {}
    words = list(words)
    for row, path in enumerate(paths):
        earlier = first.setdefault(path, row)
        if earlier == row:
            continue
        if split[earlier] != split[row]:
            raise DataError(
                f"{table.where(row)}: {path} is in the part {split[row]!r}, but in line {table.lines[earlier]} in "
                f"{split[earlier]!r}. A picture that is learnt from cannot be used to measure: take one line out."
            )
        if multi_label:
            words[earlier] = tuple(dict.fromkeys(words[earlier] + words[row]))
        elif words[earlier] != words[row]:
            raise DataError(
                f"{table.where(row)}: {path} has the label {format_names(words[row])}, but in line {table.lines[earlier]} "
                f"{format_names(words[earlier])}. Correct one of them, or set data.multi_label to true."
            )
    repeated = len(paths) - len(first)
    text = f"{table.path} repeats itself in {repeated} lines, which were left out."
    notes = [Note(text, "duplicate_rows_left_out")] if repeated else []
    return list(first.values()), words, [] if multi_label else notes


def _require_a_file(table: _Table, paths: list[str]) -> None:
    if not any(os.path.exists(os.path.join(table.path.parent, path)) for path in paths):
        first = os.path.join(table.path.parent, paths[0])
        raise DataError(
            f"None of the {len(paths):,} pictures that {table.path} lists is there; the first would be {first}. "
            f"Paths count from the folder of the file."
        )


def _shown(table: _Table) -> str:
    return format_names(table.columns, shown=12)
