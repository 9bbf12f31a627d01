"""A CSV of predictions that grows row by row, outlives a kill, and gets its name when it is whole.

Rows go to NAME.partial; NAME.partial.json says which model and which columns they are of. Begun again, it goes on
behind the last whole row, so no picture is lost and none is classified twice.
"""

import csv
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.io import atomic_file, atomic_output, move_into_place
from ..errors import DataError

SYNC_EVERY = 5.0  # seconds: what a power cut may cost
Row = dict[str, Any]


class Table:
    """`with Table(path, columns, model, wanted) as table: table.write(row)`; `table.done` are the paths it has already.

    Of what an earlier process left, rows of pictures that are not `wanted` now are dropped.
    """

    def __init__(self, path: Path, classes: int, model: str, wanted: Collection[str]) -> None:
        ranks = [f"{name}_{rank}" for rank in range(1, classes + 1) for name in ("label", "index", "probability")]
        self.columns = ["path", *ranks, "error"]
        self.path, self.model, self.wanted = path, model, set(wanted)
        self.partial = path.with_name(f"{path.name}.partial")
        self.about = path.with_name(f"{path.name}.partial.json")
        self.done: set[str] = set()
        self.failed = 0  # rows of earlier processes that hold an error

    def __enter__(self) -> "Table":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.partial.exists():
                self.recover()
            else:
                self.about.write_text(json.dumps({"model": self.model, "columns": self.columns}))
                self.file = self.partial.open("w", encoding="utf-8", errors="surrogateescape", newline="")
                csv.writer(self.file).writerow(self.columns)
        except OSError as error:
            raise self.failure(error) from None
        self.synced = time.monotonic()
        return self

    def recover(self) -> None:
        """Copies the whole rows of what an earlier process left; the last one may be torn."""
        try:
            said = json.loads(self.about.read_text())
        except (OSError, ValueError):
            said = {}
        if said != {"model": self.model, "columns": self.columns}:
            raise DataError(
                f"{self.partial} was begun with another model or another --top. Delete it, or choose another name."
            )
        with (
            atomic_file(self.partial) as made,
            made.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(self.columns)
            for cells in self.whole_rows():
                if cells[0] in self.wanted:
                    writer.writerow(cells)
                    self.done.add(cells[0])
                    self.failed += bool(cells[-1])
        self.file = self.partial.open("a", encoding="utf-8", errors="surrogateescape", newline="")

    def whole_rows(self) -> Iterator[list[str]]:
        with self.partial.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            ended = file.seek(0, os.SEEK_END)
            file.seek(max(0, ended - 1))
            torn = file.read(1) != "\n"
            file.seek(0)
            rows = csv.reader(file)
            next(rows, None)
            held: list[str] | None = None
            for cells in rows:  # one behind, since the last is only whole if its line was ended
                if held is not None:
                    yield held
                held = cells
            if held is not None and len(held) == len(self.columns) and not torn:
                yield held

    def write(self, row: Row) -> None:
        cells = [cell for score in row.get("predictions", ()) for cell in score.values()]
        cells += [""] * (len(self.columns) - 2 - len(cells))
        try:
            csv.writer(self.file).writerow([row["path"], *cells, row.get("error", "")])
            if time.monotonic() - self.synced > SYNC_EVERY:
                self.sync()
        except OSError as error:
            raise self.failure(error) from None

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.synced = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.file.close()
            if kind is None:
                move_into_place(self.partial, self.path)
                self.about.unlink(missing_ok=True)
        except OSError as error:
            raise self.failure(error) from None

    def failure(self, error: OSError) -> DataError:
        return DataError(f"{self.path} could not be written ({error.strerror or error}).")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A table of rows that all have the same keys, whole or not at all, in place of an older one."""
    with (
        atomic_output(path, overwrite=True) as made,
        made.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
