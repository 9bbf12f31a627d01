"""A figure that follows an image through the model, from pixels to probabilities."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from ..config import ViTConfig
from ..inspection.walkthrough import Walkthrough
from .attention_plot import make_thumbnail, shorten_label
from .theme import COLORMAP, current_theme, hide_axes, mosaic, new_figure, show_image

MAX_PATCHES, MAX_DIMENSIONS, MAX_BLOCKS = 14, 96, 12


def plot_walkthrough(
    walk: Walkthrough, scores: Sequence[tuple[str, float]], pool: str, attending: str, config: ViTConfig
) -> Figure:
    """Plots the five steps of the paper's Figure 1.

    Args:
        scores: the most probable classes; without a head there are none, and the last step is left out.
        pool: which tokens the head reads, in words.
        attending: whose attention is shown, in words.
    """
    heights = (3.2, 1.15, 2.9, 2.45, 1.9)[: 5 if scores else 4]
    figure = new_figure(11, sum(heights))
    rows: Sequence[SubFigure] = figure.subfigures(len(heights), 1, height_ratios=heights)  # type: ignore[assignment]
    draw_patches(rows[0], walk)
    draw_sequence(rows[1], walk, config.stem != "linear")
    draw_embedding(rows[2], walk, config)
    draw_blocks(rows[3], walk, attending, config.attention_pattern)
    if scores:
        draw_head(rows[4], scores, pool)
    return figure


def set_heading(part: SubFigure, text: str) -> None:
    """Sets the title of a row."""
    part.suptitle(text, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=current_theme().text_color)


def draw_patches(part: SubFigure, walk: Walkthrough) -> None:
    """Step 1: the image and its patches."""
    (h, w), (height, width) = walk.grid, walk.pixels.shape[:2]
    set_heading(part, f"1  The image, {height} x {width} pixels, is split into {h} x {w} = {h * w} patches")
    left, right = part.subplots(1, 2)
    hide_axes(left).imshow(make_thumbnail(to_image(walk.pixels)))
    show_image(hide_axes(right), mosaic(patch_tiles(walk), w, gap=max(1, height // h // 5)))


def draw_sequence(part: SubFigure, walk: Walkthrough, stem: bool) -> None:
    """Step 2: the first patches of the sequence."""
    h, w = walk.grid
    change = "each is flattened to" if not stem else "after the convolutional stem, each has"
    set_heading(part, f"2  The patches become a sequence, row by row; {change} {walk.patch_dim} values")
    tiles = patch_tiles(walk)[:MAX_PATCHES]
    axes = hide_axes(part.subplots())
    size = tiles.shape[2]
    show_image(axes, mosaic(tiles, len(tiles), gap=max(1, size // 4)))
    if h * w > len(tiles):
        note = f"  ... and {h * w - len(tiles)} more"
        axes.text(1.0, 0.5, note, transform=axes.transAxes, va="center", color=current_theme().muted)


def draw_embedding(part: SubFigure, walk: Walkthrough, config: ViTConfig) -> None:
    """Step 3: patch embeddings, position embeddings and their sum, normed if the model has a norm there."""
    dim = walk.patch_embeddings.shape[1]
    shown = f" (the first {MAX_DIMENSIONS} shown)" if dim > MAX_DIMENSIONS else ""
    added = "; position embeddings are added" if walk.pos_embed is not None else ""
    added += "; a norm follows" if config.norm_pre else ""
    step = "A linear projection turns each into a token" if config.stem == "linear" else "Each becomes a token"
    set_heading(part, f"3  {step} of {dim} dimensions{shown}{added}")
    panels = [("patch embedding", walk.patch_embeddings)]
    panels += [("+  position embeddings", walk.pos_embed)] if walk.pos_embed is not None else []
    tokens = f"{walk.num_prefix} + {len(walk.patch_embeddings)}" if walk.num_prefix else str(len(walk.patch_embeddings))
    extra = "prefix and patches" if walk.num_prefix else "patches"
    panels += [(f"{'norm:' if config.norm_pre else '='}  {tokens} tokens ({extra})", walk.tokens)]
    for axes, (title, values) in zip(np.ravel(part.subplots(1, len(panels))), panels, strict=True):
        draw_vectors(axes, title, values)


def draw_vectors(axes: Axes, title: str, values: np.ndarray) -> None:
    """Draws tokens from left to right, dimensions from top to bottom."""
    limit = float(np.percentile(np.abs(values), 98)) or 1.0
    axes.imshow(
        values.T[:MAX_DIMENSIONS], aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
    )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("token", fontsize=9)
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def draw_blocks(part: SubFigure, walk: Walkthrough, attending: str, pattern: str) -> None:
    """Step 4: attention and principal components of the patches after some blocks."""
    depth = len(walk.attention)
    targets = {"local": "nearby tokens", "axial": "tokens of its row or column"}.get(pattern, "all tokens")
    set_heading(part, f"4  {depth} blocks: every token attends to {targets} (top: {attending}) and is updated (bottom)")
    chosen = np.unique(np.linspace(0, depth - 1, min(depth, MAX_BLOCKS)).round().astype(int))
    panels = part.subplots(2, len(chosen), squeeze=False)
    for column, block in enumerate(chosen):
        hide_axes(panels[0, column], f"block {block + 1}", 9).imshow(
            walk.attention[block], cmap=COLORMAP, interpolation="nearest"
        )
        hide_axes(panels[1, column]).imshow(walk.colors[block], interpolation="nearest")


def draw_head(part: SubFigure, scores: Sequence[tuple[str, float]], pool: str) -> None:
    """Step 5: the probabilities of some classes."""
    set_heading(part, f"5  The head reads {pool} and gives each class a probability")
    axes = part.subplots()
    names = [shorten_label(label, 40) for label, _ in scores][::-1]
    values = [probability for _, probability in scores][::-1]
    axes.barh(range(len(values)), values, color=current_theme().series[0], height=0.7)
    axes.set_yticks(range(len(values)), names)
    for row, value in enumerate(values):
        axes.text(value + 0.01, row, f"{value:.1%}", va="center", fontsize=9, color=current_theme().muted)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def patch_tiles(walk: Walkthrough) -> np.ndarray:
    """Returns the patches as RGB tiles (N, h, w, 3) from 0 to 1, row by row."""
    (h, w), pixels = walk.grid, walk.pixels.astype(np.float32) / 255
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    height, width = pixels.shape[0] // h, pixels.shape[1] // w
    return pixels.reshape(h, height, w, width, 3).transpose(0, 2, 1, 3, 4).reshape(-1, height, width, 3)


def to_image(pixels: np.ndarray) -> Image.Image:
    """Converts uint8 pixels (H, W, C) to a Pillow image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
