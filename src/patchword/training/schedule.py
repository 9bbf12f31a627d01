"""How far a run is, and what learning rate that means: laid over steps, or over wall-clock time."""

import math
import time
from collections.abc import Callable

from ..config import ScheduleConfig


def rate(config: ScheduleConfig, progress: float) -> float:
    """The learning rate as a part of its peak, for `progress` from 0 (first step) to 1 (after the last)."""
    if progress < config.warmup_fraction:
        return (
            max(progress, 1e-3 * config.warmup_fraction) / config.warmup_fraction
        )  # a first step of exactly zero would be wasted
    after = (progress - config.warmup_fraction) / max(1e-9, 1 - config.warmup_fraction)
    left = max(0.0, 1 - after)
    if config.shape == "cosine":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, after)))
    if config.shape == "linear":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
    if config.shape == "rsqrt":
        # Falls with the square root of the steps, with warm-up as the unit of time; a linear end, as big_vision has it.
        unit = config.warmup_fraction or 0.01
        end = min(1.0, (1 - progress) / config.cooldown_fraction) if config.cooldown_fraction else 1.0
        return math.sqrt(unit / max(progress, unit)) * max(0.0, end)
    return 1.0


class StepClock:
    """A run of so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def progress(self, step: int) -> float:
        return step / self.steps

    def over(self, step: int) -> bool:
        return step >= self.steps

    def left(self, step: int, seconds_per_step: float) -> float:
        return (self.steps - step) * seconds_per_step


class BudgetClock:
    """A run of so many seconds, of which some are kept back for what comes after the last step.

    Args:
        budget: seconds from the start of the command to its end.
        spent: seconds of the budget that earlier processes of this run have used.
        started: time.monotonic() when this process began.
    """

    def __init__(self, budget: float, spent: float, started: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.spent, self.started, self.now = budget, spent, started, now
        self.reserve = 0.0  # for the last evaluation and saving; the loop learns it
        self.begun: float | None = None  # seconds of the budget that had gone when the first step began
        self.recent: list[float] = []  # seconds of the last steps

    def made(self, seconds: float) -> None:
        """Takes note of how long a step took."""
        self.recent = [*self.recent, seconds][-10:]

    @property
    def longest(self) -> float:
        """Seconds that the next step may take: the longest but one of late, so that a stall does not end a run."""
        return sorted(self.recent)[-2:][0] if self.recent else 0.0

    @property
    def elapsed(self) -> float:
        return self.spent + self.now() - self.started

    def progress(self, step: int) -> float:
        self.begun = self.elapsed if self.begun is None else self.begun
        return min(1.0, (self.elapsed - self.begun) / max(1e-9, self.budget - self.reserve - self.begun))

    def over(self, step: int, before: float = 0.0) -> bool:
        """Whether a step would end too late if it began in `before` seconds. One step is made in any case."""
        return step > 0 and self.elapsed + before + self.longest > self.budget - self.reserve

    def left(self, step: int, seconds_per_step: float) -> float:
        return max(0.0, self.budget - self.elapsed)


Clock = StepClock | BudgetClock
