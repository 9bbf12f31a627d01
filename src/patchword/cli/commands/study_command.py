"""`patchword study`: measure a claim of the paper, or of what led to it, at small scale."""

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
    """Measure a claim of the paper, or of what led to it, at small scale: a grid of runs, figures, how to read them.

    Example: patchword study positions --budget 1h

    Studies of ViT: data-size, compute, positions, head, norm, attention, resolution and inductive-bias. Of attention in
    ResNets: non-local and sasa. Of the way to ViT: seq2seq, spelling, order, warmup, bert, equivariance and gan;
    "lineage" tells that story in one report (--budget 15m). If a study is stopped or killed, the same command resumes
    it.

    Args:
        name: the study, or "lineage" for the story from seq2seq to ViT in one report
        budget: time for all runs together, e.g. 90m or 1h30m
        seeds: number of runs per cell of the grid, each with its own random seed
        recipe: recipe to vary, in studies of ViT and ResNets; by default, a small ViT on CIFAR-10
        out: directory for the runs, the results and report.html; by default, studies/NAME
    """
    from ...config.overrides import parse_duration
    from ...core.runtime import machine_summary
    from ...errors import ConfigError
    from ...recipes import load_recipe
    from ...report.figure_files import REPORT_FILE
    from ...studies import make_study, run_lineage, run_study
    from ...studies.lineage_story import NAME as LINEAGE
    from ...studies.runner import format_row
    from ...studies.study_report import write_study

    folder, seconds = out or Path("studies") / name, parse_duration(budget)
    if name == LINEAGE:
        if recipe:
            raise ConfigError("--recipe: the lineage has models and data of its own. Leave --recipe out.")
        chapters = run_lineage(folder, seconds, seeds, machine_summary(), print_stderr)
        rows = [row for chapter in chapters.values() for row in chapter]
    else:
        definition = make_study(name, load_recipe(recipe) if recipe else None)
        rows = run_study(definition, folder, seconds, seeds, print_stderr)
        write_study(definition, rows, folder, machine_summary())
    for row in rows:
        print(format_row(row))
    print_stderr(f"wrote {folder / REPORT_FILE}")
    return 0
