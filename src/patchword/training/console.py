"""Progress of a run on standard error: a live bar on a terminal, plain lines elsewhere, and a table at the end."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..config import ResNetConfig
from .callbacks import Callback, LogRow, RunInfo, TrainResult

SECONDS_PER_LINE = 5.0  # where there is no terminal
METRIC_NAMES = ("top1", "top5", "map", "f1", "nll", "ece")


class ConsoleCallback(Callback):
    """Shows loss, accuracy, learning rate, images/s and time left; every evaluation gets its own line."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.is_live = self.console.is_terminal
        percent, text = TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[text]}")
        self.bar = Progress(
            BarColumn(24), percent, text, console=self.console, transient=True, disable=not self.is_live
        )
        self.task = self.bar.add_task("", total=1.0, text="")
        self.last_line_at, self.num_classes = 0.0, 0

    def on_train_start(self, info: RunInfo) -> None:
        """Print data, model and length of the run."""
        for line in describe_run(info):
            self.on_message(line)
        self.num_classes = info.num_classes
        for note in info.notes:
            self.on_message(f"note: {note}")
        self.bar.start()

    def on_log(self, row: LogRow) -> None:
        """Print an evaluation."""
        if row["kind"] != "train":
            names = informative_metrics(row, self.num_classes)
            metrics = "  ".join(f"{name} {format_metric(name, row[name])}" for name in names)
            self.on_message(
                f"epoch {row['epoch']:6.2f}  {row['kind']:<4}  {metrics}  ({format_duration(row['seconds'])})"
            )

    def on_step(self, row: LogRow, progress: float, seconds_left: float) -> None:
        """Update the bar, or print a line every few seconds."""
        accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%}"
        speed = f"{row['images_per_second']:.0f} images/s  {format_duration(seconds_left)} left"
        text = f"epoch {row['epoch']:.2f}  loss {row['loss']:.3f}{accuracy}  lr {row['lr']:.1e}  {speed}"
        self.bar.update(self.task, completed=progress, text=text)
        if not self.is_live and time.monotonic() - self.last_line_at >= SECONDS_PER_LINE:
            self.last_line_at = time.monotonic()
            self.on_message(f"{progress:4.0%}  {text}")

    def on_message(self, message: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(message, soft_wrap=True, markup=False)

    def on_train_end(self, result: TrainResult | None) -> None:
        """Print the table of metrics."""
        self.bar.stop()
        if result is not None:
            self.console.print(make_summary(result, self.num_classes))
            self.on_message(f"model  {result.run_dir}    report  {result.report}")


def describe_run(info: RunInfo) -> list[str]:
    """Return three lines: data, model, length."""
    config = info.config
    data = ", ".join(f"{count:,} {split}" for split, count in info.num_samples.items())
    kind = "ResNet" if isinstance(config.model, ResNetConfig) else "ViT"
    size = "x".join(map(str, config.model.image_size))
    is_partial = info.num_trainable != info.num_parameters
    trainable = f" ({info.num_trainable:,} trainable)" if is_partial else ""
    length = f"{info.total_steps} steps" if info.total_steps else f"time budget {format_duration(config.budget or 0)}"
    resumed = f", resumed at step {info.resumed_step}" if info.resumed_step else ""
    return [
        f"{info.run_dir}: {config.data.source or 'data in memory'} ({data}; {info.num_classes} classes)",
        f"{kind} at {size}, {info.num_parameters:,} parameters{trainable}; {config.optim.name}, {config.precision}",
        f"{length}, batch size {config.batch_size}{resumed}",
    ]


def make_summary(result: TrainResult, num_classes: int) -> Table:
    """Make a table with a row for each split."""
    title = f"{result.run_dir.name}: {result.steps} steps in {format_duration(result.seconds)}"
    table = Table(title=title, title_justify="left")
    names = [*informative_metrics(result.metrics["val"], num_classes), "n"]
    for name in ("split", *names):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split, metrics in result.metrics.items():
        step = f" (best evaluation, step {result.best_step})" if split == "val" else " (evaluated once)"
        table.add_row(split + step, *(format_metric(name, metrics[name]) for name in names))
    return table


def informative_metrics(row: LogRow, num_classes: int) -> list[str]:
    """Return the names of the metrics to show; top-5 accuracy is always 100 % with up to five classes."""
    return [name for name in METRIC_NAMES if name in row and (name != "top5" or num_classes > 5)]


def format_metric(name: str, value: float) -> str:
    """Format a metric: a count, a number, or a percentage."""
    if name == "n":
        return f"{value:,}"
    return f"{value:.4f}" if name in ("nll", "ece") else f"{value:.2%}"


def format_duration(seconds: float) -> str:
    """Format as M:SS or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
