"""One picture that follows an image through the model, from pixels to probabilities."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from ..config import ViTConfig
from ..inspection.walkthrough import Walkthrough
from .attention_plot import short, thumbnail
from .theme import MAP, bare, mosaic, new_figure, show, theme

SEQUENCE, DIMENSIONS, MOST_BLOCKS = 14, 96, 12


def walk_figure(
    walk: Walkthrough, scores: Sequence[tuple[str, float]], pool: str, looker: str, config: ViTConfig
) -> Figure:
    """`scores` are the most probable classes; `pool` says where the head reads, `looker` whose attention is shown."""
    figure = new_figure(11, 11.6)
    rows: Sequence[SubFigure] = figure.subfigures(5, 1, height_ratios=(3.2, 1.15, 2.9, 2.45, 1.9))  # type: ignore[assignment]
    draw_cut(rows[0], walk)
    draw_sequence(rows[1], walk, config.stem != "linear")
    draw_embedding(rows[2], walk, config.stem != "linear")
    draw_blocks(rows[3], walk, looker, config.attention_pattern)
    draw_head(rows[4], scores, pool)
    return figure


def heading(part: SubFigure, text: str) -> None:
    part.suptitle(text, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=theme().ink)


def draw_cut(part: SubFigure, walk: Walkthrough) -> None:
    (h, w), (height, width) = walk.grid, walk.view.shape[:2]
    heading(part, f"1  The image, {height} x {width} pixels, is split into {h} x {w} = {h * w} patches")
    left, right = part.subplots(1, 2)
    bare(left).imshow(thumbnail(as_picture(walk.view)))
    show(bare(right), mosaic(patch_tiles(walk), w, gap=max(1, height // h // 5)))


def draw_sequence(part: SubFigure, walk: Walkthrough, stem: bool) -> None:
    h, w = walk.grid
    each = "each is flattened to" if not stem else "after the convolutional stem, each has"
    heading(part, f"2  The patches become a sequence, row by row; {each} {walk.numbers} values")
    tiles = patch_tiles(walk)[:SEQUENCE]
    axes = bare(part.subplots())
    size = tiles.shape[2]
    show(axes, mosaic(tiles, len(tiles), gap=max(1, size // 4)))
    if h * w > len(tiles):
        note = f"  ... and {h * w - len(tiles)} more"
        axes.text(1.0, 0.5, note, transform=axes.transAxes, va="center", color=theme().soft)


def draw_embedding(part: SubFigure, walk: Walkthrough, stem: bool) -> None:
    dim = walk.embedded.shape[1]
    first = f" (the first {DIMENSIONS} shown)" if dim > DIMENSIONS else ""
    added = "; position embeddings are added" if walk.positions is not None else ""
    what = "Each becomes a token" if stem else "A linear projection turns each into a token"
    heading(part, f"3  {what} of {dim} dimensions{first}{added}")
    panels = [("patch embedding", walk.embedded)]
    panels += [("+  position embeddings", walk.positions)] if walk.positions is not None else []
    tokens = f"{walk.prefix} + {len(walk.embedded)}" if walk.prefix else str(len(walk.embedded))
    extra = "prefix and patches" if walk.prefix else "patches"
    panels += [(f"=  {tokens} tokens ({extra})", walk.entering)]
    for axes, (title, values) in zip(np.ravel(part.subplots(1, len(panels))), panels, strict=True):
        draw_vectors(axes, title, values)


def draw_vectors(axes: Axes, title: str, values: np.ndarray) -> None:
    """Tokens from left to right, numbers from top to bottom."""
    limit = float(np.percentile(np.abs(values), 98)) or 1.0
    axes.imshow(values.T[:DIMENSIONS], aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("token", fontsize=9)
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def draw_blocks(part: SubFigure, walk: Walkthrough, looker: str, span: str) -> None:
    depth = len(walk.attention)
    whom = "nearby tokens" if span == "local" else "tokens of its row or column" if span == "axial" else "all tokens"
    heading(part, f"4  {depth} blocks: every token attends to {whom} (top: {looker}) and is updated (bottom)")
    chosen = np.unique(np.linspace(0, depth - 1, min(depth, MOST_BLOCKS)).round().astype(int))
    panels = part.subplots(2, len(chosen), squeeze=False)
    for column, block in enumerate(chosen):
        bare(panels[0, column], f"block {block + 1}", 9).imshow(
            walk.attention[block], cmap=MAP, interpolation="nearest"
        )
        bare(panels[1, column]).imshow(walk.colours[block], interpolation="nearest")


def draw_head(part: SubFigure, scores: Sequence[tuple[str, float]], pool: str) -> None:
    heading(part, f"5  The head reads {pool} and gives each class a probability")
    axes = part.subplots()
    names = [short(label, 40) for label, _ in scores][::-1]
    values = [share for _, share in scores][::-1]
    axes.barh(range(len(values)), values, color=theme().series[0], height=0.7)
    axes.set_yticks(range(len(values)), names)
    for place, value in enumerate(values):
        axes.text(value + 0.01, place, f"{value:.1%}", va="center", fontsize=9, color=theme().soft)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def patch_tiles(walk: Walkthrough) -> np.ndarray:
    """The patches as pictures (N, h, w, 3), row by row, 0 to 1."""
    (h, w), view = walk.grid, walk.view.astype(np.float32) / 255
    if view.shape[-1] == 1:
        view = np.repeat(view, 3, axis=-1)
    height, width = view.shape[0] // h, view.shape[1] // w
    return view.reshape(h, height, w, width, 3).transpose(0, 2, 1, 3, 4).reshape(-1, height, width, 3)


def as_picture(view: np.ndarray) -> Image.Image:
    return Image.fromarray(view[..., 0] if view.shape[-1] == 1 else view)
