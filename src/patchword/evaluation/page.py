"""An evaluation as a folder: a page, its figures as files, and the numbers behind them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..classifier import Classifier
from ..errors import ImageError
from ..figures.files import write_page
from ..report.content import Graded, Mistake
from ..report.evaluated import evaluation_html
from ..report.pictures import MOST_MISTAKES
from .classes import MOST_CONFUSED, confusion_matrix
from .exhibits import reliability_exhibit, robustness_exhibit
from .measure import Evaluation, Labelled
from .metrics import Tally
from .robustness import Robustness

MOST_NOTED = 100  # unreadable files on the page; the JSON has all
NAMES = ("reliability", "corruptions")  # of all exhibits that there may be


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
            read = each.picture(mode=classifier.preprocess.mode) if callable(each.picture) else each.picture
            image = classifier.pixels(read).numpy()
        except ImageError:  # it was there a minute ago
            continue
        said, loss = float(str(row["probability"])), float(str(row["loss"]))
        yield Mistake(each.name, image, str(row["true"]), str(row["predicted"]), said, loss)
