"""An evaluation as a folder: a page, its figures as files, and the numbers behind them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..classifier import Classifier
from ..core.text import plural
from ..errors import ImageError
from ..evaluation.classes import MOST_CONFUSED, confusion_matrix
from ..evaluation.exhibits import reliability_exhibit, robustness_exhibit
from ..evaluation.measure import Evaluation, Labelled
from ..evaluation.metrics import Tally
from ..evaluation.robustness import Robustness
from ..figures.exhibit import Exhibit
from ..figures.files import write_page
from .confusion import class_table, confusion, listing
from .content import Graded, Mistake
from .document import document, notes_list, section
from .exhibited import shown
from .pictures import MOST_MISTAKES, mistakes_grid
from .summary import accuracy_scale
from .text import escape, percent, table

NAMES = ("reliability", "corruptions")  # of all exhibits that there may be
MOST_NOTED = 100  # unreadable files on the page; the JSON has all
WORDS = {
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


def write_evaluation(
    out: Path,
    classifier: Classifier,
    pictures: Sequence[Labelled],
    result: Evaluation,
    facts: Sequence[tuple[str, str]],
    robust: Robustness | None = None,
) -> None:
    """`facts` are lines of plain text, the first of which is the model."""
    tally, exhibits = result.tally, []
    confusion = None
    if isinstance(tally, Tally) and len(classifier.labels) <= MOST_CONFUSED:
        confusion = confusion_matrix(np.array(tally.targets), np.array(tally.predicted), len(classifier.labels))
    if isinstance(tally, Tally):
        exhibits.append(reliability_exhibit(np.array(tally.confidences), tally.right, float(result.figures["ece"])))
    if robust is not None:
        exhibits.append(robustness_exhibit(robust))
    graded = Graded(
        labels=classifier.labels,
        figures=result.figures,
        confusion=confusion,
        per_class=result.per_class,
        mistakes=tuple(hardest(classifier, pictures, result.rows)),
    )
    against = "" if result.comparison is None else result.comparison.verdict()
    notes = [*classifier.checkpoint.notes, *(reason for _, reason in result.skipped[:MOST_NOTED])]
    page = evaluation_html(graded, result.intervals, facts, exhibits, against, notes)
    write_page(out, page, exhibits, NAMES)


def hardest(
    classifier: Classifier, pictures: Sequence[Labelled], rows: Sequence[Mapping[str, object]]
) -> Iterator[Mistake]:
    """Wrong ones by falling loss, read again as the model sees them."""
    named = {each.name: each for each in pictures}
    wrong = sorted((row for row in rows if row["true"] != row["predicted"]), key=lambda row: -float(str(row["loss"])))
    for row in wrong[:MOST_MISTAKES]:
        each = named[str(row["name"])]
        try:
            image = classifier.pixels(each.picture).numpy()
        except ImageError:  # it was there a minute ago
            continue
        said, loss = float(str(row["probability"])), float(str(row["loss"]))
        yield Mistake(each.name, image, str(row["true"]), str(row["predicted"]), said, loss)


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
        for key, (words, show) in WORDS.items()
        if key in intervals
    )
    head = "<th>Figure</th><th class=number>value</th><th class=number>95% interval</th>"
    return section("Figures", listing(head, rows))
