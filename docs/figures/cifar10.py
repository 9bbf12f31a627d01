"""The paper's Figure 7 for the bundled model of CIFAR-10: filters, positions and attention distance.

The model has a convolutional stem and relative positions, so its filters are those of a convolution, and its positions
are biases for each offset instead of vectors.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from patchword.checkpoints import read_checkpoint
from patchword.inference.classifier import Classifier
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images, sample_evenly
from patchword.inspection import embedding_filters, measure_attention_distance
from patchword.inspection.attention_distance import patch_distances
from patchword.models import ViT
from patchword.plots.distance_plot import plot_heads_and_mean
from patchword.plots.filter_plot import plot_filters
from patchword.plots.theme import COLORMAP, current_theme, mosaic, new_figure, show_image, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, DATASET = "patchword:cifar10", "cifar10"
NUM_IMAGES = 64  # as `patchword inspect` takes by default
REACH = 4  # patches to each side that are shown around a patch, of 7
RESOLUTION = 110  # dots per inch


@cache
def load_classifier() -> Classifier:
    """The bundled model."""
    return Classifier(read_checkpoint(NAME))


def load_model() -> ViT:
    """The bundled model as a module."""
    model = load_classifier().model
    assert isinstance(model, ViT)
    return model


def draw_filters() -> "Figure":
    """Principal components and filters of the first convolution, as `patchword inspect` draws them."""
    return plot_filters(embedding_filters(load_model()))


def relative_weights(model: ViT) -> np.ndarray:
    """Where a head would attend if all patches were alike: softmax of its biases, (L, H, 2h-1, 2w-1).

    The patch itself is in the center, and the patch below it below the center.
    """
    tables = torch.stack([block.attention.bias.relative.detach().float() for block in model.blocks])  # type: ignore[union-attr]
    weights = tables.flatten(2).softmax(dim=-1).view_as(tables)
    return weights.flip(2, 3).numpy()  # the tables are indexed by the query's place minus the key's


def draw_positions() -> "Figure":
    """What the relative positions alone make each head attend to; the patch itself is in the center of each tile."""
    weights = relative_weights(load_model())
    rows, columns = (slice(n // 2 - REACH, n // 2 + REACH + 1) for n in weights.shape[2:])
    weights = weights[:, :, rows, columns]
    layers, heads, height, width = weights.shape
    tiles = weights / weights.max(axis=(2, 3), keepdims=True)
    figure = new_figure(8.4, 6.2)
    axes = figure.subplots()
    drawn = show_image(axes, mosaic(tiles.reshape(-1, height, width), heads, gap=2), cmap=COLORMAP, vmin=0, vmax=1)
    for layer in range(layers):
        for head in range(heads):
            x, y = head * (width + 2) + width // 2, layer * (height + 2) + height // 2
            axes.plot([x], [y], "+", color="white", markersize=5, markeredgewidth=0.7)
    axes.set_xticks([i * (width + 2) + width // 2 for i in range(heads)], [str(i + 1) for i in range(heads)])
    axes.set_yticks([i * (height + 2) + height // 2 for i in range(layers)], [str(i + 1) for i in range(layers)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="head", ylabel="layer")
    axes.set_title("Learned relative positions: where a patch (+) attends", loc="left", fontweight="bold")
    figure.colorbar(drawn, ax=axes, label="weight, relative to the largest", fraction=0.04, pad=0.02)  # type: ignore[arg-type]
    return figure


def draw_distance() -> "Figure":
    """Mean attention distance by layer and head on test images, with that of uniform attention."""
    classifier, model = load_classifier(), load_model()
    batch = load_image_batch(classifier, sample_evenly(resolve_images((DATASET,)), NUM_IMAGES), 1)
    reach = measure_attention_distance(model, [classifier.preprocess.normalize(batch.pixels)])
    uniform = float(patch_distances(model.config.grid, model.config.stride).mean())
    figure = new_figure(6.4, 4.0)
    axes = style_axes(
        figure.subplots(), f"Mean attention distance on {reach.num_images} test images", "layer", "pixels"
    )
    plot_heads_and_mean(axes, reach.distance)
    axes.axhline(uniform, color=current_theme().muted, linestyle=(0, (3, 3)), linewidth=1)
    axes.annotate(
        f"uniform attention: {uniform:.1f}", (1, uniform), (2, -13), textcoords="offset points",
        color=current_theme().muted, fontsize=9,
    )  # fmt: skip
    axes.set_ylim(0, 1.06 * uniform)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))
    return figure


def save_png(figure: "Figure", path: Path) -> None:
    """Write a small PNG file."""
    figure.savefig(path, dpi=RESOLUTION)
