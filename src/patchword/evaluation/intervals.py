"""How sure a figure is: Wilson's and bootstrap intervals, and whether one model is really better than another.

Plain arrays; no models, no files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

ROUNDS = 2000
LEVEL = 0.95


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a rate that was seen in n independent trials; z = 1.96 gives 95%."""
    if n <= 0:
        return 0.0, 1.0
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    reach = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def bootstrap_all(
    statistics: Callable[[np.ndarray], np.ndarray], count: int, *, rounds: int = ROUNDS, seed: int = 0
) -> list[tuple[float, float]]:
    """95 % percentile intervals of `statistics(rows)`, (S,), where rows are drawn from `count` with replacement."""
    draw = np.random.default_rng(seed)
    values = np.stack([statistics(draw.integers(0, count, count)) for _ in range(rounds)])
    return [tail(column) for column in values.T]


def bootstrap_mean(values: np.ndarray, *, rounds: int = ROUNDS, seed: int = 0) -> tuple[float, float]:
    """The same for a mean, many rounds at once."""
    draw, count = np.random.default_rng(seed), len(values)
    step = max(1, 10_000_000 // count)  # so that memory stays below 100 MB
    means = [
        values[draw.integers(0, count, (min(step, rounds - r), count))].mean(axis=1) for r in range(0, rounds, step)
    ]
    return tail(np.concatenate(means))


def tail(values: "np.ndarray | list[float]") -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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
