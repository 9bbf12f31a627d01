"""A CSV file of predictions that grows row by row and survives a kill.

Rows go to NAME.partial; NAME.partial.json records the model and the columns. A process that finds them resumes after
the last complete row, so no image is lost or classified twice. NAME appears only when the table is complete.
"""

import csv
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Self, TextIO, TypedDict

from ..core.io import atomic_file, atomic_output, move_into_place
from ..errors import DataError, OutputError

SYNC_SECONDS = 5.0  # at most this much work is lost in a power failure


class ScoreRow(TypedDict):
    """One class of a prediction."""

    label: str
    index: int
    probability: float


class ImageResult(TypedDict):
    """What `predict` returns for one image: either predictions or an error."""

    path: str
    predictions: NotRequired[list[ScoreRow]]
    error: NotRequired[str]
    code: NotRequired[str]  # of the error


class PredictionTable:
    """`with PredictionTable(path, top, fingerprint, names) as table: table.write(result)`.

    Attributes:
        done: names of the images that the table already has, from an interrupted process. Its rows of images that are
            not in `names` are dropped.
        num_errors: how many of these rows hold an error.
    """

    def __init__(self, path: Path, top: int, model: str, names: Collection[str]) -> None:
        ranks = [f"{name}_{rank}" for rank in range(1, top + 1) for name in ("label", "index", "probability")]
        self.columns = ["path", *ranks, "error"]
        self.path, self.model, self.names = path, model, set(names)
        self.partial = path.with_name(f"{path.name}.partial")
        self.metadata = path.with_name(f"{path.name}.partial.json")
        self.done: set[str] = set()
        self.num_errors = 0

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.partial.exists():
                self._recover()
            else:
                self.metadata.write_text(json.dumps({"model": self.model, "columns": self.columns}))
                self.file = open_csv(self.partial, "w")
                csv.writer(self.file).writerow(self.columns)
        except OSError as error:
            raise self._write_error(error) from None
        self.synced = time.monotonic()
        return self

    def _recover(self) -> None:
        """Copy the complete rows of an interrupted process."""
        try:
            metadata = json.loads(self.metadata.read_text())
        except (OSError, ValueError):
            metadata = {}
        if metadata != {"model": self.model, "columns": self.columns}:
            raise DataError(
                f"{self.partial} was started with another model or another --top. Delete it, or choose another name.",
                code="table_mismatch",
            )
        with atomic_file(self.partial) as target, open_csv(target, "w") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            for cells in self._complete_rows():
                if cells[0] in self.names:
                    writer.writerow(cells)
                    self.done.add(cells[0])
                    self.num_errors += bool(cells[-1])
        self.file = open_csv(self.partial, "a")

    def _complete_rows(self) -> Iterator[list[str]]:
        """All rows but the header; the last one may have been cut off by a kill, and is dropped then."""
        with open_csv(self.partial, "r") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            truncated = file.read(1) != "\n"
            file.seek(0)
            rows = csv.reader(file)
            next(rows, None)
            previous: list[str] | None = None
            for cells in rows:  # one row behind: only the last can be incomplete
                if previous is not None:
                    yield previous
                previous = cells
            if previous is not None and len(previous) == len(self.columns) and not truncated:
                yield previous

    def write(self, result: ImageResult) -> None:
        """Append the row of one image."""
        cells: list[Any] = [cell for score in result.get("predictions", ()) for cell in score.values()]
        cells += [""] * (len(self.columns) - 2 - len(cells))
        try:
            csv.writer(self.file).writerow([result["path"], *cells, result.get("error", "")])
            if time.monotonic() - self.synced > SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise self._write_error(error) from None

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.file.close()
            if kind is None:
                move_into_place(self.partial, self.path)
                self.metadata.unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from None

    def _write_error(self, error: OSError) -> OutputError:
        return OutputError(f"{self.path} could not be written ({error.strerror or error}).")


def open_csv(path: Path, mode: str) -> TextIO:
    """Open a table; file names that are not UTF-8 survive a round trip."""
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")  # type: ignore[return-value]


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows that have the same keys as a CSV file, replacing an older one atomically."""
    with atomic_output(path, overwrite=True) as target, open_csv(target, "w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
