"""What a person sees of a run, on standard error: a live bar on a terminal, else plain lines; a table at the end."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..config import ResNetConfig
from .callbacks import Callback, RunInfo, TrainResult

LINE_EVERY = 5.0  # seconds between lines where there is no terminal


class ConsoleCallback(Callback):
    """Loss, accuracy, learning rate, images/s and time left while it goes; every evaluation on a line of its own."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        live = self.console.is_terminal
        percent, text = TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[text]}")
        self.bar = Progress(BarColumn(24), percent, text, console=self.console, transient=True, disable=not live)
        self.task = self.bar.add_task("", total=1.0, text="")
        self.live, self.told, self.classes = live, 0.0, 0

    def begin(self, briefing: RunInfo) -> None:
        config, samples = briefing.config, briefing.samples
        data = ", ".join(f"{count:,} {part}" for part, count in samples.items())
        kind = "ResNet" if isinstance(config.model, ResNetConfig) else "ViT"
        size = "x".join(map(str, config.model.image_size))
        frozen = "" if briefing.trained == briefing.parameters else f", {briefing.trained:,} of them trained"
        self.say(f"{briefing.folder}: {config.data.source or 'data in memory'} ({data}; {briefing.classes} classes)")
        self.say(
            f"{kind} at {size}, {briefing.parameters:,} parameters{frozen}; {config.optim.name}, {config.precision}"
        )
        length = f"{briefing.steps} steps" if briefing.steps else f"{clock(config.budget or 0)} of time"
        again = f", resumed at step {briefing.resumed_at}" if briefing.resumed_at else ""
        self.say(f"{length}, {config.batch_size} pictures a step{again}")
        self.classes = briefing.classes
        for note in briefing.notes:
            self.say(f"note: {note}")
        self.bar.start()

    def row(self, row: dict[str, Any], progress: float, left: float) -> None:
        if row["kind"] != "train":
            line = "  ".join(f"{name} {shown(name, row[name])}" for name in told_figures(row, self.classes))
            self.say(f"epoch {row['epoch']:6.2f}  {row['kind']:<4}  {line}  ({clock(row['seconds'])})")
            return
        self.tick(row, progress, left)

    def tick(self, row: dict[str, Any], progress: float, left: float) -> None:
        accuracy = "" if row["accuracy"] is None else f"  accuracy {row['accuracy']:.1%}"
        speed = f"{row['images_per_second']:.0f} images/s  {clock(left)} left"
        text = f"epoch {row['epoch']:.2f}  loss {row['loss']:.3f}{accuracy}  lr {row['lr']:.1e}  {speed}"
        self.bar.update(self.task, completed=progress, text=text)
        if not self.live and time.monotonic() - self.told >= LINE_EVERY:
            self.told = time.monotonic()
            self.say(f"{progress:4.0%}  {text}")

    def say(self, message: str) -> None:
        self.bar.console.print(message, soft_wrap=True, markup=False)

    def end(self, outcome: TrainResult | None) -> None:
        self.bar.stop()
        if outcome is not None:
            self.console.print(summary(outcome, self.classes))
            self.say(f"model  {outcome.folder}    report  {outcome.report}")


def summary(outcome: TrainResult, classes: int) -> Table:
    table = Table(
        title=f"{outcome.folder.name}: {outcome.steps} steps in {clock(outcome.seconds)}", title_justify="left"
    )
    names = [*told_figures(outcome.figures["val"], classes), "n"]
    for name in ("part", *names):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part, figures in outcome.figures.items():
        note = f"{part} (best of the run, step {outcome.best_step})" if part == "val" else f"{part} (measured once)"
        table.add_row(note, *(shown(name, figures[name]) for name in names))
    return table


def told_figures(row: dict[str, Any], classes: int) -> list[str]:
    """The names of the figures that say something: among five classes, the true one always is in the first five."""
    names = ("top1", "top5", "map", "f1", "nll", "ece")
    return [name for name in names if name in row and (name != "top5" or classes > 5)]


def shown(name: str, value: float) -> str:
    if name == "n":
        return f"{value:,}"
    return f"{value:.4f}" if name in ("nll", "ece") else f"{value:.2%}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
