"""Figures of weights: the filters of the first layer, and the similarity of position embeddings."""

import numpy as np
from matplotlib.figure import Figure

from ..inspection.filters import Filters
from .theme import COLORMAP, hide_axes, mosaic, new_figure, scale_tiles, show_image

MAX_FILTERS = 768
MAX_POSITIONS = 14  # maps along a side; larger grids are subsampled


def plot_filters(filters: Filters) -> Figure:
    """Plots the principal components, as the paper does, beside the filters."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(7, 6))
    explained = float(filters.explained.sum())
    count = len(filters.components)
    show_image(
        hide_axes(left, f"{count} principal components: {explained:.0%} of the variance"),
        tile_filters(filters.components, 7),
    )
    raw = filters.raw[:MAX_FILTERS]
    columns = max(1, round(np.sqrt(len(raw) * 1.1)))
    which = f"all {len(raw)}" if len(raw) == len(filters.raw) else f"the first {len(raw)} of {len(filters.raw)}"
    show_image(hide_axes(right, f"{which} filters of the {filters.place}"), tile_filters(raw, columns))
    return figure


def tile_filters(filters: np.ndarray, columns: int) -> np.ndarray:
    """Arranges filters (n, C, h, w) as RGB tiles, gray unless they have three channels."""
    tiles = scale_tiles(filters).transpose(0, 2, 3, 1)
    if tiles.shape[-1] != 3:
        tiles = np.repeat(scale_tiles(filters.mean(axis=1))[..., None], 3, axis=-1)
    return mosaic(tiles, columns, gap=max(1, tiles.shape[1] // 8))


def plot_pos_embed_similarity(similarities: dict[str, np.ndarray]) -> Figure:
    """Plots the paper's grid of similarity maps, one for each table of position embeddings by its title."""
    figure = new_figure(5.6 * len(similarities) + 0.6, 5.6)
    panels = figure.subplots(1, len(similarities), squeeze=False)[0]
    for axes, (title, similarity) in zip(panels, similarities.items(), strict=True):
        h, w = similarity.shape[:2]
        rows, columns, gap = evenly_spaced(h), evenly_spaced(w), max(1, h // 10)
        tiles = similarity[np.ix_(rows, columns)].reshape(-1, h, w)
        drawn = show_image(axes, mosaic(tiles, len(columns), gap), cmap=COLORMAP, vmin=-1, vmax=1)
        axes.set_xticks([i * (w + gap) + (w - 1) / 2 for i in range(len(columns))], [str(c + 1) for c in columns])
        axes.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(len(rows))], [str(r + 1) for r in rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.set_title(title)
    figure.colorbar(drawn, ax=list(panels), label="cosine similarity", fraction=0.04, pad=0.02)  # type: ignore[arg-type]
    return figure


def evenly_spaced(count: int) -> np.ndarray:
    """Returns at most `MAX_POSITIONS` evenly spaced indices."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_POSITIONS)).round().astype(int))
