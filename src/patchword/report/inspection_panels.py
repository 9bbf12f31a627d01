"""The panels of an inspection: first those of the weights alone, then those of the model on images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.text import pluralize
from ..inference.classifier import Classifier, Encoder
from ..inference.image_batch import ImageBatch
from ..inspection.attention_distance import measure_attention_distance
from ..inspection.attention_rollout import head_attention
from ..inspection.explain import CLASS_METHODS, NO_CLASSES, default_method, explain, methods_for, why_no_method
from ..inspection.faithfulness import (
    NO_PROBABILITIES,
    RANDOM_ORDER,
    RANDOMIZATION_STAGES,
    FaithfulnessCurves,
    deletion_insertion,
    parameter_randomization,
    random_maps,
)
from ..inspection.filters import embedding_filters
from ..inspection.pos_embed_similarity import NO_TABLE, cross_strength, position_similarity
from ..inspection.token_analysis import outlier_fraction, patch_colors, patch_similarity, token_norms
from ..inspection.walkthrough import trace_walkthrough
from ..models import ViT
from ..models.resnet import ResNetBase
from ..plots.overlay import overlay_heatmap
from ..plots.panel import Panel

# Names of all panels, in the order of the report.
NAMES: tuple[str, ...] = (
    "filters",
    "positions",
    "attention_distance",
    "walkthrough",
    "heads",
    "explanations",
    "classes",
)
NAMES += ("faithfulness", "norms", "similarity", "patch_colors")
BATCH_SIZE = 8
NUM_ORIGINALS = 6  # images that the command keeps uncropped, to be shown
NUM_OVERLAYS = 4  # images in the figure of explanations
NUM_CLASSES = 3  # explained in one image
NUM_FAITHFULNESS = 6  # images of the deletion and insertion curves, which take most of the time
NUM_RANDOMIZED = 2  # images of the parameter randomization test
MIN_SPREAD_IMAGES = 3  # a standard error needs at least so many
MIN_PROBABILITY = 0.01  # deletion cannot judge the map of a less probable class
NO_ATTENTION = "A ResNet has no class token and no attention between patches."
NO_BLOCKS = "A model without blocks has no attention."


@dataclass(frozen=True)
class Subject:
    """A model and images, with what several panels need computed once."""

    encoder: Encoder
    batch: ImageBatch
    label: int | None = None  # the class to explain; None: the most probable one of each image
    original: Checkpoint | None = None  # the same weights before they were adapted to another image size

    @property
    def model(self) -> ViT | ResNetBase:
        return self.encoder.model

    @property
    def has_head(self) -> bool:
        return bool(self.model.config.num_classes)

    @property
    def classifier(self) -> Classifier:
        """The encoder of a model that has a head."""
        assert isinstance(self.encoder, Classifier)
        return self.encoder

    @cached_property
    def images(self) -> Tensor:
        """The images that are shown, normalized."""
        return self.normalize(slice(0, len(self.batch.originals)))

    def normalize(self, rows: slice) -> Tensor:
        return self.encoder.preprocess.normalize(self.batch.pixels[rows])

    def batches(self) -> Iterator[Tensor]:
        for first in range(0, len(self.batch.pixels), BATCH_SIZE):
            yield self.normalize(slice(first, first + BATCH_SIZE))

    def calibrated(self, images: Tensor) -> Tensor:
        """Logits divided by the temperature, as the classifier has them."""
        return self.model(images) / self.classifier.checkpoint.temperature

    @cached_property
    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.calibrated(self.images)

    @cached_property
    def classes(self) -> Tensor | None:
        """The class to explain in each image; None without a head."""
        if not self.has_head:
            return None
        if self.label is not None:
            return torch.full((len(self.images),), self.label)
        return self.logits.argmax(dim=-1).clone()

    def scores(self, index: int, count: int) -> list[tuple[str, int, float]]:
        prediction = self.classifier.prediction(self.logits[index], count)
        return [(score.label, score.index, score.probability) for score in prediction.scores]

    def overlaid(self, index: int, heat: np.ndarray) -> Image.Image:
        return overlay_heatmap(self.batch.originals[index], heat, self.encoder.preprocess)


def make_panels(subject: Subject) -> Iterator[Panel]:
    """All panels in the order of the report, each computed when it is requested."""
    yield make_filters_panel(subject)
    yield make_positions_panel(subject)
    if not len(subject.batch.pixels):
        return
    for make in (make_attention_distance_panel, make_walkthrough_panel, make_heads_panel):
        yield make(subject)
    for make in (make_methods_panel, make_classes_panel, make_faithfulness_panel):
        yield make(subject)
    for make in (make_norms_panel, make_similarity_panel, make_token_colors_panel):
        yield make(subject)


def for_attention(name: str, title: str) -> Callable[[Callable[..., Panel]], Callable[[Subject], Panel]]:
    """Decorate a function that makes a panel of attention; models without attention get an absent panel."""

    def decorate(make: Callable[..., Panel]) -> Callable[[Subject], Panel]:
        def made(subject: Subject) -> Panel:
            model = subject.model
            if not isinstance(model, ViT):
                return Panel.absent(name, title, NO_ATTENTION)
            if not model.config.depth:
                return Panel.absent(name, title, NO_BLOCKS)
            return make(subject, model, partial(Panel, name, title))

        return made

    return decorate


def make_filters_panel(subject: Subject) -> Panel:
    """Principal components of the patch embedding (the paper's Figure 7, left)."""
    from ..plots.filter_plot import plot_filters

    filters = embedding_filters(subject.model)
    count = len(filters.components)
    few, total = filters.explained[: count // 3].sum(), filters.explained.sum()
    caption = (
        f"The first {count // 3} principal components explain {few:.0%} of the variance of the {len(filters.raw)} "
    )
    caption += f"filters, all {count} explain {total:.0%}."
    paper = (
        "In the paper (ViT-L/32), the leading components resemble basis functions for the fine structure of a patch: "
    )
    paper += "oriented waves and edges, and flat colors. They stay noisy if the training set is small."
    arrays = {"raw": filters.raw, "components": filters.components, "explained": filters.explained}
    title = f"Filters of the {filters.place}"
    return Panel("filters", title, caption, paper, partial(plot_filters, filters), arrays)


def make_positions_panel(subject: Subject) -> Panel:
    """Similarity of position embeddings (Figure 7, center)."""
    name, title = "positions", "Position embedding similarity"
    model = subject.model
    if not isinstance(model, ViT):
        return Panel.absent(name, title, "A ResNet adds no position embeddings.")
    if model.config.pos_embed in NO_TABLE:
        return Panel.absent(name, title, NO_TABLE[model.config.pos_embed])
    from ..plots.filter_plot import plot_pos_embed_similarity

    panels = {"positions": position_similarity(model)}
    before = subject.original.build_model() if subject.original is not None else None
    if isinstance(before, ViT) and before.config.grid != model.config.grid:
        old, new = ("x".join(map(str, m.config.grid)) for m in (before, model))
        panels = {f"original, {old}": position_similarity(before), f"resampled, {new}": panels["positions"]}
    near, far = cross_strength(list(panels.values())[-1])
    caption = (
        f"Each tile shows the cosine similarity of one position embedding with all others. Mean: {near:.2f} within "
    )
    caption += f"the same row or column, {far:.2f} elsewhere."
    caption += " The model also rotates queries and keys by their position." if model.config.has_rope else ""
    caption += " The model also adds a bias for each offset to the scores." if model.config.has_relative else ""
    paper = (
        "In the paper, nearby positions are similar and rows and columns stand out, although the grid is not built in."
    )
    arrays = {title.split(",")[0].replace(" ", "_"): values for title, values in panels.items()}
    return Panel(name, title, caption, paper, partial(plot_pos_embed_similarity, panels), arrays)


@for_attention("attention_distance", "Attention distance")
def make_attention_distance_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """Mean attention distance by head and depth (Figure 7, right)."""
    from ..plots.distance_plot import plot_attention_distance

    reach = measure_attention_distance(model, subject.batches())
    first, last = reach.distance[0].mean(), reach.distance[-1].mean()
    caption = f"Mean over {pluralize(reach.num_images, 'image')}: {first:.0f} pixels in the first layer, {last:.0f} in "
    caption += (
        f"the last. Spearman's rank correlation between depth and mean distance is {reach.depth_correlation:.2f}."
    )
    caption += " Class and register tokens are excluded." if model.config.num_prefix else ""
    paper = (
        "In the paper, some heads in the lowest layers already attend to the whole image while others stay local, and "
    )
    paper += "the distance grows with depth. After a ResNet or a convolutional stem, local heads are less pronounced."
    arrays = {"distance": reach.distance, "entropy": reach.entropy}
    return panel(caption, paper, partial(plot_attention_distance, reach), arrays)


@for_attention("walkthrough", "One image through the model")
def make_walkthrough_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """The forward pass of one image, step by step (Figure 1)."""
    from ..plots.walkthrough_plot import plot_walkthrough

    walk = trace_walkthrough(model, subject.batch.pixels[0].numpy(), subject.images[0])
    scores = [(label, p) for label, _, p in subject.scores(0, 5)] if subject.has_head else []
    caption = f"From pixels to {'probabilities' if scores else 'tokens'}. The colors in step 4 are the first three "
    caption += "principal components of the tokens after each block: patches of similar color have similar "
    caption += "representations."
    draw = partial(plot_walkthrough, walk, scores, describe_reader(model), describe_attender(model), model.config)
    paper = "The paper's Figure 1, computed for this image."
    arrays = {
        "patch_embeddings": walk.patch_embeddings,
        "tokens": walk.tokens,
        "attention": walk.attention,
        "logits" if scores else "features": walk.logits,
    }
    return panel(caption, paper, draw, arrays)


def describe_reader(model: ViT) -> str:
    """What the head reads, in words."""
    if model.config.distillation:
        return "the class and the distillation token"
    kinds = {
        "class": "the class token",
        "average": "the mean of the patches",
        "class+average": "the class token and the mean of the patches",
        "attention": "a learned probe",
        "query": "a learned query",
    }
    return kinds[model.config.pooling]


def describe_attender(model: ViT) -> str:
    """Whose attention is shown, in words."""
    kinds = ("average", "attention", "query")
    return "the patches, on average" if model.config.pooling in kinds else describe_reader(model)


@for_attention("heads", "Attention maps by layer and head")
def make_heads_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """The attention map of every head."""
    from ..plots.attention_plot import plot_heads

    maps = head_attention(model, subject.images[:1])[0].cpu().numpy()
    names = [str(i + 1) for i in range(model.config.depth)] + ["pool"] * (len(maps) - model.config.depth)
    caption = f"Attention of {describe_attender(model)} in the first image, for every head. Each map has its own scale."
    if len(maps) > model.config.depth:
        caption += " The last row is the attention of the pooling head."
    return panel(caption, "", partial(plot_heads, maps, names), {"maps": maps})


def make_methods_panel(subject: Subject) -> Panel:
    """Every explanation method on a few images."""
    name, title, methods = "explanations", "Explanations", methods_for(subject.model.config)
    if not methods:
        return Panel.absent(name, title, why_no_method(subject.model.config))
    from ..plots.attention_plot import plot_methods

    count = min(NUM_OVERLAYS, len(subject.batch.originals))
    images, classes = subject.images[:count], None if subject.classes is None else subject.classes[:count]
    maps: dict[str, np.ndarray] = {m: explain(subject.model, images, classes, m) for m in methods}
    drawn = {method: [subject.overlaid(i, heat) for i, heat in enumerate(heats)] for method, heats in maps.items()}
    titles = [""] * count if classes is None else [subject.classifier.labels[int(c)] for c in classes]
    caption = f"{'What the model attends to' if classes is None else 'Evidence for the class above each image'}, by "
    caption += "method. Brighter means more relevant; the dark border is cropped away before the model sees the image."
    by_class = [m for m in methods if m in CLASS_METHODS]
    if by_class and len(methods) > 1:
        caption += f" {', '.join(by_class)} are class-specific; the other methods are not."
    paper = "The paper's Figure 6 is attention rollout." if "rollout" in methods else ""
    draw = partial(plot_methods, subject.batch.originals[:count], titles, drawn)
    return Panel(name, title, caption, paper, draw, maps)


def make_classes_panel(subject: Subject) -> Panel:
    """Explanations of the most probable classes of one image."""
    name, title = "classes", "Explanations by class"
    if not methods_for(subject.model.config) or not subject.has_head:
        return Panel.absent(name, title, NO_CLASSES if not subject.has_head else why_no_method(subject.model.config))
    from ..plots.attention_plot import plot_classes

    scores, method = subject.scores(0, NUM_CLASSES), default_method(subject.model)
    if subject.label is not None and subject.label not in [index for _, index, _ in scores]:
        everything = subject.scores(0, len(subject.classifier.labels))
        scores = [*scores[:-1], next(score for score in everything if score[1] == subject.label)]
    classes = torch.tensor([index for _, index, _ in scores])
    maps = explain(subject.model, subject.images[:1].expand(len(classes), -1, -1, -1), classes, method)
    drawn = [subject.overlaid(0, heat) for heat in maps]
    also = " and of the requested one" if subject.label is not None else ""
    caption = f"Explanations of the most probable classes of the first image{also}, by {method}."
    pairs = [(label, probability) for label, _, probability in scores]
    draw = partial(plot_classes, subject.batch.originals[0], pairs, drawn)
    return Panel(name, title, caption, "", draw, {"maps": maps})


def make_faithfulness_panel(subject: Subject) -> Panel:
    """Deletion, insertion and parameter randomization tests of the explanations."""
    name, title, methods = "faithfulness", "Faithfulness of the explanations", methods_for(subject.model.config)
    if subject.classes is None:
        return Panel.absent(name, title, NO_PROBABILITIES)
    if not methods:
        return Panel.absent(name, title, why_no_method(subject.model.config))
    from ..plots.faithfulness_plot import plot_faithfulness

    model, images, classes = subject.model, subject.images[:NUM_FAITHFULNESS], subject.classes[:NUM_FAITHFULNESS]
    maps: dict[str, np.ndarray] = {method: explain(model, images, classes, method) for method in methods}
    maps[RANDOM_ORDER] = random_maps(maps[methods[0]].shape)
    multi_label = subject.classifier.checkpoint.multi_label
    curves = {
        n: deletion_insertion(subject.calibrated, images, classes, m, multi_label=multi_label) for n, m in maps.items()
    }
    similarity = parameter_randomization(model, images[:NUM_RANDOMIZED], classes[:NUM_RANDOMIZED], methods)
    ranked = sorted(methods, key=lambda m: -gap(curves[m]))
    caption = faithfulness_verdict(curves, ranked, len(images), min(NUM_RANDOMIZED, len(images)))
    head = ("method", "deletion", "insertion", "difference", *(f"shuffled: {ruin}" for ruin in RANDOMIZATION_STAGES))
    rows = [faithfulness_row(each, curves[each], similarity.get(each)) for each in (*ranked, RANDOM_ORDER)]  # type: ignore[call-overload]  # RANDOM_ORDER is not a method
    arrays = {f"{n}_deletion".replace(" ", "_"): c.deletion for n, c in curves.items()}
    arrays |= {f"{n}_insertion".replace(" ", "_"): c.insertion for n, c in curves.items()}
    draw = partial(plot_faithfulness, {each: curves[each] for each in (*ranked, RANDOM_ORDER)})
    return Panel(name, title, caption, "", draw, arrays, (head, *rows))


def faithfulness_verdict(
    curves: dict[str, FaithfulnessCurves], ranked: Sequence[str], num_images: int, num_randomized: int
) -> str:
    """Which maps are faithful, in words."""
    best, over = ranked[0], f"On {pluralize(num_images, 'image')}"
    least = float(curves[best].deletion[:, 0].mean())
    if least < MIN_PROBABILITY:
        return f"{over}, the class has a probability of only {least:.1%}, too low to judge the maps by deletion."
    unproved = [method for method in ranked if not is_clearly_larger(gaps(curves[method]), gaps(curves[RANDOM_ORDER]))]
    if best in unproved:
        text = f"{over}, no method is clearly better than a random order: do not rely on these maps."
    else:
        text = f"{over}, {best} is the most faithful method: its gap between insertion and deletion is the largest."
        text += f" Not clearly better than a random order: {', '.join(unproved)}." if unproved else ""
    text += " With so few images this is uncertain." if num_images < MIN_SPREAD_IMAGES else ""
    checked = pluralize(num_randomized, "image")
    return (
        f"{text} A map that hardly changes when weights are shuffled ({checked}) does not depend on what was learned."
    )


def is_clearly_larger(values: np.ndarray, chance: np.ndarray) -> bool:
    """Whether the mean paired difference exceeds two standard errors; with few images, whether it is positive."""
    difference = values - chance
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) >= MIN_SPREAD_IMAGES else 0.0
    return bool(difference.mean() > 2 * error)


def gaps(curves: FaithfulnessCurves) -> np.ndarray:
    """Area under the insertion curve minus area under the deletion curve, of each image."""
    deletion, insertion = curves.areas
    return insertion - deletion


def gap(curves: FaithfulnessCurves) -> float:
    """The mean gap between insertion and deletion."""
    return float(gaps(curves).mean())


def faithfulness_row(name: str, curves: FaithfulnessCurves, similarity: list[float] | None) -> tuple[str, ...]:
    """The table row of one method."""
    deletion, insertion = (float(each.mean()) for each in curves.areas)
    alike = [f"{value:.2f}" for value in similarity] if similarity else ["" for _ in RANDOMIZATION_STAGES]
    return (name, f"{deletion:.3f}", f"{insertion:.3f}", f"{insertion - deletion:.3f}", *alike)


@for_attention("norms", "Token norms")
def make_norms_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """Norms of the tokens after each block (Darcet et al., 2024)."""
    from ..plots.token_plot import plot_token_norms
    from ..plots.walkthrough_plot import to_image

    norms = token_norms(model, subject.images[0])
    worst = max(outlier_fraction(stage) for stage in norms)
    caption = "Each stage has its own logarithmic scale. In the first image, "
    if worst:
        caption += f"{worst:.1%} of the tokens of the worst stage have a norm above three times the median."
    else:
        caption += "no token norm exceeds three times the median of its stage: no artifacts."
    caption += (
        " Large models tend to store global information in a few high-norm tokens of uninformative patches; register "
    )
    caption += "tokens avoid this."
    view = to_image(subject.batch.pixels[0].numpy())
    return panel(caption, "", partial(plot_token_norms, view, norms), {"norms": norms})


@for_attention("similarity", "Patch similarity")
def make_similarity_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """Cosine similarity of a few patches with all others."""
    from ..plots.token_plot import plot_patch_similarity
    from ..plots.walkthrough_plot import to_image

    h, w = model.config.grid
    places = sorted({(h // 2, w // 2), (h // 4, w // 4), (h // 4, 3 * w // 4), (3 * h // 4, w // 2)})
    maps = [(place, patch_similarity(model, subject.images[0], place)) for place in places]
    caption = "Cosine similarity of the framed patch with every other patch, after the last block."
    view = to_image(subject.batch.pixels[0].numpy())
    arrays = {f"row{r}_column{c}": values for (r, c), values in maps}
    return panel(caption, "", partial(plot_patch_similarity, view, maps), arrays)


@for_attention("patch_colors", "Principal components of the patch tokens")
def make_token_colors_panel(subject: Subject, model: ViT, panel: Callable[..., Panel]) -> Panel:
    """Principal components of the patch tokens as colors."""
    from ..plots.token_plot import plot_patch_colors
    from ..plots.walkthrough_plot import to_image

    colors = patch_colors(model, subject.images)
    views = [to_image(pixels.numpy()) for pixels in subject.batch.pixels[: len(subject.images)]]
    caption = (
        "The first three principal components of the patch tokens after the last block, over all images, as red, green "
    )
    caption += "and blue: similar colors mean similar content, also across images."
    return panel(caption, "", partial(plot_patch_colors, views, colors), {"colors": colors})
