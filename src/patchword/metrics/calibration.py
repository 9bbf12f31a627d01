"""Does 93 % sure mean right in 93 % of cases? Calibration errors, the reliability diagram's numbers, and a temperature.

Plain arrays; no models, no files.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

BINS = 15
COLDEST, HOTTEST = 0.05, 20.0
USUAL = 0.25  # how far the logarithm of a temperature usually is from zero


@dataclass(frozen=True)
class Bin:
    """Pictures of similar confidence."""

    count: int
    confidence: float  # mean
    accuracy: float


def equal_width(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins (a, b] of equal width, as usual; empty ones are left out."""
    places = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    return [bin_of(confidences[places == b], right[places == b]) for b in range(bins) if (places == b).any()]


def equal_mass(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> list[Bin]:
    """Bins with equally many pictures, so that none rests on a handful: what adaptive calibration error uses."""
    order = np.argsort(confidences, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    return [bin_of(confidences[part], right[part]) for part in parts]


def bin_of(confidences: np.ndarray, right: np.ndarray) -> Bin:
    return Bin(len(confidences), float(confidences.mean()), float(right.mean()))


def calibration_error(bins: list[Bin]) -> float:
    """The mean gap between confidence and accuracy, weighted by the bins' sizes."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / total


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """What logits (N, K) must be divided by for the likelihood of the true classes (N,) to be largest.

    Fitted on pictures that the model was not trained on, it makes confidences honest and changes no decision. Its
    logarithm is drawn towards zero, as if by a normal distribution around it: twenty pictures that are all right do not
    prove that the model is never wrong, nor one mistake among them that it is wrong often; thousands have their way.
    """
    scores = logits.astype(np.float64)
    scores = scores - scores.max(axis=1, keepdims=True)
    true = scores[np.arange(len(scores)), targets]

    def loss(log_temperature: float) -> float:
        cooled = np.exp(-log_temperature)
        likelihood = np.log(np.exp(cooled * scores).sum(axis=1)) - cooled * true
        return float(likelihood.sum() + (log_temperature / USUAL) ** 2 / 2)

    found = minimize_scalar(loss, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))
