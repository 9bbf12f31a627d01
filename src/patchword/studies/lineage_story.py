"""The lineage of ViT in one report: each step with the study that shows what it adds, in a share of one budget."""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.io import read_json, replace_json
from ..errors import ConfigError
from ..report.figure_files import write_page
from ..report.pages import Chapter, story_html
from .definitions import make_study
from .lineage_steps import STEPS, vit_on_digits
from .runner import RESULTS_FILE, BudgetTooShortError, format_seconds, holds_nothing, make_plan, run_study
from .study import ResultRow, Study
from .study_report import describe_study, make_panels

NAME = "lineage"


def run_lineage(
    out: Path, budget: float, seeds: int = 1, machine: str = "", say: Callable[[str], object] = lambda text: None
) -> dict[str, list[ResultRow]]:
    """Run the study of each step in a directory of its own, and write one report, which grows with each chapter.

    It is resumed like its studies, and from any moment, also while it plans.

    Returns:
        The rows of each study, by its name.
    """
    start_story(out, budget, seeds)
    studies = {step.study: vit_on_digits() if step.study == "vit" else make_study(step.study) for step in STEPS}
    plan_chapters(studies, out, budget, seeds, say)
    rows: dict[str, list[ResultRow]] = {}
    chapters, panels = [], []
    for step in STEPS:
        say(step.title)
        study = studies[step.study]
        rows[step.study] = run_study(study, out / step.study, step.fraction * budget, seeds, say)
        figures = make_panels(study, rows[step.study])
        facts = [fact for fact in describe_study(study, rows[step.study], machine) if fact[0] != "Machine"]
        contrast = step.contrast.measure(rows[step.study])
        chapters.append(Chapter(step.title, step.text, facts, figures, study.limits, contrast))
        panels += figures
        replace_json(out / RESULTS_FILE, {**header(budget, seeds), "chapters": rows})
        page = story_html("From seq2seq to ViT: what each step added", [("Machine", machine)], chapters)
        write_page(out, page, panels, [panel.name for panel in panels])
    return rows


def header(budget: float, seeds: int) -> dict[str, Any]:
    """What results.json says besides the rows."""
    return {"study": NAME, "budget": budget, "seeds": seeds}


def start_story(out: Path, budget: float, seeds: int) -> None:
    """Write results.json without any chapter, by which a story that was stopped is known, however early that was.

    Raises:
        ConfigError: The directory holds anything but this story, with the same settings.
    """
    if (out / RESULTS_FILE).exists() and (saved := read_json(out / RESULTS_FILE)).get("study") == NAME:
        if (saved["budget"], saved["seeds"]) != (budget, seeds):
            raise ConfigError(
                f"{out} was started with --budget {format_seconds(saved['budget'])} --seeds {saved['seeds']}. Use "
                "these, or choose another --out.",
                code="study_differs",
            )
    elif out.exists() and not holds_nothing(out, RESULTS_FILE):
        raise ConfigError(
            f"{out} exists and is not the report of the lineage. Choose another --out.", code="not_a_study"
        )
    else:
        replace_json(out / RESULTS_FILE, {**header(budget, seeds), "chapters": {}})


def plan_chapters(
    studies: dict[str, Study], out: Path, budget: float, seeds: int, say: Callable[[str], object]
) -> None:
    """Plan all chapters before the first run, so that a budget that is too short for one of them costs no time.

    Raises:
        BudgetTooShortError: It says how long the whole story must be.
    """
    needed: dict[str, float] = {}
    for step in STEPS:
        try:
            make_plan(studies[step.study], out / step.study, step.fraction * budget, seeds, say, time.monotonic)
        except BudgetTooShortError as error:
            needed[step.title] = error.needed / step.fraction
    if needed:
        remove_plans(out)
        title = max(needed, key=lambda each: needed[each])
        raise BudgetTooShortError.explain(f"{format_seconds(budget)} are too short for {title!r}", 1.1 * needed[title])


def remove_plans(out: Path) -> None:
    """Remove a story without any run, so that another budget can use its directory.

    results.json goes last: without it, what a kill leaves would not be known as a story.
    """
    for step in STEPS:
        shutil.rmtree(out / step.study, ignore_errors=True)
    (out / RESULTS_FILE).unlink()
    with contextlib.suppress(OSError):  # it holds something of the user
        out.rmdir()
