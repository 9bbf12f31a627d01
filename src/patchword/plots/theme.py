"""The look of all figures in light and dark themes, and helpers for axes and tiles.

Figures are made without pyplot, which keeps them in a global list and is not meant for servers.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colors of a figure: background, text, secondary text, grid lines, and five series."""

    background: str
    text_color: str
    muted: str
    grid_color: str
    series: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1b1f24", "#5d6671", "#e3e6ea", ("#2f74d0", "#d1600a", "#1a8a5a", "#8a4fc4", "#a8891a"))
DARK = Theme("#14171b", "#e6e9ed", "#98a2ae", "#2b3138", ("#6aa6f2", "#f39a4f", "#54c794", "#bd8cf0", "#d8ba4a"))
COLORMAP = "viridis"  # for values; heatmaps over images have their own colors (overlay.py)

FALLBACK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "Noto Sans Devanagari",
    "Noto Sans Arabic",
)

_current: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


def current_theme() -> Theme:
    """Returns the theme that `use_theme` has set."""
    return _current.get()


@contextmanager
def use_theme(theme: Theme) -> Iterator[None]:
    """Figures that are made inside the context have this theme."""
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), theme.text_color)
    colors |= dict.fromkeys(("xtick.color", "ytick.color"), theme.muted)
    colors |= dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), theme.background)
    style = {
        "axes.edgecolor": theme.grid_color,
        "grid.color": theme.grid_color,
        "font.size": 10.0,
        "axes.titlesize": 11.0,
    }
    style |= {"svg.fonttype": "path", "svg.hashsalt": "patchword", "figure.dpi": 100}
    style |= {
        "text.parse_math": False,
        "text.usetex": False,
        "font.family": available_fonts(),
    }  # labels are arbitrary text
    settings: Any = {**colors, **style}
    token = _current.set(theme)
    try:
        with matplotlib.rc_context(settings):
            yield
    finally:
        _current.reset(token)


@functools.cache
def available_fonts() -> list[str]:
    """Returns matplotlib's default font and the installed fallback fonts for other scripts."""
    logging.getLogger("matplotlib.font_manager").setLevel(
        logging.ERROR
    )  # it warns about every weight that a font lacks
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


def new_figure(width: float, height: float) -> Figure:
    """Makes a figure of this size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def hide_axes(axes: Axes, title: str = "", size: float = 11.0) -> Axes:
    """Prepares axes for an image: no frame, no ticks."""
    axes.set_axis_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_visible(False)  # an axis that is only off still takes part in the layout
    if title:
        axes.set_title(title, fontsize=size, color=current_theme().text_color)
    return axes


def style_axes(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Prepares axes for a line plot: title, labels, a light grid, two spines."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def mosaic(tiles: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """Arranges tiles (n, h, w) or (n, h, w, 3) row by row, with gaps of NaN, which are transparent."""
    n, h, w = tiles.shape[:3]
    rows = -(-n // columns)
    shape = (rows * (h + gap) - gap, columns * (w + gap) - gap, *tiles.shape[3:])
    canvas = np.full(shape, np.nan, dtype=np.float32)
    for i, tile in enumerate(tiles):
        y, x = (i // columns) * (h + gap), (i % columns) * (w + gap)
        canvas[y : y + h, x : x + w] = tile
    return canvas


def show_image(axes: Axes, pixels: np.ndarray, **options: object) -> object:
    """Shows an array without interpolation; NaN in RGB is transparent."""
    if pixels.ndim == 3:
        empty = np.isnan(pixels).any(axis=-1, keepdims=True)
        pixels = np.concatenate([np.nan_to_num(pixels), np.where(empty, 0.0, 1.0)], axis=-1)
    return axes.imshow(pixels, interpolation="nearest", **options)  # type: ignore[arg-type]


def scale_tiles(tiles: np.ndarray) -> np.ndarray:
    """Scales each tile (n, ...) to 0..1 by its own extremes."""
    flat = tiles.reshape(len(tiles), -1)
    low, high = flat.min(axis=1), flat.max(axis=1)
    shape = (-1,) + (1,) * (tiles.ndim - 1)
    scaled: np.ndarray = (tiles - low.reshape(shape)) / np.maximum(high - low, 1e-12).reshape(shape)
    return scaled
