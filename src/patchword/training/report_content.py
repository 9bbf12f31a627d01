"""What the report of a run shows about its model: metrics, confusion matrix, metrics of each class, mistakes."""

from typing import Any

import numpy as np

from ..data.loader import Loader
from ..errors import Note
from ..metrics.classification import ClassificationMetrics
from ..metrics.multilabel import MultiLabelMetrics
from ..metrics.per_class import MAX_CONFUSION_CLASSES, confusion_matrix
from ..report.mistakes import hardest_mistakes
from .evaluator import EvalOutputs

MAX_MISTAKES = 24
MAX_REASONS = 10  # of unreadable images in a note


def classification_results(loader: Loader, outputs: EvalOutputs) -> dict[str, Any]:
    """Return the fields of `ClassificationResults`, except the metrics.

    Args:
        loader: The split that was evaluated.
        outputs: The outputs of the published model.
    """
    labels = loader.source.labels
    if outputs.is_multi_label:
        multi_label = MultiLabelMetrics.from_arrays(outputs.logits, outputs.targets)
        return {"labels": labels, "per_class": multi_label.class_rows(labels)}
    metrics = ClassificationMetrics.from_arrays(outputs.logits, outputs.targets)
    results: dict[str, Any] = {"labels": labels}
    if len(labels) <= MAX_CONFUSION_CLASSES:
        results["confusion"] = confusion_matrix(outputs.targets, np.array(metrics.predicted), len(labels))
    else:
        results["per_class"] = metrics.class_rows(labels)
    names = [loader.source.name(int(index)) for index in outputs.indices]

    def read_pixels(row: int) -> np.ndarray:
        image = loader.source.read(int(outputs.indices[row]), mode=loader.preprocess.mode)
        return loader.preprocess.resize_and_crop(image)

    results["mistakes"] = hardest_mistakes(metrics.prediction_rows(names, labels), read_pixels, MAX_MISTAKES)
    return results


def unreadable_images(loaders: dict[str, Loader | None]) -> dict[str, list[str]]:
    """Return the reasons why images could not be read, by split; splits without such images are left out."""
    reasons = {name: list(loader.unreadable.values()) for name, loader in loaders.items() if loader is not None}
    return {name: texts for name, texts in reasons.items() if texts}


def unreadable_notes(unreadable: dict[str, list[str]]) -> list[Note]:
    """Make a note for each split with images that could not be read."""
    notes = []
    for name, reasons in unreadable.items():
        count = "1 image was" if len(reasons) == 1 else f"{len(reasons)} images were"
        text = f"{count} left out of the {name} split, because they could not be read: "
        notes.append(Note(text + "; ".join(reasons[:MAX_REASONS]), "images_unreadable"))
    return notes
