"""The top of a report: the main metric, the other metrics, and what was trained, in a few lines."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.text import format_count, pluralize
from ..metrics.intervals import wilson
from .formatting import duration, percent
from .report_data import ClassificationResults, TrainingReport, finite

SPLITS = {"train": "training", "val": "validation", "test": "test"}
SELECTED = "the checkpoint was selected on the validation set, so expect slightly lower accuracy on new images"
HELD_OUT = "the test set was not used for model selection"

MetricText = tuple[str, str]  # value, name


@dataclass(frozen=True)
class Headline:
    """The main metric: its value, what it is, how certain it is; and a scale from 0 to 100% for an accuracy."""

    score: float | None  # None: not measured
    text: str
    context: str = ""
    interval: tuple[float, float] | None = None
    baseline: float | None = None  # the accuracy of always predicting the most frequent class


def training_headline(report: TrainingReport) -> Headline:
    """The accuracy on the test set, or on the validation set if there is no test set."""
    score, n = finite(report.metrics.get(report.main_metric)), int(report.metrics.get("n", 0))
    split = SPLITS.get(report.split, report.split)
    if score is None:
        return Headline(None, f"There are no {split} metrics.")
    images = pluralize(n, f"{split} image")
    context = ["one seed", SELECTED if report.split == "val" else HELD_OUT]
    if report.main_metric == "map":
        return Headline(score, f"mean average precision on {images}", f"{'; '.join(context)}.".capitalize())
    interval = wilson(score, n)
    certainty = f"95% confidence interval {percent(interval[0])} to {percent(interval[1])} (Wilson)"
    context = [certainty, *context]
    return Headline(
        score, f"top-1 accuracy on {images}", f"{'; '.join(context)}.", interval, report.majority_baseline()
    )


def evaluation_headline(results: ClassificationResults, interval: tuple[float, float]) -> Headline:
    """The main metric of an evaluation with its measured interval."""
    name = "mean average precision" if results.main_metric == "map" else "top-1 accuracy"
    text = f"{name} on {pluralize(int(results.metrics['n']), 'image')}"
    context = f"95% confidence interval {percent(interval[0])} to {percent(interval[1])}."
    score = float(results.metrics[results.main_metric])
    return Headline(score, text, context, interval, results.majority_baseline())


def metric_tiles(results: ClassificationResults) -> list[MetricText]:
    """The other metrics of a run; metrics that were not measured are left out."""
    known = {
        "top5": ("top-5 accuracy", percent),
        "nll": ("loss (negative log-likelihood)", "{:.3f}".format),
        "ece": ("expected calibration error (ECE)", percent),
        "ece_calibrated": ("ECE after temperature scaling", percent),
        "f1": ("F1", "{:.3f}".format),
    }
    if len(results.labels) <= 5:
        known.pop("top5")  # always 100%
    found = {key: finite(results.metrics.get(key)) for key in known}
    return [(known[key][1](value), known[key][0]) for key, value in found.items() if value is not None]


def run_facts(report: TrainingReport) -> list[tuple[str, str]]:
    """What was trained, on what, for how long: names and values."""
    settings, train = report.settings, report.rows("train")
    facts = [("Model", model_text(settings.get("model") or {}))]
    if report.parameters is not None:
        facts.append(("Parameters", format_count(report.parameters)))
    facts.append(("Initialized from", str(settings.get("init") or "random weights (trained from scratch)")))
    facts.append(("Data", data_text(report)))
    if train:  # every tenth step has a row; the last step of a run has one of validation
        last = max((train[-1], *report.rows("val")), key=lambda row: finite(row.get("step")) or 0)
        length = f"{finite(last.get('epoch')) or 0:.3g} epochs, {format_count(int(last.get('step') or 0))} steps"
        facts.append(("Training length", f"{length}, batch size {format_count(settings.get('batch_size', 0))}"))
    optim = settings.get("optim") or {}
    if optim:
        shape = (settings.get("schedule") or {}).get("shape", "")
        facts.append(("Optimizer", f"{optim.get('name')}, learning rate {optim.get('lr'):g}, {shape} schedule"))
    if report.seconds is not None:
        facts.append(("Training time", duration(report.seconds)))
    speeds = [v for row in train if (v := finite(row.get("images_per_second"))) is not None]
    if speeds:
        facts.append(("Throughput", f"{statistics.median(speeds):,.0f} images per second in training (median)"))
    return [*facts, ("Seed", str(settings.get("seed", "unknown")))]


def model_text(model: Mapping[str, Any]) -> str:
    """The architecture in one line."""
    size = " x ".join(map(str, model.get("image_size", ())))
    if "layers" in model:
        layers = ", ".join(map(str, model["layers"]))
        return f"ResNet: {layers} blocks, width factor {model.get('width_factor', 1)}, {size} images"
    if "embed_dim" not in model:
        return "unknown"
    patch = " x ".join(map(str, model.get("patch_size", ())))
    stem = "" if model.get("stem", "linear") == "linear" else f", {model['stem']} stem"
    blocks = f"{model.get('depth')} blocks, width {model['embed_dim']}, {model.get('num_heads')} heads"
    return f"ViT: {blocks}, {patch} patches, {size} images{stem}"


def data_text(report: TrainingReport) -> str:
    """The source of the data, its splits and the number of classes."""
    source = str((report.settings.get("data") or {}).get("source") or "in memory")
    sizes = [f"{format_count(n)} {SPLITS.get(split, split)}" for split, n in report.samples.items()]
    images = f": {', '.join(sizes)} images" if sizes else ""
    return f"{source}{images}; {pluralize(len(report.labels), 'class', 'es')}"
