"""A classifier on many pictures: what it says (predict.py), and how good that is (measure.py and the rest)."""

from ..metrics.classification import ClassificationMetrics, expected_calibration_error
from .evaluate import Evaluation, LabeledImage, evaluate, labeled_images
from .probe import ProbeResult, probe

__all__ = [
    "ProbeResult",
    "probe",
    "Evaluation",
    "LabeledImage",
    "ClassificationMetrics",
    "evaluate",
    "expected_calibration_error",
    "labeled_images",
]
