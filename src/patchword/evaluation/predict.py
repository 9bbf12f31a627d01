"""Many pictures classified: from paths on a command line to rows for a screen, a JSON document or a CSV file."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..classifier import Classifier
from ..data.images import list_images
from ..errors import DataError, ImageError

Row = dict[str, Any]  # {"path", "predictions": [{"label", "index", "probability"}]} or {"path", "error"}


def find_files(paths: Sequence[str]) -> list[Path]:
    """Files as they are, folders by what is in them."""
    if not paths:
        raise DataError("No picture was named. Give files or folders after the model.")
    files: list[Path] = []
    for path in map(Path, paths):
        files += list_images(path) if path.is_dir() else [path]
    return files


def predict_files(classifier: Classifier, files: Iterable[Path], top: int) -> Iterator[Row]:
    files = list(files)
    for file, result in zip(files, classifier.stream(files), strict=True):
        if isinstance(result, ImageError):
            yield {"path": str(file), "error": str(result)}
        else:
            scores = classifier.prediction(result, top).scores
            yield {"path": str(file), "predictions": [asdict(score) for score in scores]}


def write_csv(path: Path, rows: Sequence[Row], top: int) -> None:
    """One row for each picture, best class first; the file appears whole, in place of an older one."""
    text = io.StringIO()
    writer = csv.writer(text)
    count = max((len(row.get("predictions", ())) for row in rows), default=top)
    ranks = [f"{name}_{rank}" for rank in range(1, count + 1) for name in ("label", "index", "probability")]
    writer.writerow(["path", *ranks, "error"])
    for row in rows:
        cells = [cell for score in row.get("predictions", ()) for cell in score.values()]
        cells += [""] * (3 * count - len(cells))
        writer.writerow([row["path"], *cells, row.get("error", "")])
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text.getvalue(), encoding="utf-8", newline="")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"{path} could not be written ({error.strerror or error}).") from None
