"""The study of what is built into a CNN and a ViT before any training: equivariance, locality, fixed weights or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ViTConfig
from ..inspection.capture import attention_maps
from ..models import ViT, build_model
from ..models.patches import unpatchify
from ..models.vit import patchify
from ..plots.panel import Panel
from .study import Cell, Length, ResultRow, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE, PATCH, CHANNELS, LAYERS = 32, 4, 32, 4
GRID = IMAGE // PATCH
SMALL_VIT = ViTConfig(
    image_size=(IMAGE, IMAGE), patch_size=(PATCH, PATCH), embed_dim=96, depth=LAYERS, num_heads=3, mlp_dim=192,
    num_classes=10, class_token=False, pooling="average",
)  # fmt: skip
FLOOR = 1e-8  # the smallest change that the figure shows


@dataclass(frozen=True)
class Measurement:
    """A number that a function measures on random weights and images, as a cell of a study."""

    name: str
    measure: Callable[[], float]

    def to_json(self) -> dict[str, Any]:
        """The name."""
        return {"measurement": self.name}

    def time_step(self, now: Callable[[], float]) -> tuple[float, float]:
        """Nothing is trained."""
        return 0.0, 0.0

    def run(self, seed: int, length: Length, now: Callable[[], float]) -> dict[str, Any]:
        """Measure with the random numbers of a seed."""
        torch.manual_seed(seed)
        with torch.no_grad():
            return {"value": self.measure()}


def random_images(count: int = 8) -> Tensor:
    """Smooth images (count, 3, H, W): neighboring pixels are alike, as in photos."""
    return F.interpolate(torch.randn(count, 3, GRID, GRID), (IMAGE, IMAGE), mode="bilinear")


def relative_change(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a|."""
    return float((a - b).norm() / a.norm())


def random_vit(positions: bool) -> ViT:
    """A new ViT, whose position embeddings are as large as those of a trained one (Ti/16: standard deviation 0.47)."""
    model = build_model(SMALL_VIT.replace(pos_embed="learned" if positions else "none")).eval()
    assert isinstance(model, ViT)
    if positions:
        nn.init.normal_(model.positions.table, std=0.5)  # type: ignore[arg-type]  # new ones have 0.02
    return model


