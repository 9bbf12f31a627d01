"""Callbacks: what a run reports while it trains. Console and loggers are callbacks, and users can add their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import Note

LogRow = dict[str, Any]
"""A line of metrics.jsonl: `kind` ("train", "val" or "test"), `step`, `epoch`, `seconds` of training, and metrics."""


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run before its first step.

    Attributes:
        run_dir: The run directory.
        config: The configuration, with the resolved architecture.
        num_parameters: The number of parameters of the model.
        num_trainable: The number of parameters that are trained.
        num_samples: The number of images in each split, by the names "train", "val" and "test".
        num_classes: The number of classes.
        total_steps: The number of steps; None if a time budget determines it.
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
        metrics: The metrics of the selected model on "val" and, if there is a test set, on "test", such as
            `metrics["val"]["top1"]`.
        best_step: The step of the selected model, the best on the validation set.
        steps: The number of training steps.
        seconds: The training time, including that of processes that were killed.
        report: The path of the HTML report.
        notes: Everything that was reported during the run.
        num_unreadable: The number of images that could not be read, over all splits.
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
    """Base class of callbacks, whose methods do nothing; override those you need.

    In distributed training, only the first process calls them.

    Examples:
        ```python
        import patchword as pw

        class PrintAccuracy(pw.Callback):
            def on_log(self, row):
                if row["kind"] == "val":
                    print(row["step"], row["top1"])

        pw.train(pw.load_recipe("quickstart"), callbacks=(PrintAccuracy(),))
        ```
    """

    def on_train_start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        """Called after every training step.

        Args:
            row: The step, with loss, accuracy, learning rate and images per second.
            progress: The completed fraction of the run, from 0 to 1.
            seconds_left: The estimated time until the end of training.
        """

    def on_log(self, row: LogRow) -> None:
        """Called after each row that is written to metrics.jsonl: some training steps and all evaluations."""

    def on_message(self, message: str) -> None:
        """Called with each message for the user."""

    def on_train_end(self, result: TrainResult | None) -> None:
        """Called at the end; `result` is None if the run was stopped or failed."""
