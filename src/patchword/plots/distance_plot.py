"""Mean attention distance and entropy, by layer and head: the paper's plot."""

import numpy as np
from matplotlib.figure import Figure

from ..inspection.attention_distance import AttentionDistance
from .current_theme import new_figure, plotted, current_theme


def plot_attention_distance(reach: AttentionDistance) -> Figure:
    figure = new_figure(10, 4.0)
    left, right = figure.subplots(1, 2)
    plotted(left, "Mean attention distance", "layer", "pixels")
    plotted(right, "Attention entropy", "layer", "bits")
    plot_heads_and_mean(left, reach.distance)
    plot_heads_and_mean(right, reach.entropy)
    left.margins(y=0.12)
    left.set_ylim(bottom=0)
    if reach.num_patches > 1:
        most = float(np.log2(reach.num_patches))
        right.axhline(most, color=current_theme().muted, linestyle=(0, (3, 3)), linewidth=1)
        right.set_ylim(0, 1.14 * most)
        right.annotate(
            f"uniform over {reach.num_patches} patches",
            (1, most),
            (2, 4),
            textcoords="offset points",
            color=current_theme().muted,
            fontsize=9,
        )
    return figure


def plot_heads_and_mean(axes: object, values: np.ndarray) -> None:
    """A dot for each head, a line through the means of the layers."""
    layers = np.arange(1, len(values) + 1)
    blue, orange = current_theme().series[:2]
    for head in range(values.shape[1]):
        label = "one head" if head == 0 else None
        axes.plot(layers, values[:, head], "o", color=blue, alpha=0.55, markersize=5, label=label)  # type: ignore[attr-defined]
    axes.plot(layers, values.mean(axis=1), color=orange, linewidth=2, label="mean over heads")  # type: ignore[attr-defined]
    axes.set_xticks(layers[:: max(1, len(layers) // 12)])  # type: ignore[attr-defined]
    axes.legend(frameon=False, loc="lower right")  # type: ignore[attr-defined]
