"""Calibration errors, the bins of a reliability diagram, and temperature scaling."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

BINS = 15
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
PRIOR_STD = 0.25  # of the normal prior on log(temperature)


@dataclass(frozen=True)
class Bin:
    """Images of similar confidence."""

    count: int
    confidence: float  # mean
    accuracy: float


def equal_width_bins(confidences: np.ndarray, correct: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins (a, b] of equal width; empty ones are left out."""
    places = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    return [make_bin(confidences[places == b], correct[places == b]) for b in range(bins) if (places == b).any()]


def equal_mass_bins(confidences: np.ndarray, correct: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins with equally many images, as in the adaptive calibration error (Nixon et al., 2019)."""
    order = np.argsort(confidences, kind="stable")
    chunks = np.array_split(order, min(bins, len(order)))
    return [make_bin(confidences[chunk], correct[chunk]) for chunk in chunks]


def make_bin(confidences: np.ndarray, correct: np.ndarray) -> Bin:
    """The means of the images of one bin."""
    return Bin(len(confidences), float(confidences.mean()), float(correct.mean()))


def calibration_error(bins: list[Bin]) -> float:
    """The mean gap between confidence and accuracy, weighted by the size of the bins."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / total


def expected_calibration_error(confidences: np.ndarray, correct: np.ndarray, bins: int = BINS) -> float:
    """The calibration error over bins of equal width (ECE; Guo et al., 2017)."""
    return calibration_error(equal_width_bins(confidences, correct, bins))


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """Temperature scaling (Guo et al., 2017): the divisor of logits (N, K) that maximizes the likelihood of targets.

    Fit it on images that the model was not trained on. It changes confidences, never the predicted class. A normal
    prior on log(temperature), with standard deviation `PRIOR_STD`, keeps a handful of images from driving it to an
    extreme; with thousands of images the prior has no effect.
    """
    scores = logits.astype(np.float64)
    scores = scores - scores.max(axis=1, keepdims=True)
    true = scores[np.arange(len(scores)), targets]

    def loss(log_temperature: float) -> float:
        inverse = np.exp(-log_temperature)
        nll = np.log(np.exp(inverse * scores).sum(axis=1)) - inverse * true
        return float(nll.sum() + (log_temperature / PRIOR_STD) ** 2 / 2)

    bounds = (np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE))
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(result.x))
