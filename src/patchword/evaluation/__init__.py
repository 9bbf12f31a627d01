"""A classifier on many pictures: what it says (predict.py), and how good that is (measure.py and the rest)."""

from .measure import Evaluation, Labelled, evaluate, labelled_pictures
from .metrics import Tally, expected_calibration_error

__all__ = ["Evaluation", "Labelled", "Tally", "evaluate", "expected_calibration_error", "labelled_pictures"]
