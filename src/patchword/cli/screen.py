"""What the commands print. Standard output carries the result, standard error everything else."""

import json as json_format
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..training import Outcome


def say(text: str) -> None:
    """To standard error: standard output is for results."""
    print(text, file=sys.stderr)


class progress:
    """A bar on standard error, when that is a terminal: `with progress("reading", 10) as step: step()`."""

    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> Callable[[], bool]:
        self.bar.start()
        return self.step

    def step(self) -> bool:
        self.bar.advance(self.task)
        return True

    def __exit__(self, *failure: object) -> None:
        self.bar.stop()


def print_predictions(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "error" in row:
            continue
        print(row["path"])
        for score in row["predictions"]:
            print(f"  {score['probability']:7.2%}  {score['label']}")


def print_evaluation(figures: dict[str, Any], speed: float) -> None:
    print(f"pictures  {figures['n']}")
    print(f"top-1     {figures['top1']:.2%}")
    print(f"top-5     {figures['top5']:.2%}")
    print(f"NLL       {figures['nll']:.4f}")
    print(f"ECE       {figures['ece']:.4f}")
    say(f"{speed:.1f} pictures per second")


def report_unread(unread: list[tuple[str, str]], total: int) -> int:
    for _, reason in unread:
        say(reason)
    if unread:
        say(f"{len(unread)} of {total} pictures could not be read.")
    return 3 if unread else 0


def print_outcome(outcome: "Outcome | None", json: bool) -> int:
    """The end of a run; with several processes only the first has one."""
    if outcome is not None and json:
        said: dict[str, Any] = {
            "run": str(outcome.folder),
            "report": str(outcome.report),
            **outcome.figures,
            "notes": outcome.notes,
        }
        said |= {"best_step": outcome.best_step, "steps": outcome.steps, "seconds": round(outcome.seconds, 1)}
        print(json_format.dumps(said, indent=2))
    unread = outcome is not None and any("could not be read" in note for note in outcome.notes)
    return 3 if unread else 0
