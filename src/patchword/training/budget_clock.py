"""Clocks that tell how much of a run is done: by steps, or by a time budget."""

import time
from collections.abc import Callable


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
