"""Deletion and insertion curves of each explanation method, and of a random order."""

import numpy as np
from matplotlib.figure import Figure

from ..inspection.explain import METHODS
from ..inspection.faithfulness import RANDOM_ORDER, FaithfulnessCurves
from .theme import current_theme, new_figure, style_axes


def plot_faithfulness(curves: dict[str, FaithfulnessCurves]) -> Figure:
    """Plots the mean curves over the images."""
    figure = new_figure(10, 4.0)
    panels = figure.subplots(1, 2, sharey=True)
    style_axes(panels[0], "Deletion: lower is better", "fraction of the image removed", "probability of the class")
    style_axes(panels[1], "Insertion: higher is better", "fraction of the image shown", "")
    colors = dict(zip(METHODS, current_theme().series, strict=True)) | {
        RANDOM_ORDER: current_theme().muted
    }  # the same in every report
    for name, method_curves in curves.items():
        style = {"linestyle": (0, (3, 3))} if name == RANDOM_ORDER else {}
        for axes, values in zip(panels, (method_curves.deletion, method_curves.insertion), strict=True):
            x = np.linspace(0, 1, values.shape[1])
            axes.plot(x, values.mean(axis=0), color=colors[name], linewidth=2, label=name, **style)
    for axes in panels:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0, 1)
    panels[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
