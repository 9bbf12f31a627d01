"""The page, top to bottom, and how it gets into the run's folder."""

import base64
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoints.files import atomic_output
from ..data.visible import visible
from .confusion import class_table, confusion
from .content import Report
from .curves import curves
from .pictures import MOST_MISTAKES, mistakes_grid
from .style import SCRIPT, STYLE
from .summary import hero, summary, tiles
from .text import count, escape, name, table


def write_report(folder: Path, report: Report) -> Path:
    """Writes folder/report.html, in place of an older one; a kill or a full disk leaves that as it was."""
    target = Path(folder) / "report.html"
    page = report_html(report, str(folder))
    with atomic_output(target, overwrite=True) as made:
        made.write_text(page, encoding="utf-8")
    return target


def report_html(report: Report, run: str) -> str:
    """The whole page. `run` is the path of the run, for the commands."""
    # Only this very script may run: should a label's markup ever slip through, the browser refuses it.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = [
        section("How it learned", curves(report), tag='div class="curves"'),
        section("What it confuses", confusion(report), tag='div class="beside"'),
        section("Each class, worst first", class_table(report), lead=class_lead(report)),
        section("Hardest mistakes", mistakes_grid(report) if report.mistakes else "", lead=mistakes_lead(report)),
        section("What to do next", next_steps(run)),
        section("Notes", notes(report)),
        section("How to repeat it", repeat(report)),
    ]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.title)}</title><style>{STYLE}</style></head><body><main>
<p class="kind">patchword training report</p><h1>{name(report.title)}</h1>
{hero(report)}{tiles(report)}{summary(report)}
{"".join(sections)}
<footer>Made by patchword {escape(__version__)}. This page needs no network; all of it is in this file.</footer>
</main><script>{SCRIPT}</script></body></html>
"""


def section(title: str, body: str, *, lead: str = "", tag: str = "div") -> str:
    if not body:
        return ""
    before = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{before}<{tag}>{body}</{tag.split()[0]}></section>\n"


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


def notes(report: Report) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in report.notes)}</ul>" if report.notes else ""


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
