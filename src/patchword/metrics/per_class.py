"""Figures of each class, and those that count every class alike. Plain arrays; no models, no files."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PerClassMetrics:
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


PULL = 2.0  # pictures
MAX_CONFUSION_CLASSES = 2000  # classes: a matrix of more takes too much memory, and shows nothing


def confusion_matrix(targets: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """How often each class (row) was taken for each (column)."""
    from sklearn import metrics  # late: it takes a second

    return metrics.confusion_matrix(targets, predicted, labels=np.arange(classes))


def class_intervals(
    targets: np.ndarray, predicted: np.ndarray, classes: int, rounds: int = 500, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % intervals of balanced accuracy and macro F1, for the classes and pictures at hand.

    Drawing pictures anew would leave classes out, and know no doubt about a class of one picture. Instead whether each
    is recognised is drawn anew, with its class's rate, pulled towards that of all by two pictures' weight.
    """
    draw, right = np.random.default_rng(seed), targets == predicted
    hits, support = (np.bincount(rows, minlength=classes) for rows in (targets[right], targets))
    whole = (right.sum() + 2) / (len(right) + 4)  # of all classes; never quite 0 or 1, of which nothing is certain
    rate = ((hits + PULL * whole) / (support + PULL))[targets]
    mistakes = predicted[~right] if not right.all() else draw.integers(0, classes, len(targets))
    made = []
    for _ in range(rounds):
        said = np.where(right, draw.choice(mistakes, len(targets)), predicted)  # what it is taken for, if it is
        found = per_class_metrics(targets, np.where(draw.random(len(targets)) < rate, targets, said), classes)
        made.append((found.balanced_accuracy, found.macro_f1))
    values = per_class_metrics(targets, predicted, classes)
    shifts = np.quantile(np.array(made) - np.mean(made, axis=0), [0.025, 0.975], axis=0)
    pairs = zip(("balanced_accuracy", "macro_f1"), (values.balanced_accuracy, values.macro_f1), shifts.T, strict=True)
    return {name: (max(0.0, value + low), min(1.0, value + high)) for name, value, (low, high) in pairs}


def per_class_metrics(targets: np.ndarray, predicted: np.ndarray, classes: int) -> PerClassMetrics:
    """What scikit-learn's precision_recall_fscore_support gives with zero_division=nan, without the matrix.

    Counted here since intervals need it 500 times over: for 50,000 images of 1,000 classes it takes 0.3 ms, there 18.
    """
    hits = np.bincount(targets[targets == predicted], minlength=classes).astype(np.float64)
    support, said = (np.bincount(values, minlength=classes) for values in (targets, predicted))
    with np.errstate(invalid="ignore"):
        precision, recall = hits / said, hits / support
        f1 = 2 * hits / (support + said)
    return PerClassMetrics(support, precision, recall, f1)
