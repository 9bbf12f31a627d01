"""What an inspection shows: first what the weights alone tell, then what the model does with pictures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..checkpoints import Checkpoint
from ..core.text import pluralize
from ..inference.classifier import Classifier
from ..inference.inspection_images import Pictures
from ..inspection.attention_rollout import head_attention
from ..inspection.explain import CLASS_METHODS, default_method, explain, methods_for
from ..inspection.faithfulness import (
    RANDOM_ORDER,
    RANDOMIZATION_STAGES,
    FaithfulnessCurves,
    deletion_insertion,
    parameter_randomization,
    random_maps,
)
from ..inspection.filters import embedding_filters
from ..inspection.attention_distance import measure_attention_distance
from ..inspection.pos_embed_similarity import NO_TABLE, cross_strength, position_similarity
from ..inspection.token_analysis import outlier_fraction, patch_colors, patch_similarity, token_norms
from ..inspection.walkthrough import trace_walkthrough
from ..models import ViT
from ..models.resnet import ResNetBase
from ..plots.overlay_heatmap import overlay_heatmap
from ..plots.panel import Panel

# Of all exhibits, in the order of the page.
NAMES: tuple[str, ...] = ("filters", "positions", "attention_distance", "walk", "heads", "explanations", "classes")
NAMES += ("trust", "norms", "similarity", "colours")
BATCH = 8  # images that go through the model together
DRAWN = 4  # pictures in a figure of overlays
CLASSES = 3  # "why this one?" is asked of so many
JUDGED = 6  # pictures of the deletion and insertion curves, which cost most of an inspection's time
RUINED = 2  # pictures of the randomisation check
FEW = 3  # pictures, from which on a spread can be told
IMPROBABLE = 0.01  # a class below this cannot lose enough for a map of it to be judged
NO_ATTENTION = "A ResNet has no tokens and no attention."
NO_BLOCKS = "A model without blocks has no attention."


@dataclass(frozen=True)
class Subject:
    """A model and the pictures it is shown, with what several exhibits need computed once."""

    classifier: Classifier
    pictures: Pictures
    label: int | None = None  # the class to explain; None: the most probable one of each picture
    before: Checkpoint | None = None  # the same weights before they were fitted to another image size

    @property
    def model(self) -> ViT | ResNetBase:
        return self.classifier.model

    @cached_property
    def images(self) -> Tensor:
        """The pictures that are drawn, normalised."""
        return self.normalised(slice(0, len(self.pictures.whole)))

    def normalised(self, rows: slice) -> Tensor:
        return self.classifier.preprocess.normalize(self.pictures.pixels[rows])

    def batches(self) -> Iterator[Tensor]:
        for first in range(0, len(self.pictures.pixels), BATCH):
            yield self.normalised(slice(first, first + BATCH))

    def calibrated(self, images: Tensor) -> Tensor:
        """Logits as the classifier has them."""
        return self.model(images) / self.classifier.checkpoint.temperature

    @cached_property
    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.calibrated(self.images)

    @cached_property
    def classes(self) -> Tensor:
        if self.label is not None:
            return torch.full((len(self.images),), self.label)
        return self.logits.argmax(dim=-1).clone()

    def scores(self, picture: int, count: int) -> list[tuple[str, int, float]]:
        found = self.classifier.prediction(self.logits[picture], count).scores
        return [(score.label, score.index, score.probability) for score in found]

    def overlaid(self, picture: int, heat: np.ndarray) -> Image.Image:
        return overlay_heatmap(self.pictures.whole[picture], heat, self.classifier.preprocess)


def exhibits(subject: Subject) -> Iterator[Panel]:
    """All of them, in the order of the page. Each is computed when it is asked for."""
    yield filters_exhibit(subject)
    yield positions_exhibit(subject)
    if not len(subject.pictures.pixels):
        return
    for make in (reach_exhibit, walk_exhibit, heads_exhibit):
        yield make(subject)
    for make in (methods_exhibit, classes_exhibit, trust_exhibit):
        yield make(subject)
    for make in (norms_exhibit, similarity_exhibit, colours_exhibit):
        yield make(subject)


def of_attention(name: str, title: str) -> Callable[[Callable[..., Panel]], Callable[[Subject], Panel]]:
    """The decorated maker is called for models that have blocks; for others the exhibit says why it is absent."""

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


def filters_exhibit(subject: Subject) -> Panel:
    from ..plots.filter_plot import plot_filters

    filters = embedding_filters(subject.model)
    count = len(filters.components)
    few, share = filters.explained[: count // 3].sum(), filters.explained.sum()
    seen = f"The first {count // 3} principal components explain {few:.0%} of the variance of the {len(filters.raw)} "
    seen += f"filters, all {count} explain {share:.0%}."
    paper = (
        "In the paper (ViT-L/32), the leading components resemble basis functions for the fine structure of a patch: "
    )
    paper += "oriented waves and edges, and flat colors. They stay noisy if the training set is small."
    arrays = {"raw": filters.raw, "components": filters.components, "explained": filters.explained}
    title = f"Filters of the {filters.place}"
    return Panel("filters", title, seen, paper, partial(plot_filters, filters), arrays)


def positions_exhibit(subject: Subject) -> Panel:
    name, title = "positions", "Position embedding similarity"
    model = subject.model
    if not isinstance(model, ViT):
        return Panel.absent(name, title, "A ResNet has no position embeddings.")
    if model.config.pos_embed in NO_TABLE:
        return Panel.absent(name, title, NO_TABLE[model.config.pos_embed])
    from ..plots.filter_plot import plot_pos_embed_similarity

    panels = {"positions": position_similarity(model)}
    before = subject.before.build_model() if subject.before is not None else None
    if isinstance(before, ViT) and before.config.grid != model.config.grid:
        old, new = ("x".join(map(str, m.config.grid)) for m in (before, model))
        panels = {f"original, {old}": position_similarity(before), f"resampled, {new}": panels["positions"]}
    near, far = cross_strength(list(panels.values())[-1])
    seen = f"Each tile shows the cosine similarity of one position embedding with all others. Mean: {near:.2f} within "
    seen += f"the same row or column, {far:.2f} elsewhere."
    paper = (
        "In the paper, nearby positions are similar and rows and columns stand out, although the grid is not built in."
    )
    arrays = {title.split(",")[0].replace(" ", "_"): values for title, values in panels.items()}
    return Panel(name, title, seen, paper, partial(plot_pos_embed_similarity, panels), arrays)


@of_attention("attention_distance", "Attention distance")
def reach_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.distance_plot import plot_attention_distance

    reach = measure_attention_distance(model, subject.batches())
    first, last = reach.distance[0].mean(), reach.distance[-1].mean()
    seen = f"Mean over {pluralize(reach.images, 'image')}: {first:.0f} pixels in the first layer, {last:.0f} in the last. "
    seen += f"Spearman's rank correlation between depth and mean distance is {reach.growth:.2f}."
    seen += " Class and register tokens are excluded." if model.config.num_prefix else ""
    paper = (
        "In the paper, some heads in the lowest layers already attend to the whole image while others stay local, and "
    )
    paper += "the distance grows with depth. After a ResNet or a convolutional stem, local heads are less pronounced."
    arrays = {"distance": reach.distance, "entropy": reach.entropy}
    return exhibit(seen, paper, partial(plot_attention_distance, reach), arrays)


@of_attention("walk", "One image through the model")
def walk_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.walkthrough_plot import plot_walkthrough

    walk = trace_walkthrough(model, subject.pictures.pixels[0].numpy(), subject.images[0])
    scores = [(label, share) for label, _, share in subject.scores(0, 5)]
    seen = "From pixels to probabilities. The colors in step 4 are the first three principal components of the tokens "
    seen += "after each block: patches of similar color have similar representations."
    draw = partial(plot_walkthrough, walk, scores, reader(model), looker(model), model.config)
    paper = "The paper's Figure 1, computed for this image."
    arrays = {"embedded": walk.embedded, "entering": walk.entering, "attention": walk.attention, "logits": walk.logits}
    return exhibit(seen, paper, draw, arrays)


def reader(model: ViT) -> str:
    """Where the head reads, in words."""
    if model.config.distillation:
        return "the class and the distillation token"
    kinds = {"class": "the class token", "average": "the mean of the patches", "attention": "a learned probe"}
    return kinds.get(model.config.pooling, "the class token and the mean of the patches")


def looker(model: ViT) -> str:
    """Whose attention stands for the picture, in words."""
    return "the patches, on average" if model.config.pooling in ("average", "attention") else reader(model)


@of_attention("heads", "Attention maps by layer and head")
def heads_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.attention_plot import plot_heads

    maps = head_attention(model, subject.images[:1])[0].cpu().numpy()
    names = [str(i + 1) for i in range(model.config.depth)] + ["pool"] * (len(maps) - model.config.depth)
    seen = f"Attention of {looker(model)} in the first image, for every head. Each map has its own scale."
    if len(maps) > model.config.depth:
        seen += " The last row is the attention of the pooling head."
    return exhibit(seen, "", partial(plot_heads, maps, names), {"maps": maps})


def methods_exhibit(subject: Subject) -> Panel:
    name, title, methods = "explanations", "Explanations", methods_for(subject.model.config)
    if not methods:
        return Panel.absent(name, title, NO_BLOCKS)
    from ..plots.attention_plot import plot_methods

    count = min(DRAWN, len(subject.pictures.whole))
    images, classes = subject.images[:count], subject.classes[:count]
    found: dict[str, np.ndarray] = {m: explain(subject.model, images, classes, m) for m in methods}
    drawn = {method: [subject.overlaid(i, heat) for i, heat in enumerate(maps)] for method, maps in found.items()}
    titles = [subject.classifier.labels[int(c)] for c in classes]
    seen = "Evidence for the class above each image, by method. Brighter means more relevant; the dark border is "
    seen += "cropped away before the model sees the image."
    paper = ""
    if len(methods) > 1:
        seen += f" {', '.join(m for m in methods if m in CLASS_METHODS)} are class-specific; the other methods are not."
        paper = "The paper's Figure 6 is attention rollout."
    draw = partial(plot_methods, subject.pictures.whole[:count], titles, drawn)
    return Panel(name, title, seen, paper, draw, found)


def classes_exhibit(subject: Subject) -> Panel:
    name, title = "classes", "Explanations by class"
    if not methods_for(subject.model.config):
        return Panel.absent(name, title, NO_BLOCKS)
    from ..plots.attention_plot import plot_classes

    scores, method = subject.scores(0, CLASSES), default_method(subject.model)
    if subject.label is not None and subject.label not in [index for _, index, _ in scores]:
        everything = subject.scores(0, len(subject.classifier.labels))
        scores = [*scores[:-1], next(score for score in everything if score[1] == subject.label)]
    asked = torch.tensor([index for _, index, _ in scores])
    maps = explain(subject.model, subject.images[:1].expand(len(asked), -1, -1, -1), asked, method)
    drawn = [subject.overlaid(0, heat) for heat in maps]
    also = " and of the requested one" if subject.label is not None else ""
    seen = f"Explanations of the most probable classes of the first image{also}, by {method}."
    pairs = [(label, share) for label, _, share in scores]
    draw = partial(plot_classes, subject.pictures.whole[0], pairs, drawn)
    return Panel(name, title, seen, "", draw, {"maps": maps})


def trust_exhibit(subject: Subject) -> Panel:
    name, title, methods = "trust", "Faithfulness of the explanations", methods_for(subject.model.config)
    if not methods:
        return Panel.absent(name, title, NO_BLOCKS)
    from ..plots.faithfulness_plot import plot_faithfulness

    model, images, classes = subject.model, subject.images[:JUDGED], subject.classes[:JUDGED]
    found: dict[str, np.ndarray] = {method: explain(model, images, classes, method) for method in methods}
    found[RANDOM_ORDER] = random_maps(found[methods[0]].shape)
    multi_label = subject.classifier.checkpoint.multi_label
    curves = {
        n: deletion_insertion(subject.calibrated, images, classes, m, multi_label=multi_label) for n, m in found.items()
    }
    kept = parameter_randomization(model, images[:RUINED], classes[:RUINED], methods)
    ranked = sorted(methods, key=lambda m: -gap(curves[m]))
    seen = verdict(curves, ranked, len(images), min(RUINED, len(images)))
    head = ("method", "deletion", "insertion", "difference", *(f"shuffled: {ruin}" for ruin in RANDOMIZATION_STAGES))
    rows = [row(each, curves[each], kept.get(each)) for each in (*ranked, RANDOM_ORDER)]  # type: ignore[call-overload]
    arrays = {f"{n}_deletion".replace(" ", "_"): c.deletion for n, c in curves.items()}
    arrays |= {f"{n}_insertion".replace(" ", "_"): c.insertion for n, c in curves.items()}
    draw = partial(plot_faithfulness, {each: curves[each] for each in (*ranked, RANDOM_ORDER)})
    return Panel(name, title, seen, "", draw, arrays, (head, *rows))


def verdict(curves: dict[str, FaithfulnessCurves], ranked: Sequence[str], pictures: int, ruined: int) -> str:
    """Which map to believe, in words."""
    best, over = ranked[0], f"On {pluralize(pictures, 'image')}"
    least = float(curves[best].deletion[:, 0].mean())
    if least < IMPROBABLE:
        return f"{over}, the class has a probability of only {least:.1%}, too low to judge the maps by deletion."
    unproved = [method for method in ranked if not clearly_more(gaps(curves[method]), gaps(curves[RANDOM_ORDER]))]
    if best in unproved:
        said = f"{over}, no method is clearly better than a random order: do not rely on these maps."
    else:
        said = f"{over}, {best} is the most faithful method: its gap between insertion and deletion is the largest."
        said += f" Not clearly better than a random order: {', '.join(unproved)}." if unproved else ""
    said += " With so few images this is uncertain." if pictures < FEW else ""
    checked = pluralize(ruined, "image")
    return (
        f"{said} A map that hardly changes when weights are shuffled ({checked}) does not depend on what was learned."
    )


def clearly_more(values: np.ndarray, chance: np.ndarray) -> bool:
    """By more than twice the standard error of the difference, picture by picture; of few pictures, at all."""
    difference = values - chance
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) >= FEW else 0.0
    return bool(difference.mean() > 2 * error)


def gaps(curves: FaithfulnessCurves) -> np.ndarray:
    """Of each picture."""
    deletion, insertion = curves.areas
    return insertion - deletion


def gap(curves: FaithfulnessCurves) -> float:
    return float(gaps(curves).mean())


def row(name: str, curves: FaithfulnessCurves, kept: list[float] | None) -> tuple[str, ...]:
    deletion, insertion = (float(each.mean()) for each in curves.areas)
    alike = [f"{value:.2f}" for value in kept] if kept else ["" for _ in RANDOMIZATION_STAGES]
    return (name, f"{deletion:.3f}", f"{insertion:.3f}", f"{insertion - deletion:.3f}", *alike)


@of_attention("norms", "Token norms")
def norms_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.token_plot import plot_token_norms
    from ..plots.walkthrough_plot import to_image

    norms = token_norms(model, subject.images[0])
    worst = max(outlier_fraction(stage) for stage in norms)
    seen = "Each stage has its own logarithmic scale. In the first image, "
    if worst:
        seen += f"{worst:.1%} of the tokens of the worst stage have a norm above three times the median."
    else:
        seen += "no token norm exceeds three times the median of its stage: no artifacts."
    seen += (
        " Large models tend to store global information in a few high-norm tokens of uninformative patches; register "
    )
    seen += "tokens avoid this."
    view = to_image(subject.pictures.pixels[0].numpy())
    return exhibit(seen, "", partial(plot_token_norms, view, norms), {"norms": norms})


@of_attention("similarity", "Patch similarity")
def similarity_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.token_plot import plot_patch_similarity
    from ..plots.walkthrough_plot import to_image

    h, w = model.config.grid
    places = sorted({(h // 2, w // 2), (h // 4, w // 4), (h // 4, 3 * w // 4), (3 * h // 4, w // 2)})
    maps = [(place, patch_similarity(model, subject.images[0], place)) for place in places]
    seen = "Cosine similarity of the framed patch with every other patch, after the last block."
    view = to_image(subject.pictures.pixels[0].numpy())
    arrays = {f"row{r}_column{c}": values for (r, c), values in maps}
    return exhibit(seen, "", partial(plot_patch_similarity, view, maps), arrays)


@of_attention("colours", "Principal components of the patch tokens")
def colours_exhibit(subject: Subject, model: ViT, exhibit: Callable[..., Panel]) -> Panel:
    from ..plots.token_plot import plot_patch_colors
    from ..plots.walkthrough_plot import to_image

    colours = patch_colors(model, subject.images)
    views = [to_image(pixels.numpy()) for pixels in subject.pictures.pixels[: len(subject.images)]]
    seen = (
        "The first three principal components of the patch tokens after the last block, over all images, as red, green "
    )
    seen += "and blue: similar colors mean similar content, also across images."
    return exhibit(seen, "", partial(plot_patch_colors, views, colours), {"colours": colours})