def convolutions(padding: Literal["zeros", "circular"], layers: int = LAYERS) -> nn.Sequential:
    """Layers of 3x3 convolutions with ReLU, whose borders are padded by zeros, or by the opposite side."""
    widths = [3] + layers * [CHANNELS]
    modules = [(nn.Conv2d(a, b, 3, padding=1, padding_mode=padding), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*(module for pair in modules for module in pair))


def convolution_shift(padding: Literal["zeros", "circular"]) -> float:
    """Change of shifted features when the image is shifted by a patch instead."""
    network, images = convolutions(padding), random_images()
    shifted = network(images.roll((PATCH, PATCH), (2, 3)))
    return relative_change(network(images).roll((PATCH, PATCH), (2, 3)), shifted)


def vit_shift(positions: bool) -> float:
    """The same for the tokens of a ViT."""
    model, images = random_vit(positions), random_images()
    tokens, shifted = (
        model.forward_features(x).unflatten(1, (GRID, GRID)) for x in (images, images.roll((PATCH, PATCH), (2, 3)))
    )
    return relative_change(tokens.roll((1, 1), (1, 2)), shifted)


def shuffle_patches(images: Tensor, order: Tensor) -> Tensor:
    """The same images, or feature maps, with their patches in another order."""
    return unpatchify(patchify(images, (PATCH, PATCH))[:, order], (PATCH, PATCH), (GRID, GRID))


def vit_shuffle(positions: bool) -> float:
    """Change of the tokens of a ViT when the patches are shuffled before the model instead of after it."""
    model, images, order = random_vit(positions), random_images(), torch.randperm(GRID**2)
    return relative_change(
        model.forward_features(images)[:, order], model.forward_features(shuffle_patches(images, order))
    )


def convolution_shuffle() -> float:
    """The same for the feature map of convolutions."""
    network, images, order = convolutions("zeros"), random_images(), torch.randperm(GRID**2)
    return relative_change(shuffle_patches(network(images), order), network(shuffle_patches(images, order)))


def layers_to_see_all(network: Callable[[int], Callable[[Tensor], Tensor]]) -> float:
    """The smallest number of layers after which the output at a corner depends on every pixel of the image."""
    for layers in range(1, IMAGE):
        image = torch.randn(1, 3, IMAGE, IMAGE, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            corner = network(layers)(image).flatten()
            # Weighted, because the plain sum of a normalized token is constant.
            (gradient,) = torch.autograd.grad(corner @ torch.randn_like(corner), image)
        if bool((gradient.abs().sum(1) > 0).all()):
            return float(layers)
    return float("inf")


def convolution_corner(layers: int) -> Callable[[Tensor], Tensor]:
    """The output of convolutions at the top left corner; without ReLU, whose zeros would hide dependence."""
    linear = nn.Sequential(*(module for module in convolutions("zeros", layers) if isinstance(module, nn.Conv2d)))
    network = linear.double()
    return lambda image: network(image)[..., 0, 0]


def vit_corner(layers: int) -> Callable[[Tensor], Tensor]:
    """The output token of a ViT at the top left corner."""
    model = build_model(SMALL_VIT.replace(depth=layers)).double()
    assert isinstance(model, ViT)
    return lambda image: model.forward_features(image)[:, 0]


def attention_variation() -> float:
    """Mean total variation between the attention of a patch in two images: 0 if weights were fixed, at most 1."""
    model = random_vit(True)
    one, other = attention_maps(model, random_images(2))[0].unbind()  # (H, N, N) each
    return float((one - other).abs().sum(-1).mean() / 2)


MEASUREMENTS: dict[str, dict[str, Callable[[], float]]] = {
    "image shifted": {
        "convolutions, circular": partial(convolution_shift, "circular"),
        "convolutions, zero padding": partial(convolution_shift, "zeros"),
        "ViT without positions": partial(vit_shift, False),
        "ViT": partial(vit_shift, True),
    },
    "patches shuffled": {
        "convolutions": convolution_shuffle,
        "ViT without positions": partial(vit_shuffle, False),
        "ViT": partial(vit_shuffle, True),
    },
    "layers to see all": {
        "convolutions 3x3": partial(layers_to_see_all, convolution_corner),
        "ViT": partial(layers_to_see_all, vit_corner),
    },
    "attention in two images": {"ViT": attention_variation},
}


def equivariance() -> Study:
    """Measure what a CNN and a ViT have built in; nothing is trained."""
    cells = [
        Cell(series, x, Measurement(f"{series}: {x}", measure))
        for series, measures in MEASUREMENTS.items()
        for x, measure in measures.items()
    ]
    return Study(
        "equivariance", "What is built into a CNN, and what into a ViT?",
        "New models with random weights: is it the same to shift the image, or to shuffle its patches, before the "
        "model and after it? How many layers until an output depends on the whole image?",
        "Convolutions are local and translation-equivariant; in a ViT, only the MLPs are, and all knowledge of "
        "positions must be learned (section 3.1 of the ViT paper).",
        "model", tuple(cells), "nothing", panels=equivariance_panels,
        limits="Position embeddings are drawn as large as trained ones; new ones are small, and the changes with them. "
        "Random weights show the structure, not what trained models do: a trained ViT becomes less sensitive "
        "to shifts, and strided CNNs are equivariant only to shifts by their stride.",
    )  # fmt: skip


def equivariance_panels(study: Study, rows: Sequence[ResultRow]) -> list[Panel]:
    """Changes of outputs, and the table of all measurements."""
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        values.setdefault((row["series"], str(row["x"])), []).append(row["value"])
    means = {key: float(np.mean(each)) for key, each in values.items()}
    table = (("what", "model", "value"), *((*key, f"{mean:.3g}") for key, mean in means.items()))
    depth = ", ".join(f"{x} {mean:.0f}" for (series, x), mean in means.items() if series == "layers to see all")
    varied = means["attention in two images", "ViT"]
    changes = {key: mean for key, mean in means.items() if key[0] in ("image shifted", "patches shuffled")}
    return [
        Panel(
            study.name, "How much outputs change",
            f"Relative difference of the features at each position. Layers until a corner depends on every pixel: "
            f"{depth}. Attention of the same patch differs between two images by {varied:.0%}; a convolution's weights "
            "are the same for all images.",
            f"The paper: {study.paper}", partial(change_figure, changes),
            {"values": np.array(list(means.values()))}, table,
        )
    ]  # fmt: skip


def change_figure(changes: dict[tuple[str, str], float]) -> "Figure":
    """A bar for each model, on a logarithmic axis: rounding errors on the left, changes on the right."""
    from ..plots.theme import current_theme, new_figure, style_axes

    figure = new_figure(7.8, 3.8)
    axes = style_axes(figure.subplots(), "", "relative change of the output (1e-8 and less: none)", "")
    kinds = list(dict.fromkeys(series for series, _ in changes))
    for position, ((series, _), value) in enumerate(changes.items()):
        color = current_theme().series[kinds.index(series)]
        axes.barh(position, max(value, FLOOR), color=color, left=0, height=0.7)
        axes.text(max(value, FLOOR) * 1.3, position, f"{value:.2g}", va="center", fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")  # powers would need math text
    axes.set_xlim(FLOOR, 20)
    axes.set_yticks(range(len(changes)), [f"{series}: {x}" for series, x in changes])
    axes.invert_yaxis()
    return figure
