"""What the commands print. Standard output carries the result, standard error everything else."""

import json as json_format
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.text import escape_unprintable

if TYPE_CHECKING:
    from ..evaluation.evaluate import Evaluation
    from ..evaluation.probe import ProbeResult
    from ..evaluation.robustness import Robustness
    from ..training import TrainResult


def print_status(text: str) -> None:
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
        print(escape_unprintable(row["path"]))
        for score in row["predictions"]:
            print(f"  {score['probability']:7.2%}  {escape_unprintable(score['label'])}")


# Figures in the order of the screen: what they are called there, and how they are written.
METRIC_FORMATS = {"map": ("mAP", ".2%"), "top1": ("top-1", ".2%"), "top5": ("top-5", ".2%"), "f1": ("F1", ".2%")}
METRIC_FORMATS |= {"balanced_accuracy": ("balanced", ".2%"), "macro_f1": ("F1", ".2%"), "nll": ("NLL", ".4f")}
METRIC_FORMATS |= {"brier": ("Brier", ".4f"), "ece": ("ECE", ".4f"), "ece_adaptive": ("ACE", ".4f")}


def print_evaluation(result: "Evaluation", robust: "Robustness | None" = None) -> None:
    """Figures with their intervals; a line on the other model, if there is one."""
    print(f"pictures  {result.figures['n']}")
    for name, (short, show) in METRIC_FORMATS.items():
        if name in result.figures:
            value, (low, high) = result.figures[name], result.intervals[name]
            print(f"{short:9} {value:{show}}  ({low:{show}} to {high:{show}})")
    if result.comparison is not None:
        print(f"the other {result.comparison.first:.2%}: {result.comparison.verdict()}")
    if robust is not None:
        print_robustness(robust)
    print_status(f"{result.images_per_second:.1f} pictures per second")


def print_robustness(robust: "Robustness") -> None:
    """A line for each family, from the mildest severity to the worst."""
    print(f"corrupted {robust.mean:.2%}  (accuracy, mean of {len(robust.accuracy)} corruptions at five severities)")
    print("  severity " + "  ".join(f"{severity:>6}" for severity in range(1, 6)))
    for name, values in robust.families().items():
        print(f"  {name:8} " + "  ".join(f"{value:6.1%}" for value in values))


def print_probe(found: "ProbeResult") -> None:
    from ..metrics.intervals import wilson

    print(f"{found.classes} classes, learnt from {found.train:,} pictures, measured on {found.test:,} ({found.part})")
    for name, accuracy, spread in found.rows():
        low, high = wilson(accuracy, found.test)
        drawn = f", +- {spread:.2%} over draws" if spread is not None else ""
        print(f"{name:10} {accuracy:.2%}  ({low:.2%} to {high:.2%}{drawn})")
    if found.part == "validation":
        print_status("note: there is no test part, and the same pictures chose the penalty of the logistic regression.")
    if found.left_out:
        shots = ", ".join(map(str, found.left_out))
        print_status(f"left out: {shots} shots, more than the smallest class has pictures to learn from")


MAX_LISTED = 100  # reasons on the screen; --json and --csv have them all


def report_unreadable(unread: list[tuple[str, str]], total: int) -> int:
    for _, reason in unread[:MAX_LISTED]:
        print_status(escape_unprintable(reason))
    if len(unread) > MAX_LISTED:
        print_status(f"... and {len(unread) - MAX_LISTED:,} more")
    if unread:
        print_status(f"{len(unread)} of {total} pictures could not be read.")
    return 3 if unread else 0


def print_train_result(outcome: "TrainResult | None", json: bool) -> int:
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
    return 3 if outcome is not None and outcome.unreadable else 0
