"""The pages: each function prepares plain data and renders one template of `templates/`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.io import atomic_output
from ..core.text import escape_unprintable
from ..engines.bench import EngineBench
from ..evaluation.evaluate import Evaluation
from ..evaluation.robustness import Robustness
from ..inference.classifier import Classifier
from ..inference.inputs import InputImage
from ..metrics.classification import ClassificationMetrics
from ..metrics.per_class import MAX_CONFUSION_CLASSES, confusion_matrix
from ..plots.panel import Panel
from .bench_results import NAME as BENCH_FIGURE
from .bench_results import make_bench_panel
from .confusion import class_table, confusion_matrix_view
from .curves import training_curves
from .embedded_images import RenderedPanel, render_panels
from .environment import render
from .evaluation_panels import make_reliability_panel, make_robustness_panel
from .figure_files import REPORT_FILE, write_page
from .formatting import percent, plain
from .mistakes import MAX_MISTAKES, hardest_mistakes, thumbnails
from .report_data import ClassificationResults, TrainingReport
from .run_summary import evaluation_headline, metric_tiles, run_facts, training_headline

Facts = Sequence[tuple[str, str]]  # names and values, shown as a table

MAX_PAIRS = 15
EVALUATION_FIGURES = ("reliability", "corruptions")
MAX_NOTES = 100  # unreadable files on the page; the JSON has all
METRICS = {
    "map": ("Mean average precision", percent),
    "f1": ("Micro-averaged F1", percent),
    "top1": ("Top-1 accuracy", percent),
    "top5": ("Top-5 accuracy", percent),
    "balanced_accuracy": ("Balanced accuracy", percent),
    "macro_f1": ("Macro-averaged F1", percent),
    "nll": ("Negative log-likelihood (NLL)", "{:.4f}".format),
    "brier": ("Brier score", "{:.4f}".format),
    "ece": ("Expected calibration error (ECE)", "{:.4f}".format),
    "ece_adaptive": ("Adaptive ECE (bins of equal size)", "{:.4f}".format),
}


def write_training_report(run_dir: Path, report: TrainingReport) -> Path:
    """Write run_dir/report.html, replacing an older one; a kill or a full disk leaves that as it was."""
    target = Path(run_dir) / REPORT_FILE
    page = training_html(report, str(run_dir))
    with atomic_output(target, overwrite=True) as file:
        file.write_text(page, encoding="utf-8")
    return target


def training_html(report: TrainingReport, run_dir: str) -> str:
    """The report of a training run. `run_dir` is used in the commands of the next steps."""
    config = json.dumps(report.settings, indent=2, ensure_ascii=False, default=str)
    versions = {**report.machine, **report.provenance}
    return render(
        "training.html.j2",
        title=report.title,
        headline=training_headline(report),
        tiles=metric_tiles(report),
        facts=run_facts(report),
        curves=training_curves(report),
        mistakes_shown=mistakes_text(report),
        commands=next_steps(run_dir),
        notes=report.notes,
        environment=[(key, plain(value)) for key, value in versions.items()],
        config_lines=config.split("\n"),
        **results_values(report),
    )


def results_values(results: ClassificationResults) -> dict[str, object]:
    """What templates/results.html.j2 shows: confusion matrix, classes and mistakes."""
    return {
        "confusion": confusion_matrix_view(results),
        "pairs": results.confused_pairs(MAX_PAIRS),
        "classes": class_table(results),
        "multi_label": results.main_metric == "map",
        "mistakes": thumbnails(results),
    }


def mistakes_text(results: ClassificationResults) -> str:
    """Which of the mistakes are shown."""
    shown = min(len(results.mistakes), MAX_MISTAKES)
    if results.confusion is None:
        return f"The {shown} misclassified images with the highest loss."
    wrong = int(results.confusion.sum() - results.confusion.diagonal().sum())
    which = f"{shown} of {wrong:,} mistakes" if shown < wrong else "All mistakes"
    return f"{which}, highest loss first."


def next_steps(run_dir: str) -> list[tuple[str, str]]:
    """Commands with the comment above each."""
    model, exported = (shlex.quote(escape_unprintable(name)) for name in (run_dir, f"{run_dir}-timm"))
    return [
        ("classify images", f"patchword predict {model} photo.jpg"),
        ("evaluate on other data, one folder per class", f"patchword evaluate {model} photos/"),
        ("convert to timm's format for other libraries", f"patchword convert {model} {exported} --to timm"),
    ]


def write_evaluation(
    out: Path,
    title: str,
    classifier: Classifier,
    images: Sequence[InputImage],
    result: Evaluation,
    facts: Facts,
    robustness: Robustness | None = None,
) -> None:
    """Write the report of an evaluation, and its figures as PNG, SVG and arrays."""
    panels, confusion, data = [], None, result.accumulated
    if isinstance(data, ClassificationMetrics):
        if len(classifier.labels) <= MAX_CONFUSION_CLASSES:
            confusion = confusion_matrix(np.array(data.targets), np.array(data.predicted), len(classifier.labels))
        panels.append(make_reliability_panel(np.array(data.confidences), data.correct, float(result.metrics["ece"])))
    if robustness is not None:
        panels.append(make_robustness_panel(robustness))
    inputs = {image.name: image.image for image in images}

    def read_pixels(row: int) -> np.ndarray:
        return classifier.pixels(inputs[result.predictions[row]["name"]]).numpy()

    results = ClassificationResults(
        labels=classifier.labels,
        metrics=result.metrics,
        confusion=confusion,
        per_class=result.per_class,
        mistakes=hardest_mistakes(result.predictions, read_pixels),
    )
    comparison = "" if result.comparison is None else result.comparison.verdict()
    notes = [*classifier.checkpoint.notes, *(reason for _, reason in result.skipped[:MAX_NOTES])]
    page = evaluation_html(title, results, result.intervals, facts, panels, comparison, notes)
    write_page(out, page, panels, EVALUATION_FIGURES)


def evaluation_html(
    title: str,
    results: ClassificationResults,
    intervals: Mapping[str, tuple[float, float]],
    facts: Facts,
    panels: Sequence[Panel],
    comparison: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The report of an evaluation. `comparison` is a sentence about the other model, if there is one."""
    rows = [
        (name, show(results.metrics[key]), f"{show(intervals[key][0])} to {show(intervals[key][1])}")
        for key, (name, show) in METRICS.items()
        if key in intervals
    ]
    return render(
        "evaluation.html.j2",
        title=title,
        headline=evaluation_headline(results, intervals[results.main_metric]),
        facts=facts,
        metrics=rows,
        comparison=comparison,
        panels=render_panels(panels),
        mistakes_shown=mistakes_text(results),
        notes=notes,
        **results_values(results),
    )


