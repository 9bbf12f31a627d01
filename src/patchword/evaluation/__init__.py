"""A classifier on many pictures: what it says (predict.py), and how good that is (measure.py, metrics.py)."""

from .measure import Evaluation, evaluate
from .metrics import Tally, expected_calibration_error

__all__ = ["Evaluation", "Tally", "evaluate", "expected_calibration_error"]
