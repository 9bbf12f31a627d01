"""Mean attention distance and entropy by layer and head (the paper's Figure 7, right)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..inspection.attention_distance import AttentionDistance
from .theme import current_theme, new_figure, style_axes


def plot_attention_distance(result: AttentionDistance) -> Figure:
    """Plots distance and entropy side by side."""
    figure = new_figure(10, 4.0)
    left, right = figure.subplots(1, 2)
    style_axes(left, "Mean attention distance", "layer", "pixels")
    style_axes(right, "Attention entropy", "layer", "bits")
    plot_heads_and_mean(left, result.distance)
    plot_heads_and_mean(right, result.entropy)
    left.margins(y=0.12)
    left.set_ylim(bottom=0)
    if result.num_patches > 1:
        maximum = float(np.log2(result.num_patches))
        right.axhline(maximum, color=current_theme().muted, linestyle=(0, (3, 3)), linewidth=1)
        right.set_ylim(0, 1.14 * maximum)
        right.annotate(
            f"uniform over {result.num_patches} patches",
            (1, maximum),
            (2, 4),
            textcoords="offset points",
            color=current_theme().muted,
            fontsize=9,
        )
    return figure


def plot_heads_and_mean(axes: Axes, values: np.ndarray) -> None:
    """Plots a dot for each head, and a line through the layers' means."""
    layers = np.arange(1, len(values) + 1)
    blue, orange = current_theme().series[:2]
    for head in range(values.shape[1]):
        label = "one head" if head == 0 else None
        axes.plot(layers, values[:, head], "o", color=blue, alpha=0.55, markersize=5, label=label)
    axes.plot(layers, values.mean(axis=1), color=orange, linewidth=2, label="mean over heads")
    axes.set_xticks(layers[:: max(1, len(layers) // 12)])
    axes.legend(frameon=False, loc="lower right")
