"""Callbacks: what a run reports while it trains. Console and loggers are callbacks, and users can add their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import Note

LogRow = dict[str, Any]  # a line of metrics.jsonl: kind ("train", "val" or "test"), step, epoch, seconds and metrics


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run before its first step.

    Attributes:
        run_dir: The run directory.
        config: The resolved configuration.
        num_parameters: All parameters of the model.
        num_trainable: The parameters that are trained.
        num_samples: The number of samples of each split.
        num_classes: The number of classes.
        total_steps: The length of the run; None if a time budget determines it.
        resumed_step: The step that the run resumes from; 0 for a new run.
        notes: What the user should know about the configuration, the weights and the data.
    """

    run_dir: Path
    config: Config
    num_parameters: int
    num_trainable: int
    num_samples: dict[str, int]
    num_classes: int
    total_steps: int | None
    resumed_step: int
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class TrainResult:
    """The result of a finished run.

    Attributes:
        run_dir: The run directory, which is also a model directory.
        metrics: The metrics of "val" and, if there is a test set, of "test".
        best_step: The step of the published model.
        steps: The number of training steps.
        seconds: Training time, including that of processes that were killed.
        report: The HTML report.
        notes: Everything that was reported during the run.
        num_unreadable: How many images could not be read, over all splits.
    """

    run_dir: Path
    metrics: dict[str, dict[str, Any]]
    best_step: int
    steps: int
    seconds: float
    report: Path
    notes: tuple[Note, ...]
    num_unreadable: int = 0


class Callback:
    """Base class with methods that do nothing; override those you need. Only the first process calls them."""

    def on_train_start(self, info: RunInfo) -> None:
        """Run before the first step."""

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        """Run after every training step.

        Args:
            row: Loss, accuracy, learning rate and throughput of the step.
            progress: The completed fraction of the run.
            seconds_left: The estimated time until the end of training.
        """

    def on_log(self, row: LogRow) -> None:
        """Run after each row that is written to metrics.jsonl: some training steps and all evaluations."""

    def on_message(self, message: str) -> None:
        """Run when there is something to tell the user."""

    def on_train_end(self, result: TrainResult | None) -> None:
        """Run at the end; `result` is None if the run was stopped or failed."""
