"""Figures of each class, and those that count every class alike. Plain arrays; no models, no files."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ClassFigures:
    """For classes in order of their indices, (K,) each; a share of nothing is NaN."""

    support: np.ndarray  # pictures of the class
    precision: np.ndarray  # of those taken for it, the part that was
    recall: np.ndarray  # of those that are it, the part that was recognised
    f1: np.ndarray

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that occur."""
        return float(self.recall[self.support > 0].mean())

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur or were said to."""
        occurring = ~np.isnan(self.f1)
        return float(self.f1[occurring].mean())


MOST_CONFUSED = 2000  # classes: a matrix of more takes too much memory, and shows nothing


def confusion_matrix(targets: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """How often each class (row) was taken for each (column)."""
    return np.bincount(targets * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def class_figures(targets: np.ndarray, predicted: np.ndarray, classes: int) -> ClassFigures:
    """Without the matrix, which for 21,843 classes would take gigabytes."""
    hits = np.bincount(targets[targets == predicted], minlength=classes).astype(np.float64)
    support, said = (np.bincount(values, minlength=classes) for values in (targets, predicted))
    with np.errstate(invalid="ignore"):
        precision, recall = hits / said, hits / support
        f1 = 2 * hits / (support + said)
    return ClassFigures(support, precision, recall, f1)
