"""Figures of the tokens: norms by layer, similarity to one patch, and principal components as colors."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from .attention_plot import make_thumbnail
from .theme import COLORMAP, current_theme, hide_axes, new_figure

MAX_LAYERS = 8


def plot_token_norms(image: Image.Image, norms: np.ndarray) -> Figure:
    """Plots the input image and the norms of its patch tokens after some blocks, each on its own logarithmic scale.

    On a linear scale a few outliers would hide all other differences.
    """
    stages = np.unique(np.linspace(0, len(norms) - 1, min(len(norms), MAX_LAYERS)).round().astype(int))
    columns = min(len(stages) + 1, 5)
    rows = -(-(len(stages) + 1) // columns)
    figure = new_figure(2.1 * columns, 2.35 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    hide_axes(panels[0], "model input", 10).imshow(make_thumbnail(image))
    for axes, stage in zip(panels[1:], stages, strict=False):
        name = "input" if stage == 0 else f"after block {stage}"
        largest, median = norms[stage].max(), np.median(norms[stage])
        hide_axes(axes, f"{name}\nmedian {median:.3g}, largest {largest:.3g}", 8.5)
        axes.imshow(np.log(np.maximum(norms[stage], 1e-12)), cmap=COLORMAP, interpolation="nearest")
    for axes in panels[1 + len(stages) :]:
        axes.set_axis_off()
    return figure


def plot_patch_similarity(image: Image.Image, maps: Sequence[tuple[tuple[int, int], np.ndarray]]) -> Figure:
    """Plots the input image and the similarity of some of its patches to all others."""
    figure = new_figure(2.4 * (1 + len(maps)), 2.8)
    panels = figure.subplots(1, 1 + len(maps))
    hide_axes(panels[0], "model input", 10).imshow(make_thumbnail(image))
    for axes, ((row, column), values) in zip(panels[1:], maps, strict=True):
        hide_axes(axes, f"row {row + 1}, column {column + 1}", 10)
        axes.imshow(values, cmap=COLORMAP, vmin=-1, vmax=1, interpolation="nearest")
        box = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=current_theme().series[1], linewidth=2)
        axes.add_patch(box)
    return figure


def plot_patch_colors(images: Sequence[Image.Image], colors: np.ndarray) -> Figure:
    """Plots images, and the colors of their patches below."""
    figure = new_figure(2.1 * len(images), 4.3)
    panels = figure.subplots(2, len(images), squeeze=False)
    for column, image in enumerate(images):
        hide_axes(panels[0, column]).imshow(make_thumbnail(image))
        hide_axes(panels[1, column]).imshow(colors[column], interpolation="nearest")
    return figure
