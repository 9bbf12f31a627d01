"""The command that repeats the paper's experiments in small: study."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from ..model_args import arg
from ..output import print_status


def study(
    name: Annotated[Positional[str], arg("NAME")],
    budget: str = "2h",
    seeds: int = 1,
    recipe: Annotated[str | None, arg("RECIPE")] = None,
    out: Annotated[Path | None, arg("DIR")] = None,
) -> int:
    """Repeat an experiment of the paper in small: a grid of training runs, a figure, and what it says.

    Example: patchword study positions --budget 1h

    Stopped or killed, the same command goes on where it was.

    Args:
        name: data-size, compute, positions, head, norm, attention, resolution or inductive-bias
        budget: for all runs together, e.g. 90m
        seeds: runs of each cell
        recipe: a recipe to vary in place of the small ViT on CIFAR-10
        out: folder for the runs, the table and report.html; studies/NAME if not given
    """
    from ...config.overrides import parse_duration
    from ...core.runtime import machine_summary
    from ...recipes import load_recipe
    from ...report.figure_files import REPORT_FILE
    from ...studies import make_study, run_study
    from ...studies.definitions import SMALL
    from ...studies.runner import format_accuracy
    from ...studies.study_report import write_study

    chosen = make_study(name, load_recipe(recipe) if recipe else SMALL)
    folder = out or Path("studies") / name
    rows = run_study(chosen, folder, parse_duration(budget), seeds, print_status)
    write_study(chosen, rows, folder, machine_summary())
    for row in rows:
        print(f"{row['series']:24} {row['x']!s:18} seed {row['seed']}  {format_accuracy(row)}")
    print_status(f"wrote {folder / REPORT_FILE}")
    return 0
