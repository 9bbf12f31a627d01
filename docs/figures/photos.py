"""Images of a model on real photos: predictions, explanations and the paper's figures.

The photos come inside wheels: chelsea, coffee and camera with scikit-image (CC0 by their photographers, docstrings of
`skimage.data`), Grace Hopper with matplotlib (portrait by James S. Davis for the US Navy, public domain).
"""

import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from patchword.checkpoints import read_checkpoint
from patchword.inference.classifier import Classifier
from patchword.inference.image_batch import load_image_batch
from patchword.inference.inputs import resolve_images
from patchword.inspection import embedding_filters, explain, measure_attention_distance, position_similarity
from patchword.inspection.walkthrough import trace_walkthrough
from patchword.plots.attention_plot import shorten_label
from patchword.plots.distance_plot import plot_heads_and_mean
from patchword.plots.filter_plot import tile_filters
from patchword.plots.theme import COLORMAP, current_theme, hide_axes, mosaic, new_figure, show_image, style_axes
from patchword.plots.walkthrough_plot import patch_tiles
from patchword.report.inspection_panels import Subject, make_classes_panel, make_walkthrough_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHOTOS = (
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/camera.png"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
MODEL = os.environ.get("PATCHWORD_FIGURES_MODEL", "hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k")
JPEG_QUALITY = 88
LABELS = os.environ.get("PATCHWORD_FIGURES_LABELS")  # a JSON list, or Keras' imagenet_class_index.json


def photo_paths() -> list[Path]:
    """The photos inside the installed packages."""
    paths = []
    for package, name in PHOTOS:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"A photo is in {package}: pip install -c constraints.txt '.[docs]'")
        paths.append(Path(spec.submodule_search_locations[0]) / name)
    return paths


def read_class_labels() -> list[str] | None:
    """The labels of PATCHWORD_FIGURES_LABELS; None if the model has its own."""
    if not LABELS:
        return None
    document: Any = json.loads(Path(LABELS).read_text())
    if isinstance(document, dict):
        document = [name for _, (_, name) in sorted(document.items(), key=lambda item: int(item[0]))]
    return [str(label).replace("_", " ") for label in document]


@cache
def load_subject() -> Subject:
    """The model and the photos, opened once for all images."""
    checkpoint = read_checkpoint(MODEL)
    if labels := read_class_labels():
        checkpoint = checkpoint.with_metadata(labels)
    classifier = Classifier(checkpoint)
    inputs = resolve_images(tuple(map(str, photo_paths())))
    return Subject(classifier, load_image_batch(classifier, inputs, len(inputs)))


def draw_hero() -> "Figure":
    """Each photo as the model sees it, its relevance map, and its most probable classes."""
    subject = load_subject()
    maps = explain(subject.model, subject.images, subject.classes, "relevance")
    count = len(subject.images)
    figure = new_figure(3 * count, 7.5)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.05, hspace=0, wspace=0)  # type: ignore[union-attr]
    panels = figure.subplots(3, count, height_ratios=(3, 3, 1.25))
    for column in range(count):
        original = subject.batch.originals[column]
        hide_axes(panels[0, column]).imshow(crop_to_input(subject, original))
        hide_axes(panels[1, column]).imshow(crop_to_input(subject, subject.overlaid(column, maps[column])))
        draw_scores(panels[2, column], [(label, p) for label, _, p in subject.scores(column, 3)])
    return figure


def crop_to_input(subject: Subject, image: Image.Image) -> Image.Image:
    """The square of an original that the model sees."""
    box = subject.classifier.preprocess.crop_box(image.height, image.width)
    return image.convert("RGB").crop(tuple(round(v) for v in box)).resize((448, 448), Image.Resampling.LANCZOS)


def draw_scores(axes: "Axes", scores: list[tuple[str, float]]) -> None:
    """Class labels with bars of their probability."""
    theme = current_theme()
    hide_axes(axes).set(xlim=(0, 1), ylim=(len(scores) - 0.2, -0.5))
    for row, (label, probability) in enumerate(scores):
        color = theme.series[1] if row == 0 else theme.muted
        axes.text(0, row, shorten_label(label, 20), fontsize=13, va="center", color=theme.text_color)
        axes.text(1, row, f"{probability:.1%}", fontsize=13, va="center", ha="right", color=theme.text_color)
        axes.plot([0, 1], [row + 0.38] * 2, color=theme.grid_color, linewidth=4, solid_capstyle="butt")
        axes.plot([0, probability], [row + 0.38] * 2, color=color, linewidth=4, solid_capstyle="butt")


def draw_classes() -> "Figure":
    """Why this class and not another, for the first photo."""
    return make_classes_panel(load_subject()).draw()  # type: ignore[misc]


def draw_walkthrough() -> "Figure":
    """The first photo on its way through the model."""
    return make_walkthrough_panel(load_subject()).draw()  # type: ignore[misc]


def draw_paper_strip() -> "Figure":
    """Four of the paper's figures side by side: patches, filters, position embeddings, attention distance."""
    subject = load_subject()
    walk = trace_walkthrough(subject.model, subject.batch.pixels[0].numpy(), subject.images[0])  # type: ignore[arg-type]
    figure = new_figure(13, 3.7)
    patches, filters, positions, distance = figure.subplots(1, 4)
    show_image(
        hide_axes(patches, f"{walk.grid[0]} x {walk.grid[1]} patches"), mosaic(patch_tiles(walk), walk.grid[1], 3)
    )
    components = embedding_filters(subject.model).components[:25]
    show_image(hide_axes(filters, "patch embedding filters (PCA)"), tile_filters(components, 5))
    similarity = position_similarity(subject.model)[1::2, 1::2]  # type: ignore[arg-type]
    rows, columns, h, w = similarity.shape
    tiles = mosaic(similarity.reshape(rows * columns, h, w), columns, gap=2)
    show_image(hide_axes(positions, "position embedding similarity"), tiles, cmap=COLORMAP, vmin=-1, vmax=1)
    reach = measure_attention_distance(subject.model, subject.batches())  # type: ignore[arg-type]
    style_axes(distance, "", "layer", "pixels").set_title("mean attention distance")
    plot_heads_and_mean(distance, reach.distance)
    distance.set_ylim(0, float(np.max(reach.distance)) * 1.08)
    distance.set_box_aspect(1)
    return figure


def save_jpeg(figure: "Figure", path: Path) -> None:
    """Write a figure that contains photos, a fifth of the size of a PNG file."""
    figure.savefig(path, dpi=100, pil_kwargs={"quality": JPEG_QUALITY, "optimize": True, "subsampling": 0})
