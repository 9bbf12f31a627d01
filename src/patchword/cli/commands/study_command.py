"""`patchword study`: repeat an experiment of the paper at small scale."""

from pathlib import Path
from typing import Annotated

from ...core.text import print_stderr
from ..arguments import arg, positional


def study(
    name: Annotated[str, positional("NAME")],
    budget: Annotated[str, arg("TIME")] = "2h",
    seeds: int = 1,
    recipe: Annotated[str | None, arg("RECIPE")] = None,
    out: Annotated[Path | None, arg("DIR")] = None,
) -> int:
    """Repeat an experiment of the paper at small scale: a grid of training runs, a figure, and how to read it.

    Example: patchword study positions --budget 1h

    If a study is stopped or killed, the same command resumes it.

    Args:
        name: the study: data-size, compute, positions, head, norm, attention, resolution or inductive-bias
        budget: time for all runs together, e.g. 90m or 1h30m
        seeds: number of runs per cell of the grid, each with its own random seed
        recipe: recipe to vary; by default, a small ViT on CIFAR-10
        out: directory for the runs, the results and report.html; by default, studies/NAME
    """
    from ...config.overrides import parse_duration
    from ...core.runtime import machine_summary
    from ...recipes import load_recipe
    from ...report.figure_files import REPORT_FILE
    from ...studies import make_study, run_study
    from ...studies.definitions import SMALL
    from ...studies.runner import format_accuracy
    from ...studies.study_report import write_study

    definition = make_study(name, load_recipe(recipe) if recipe else SMALL)
    folder = out or Path("studies") / name
    rows = run_study(definition, folder, parse_duration(budget), seeds, print_stderr)
    write_study(definition, rows, folder, machine_summary())
    for row in rows:
        print(f"{row['series']:24} {row['x']!s:18} seed {row['seed']}  {format_accuracy(row)}")
    print_stderr(f"wrote {folder / REPORT_FILE}")
    return 0
