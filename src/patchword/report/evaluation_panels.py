"""Figures of an evaluation: the reliability diagram, and accuracy on corrupted images."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..evaluation.corruptions import SEVERITIES
from ..evaluation.robustness import Robustness
from ..metrics.calibration import equal_width_bins
from ..metrics.classification import MIN_CALIBRATION_IMAGES
from ..plots.panel import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..metrics.calibration import Bin


def make_reliability_panel(confidences: np.ndarray, correct: np.ndarray, error: float) -> Panel:
    """The reliability diagram (Guo et al., 2017). `error` is the expected calibration error."""
    bins = equal_width_bins(confidences, correct)
    confidence, accuracy = float(confidences.mean()), float(correct.mean())
    verdict = f"well calibrated, within the uncertainty of {len(correct):,} images"
    if abs(confidence - accuracy) > max(0.01, 1.96 * float(np.sqrt(accuracy * (1 - accuracy) / len(correct)))):
        verdict = "overconfident" if confidence > accuracy else "underconfident"
    caption = f"Mean confidence {confidence:.1%}, accuracy {accuracy:.1%}: {verdict}. The expected calibration error, "
    caption += f"the mean gap between confidence and accuracy over the bins, is {100 * error:.1f} points"
    caption += ", but it is not reliable with so few images." if len(correct) < MIN_CALIBRATION_IMAGES else "."
    caption += " On the dashed diagonal, confidence equals accuracy."
    arrays = {
        "confidence": np.array([b.confidence for b in bins]),
        "accuracy": np.array([b.accuracy for b in bins]),
        "count": np.array([b.count for b in bins]),
    }
    draw = partial(reliability_figure, bins)
    return Panel("reliability", "Calibration", caption, "", draw, arrays)


def reliability_figure(bins: "list[Bin]") -> "Figure":
    """Accuracy over confidence with 95% error bars, above the number of images in each bin."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(6.4, 5.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    style_axes(top, "Reliability diagram", "", "accuracy")
    top.plot([0, 1], [0, 1], color=current_theme().muted, linewidth=1, linestyle="--")
    confidence, accuracy, count = (np.array([getattr(b, n) for b in bins]) for n in ("confidence", "accuracy", "count"))
    reach = 1.96 * np.sqrt(np.maximum(accuracy * (1 - accuracy), 0.25 / np.maximum(count, 1)) / count)
    bounds = np.stack([np.minimum(reach, accuracy), np.minimum(reach, 1 - accuracy)])
    top.errorbar(
        confidence, accuracy, yerr=bounds, color=current_theme().series[0], marker="o", capsize=3, linestyle="none"
    )
    top.set(xlim=(0, 1.02), ylim=(-0.02, 1.02))
    style_axes(bottom, "", "confidence", "images")
    bottom.yaxis.get_major_locator().set_params(integer=True)
    bottom.bar(confidence, count, width=0.03, color=current_theme().series[0], alpha=0.6)
    return figure


def make_robustness_panel(found: Robustness) -> Panel:
    """A line for each family of corruptions, and a table of all corruptions."""
    worst = min(found.accuracy, key=lambda name: float(np.mean(found.accuracy[name])))
    caption = f"Accuracy on {found.n:,} images: {found.clean:.1%} clean, {found.mean:.1%} on average over "
    caption += f"{len(found.accuracy)} corruptions at five severities. Worst: {worst.replace('_', ' ')}."
    rows = [
        (name.replace("_", " "), *(f"{100 * value:.1f}" for value in values), f"{100 * np.mean(values):.1f}")
        for name, values in found.accuracy.items()
    ]
    head = ("accuracy, %", *(f"severity {s}" for s in SEVERITIES), "mean")
    arrays = {name: np.array(values) for name, values in found.accuracy.items()}
    draw = partial(robustness_figure, found)
    return Panel("corruptions", "Robustness to corruptions", caption, "", draw, arrays, (head, *rows))


def robustness_figure(found: Robustness) -> "Figure":
    """Accuracy over severity, a line for each family."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(7.2, 4.4)
    axes = style_axes(figure.subplots(), "Accuracy by corruption family", "severity", "accuracy")
    for color, (name, values) in zip(current_theme().series, found.families().items(), strict=False):
        axes.plot((0, *SEVERITIES), (found.clean, *values), color=color, marker="o", linewidth=1.8, label=name)
    axes.set(ylim=(0, 1.02), xticks=(0, *SEVERITIES))
    axes.set_xticklabels(("clean", *map(str, SEVERITIES)))
    axes.legend(frameon=False)
    return figure
