"""The page, top to bottom, and how it gets into the run's folder."""

import json
import shlex
from pathlib import Path
from typing import Any

from ..core.io import atomic_output
from ..core.text import count, visible
from .confusion import class_table, confusion
from .content import Report
from .curves import curves
from .document import document, notes_list, section
from .pictures import MOST_MISTAKES, mistakes_grid
from .style import SCRIPT
from .summary import hero, summary, tiles
from .text import escape, table


def write_report(folder: Path, report: Report) -> Path:
    """Writes folder/report.html, in place of an older one; a kill or a full disk leaves that as it was."""
    target = Path(folder) / "report.html"
    page = report_html(report, str(folder))
    with atomic_output(target, overwrite=True) as made:
        made.write_text(page, encoding="utf-8")
    return target


def report_html(report: Report, run: str) -> str:
    """The whole page. `run` is the path of the run, for the commands."""
    sections = [
        section("How it learned", curves(report), tag='div class="curves"'),
        section("What it confuses", confusion(report), tag='div class="beside"'),
        section("Each class, worst first", class_table(report), lead=class_lead(report)),
        section("Hardest mistakes", mistakes_grid(report) if report.mistakes else "", lead=mistakes_lead(report)),
        section("What to do next", next_steps(run)),
        section("Notes", notes_list(report.notes)),
        section("How to repeat it", repeat(report)),
    ]
    body = hero(report) + tiles(report) + summary(report) + "\n" + "".join(sections)
    return document(report.title, "patchword training report", body, SCRIPT)


def class_lead(report: Report) -> str:
    if report.headline == "map":
        return ""
    return "The thin line is the 95% interval: with few pictures a class's place in this list says little."


def mistakes_lead(report: Report) -> str:
    shown = min(len(report.mistakes), MOST_MISTAKES)
    advice = "Look for wrong labels: they gather here."
    if report.confusion is None:
        return f"The {count(shown)} pictures with the largest loss. {advice}"
    wrong = int(report.confusion.sum() - report.confusion.diagonal().sum())
    of = f"{shown} of {count(wrong)} mistakes" if shown < wrong else "All mistakes"
    return f"{of}, those first to which the model gave the true class the least probability. {advice}"


def next_steps(run: str) -> str:
    folder = shlex.quote(visible(run))
    commands = [
        ("classify pictures", f"patchword predict {folder} photo.jpg"),
        ("measure it on other data, one folder for each class", f"patchword evaluate {folder} photos/"),
        ("hand it to other libraries", f"patchword convert {folder} {shlex.quote(f'{visible(run)}-timm')} --to timm"),
    ]
    lines = "\n".join(f"<i># {escape(why)}</i>\n{escape(command)}" for why, command in commands)
    return f"<p>From the folder where it was trained:</p><pre>{lines}</pre>"


def repeat(report: Report) -> str:
    """The configuration and everything that the result may depend on."""
    text = json.dumps(report.settings, indent=2, ensure_ascii=False, default=str)
    lines = "\n".join(map(escape, text.split("\n")))
    folded = f"<details><summary>The whole configuration (config.json)</summary><pre>{lines}</pre></details>"
    facts = [(escape(key), escape(plain(value))) for key, value in {**report.machine, **report.provenance}.items()]
    return (table(facts) if facts else "") + folded


def plain(value: Any) -> str:
    """In words, without brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
