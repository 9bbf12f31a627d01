"""A classifier on labelled pictures: figures, how sure they are, and the files that could not be read."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..classifier import BATCH_SIZE, Classifier, Readable
from ..data.folders import class_folders, match_classes
from ..data.open import find
from ..errors import DataError, ImageError
from .intervals import Comparison, compare
from .metrics import Tally

PARTS = ("test", "val", "train")  # of a data set, that part is measured which comes first here


@dataclass(frozen=True)
class Labelled:
    """A picture, not yet read, and the name of its class."""

    name: str
    picture: Readable
    label: str


@dataclass(frozen=True)
class Evaluation:
    """What `patchword evaluate` found."""

    figures: dict[str, float | int]  # top1, top5, balanced_accuracy, macro_f1, nll, brier, ece, ece_adaptive, n
    intervals: dict[str, tuple[float, float]]  # of each figure, 95 %
    per_class: list[dict[str, Any]]  # label, index, n, top1 (which is recall), precision, f1
    skipped: list[tuple[str, str]]  # name and reason
    images_per_second: float
    rows: list[dict[str, Any]]  # name, true, predicted, probability and loss of each picture
    tally: Tally
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {**self.figures, "intervals": self.intervals, "skipped": len(self.skipped)}
        said |= {"images_per_second": self.images_per_second, "per_class": self.per_class}
        said["errors"] = [{"path": path, "error": reason} for path, reason in self.skipped]
        if self.comparison is not None:
            said["comparison"] = {**vars(self.comparison), "verdict": self.comparison.verdict()}
        return said


def labelled_pictures(data: str | Path) -> list[Labelled]:
    """The pictures of a folder of class folders, or of any data set: its test part, or else validation, training."""
    if Path(data).expanduser().is_dir():
        return [Labelled(str(file), file, name) for file, name in class_folders(Path(data).expanduser())]
    parts = find(str(data)).parts
    part = next((parts[name] for name in PARTS if name in parts), None)
    if part is None or not len(part):
        raise DataError(f"{data} has no pictures.")
    if part.multi_label:
        raise DataError(f"{data} has several labels for a picture; only one for each can be measured here.")
    return [Labelled(part.name(i), partial(part.read, i), part.labels[target]) for i, target in enumerate(part.targets)]


def evaluate(
    classifier: Classifier,
    data: str | Path | Sequence[Labelled],
    *,
    against: Classifier | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Classes may be named by label, ImageNet WordNet id, or index. `against` is measured on the same pictures."""
    pictures = labelled_pictures(data) if isinstance(data, str | Path) else data
    start = time.perf_counter()
    tally, rows, skipped = graded(classifier, pictures, batch_size, on_progress)
    seconds = time.perf_counter() - start
    comparison = None
    if against is not None:
        other, _, unread = graded(against, pictures, batch_size, on_progress)
        if len(unread) != len(skipped):
            raise DataError("Some pictures can be read for one of the two models only, so they cannot be compared.")
        comparison = compare(other.right, tally.right)
    figures, intervals = tally.detailed(classifier.checkpoint.config.num_classes)
    per_class = tally.per_class(classifier.labels)
    return Evaluation(figures, intervals, per_class, skipped, len(pictures) / seconds, rows, tally, comparison)


def graded(
    classifier: Classifier, pictures: Sequence[Labelled], batch_size: int, on_progress: Callable[[], object]
) -> tuple[Tally, list[dict[str, Any]], list[tuple[str, str]]]:
    """What the classifier said of every picture that can be read, and which could not."""
    names = sorted({each.label for each in pictures})
    indices = match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)
    tally, read, skipped = Tally(), [], []
    results = classifier.stream((each.picture for each in pictures), batch_size)
    for each, result in zip(pictures, results, strict=True):
        if isinstance(result, ImageError):
            skipped.append((each.name, str(result)))
        else:
            tally.add(result[None], [indices[each.label]])
            read.append(each.name)
        on_progress()
    if not read:
        raise DataError(f"None of the {len(pictures)} pictures could be read. The first: {skipped[0][1]}")
    said = zip(read, tally.targets, tally.predicted, tally.confidences, tally.losses, strict=True)
    labels = classifier.labels
    rows = [
        {"name": name, "true": labels[t], "predicted": labels[p], "probability": round(c, 6), "loss": round(loss, 6)}
        for name, t, p, c, loss in said
    ]
    return tally, rows, skipped
