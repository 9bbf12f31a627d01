"""Output of the commands. Standard output carries the result, standard error everything else."""

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.runtime import busy_cores
from ..core.text import escape_unprintable, print_stderr
from ..errors import OutputError

if TYPE_CHECKING:
    from ..evaluation.evaluate import Evaluation
    from ..evaluation.robustness import Robustness
    from ..inference.prediction_csv import ImageResult
    from ..training import TrainResult

EXIT_UNREADABLE = 3  # done, but some inputs could not be read
MAX_BUSY_CORES = 0.5  # with which timings are still reliable
MAX_LISTED = 100  # unreadable images on the screen; --json and --csv have all of them
# Metrics in the order in which they are printed: their names on the screen and their formats.
METRIC_FORMATS = {
    "map": ("mAP", ".2%"),
    "top1": ("top-1", ".2%"),
    "top5": ("top-5", ".2%"),
    "f1": ("F1", ".2%"),
    "balanced_accuracy": ("balanced", ".2%"),
    "macro_f1": ("F1", ".2%"),
    "nll": ("NLL", ".4f"),
    "brier": ("Brier", ".4f"),
    "ece": ("ECE", ".4f"),
    "ece_adaptive": ("ACE", ".4f"),
}


def print_json(document: object) -> None:
    """Print the one JSON document of `--json`."""
    print(json_format.dumps(document, indent=2))


def print_notes(notes: Sequence[str]) -> None:
    """Print notes to standard error."""
    for note in notes:
        print_stderr(f"note: {note}")


def require_new_files(*paths: Path | None, overwrite: bool) -> None:
    """Check, before any work is done, that no output file exists; None stands for an output that is not written."""
    for path in paths:
        if path is not None and path.exists() and not overwrite:
            message = f"{path} already exists. Choose another name, or add --overwrite."
            raise OutputError(message, code="output_exists")


def report_unreadable(unreadable: Sequence[tuple[str, str]], total: int) -> int:
    """List images that could not be read on standard error.

    Args:
        unreadable: Name and reason of each.
        total: How many images there were.

    Returns:
        The exit code: 3 if there are any, else 0.
    """
    for _, reason in unreadable[:MAX_LISTED]:
        print_stderr(escape_unprintable(reason))
    if len(unreadable) > MAX_LISTED:
        print_stderr(f"... and {len(unreadable) - MAX_LISTED:,} more")
    if unreadable:
        print_stderr(f"{len(unreadable):,} of {total:,} images could not be read.")
    return EXIT_UNREADABLE if unreadable else 0


def print_busy_note() -> None:
    """Warn on standard error, before something is timed, that other processes are running."""
    busy = busy_cores()
    if busy > MAX_BUSY_CORES:
        print_stderr(f"note: other processes use {busy:.1f} cores, so timings are unreliable.")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def print_predictions(results: "Sequence[ImageResult]") -> None:
    """Print the most probable classes of each image that could be read."""
    for result in results:
        if "error" in result:
            continue
        print(escape_unprintable(result["path"]))
        for score in result["predictions"]:
            print(f"  {score['probability']:7.2%}  {escape_unprintable(score['label'])}")


def print_evaluation(result: "Evaluation", robustness: "Robustness | None" = None) -> None:
    """Print metrics with their 95% intervals, the comparison with another model, and robustness."""
    print(f"images    {result.metrics['n']}")
    for name, (short_name, number_format) in METRIC_FORMATS.items():
        if name in result.metrics:
            value, (low, high) = result.metrics[name], result.intervals[name]
            print(f"{short_name:9} {value:{number_format}}  ({low:{number_format}} to {high:{number_format}})")
    if result.comparison is not None:
        print(f"the other {result.comparison.first:.2%}: {result.comparison.verdict()}")
    if robustness is not None:
        print_robustness(robustness)
    print_stderr(f"{result.images_per_second:.1f} images per second")


def print_robustness(robustness: "Robustness") -> None:
    """Print the accuracy on corrupted images: a line per family of corruptions, a column per severity."""
    count = len(robustness.accuracy)
    print(f"corrupted {robustness.mean:.2%}  (mean accuracy over {count} corruptions at five severities)")
    print("  severity " + "  ".join(f"{severity:>6}" for severity in range(1, 6)))
    for name, values in robustness.families().items():
        print(f"  {name:8} " + "  ".join(f"{value:6.1%}" for value in values))


def print_train_result(result: "TrainResult | None", json: bool) -> int:
    """Print the result of a run; None on processes other than the first.

    Returns:
        The exit code.
    """
    if result is None:
        return 0
    if json:
        document: dict[str, Any] = {"run": str(result.run_dir), "report": str(result.report), **result.metrics}
        document |= {"notes": result.notes, "best_step": result.best_step, "steps": result.steps}
        print_json(document | {"seconds": round(result.seconds, 1)})
    return EXIT_UNREADABLE if result.num_unreadable else 0
