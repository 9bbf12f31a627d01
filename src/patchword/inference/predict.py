"""Many pictures classified: from paths on a command line to rows for a screen, a JSON document or a CSV file."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.io import digest, weights_digest
from ..data.images import list_images
from ..errors import DataError, ImageError
from .classifier import Classifier
from .prediction_csv import Table

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
    files, again = itertools.tee(files)
    for file, result in zip(again, classifier.stream(files), strict=True):
        if isinstance(result, ImageError):
            yield {"path": str(file), "error": str(result)}
        else:
            scores = classifier.prediction(result, top).scores
            yield {"path": str(file), "predictions": [asdict(score) for score in scores]}


@dataclass(frozen=True)
class Written:
    """What became of a table."""

    already: int  # rows that an earlier process had written ...
    already_unread: int  # ... of which so many hold an error
    unread: list[tuple[str, str]]  # files that this process could not read, with reasons


def predict_table(
    classifier: Classifier, files: Sequence[Path], top: int, path: Path, on_row: Callable[[], object]
) -> Written:
    """Classifies files into a CSV, going on where an earlier process stopped."""
    unread: list[tuple[str, str]] = []
    wanted = [str(file) for file in files]
    with Table(path, min(top, len(classifier.labels)), fingerprint(classifier), wanted) as table:
        written = Written(len(table.done), table.failed, unread)
        for row in predict_files(classifier, (file for file in files if str(file) not in table.done), top):
            table.write(row)
            on_row()
            if "error" in row:
                unread.append((row["path"], row["error"]))
    return written


def fingerprint(classifier: Classifier) -> str:
    """Changes with anything that changes a prediction."""
    checkpoint = classifier.checkpoint
    model = (
        checkpoint.config,
        classifier.preprocess,
        classifier.labels,
        checkpoint.temperature,
        checkpoint.multi_label,
    )
    return digest(*model, classifier.engine_name, weights_digest(checkpoint.tensors))
