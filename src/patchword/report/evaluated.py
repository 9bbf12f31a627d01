"""The page of an evaluation."""

from collections.abc import Mapping, Sequence

from ..figures.exhibit import Exhibit
from .confusion import class_table, confusion
from .content import Graded
from .document import document, notes_list, section
from .exhibited import shown
from .pictures import MOST_MISTAKES, mistakes_grid
from .summary import accuracy_scale
from .text import escape, percent, plural, table

SHOWN = {
    "map": ("mean average precision", percent),
    "f1": ("F1 of all decisions", percent),
    "top1": ("accuracy", percent),
    "top5": ("among the five best guesses", percent),
    "balanced_accuracy": ("accuracy, every class counting alike", percent),
    "macro_f1": ("F1, every class counting alike", percent),
    "nll": ("loss (negative log-likelihood)", "{:.4f}".format),
    "brier": ("Brier score", "{:.4f}".format),
    "ece": ("calibration error", "{:.4f}".format),
    "ece_adaptive": ("calibration error, bins of equal size", "{:.4f}".format),
}


def evaluation_html(
    graded: Graded,
    intervals: Mapping[str, tuple[float, float]],
    facts: Sequence[tuple[str, str]],
    exhibits: Sequence[Exhibit],
    comparison: str = "",
    notes: Sequence[str] = (),
) -> str:
    """`facts` are lines of plain text: the model, the data, the speed."""
    body = hero(graded, intervals[graded.headline]) + "<p></p>"
    body += table([(escape(key), escape(value)) for key, value in facts]) + figures_table(graded, intervals)
    body += section("Against the other model", f"<p>{escape(comparison)}</p>" if comparison else "")
    body += section("What it confuses", confusion(graded), tag='div class="beside"')
    body += shown(exhibits)
    body += section("Each class, worst first", class_table(graded))
    lead = f"Those with the largest loss, {MOST_MISTAKES} at most."
    body += section("Hardest mistakes", mistakes_grid(graded) if graded.mistakes else "", lead=lead)
    body += section("Notes", notes_list(notes))
    return document(dict(facts)["model"], "patchword evaluation", body)


def hero(graded: Graded, interval: tuple[float, float]) -> str:
    score, (low, high) = float(graded.figures[graded.headline]), interval
    pictures = plural(int(graded.figures["n"]), "picture")
    said = f"of {pictures} recognised at the first guess"
    if graded.headline == "map":
        said = f"mean average precision on {pictures}"
    context = f"95% interval {percent(low)} to {percent(high)}."
    about = f"<p><b>{escape(said)}</b></p><p class=soft>{context}</p>"
    scale = accuracy_scale(graded, score, low, high)
    return f'<div class="hero"><div class="big">{percent(score)}</div><div>{about}</div>{scale}</div>\n'


def figures_table(graded: Graded, intervals: Mapping[str, tuple[float, float]]) -> str:
    rows = "".join(
        f'<tr><td>{words}</td><td class="number">{show(graded.figures[key])}</td>'
        f'<td class="number">{show(intervals[key][0])} to {show(intervals[key][1])}</td></tr>'
        for key, (words, show) in SHOWN.items()
        if key in intervals
    )
    head = "<th>Figure</th><th class=number>value</th><th class=number>95% interval</th>"
    return section("Figures", f'<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>')
