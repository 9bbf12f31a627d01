"""Confidence intervals (Wilson, bootstrap), and a paired comparison of two models (McNemar's test)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

ROUNDS = 2000
LEVEL = 0.95
MAX_BATCH_VALUES = 5_000_000  # resampled at once: less than 100 MB


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a rate observed in n independent trials."""
    if n <= 0:
        return 0.0, 1.0
    interval = binomtest(round(rate * n), n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_statistics(
    statistics: Callable[[np.ndarray], np.ndarray], count: int, *, rounds: int = ROUNDS, seed: int = 0
) -> list[tuple[float, float]]:
    """95% percentile intervals of `statistics(rows)`, (S,), with rows drawn from range(count) with replacement."""
    if count < 2:  # scipy refuses a single row: every resample is the same
        return [(float(value), float(value)) for value in statistics(np.arange(count))]
    interval = percentile_bootstrap(np.arange(count), statistics, rounds, seed, vectorized=False)
    return [(float(low), float(high)) for low, high in zip(interval.low, interval.high, strict=True)]


def bootstrap_mean(values: np.ndarray, *, rounds: int = ROUNDS, seed: int = 0) -> tuple[float, float]:
    """The 95% percentile interval of a mean, vectorized."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    interval = percentile_bootstrap(values, np.mean, rounds, seed, vectorized=True)
    return float(interval.low), float(interval.high)


def percentile_bootstrap(
    values: np.ndarray, statistic: Callable[..., Any], rounds: int, seed: int, *, vectorized: bool
) -> Any:
    """Scipy's confidence interval, with `low` and `high`, in batches of bounded memory."""
    result = bootstrap(
        (values,), statistic, n_resamples=rounds, batch=max(1, MAX_BATCH_VALUES // len(values)),
        vectorized=vectorized, confidence_level=LEVEL, method="percentile", random_state=np.random.default_rng(seed),
    )  # fmt: skip
    return result.confidence_interval


@dataclass(frozen=True)
class Comparison:
    """Two models on the same images; of `evaluate`, the first is `compare_to` and the second the model itself.

    Attributes:
        first: The accuracy of the first model, from 0 to 1.
        second: The accuracy of the second model.
        only_first: The number of images that only the first model classifies correctly.
        only_second: The number of images that only the second model classifies correctly.
        p_value: The p-value of McNemar's exact test.
        difference: The 95% confidence interval of `second - first`.
    """

    first: float
    second: float
    only_first: int
    only_second: int
    p_value: float
    difference: tuple[float, float]

    def verdict(self) -> str:
        """Return the comparison as a sentence."""
        gain, (low, high) = 100 * (self.second - self.first), (100 * end for end in self.difference)
        only = f"only this model is right on {self.only_second} images, only the other on {self.only_first}"
        numbers = (
            f"{gain:+.1f} points, 95% confidence interval {low:+.1f} to {high:+.1f}; {only}; p = {self.p_value:.2g}"
        )
        if self.p_value >= 1 - LEVEL:
            return f"These images show no significant difference ({numbers})."
        return f"{'This model' if gain > 0 else 'The other model'} is better ({numbers})."


def compare_paired(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Compare two models by whether each classified each image correctly: bool (N,) each."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    disagreements = only_first + only_second
    p_value = float(binomtest(only_first, disagreements, 0.5).pvalue) if disagreements else 1.0
    difference = bootstrap_mean(second.astype(np.float64) - first.astype(np.float64))
    return Comparison(float(first.mean()), float(second.mean()), only_first, only_second, p_value, difference)