def inspection_html(title: str, facts: Facts, panels: Sequence[Panel], notes: Sequence[str] = ()) -> str:
    """The report of an inspection."""
    absent = [f"{each.title}: {each.caption}" for each in panels if each.draw is None]
    rendered = render_panels(panels)
    return render("inspection.html.j2", title=title, facts=facts, panels=rendered, absent=absent, notes=notes)


def write_bench(out: Path, title: str, facts: Facts, rows: Sequence[EngineBench], accuracy: dict[str, float]) -> None:
    """Write the report of a bench, and its figure as PNG, SVG and arrays. `accuracy` of each engine may be empty."""
    panel = make_bench_panel(rows, accuracy)
    page = render("bench.html.j2", title=title, facts=facts, panels=render_panels([panel]))
    write_page(out, page, [panel], [BENCH_FIGURE])


def study_html(title: str, facts: Facts, panels: Sequence[Panel], limits: str) -> str:
    """The report of a study. `limits` says what it cannot show, and may be empty."""
    return render("study.html.j2", title=title, facts=facts, panels=render_panels(panels), limits=limits)


@dataclass(frozen=True)
class Contrast:
    """What a step of a story added: the same figure without it and with it, each with a name."""

    subject: str
    before: tuple[str, str]
    after: tuple[str, str]


@dataclass(frozen=True)
class Chapter:
    """A chapter of a story of several studies: `text` says why the step was made, `limits` what it cannot show."""

    title: str
    text: str
    facts: Facts
    panels: Sequence[Panel]
    limits: str
    contrast: Contrast

    @property
    def rendered(self) -> list[RenderedPanel]:
        """The figures as images inside the page."""
        return render_panels(self.panels)


def story_html(title: str, facts: Facts, chapters: Sequence[Chapter]) -> str:
    """The report of several studies that build on each other."""
    return render("story.html.j2", title=title, facts=facts, chapters=chapters)
