"""Who looks on while a run goes: the console and the loggers are watchers, and so may be a user's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import Note


@dataclass(frozen=True)
class RunInfo:
    """What is known when the first step begins."""

    folder: Path
    config: Config
    parameters: int
    trained: int  # of these, those that change
    samples: dict[str, int]  # of each part
    classes: int
    steps: int | None  # None: as many as the budget allows
    resumed_at: int  # step
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    folder: Path
    figures: dict[str, dict[str, Any]]  # of "val" and, if there is one, "test"
    best_step: int
    steps: int
    seconds: float
    report: Path
    notes: tuple[Note, ...]
    unreadable: int = 0  # images that could not be read, of all splits


class Callback:
    """Does nothing; override what is of interest."""

    def begin(self, briefing: RunInfo) -> None: ...

    def row(self, row: dict[str, Any], progress: float, left: float) -> None:
        """A row of metrics.jsonl; `progress` 0 to 1, `left` seconds."""

    def tick(self, row: dict[str, Any], progress: float, left: float) -> None:
        """A step that metrics.jsonl has no row for."""

    def say(self, message: str) -> None: ...

    def end(self, outcome: TrainResult | None) -> None:
        """None: the run did not come to its end."""
