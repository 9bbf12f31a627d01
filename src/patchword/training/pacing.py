"""When a run evaluates, saves and ends, from how long its steps, evaluations and saves take."""

import math
import time
from collections.abc import Callable

from ..config import Config
from .budget_clock import BudgetClock, Clock, StepClock

MAX_EVAL_FRACTION = 0.1  # of a time budget, for evaluations before the last
MAX_EVALUATIONS = 200  # per run: with few images an epoch takes almost no time
SAVES_PER_BUDGET = 20  # so that a kill does not cost much of a time budget


def make_clock(
    config: Config, num_train: int, spent: float, started: float, now: Callable[[], float] = time.monotonic
) -> Clock:
    """Make the clock that measures the progress of a run: a time budget, or a number of steps.

    Args:
        config: The configuration.
        num_train: The number of training images.
        spent: Seconds that earlier processes of the run took.
        started: `now()` when this process started.
        now: The clock, in seconds.
    """
    if config.budget is not None:
        return BudgetClock(config.budget, spent, started, now)
    return StepClock(config.steps or max(1, math.ceil(config.epochs * num_train / config.batch_size)))


class Pacing:
    """Decides what follows each step.

    Args:
        config: The configuration.
        clock: Measures the progress of the run.
        num_images: The number of images of each split.
        num_final_rounds: How often the validation set is evaluated after the last step.
        seconds_per_image: How long a forward pass takes; 0 if that is not known yet.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        num_images: dict[str, int],
        num_final_rounds: int,
        seconds_per_image: float,
        now: Callable[[], float],
    ) -> None:
        self.config, self.clock, self.now = config, clock, now
        self.num_val = num_images["val"]
        self.num_final = num_final_rounds * self.num_val + num_images.get("test", self.num_val)
        every = max(1, round(config.eval_every * num_images["train"] / config.batch_size))
        self.eval_every = every if isinstance(clock, BudgetClock) else max(every, clock.total_steps // MAX_EVALUATIONS)
        self.num_passes = 2 if config.tta_flip else 1
        self.seconds_per_image = seconds_per_image * self.num_passes  # of evaluation
        self.total_eval_seconds = self.evaluated_at = self.save_seconds = 0.0
        self.saved_at = now()

    def record_step(self, seconds: float) -> None:
        """Record how long a step took, and reserve time of the budget for the last evaluations, saving and report."""
        if isinstance(self.clock, BudgetClock):
            self.clock.record_step(seconds)
            evaluation = 1.15 * self.estimate_seconds_per_image(seconds) * self.num_final
            self.clock.reserve = min(0.5 * self.clock.budget, evaluation + 1.5 * self.save_seconds + 1.0)

    def record_evaluation(self, seconds: float) -> None:
        """Record how long an evaluation of the validation set took."""
        self.total_eval_seconds += seconds
        self.seconds_per_image = seconds / self.num_val
        if isinstance(self.clock, BudgetClock):
            self.evaluated_at = self.clock.elapsed

    def record_save(self, started: float) -> None:
        """Record that a checkpoint was saved, from `started` until now."""
        self.saved_at = self.now()
        self.save_seconds = self.saved_at - started

    def estimate_seconds_per_image(self, step_seconds: float) -> float:
        """Return how long an evaluation takes per image: as measured, or else half of a training step's time."""
        return self.seconds_per_image or 0.5 * step_seconds / self.config.batch_size * self.num_passes

    def is_eval_due(self, step: int) -> bool:
        """Whether to evaluate after this step; a time budget limits how often."""
        if step % self.eval_every:
            return False
        if not isinstance(self.clock, BudgetClock):
            return True
        elapsed, budget = self.clock.elapsed, self.clock.budget
        cost = self.estimate_seconds_per_image(self.clock.expected_step_seconds) * self.num_val
        return (
            elapsed - self.evaluated_at >= budget / MAX_EVALUATIONS
            and self.total_eval_seconds + cost <= MAX_EVAL_FRACTION * elapsed
            and not self.clock.is_over(1, cost)
        )

    def is_save_due(self) -> bool:
        """Whether enough time has passed since the last checkpoint; with a budget less is enough, if saving is fast."""
        every = self.config.save_every
        if self.config.budget is not None:
            every = min(every, max(self.config.budget / SAVES_PER_BUDGET, 50 * self.save_seconds))
        return self.now() - self.saved_at >= every
