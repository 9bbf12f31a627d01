"""Evaluate a classifier on labeled images: metrics with confidence intervals, and a comparison with another model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.formats.image_folder import match_classes
from ..errors import DataError, ImageError
from ..inference.classifier import BATCH_SIZE, Classifier
from ..inference.inputs import InputImage, UnreadableImage, resolve_labeled_images
from ..metrics.classification import ClassificationMetrics, Intervals, Metrics, PredictionRow
from ..metrics.intervals import Comparison, compare_paired
from ..metrics.multilabel import MultiLabelMetrics
from ..metrics.per_class import ClassRows


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        metrics: top1, top5, balanced_accuracy, macro_f1, nll, brier, ece, ece_adaptive and n (the number of images); of
            multi-label models map, f1, nll and n. Accuracies are fractions from 0 to 1.
        intervals: The 95% confidence interval, (low, high), of each metric except n.
        per_class: A row for each class that occurs.
        predictions: A row for each image that could be read.
        skipped: The images that could not be read.
        images_per_second: The throughput, decoding included.
        accumulated: The targets, predictions and losses that the metrics are computed from.
        split: The split of the dataset that was evaluated; "" for a folder.
        comparison: The comparison with `compare_to`; None without it.
    """

    metrics: Metrics
    intervals: Intervals
    per_class: ClassRows
    predictions: list[PredictionRow]
    skipped: list[UnreadableImage]
    images_per_second: float
    accumulated: ClassificationMetrics | MultiLabelMetrics
    split: str = ""
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `patchword evaluate --json` prints."""
        document: dict[str, Any] = {**self.metrics, "intervals": self.intervals, "split": self.split}
        document |= {"images_per_second": self.images_per_second, "per_class": self.per_class}
        document["skipped"] = len(self.skipped)
        document["errors"] = [{"path": path, "error": reason} for path, reason in self.skipped]
        if self.comparison is not None:
            document["comparison"] = {**vars(self.comparison), "verdict": self.comparison.verdict()}
        return document


@dataclass(frozen=True)
class ClassifierRun:
    """The outputs of a classifier on labeled images.

    Attributes:
        accumulated: The targets, predictions and losses.
        names: The names of the images that could be read.
        skipped: The images that could not be read.
    """

    accumulated: ClassificationMetrics | MultiLabelMetrics
    names: list[str]
    skipped: list[UnreadableImage]


def evaluate(
    classifier: Classifier | str | Path,
    data: str | Path | Sequence[InputImage],
    *,
    compare_to: Classifier | str | Path | None = None,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Evaluate a classifier on labeled images.

    Args:
        classifier: The classifier, or a model reference.
        data: A folder with one subfolder per class, a dataset reference (its test set is used, or else the validation
            set, or else the training set), or labeled images. Classes are matched by label, WordNet ID or index.
        compare_to: Another model, which is evaluated on the same images and compared by McNemar's test.
        batch_size: The number of images in a batch on each core, by default 16.
        on_progress: A function that is called after each image.

    Raises:
        DataError: The images have no labels, their classes do not fit the model, or none can be read.

    Examples:
        ```python
        import patchword as pw

        evaluation = pw.evaluate("runs/digits", "digits")
        print(evaluation.metrics["top1"], evaluation.intervals["top1"])
        ```
    """
    classifier = classifier if isinstance(classifier, Classifier) else Classifier.load(classifier)
    if compare_to is not None and not isinstance(compare_to, Classifier):
        compare_to = Classifier.load(compare_to)
    if compare_to is not None and (classifier.checkpoint.multi_label or compare_to.checkpoint.multi_label):
        raise DataError("Only single-label models can be compared.", code="unsupported_by_model")
    multi_label = classifier.checkpoint.multi_label
    images = resolve_labeled_images(data, multi_label) if isinstance(data, str | Path) else data
    start = time.perf_counter()
    run = run_classifier(classifier, images, batch_size, on_progress)
    seconds = time.perf_counter() - start
    comparison = None
    if compare_to is not None:
        comparison = compare_runs(run_classifier(compare_to, images, batch_size, on_progress), run)
    metrics, intervals = run.accumulated.compute_with_intervals(classifier.checkpoint.config.num_classes)
    return Evaluation(
        metrics,
        intervals,
        per_class=run.accumulated.class_rows(classifier.labels),
        predictions=run.accumulated.prediction_rows(run.names, classifier.labels),
        skipped=run.skipped,
        images_per_second=len(images) / seconds,
        accumulated=run.accumulated,
        split=images[0].split,
        comparison=comparison,
    )


def run_classifier(
    classifier: Classifier,
    images: Sequence[InputImage],
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[], object] = lambda: None,
) -> ClassifierRun:
    """Classify labeled images and accumulate the metrics; images that cannot be read are skipped."""
    indices = class_indices(classifier, images)
    multi_label = classifier.checkpoint.multi_label
    if not multi_label and any(isinstance(image.label, tuple) for image in images):
        raise DataError("The data are multi-label, but the model is single-label.", code="unsupported_by_model")
    accumulated: ClassificationMetrics | MultiLabelMetrics
    accumulated = MultiLabelMetrics() if multi_label else ClassificationMetrics()
    names: list[str] = []
    skipped: list[UnreadableImage] = []
    outputs = classifier.stream((image.image for image in images), batch_size)
    for image, output in zip(images, outputs, strict=True):
        if isinstance(output, ImageError):
            skipped.append(UnreadableImage(image.name, str(output)))
        else:
            accumulated.update(output[None], [indices[label] for label in image.labels])
            names.append(image.name)
        on_progress()
    if not names:
        raise no_readable_image(skipped)
    return ClassifierRun(accumulated, names, skipped)


def class_indices(classifier: Classifier, images: Sequence[InputImage]) -> dict[str, int]:
    """Return the model's class index of every label of the images; raise `DataError` if they do not fit the model."""
    if not images:
        raise DataError("No images were given.", code="no_image")
    if any(image.label is None for image in images):
        raise DataError("Labeled images are needed: a folder with one folder per class, or a dataset.")
    names = sorted({label for image in images for label in image.labels})
    return match_classes(names, classifier.checkpoint.labels, classifier.checkpoint.config.num_classes)


def no_readable_image(skipped: Sequence[UnreadableImage]) -> DataError:
    """Return the error for a set of images of which none could be read."""
    return DataError(f"None of the {len(skipped)} images could be read. The first: {skipped[0].reason}")


def compare_runs(first: ClassifierRun, second: ClassifierRun) -> Comparison:
    """Compare two models on the images that both could read."""
    assert isinstance(first.accumulated, ClassificationMetrics)
    assert isinstance(second.accumulated, ClassificationMetrics)
    common = set(first.names) & set(second.names)
    masks = [np.array([name in common for name in run.names]) for run in (first, second)]
    return compare_paired(first.accumulated.correct[masks[0]], second.accumulated.correct[masks[1]])
