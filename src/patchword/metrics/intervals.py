"""How sure a figure is: Wilson's and bootstrap intervals, and whether one model is really better than another.

Plain arrays; no models, no files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

ROUNDS = 2000
LEVEL = 0.95


def wilson(rate: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a rate that was seen in n independent trials."""
    if n <= 0:
        return 0.0, 1.0
    found = binomtest(round(rate * n), n).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def bootstrap_all(
    statistics: Callable[[np.ndarray], np.ndarray], count: int, *, rounds: int = ROUNDS, seed: int = 0
) -> list[tuple[float, float]]:
    """95 % percentile intervals of `statistics(rows)`, (S,), where rows are drawn from `count` with replacement."""
    if count < 2:  # which scipy refuses: every draw is the same
        return [(float(value), float(value)) for value in statistics(np.arange(count))]
    found = percentile_bootstrap(np.arange(count), statistics, rounds, seed, vectorized=False)
    return [(float(low), float(high)) for low, high in zip(found.low, found.high, strict=True)]


def bootstrap_mean(values: np.ndarray, *, rounds: int = ROUNDS, seed: int = 0) -> tuple[float, float]:
    """The same for a mean, many rounds at once."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    found = percentile_bootstrap(values, np.mean, rounds, seed, vectorized=True)
    return float(found.low), float(found.high)


def percentile_bootstrap(
    values: np.ndarray, statistic: Callable[..., Any], rounds: int, seed: int, *, vectorized: bool
) -> Any:
    """The interval, as an object with `low` and `high`, from as many draws at once as take less than 100 MB."""
    result = bootstrap(
        (values,), statistic, n_resamples=rounds, batch=max(1, 5_000_000 // len(values)), vectorized=vectorized,
        confidence_level=LEVEL, method="percentile", random_state=np.random.default_rng(seed),
    )  # fmt: skip
    return result.confidence_interval


@dataclass(frozen=True)
class Comparison:
    """Two models on the same pictures."""

    first: float  # accuracy of the other
    second: float  # accuracy of the model in question
    only_first: int  # pictures that only the other got right ...
    only_second: int  # ... and only the model in question
    p_value: float  # of McNemar's exact test: how probable such a difference is, were they equally good
    difference: tuple[float, float]  # 95 % interval of second - first

    def verdict(self) -> str:
        """In a sentence."""
        gain, (low, high) = 100 * (self.second - self.first), (100 * end for end in self.difference)
        only = f"only this model is right on {self.only_second} images, only the other on {self.only_first}"
        numbers = (
            f"{gain:+.1f} points, 95% confidence interval {low:+.1f} to {high:+.1f}; {only}; p = {self.p_value:.2g}"
        )
        if self.p_value >= 1 - LEVEL:
            return f"These images show no significant difference ({numbers})."
        return f"{'This model' if gain > 0 else 'The other model'} is better ({numbers})."


def compare(first: np.ndarray, second: np.ndarray) -> Comparison:
    """From whether each model was right, picture by picture: boolean (N,) each."""
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    disagreements = only_first + only_second
    p_value = float(binomtest(only_first, disagreements, 0.5).pvalue) if disagreements else 1.0
    difference = bootstrap_mean(second.astype(np.float64) - first.astype(np.float64))
    return Comparison(float(first.mean()), float(second.mean()), only_first, only_second, p_value, difference)
