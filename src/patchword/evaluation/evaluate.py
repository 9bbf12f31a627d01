"""A classifier on labelled pictures: figures, how sure they are, and the files that could not be read."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..data.formats.image_folder import class_folders, match_classes
from ..data.resolve import is_plain_folder, resolve_dataset
from ..errors import DataError, ImageError
from ..inference.classifier import BATCH_SIZE, Classifier, ImageInput
from ..metrics.classification import ClassificationMetrics
from ..metrics.intervals import Comparison, compare
from ..metrics.multilabel import MultiLabelMetrics

PARTS = ("test", "val", "train")  # of a data set, that part is measured which comes first here


@dataclass(frozen=True)
class LabeledImage:
    """A picture, not yet read, and the name of its class; or those of all its labels, if there may be several."""

    name: str
    picture: ImageInput
    label: str | tuple[str, ...]
    part: str = ""  # of the data set that it is from

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label


@dataclass(frozen=True)
class Evaluation:
    """What `patchword evaluate` found."""

    # top1, top5, balanced_accuracy, macro_f1, nll, brier, ece, ece_adaptive, n; with several labels map, f1, nll, n
    figures: dict[str, float | int]
    intervals: dict[str, tuple[float, float]]  # of each figure, 95 %
    per_class: list[dict[str, Any]]  # label, index, n, top1 (which is recall), precision, f1; with several labels ap
    skipped: list[tuple[str, str]]  # name and reason
    images_per_second: float
    rows: list[dict[str, Any]]  # name, true, predicted, probability and loss of each picture
    tally: ClassificationMetrics | MultiLabelMetrics
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {**self.figures, "intervals": self.intervals, "skipped": len(self.skipped)}
        said |= {"images_per_second": self.images_per_second, "per_class": self.per_class}
        said["errors"] = [{"path": path, "error": reason} for path, reason in self.skipped]
        if self.comparison is not None:
            said["comparison"] = {**vars(self.comparison), "verdict": self.comparison.verdict()}
        return said


def labeled_images(data: str | Path, multi_label: bool = False) -> list[LabeledImage]:
    """The pictures of a folder of class folders, or of any data set: its test part, or else validation, training.

    Args:
        several: a picture may have several labels
    """
    folder = Path(data).expanduser()
    if folder.is_dir() and is_plain_folder(folder):
        return [LabeledImage(str(file), file, name) for file, name in class_folders(folder)]
    parts = resolve_dataset(str(data), multi_label).parts
    name = next((name for name in PARTS if name in parts), None)
    if name is None or not len(parts[name]):
        raise DataError(f"{data} has no pictures.")
    part = parts[name]
    labels: list[Any] = [part.labels[target] for target in part.targets] if not part.multi_label else [
        tuple(part.labels[k] for k in row.nonzero()[0]) for row in part.targets
    ]  # fmt: skip
    return [LabeledImage(part.name(i), partial(part.read, i), label, name) for i, label in enumerate(labels)]


def evaluate(
    classifier: Classifier,
    data: str | Path | Sequence[LabeledImage],
    *,
    against: Classifier | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Classes may be named by label, ImageNet WordNet id, or index. `against` is measured on the same pictures."""
    pictures = labeled_images(data, classifier.checkpoint.multi_label) if isinstance(data, str | Path) else data
    if against is not None and (classifier.checkpoint.multi_label or against.checkpoint.multi_label):
        raise DataError("Only models that give one class for each picture can be compared.")
    start = time.perf_counter()
    tally, read, skipped = graded(classifier, pictures, batch_size, on_progress)
    seconds = time.perf_counter() - start
    comparison = None
    if against is not None:
        other, others, _ = graded(against, pictures, batch_size, on_progress)
        assert isinstance(tally, ClassificationMetrics)
        assert isinstance(other, ClassificationMetrics)
        both = set(read) & set(others)  # a picture may be readable for one of them only
        rows = [np.array([name in both for name in names]) for names in (others, read)]
        comparison = compare(other.right[rows[0]], tally.right[rows[1]])
    figures, intervals = tally.detailed(classifier.checkpoint.config.num_classes)
    per_class, said = tally.per_class(classifier.labels), tally.rows(read, classifier.labels)
    return Evaluation(figures, intervals, per_class, skipped, len(pictures) / seconds, said, tally, comparison)


def graded(
    classifier: Classifier, pictures: Sequence[LabeledImage], batch_size: int, on_progress: Callable[[], object]
) -> tuple[ClassificationMetrics | MultiLabelMetrics, list[str], list[tuple[str, str]]]:
    """What the classifier said; the names of the pictures that could be read, and which could not be, and why."""
    names = sorted({label for each in pictures for label in each.labels})
    config = classifier.checkpoint.config
    indices = match_classes(names, classifier.checkpoint.labels, config.num_classes)
    multi_label = classifier.checkpoint.multi_label
    if not multi_label and any(not isinstance(each.label, str) for each in pictures):
        raise DataError("These pictures may have several labels, but the model was trained to give one class to each.")
    tally: ClassificationMetrics | MultiLabelMetrics = MultiLabelMetrics() if multi_label else ClassificationMetrics()
    read: list[str] = []
    skipped: list[tuple[str, str]] = []
    results = classifier.stream((each.picture for each in pictures), batch_size)
    for each, result in zip(pictures, results, strict=True):
        if isinstance(result, ImageError):
            skipped.append((each.name, str(result)))
        else:
            tally.add(result[None], [indices[label] for label in each.labels])
            read.append(each.name)
        on_progress()
    if not read:
        raise DataError(f"None of the {len(pictures)} pictures could be read. The first: {skipped[0][1]}")
    return tally, read, skipped
