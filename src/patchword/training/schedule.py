"""Learning rate schedules, and clocks that tell how much of a run is done: by steps, or by time."""

import math
import time
from collections.abc import Callable

from ..config import ScheduleConfig


def lr_factor(config: ScheduleConfig, progress: float) -> float:
    """Return the learning rate as a fraction of its peak.

    Args:
        config: The schedule.
        progress: The completed fraction of the run: 0 at the first step, 1 after the last.
    """
    warmup = config.warmup_fraction
    if progress < warmup:
        return max(progress, 1e-3 * warmup) / warmup  # a first step with a learning rate of 0 would be wasted
    decay_progress = (progress - warmup) / max(1e-9, 1 - warmup)
    if config.shape == "cosine":
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, decay_progress)))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine
    if config.shape == "linear":
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * max(0.0, 1 - decay_progress)
    if config.shape == "rsqrt":
        # Reciprocal square root with the warmup as time scale and a linear cooldown, as in big_vision.
        timescale = warmup or 0.01
        cooldown = min(1.0, (1 - progress) / config.cooldown_fraction) if config.cooldown_fraction else 1.0
        return math.sqrt(timescale / max(progress, timescale)) * max(0.0, cooldown)
    return 1.0


class StepClock:
    """A run with a fixed number of steps."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def progress(self, step: int) -> float:
        """Return the completed fraction of the run."""
        return step / self.total_steps

    def is_over(self, step: int) -> bool:
        """Whether all steps are done."""
        return step >= self.total_steps

    def seconds_left(self, step: int, seconds_per_step: float) -> float:
        """Estimate the time until the last step."""
        return (self.total_steps - step) * seconds_per_step


class BudgetClock:
    """A run with a time budget, part of which is reserved for what follows the last step.

    Args:
        budget: Seconds from the start of the command to its end.
        spent: Seconds of the budget that earlier processes of this run used.
        started: `now()` when this process started.
        now: The clock, in seconds.

    Attributes:
        reserve: Seconds for the last evaluation and for saving; `Pacing` updates it.
        first_step_at: Seconds of the budget that were spent when the first step began, once it has.
    """

    def __init__(self, budget: float, spent: float, started: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget, self.spent, self.started, self.now = budget, spent, started, now
        self.reserve = 0.0
        self.first_step_at: float | None = None
        self.recent: list[float] = []  # seconds of the last steps

    def record_step(self, seconds: float) -> None:
        """Record how long a step took."""
        self.recent = [*self.recent, seconds][-10:]

    @property
    def expected_step_seconds(self) -> float:
        """The second longest of the last ten steps: a single stall must not end a run."""
        return sorted(self.recent)[-2:][0] if self.recent else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of the budget that are spent."""
        return self.spent + self.now() - self.started

    def progress(self, step: int) -> float:
        """Return the completed fraction of the training time; the first call starts it."""
        self.first_step_at = self.elapsed if self.first_step_at is None else self.first_step_at
        total = max(1e-9, self.budget - self.reserve - self.first_step_at)
        return min(1.0, (self.elapsed - self.first_step_at) / total)

    def is_over(self, step: int, delay: float = 0.0) -> bool:
        """Whether another step that starts in `delay` seconds would end too late. At least one step is made."""
        return step > 0 and self.elapsed + delay + self.expected_step_seconds > self.budget - self.reserve

    def seconds_left(self, step: int, seconds_per_step: float) -> float:
        """Return the rest of the budget."""
        return max(0.0, self.budget - self.elapsed)


Clock = StepClock | BudgetClock
