"""A classifier on many pictures: what it says (predict.py), and how good that is (measure.py and the rest)."""

from ..metrics.classification import Tally, expected_calibration_error
from .evaluate import Evaluation, Labelled, evaluate, labelled_pictures
from .probe import Probed, probe

__all__ = [
    "Probed",
    "probe",
    "Evaluation",
    "Labelled",
    "Tally",
    "evaluate",
    "expected_calibration_error",
    "labelled_pictures",
]
