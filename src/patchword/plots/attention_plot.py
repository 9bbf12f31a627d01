"""Figures of attention and explanations: methods side by side, classes side by side, every layer and head."""

import unicodedata
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..core.text import escape_unprintable
from .theme import COLORMAP, current_theme, hide_axes, mosaic, new_figure, scale_tiles, show_image

MAX_THUMBNAIL_SIDE = 420  # pixels of the longer side of an image in a figure
MAX_HEIGHT = 15.0  # inches


def plot_methods(
    images: Sequence[Image.Image], titles: Sequence[str], overlays: dict[str, list[Image.Image]]
) -> Figure:
    """Plots a row for each image: the image, then its explanation by each method."""
    columns = {"": list(images), **overlays}
    heights = [min(1.4, max(0.2, image.height / image.width)) for image in images]
    figure = new_figure(2.0 * len(columns), 1.95 * sum(heights) + 0.3 * len(images) + 0.1)
    panels = figure.subplots(len(images), len(columns), squeeze=False, height_ratios=[h + 0.1 for h in heights])
    for row, title in enumerate(titles):
        for column, (name, column_images) in enumerate(columns.items()):
            axes = hide_axes(panels[row, column], (name if row == 0 else "") if column else "")
            axes.imshow(make_thumbnail(column_images[row]))
        panels[row, 0].set_title(shorten_label(title, 22), fontsize=9, color=current_theme().muted)
    return figure


def plot_classes(image: Image.Image, scores: Sequence[tuple[str, float]], overlays: Sequence[Image.Image]) -> Figure:
    """Plots an image and its explanation for each of several classes."""
    height = min(1.4, image.height / image.width)
    figure = new_figure(2.6 * (1 + len(overlays)), 2.55 * height + 0.7)
    panels = figure.subplots(1, 1 + len(overlays))
    hide_axes(panels[0], "image", 10).imshow(make_thumbnail(image))
    for axes, (label, probability), overlay in zip(panels[1:], scores, overlays, strict=True):
        hide_axes(axes, f"why {shorten_label(label)}?\n{probability:.1%}", 10).imshow(make_thumbnail(overlay))
    return figure


def plot_heads(maps: np.ndarray, names: Sequence[str]) -> Figure:
    """Plots the maps (L, H, h, w) of every layer and head, each with its own scale; the longer axis is horizontal."""
    layers, heads, h, w = maps.shape
    gap = max(1, h // 8)
    across, down = ("layer", "head") if layers > heads else ("head", "layer")
    ticks = {"layer": list(names), "head": [str(i + 1) for i in range(heads)]}
    columns, rows = len(ticks[across]), len(ticks[down])
    tiles = maps.swapaxes(0, 1) if across == "layer" else maps
    tile = mosaic(scale_tiles(tiles.reshape(-1, h, w)), columns, gap)
    ratio = tile.shape[0] / tile.shape[1]
    width = min(10.0, max(3.0, 1.1 * columns * w / max(h, w)), MAX_HEIGHT / ratio)
    figure = new_figure(max(2.5, width + 0.8), width * ratio + 0.6)
    axes = figure.subplots()
    show_image(axes, tile, cmap=COLORMAP)
    axes.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(rows)], ticks[down])
    axes.set_xticks([i * (w + gap) + (w - 1) / 2 for i in range(columns)], ticks[across])
    axes.set(xlabel=across, ylabel=down)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def make_thumbnail(image: Image.Image) -> np.ndarray:
    """Resizes an image for a figure; tiny images are enlarged by an integer factor without interpolation."""
    image = image.convert("RGB")
    longest = max(image.size)
    if longest < MAX_THUMBNAIL_SIDE // 2:
        factor = MAX_THUMBNAIL_SIDE // longest
        return np.asarray(image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST))
    image = image.copy()
    image.thumbnail((MAX_THUMBNAIL_SIDE, MAX_THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image)


def shorten_label(label: str, max_width: int = 24) -> str:
    """Shortens a label for a title: its first synonym, cut to `max_width` columns; wide characters count double."""
    label = escape_unprintable(label.split(",")[0])
    width = 0
    for index, character in enumerate(label):
        width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width > max_width:
            return label[: max(1, index - 1)] + "…"
    return label
