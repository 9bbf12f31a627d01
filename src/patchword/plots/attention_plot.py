"""Figures of what a model looks at: each way side by side, class against class, every layer and head."""

import unicodedata
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..core.text import escape_unprintable
from .current_theme import MAP, bare, mosaic, new_figure, show, stretched, current_theme

MAX_THUMBNAIL_SIDE = 420  # pixels of a picture's longer side in a figure
MAX_HEIGHT = 15.0  # inches


def plot_methods(
    pictures: Sequence[Image.Image], titles: Sequence[str], overlays: dict[str, list[Image.Image]]
) -> Figure:
    """A row for each picture: the picture, then each way to explain it."""
    columns = {"": list(pictures), **overlays}
    tall = [min(1.4, max(0.2, picture.height / picture.width)) for picture in pictures]
    figure = new_figure(2.0 * len(columns), 1.95 * sum(tall) + 0.3 * len(pictures) + 0.1)
    panels = figure.subplots(len(pictures), len(columns), squeeze=False, height_ratios=[t + 0.1 for t in tall])
    for row, title in enumerate(titles):
        for column, (name, images) in enumerate(columns.items()):
            axes = bare(panels[row, column], (name if row == 0 else "") if column else "")
            axes.imshow(make_thumbnail(images[row]))
        panels[row, 0].set_title(shorten_label(title, 22), fontsize=9, color=current_theme().muted)
    return figure


def plot_classes(
    picture: Image.Image, scores: Sequence[tuple[str, float]], overlays: Sequence[Image.Image]
) -> Figure:
    """One picture, and why it is each of several classes."""
    tall = min(1.4, picture.height / picture.width)
    figure = new_figure(2.6 * (1 + len(overlays)), 2.55 * tall + 0.5)
    panels = figure.subplots(1, 1 + len(overlays))
    bare(panels[0], "image", 10).imshow(make_thumbnail(picture))
    for axes, (label, share), image in zip(panels[1:], scores, overlays, strict=True):
        bare(axes, f"why {shorten_label(label)}?\n{share:.1%}", 10).imshow(make_thumbnail(image))
    return figure


def plot_heads(maps: np.ndarray, names: Sequence[str]) -> Figure:
    """Every layer and head: maps (L, H, h, w), each by its own extremes; whichever are more go from left to right."""
    layers, heads, h, w = maps.shape
    gap = max(1, h // 8)
    across, down = ("layer", "head") if layers > heads else ("head", "layer")
    ticks = {"layer": list(names), "head": [str(i + 1) for i in range(heads)]}
    columns, rows = len(ticks[across]), len(ticks[down])
    tiles = maps.swapaxes(0, 1) if across == "layer" else maps
    tile = mosaic(stretched(tiles.reshape(-1, h, w)), columns, gap)
    ratio = tile.shape[0] / tile.shape[1]
    width = min(10.0, max(3.0, 1.1 * columns * w / max(h, w)), MAX_HEIGHT / ratio)
    figure = new_figure(max(2.5, width + 0.8), width * ratio + 0.6)
    axes = figure.subplots()
    show(axes, tile, cmap=MAP)
    axes.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(rows)], ticks[down])
    axes.set_xticks([i * (w + gap) + (w - 1) / 2 for i in range(columns)], ticks[across])
    axes.set(xlabel=across, ylabel=down)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def make_thumbnail(picture: Image.Image) -> np.ndarray:
    """Small enough for a figure; tiny pictures grow by whole squares, so that their pixels are seen as they are."""
    picture = picture.convert("RGB")
    longest = max(picture.size)
    if longest < MAX_THUMBNAIL_SIDE // 2:
        times = MAX_THUMBNAIL_SIDE // longest
        return np.asarray(picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST))
    picture = picture.copy()
    picture.thumbnail((MAX_THUMBNAIL_SIDE, MAX_THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def shorten_label(label: str, most: int = 24) -> str:
    """A label for a title: its first synonym, cut where it would run into its neighbour; wide letters count double."""
    label = escape_unprintable(label.split(",")[0])
    width = 0
    for place, letter in enumerate(label):
        width += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if width > most:
            return label[: max(1, place - 1)] + "…"
    return label
