"""Faithfulness of explanations: deletion and insertion curves, and the parameter randomization test.

- Deletion, insertion (RISE, Petsiuk et al., 2018): patches are blanked, or shown, in the order of the map, and the
  probability of the class is recorded. A faithful map has a small area under the deletion curve, and a large one under
  the insertion curve. Blank means the mean that the preprocessing subtracts.
- Parameter randomization (Adebayo et al., 2018): weights are shuffled within each tensor, from the head down. A map
  that stays the same does not depend on what the model learned.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.prefetch import prefetch
from ..errors import ConfigError
from ..models import ViT
from ..models.layers import NoKeyBiasLinear
from ..models.resnet import ResNetBase
from .explain import Method, explain

STEPS = 10  # of a curve, from the whole image to the blank one
RANDOM_ORDER = "random order"
RANDOMIZATION_STAGES = ("head", "upper half", "all")  # which weights are shuffled
NO_PROBABILITIES = "The model has no head, but deletion and insertion measure the probability of a class."


@dataclass(frozen=True)
class FaithfulnessCurves:
    """Deletion and insertion curves of explanation maps.

    Attributes:
        deletion: The probability of each image's class while cells of the map are blanked, the most relevant first,
            from the whole image to the blank one: (B, steps + 1), where steps is 10 or the number of cells, if smaller.
        insertion: The same while cells are revealed, the most relevant first, from the blank image to the whole one.
    """

    deletion: np.ndarray
    insertion: np.ndarray

    @property
    def areas(self) -> tuple[np.ndarray, np.ndarray]:
        """The areas under the deletion and the insertion curve of each image, (B,) each.

        A faithful map has a small area under the deletion curve and a large one under the insertion curve.
        """
        return area_under_curve(self.deletion), area_under_curve(self.insertion)


def area_under_curve(curves: np.ndarray) -> np.ndarray:
    """Integrates curves (B, steps + 1) from 0 to 1 by the trapezoidal rule: (B,)."""
    return (curves[:, :-1] + curves[:, 1:]).mean(axis=1) / 2


def deletion_insertion(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, maps: np.ndarray, *, multi_label: bool = False
) -> FaithfulnessCurves:
    """Measures how faithful maps are to the model, by deletion and insertion (RISE, Petsiuk et al., 2018).

    Args:
        model: A function from normalized images to logits (B, K), such as a model in evaluation mode.
        images: Normalized images, (B, C, H, W).
        classes: The index of the class of each image, integers (B,).
        maps: An explanation map for each image, (B, h, w) of any grid.
        multi_label: Whether probabilities are sigmoids instead of a softmax.

    Raises:
        ConfigError: The model has no head, so there are no probabilities.
    """
    if isinstance(model, ViT | ResNetBase) and not model.config.num_classes:
        raise ConfigError(NO_PROBABILITIES, code="unsupported_by_model")

    def compute_curves(item: tuple[Tensor, int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        image, label, heat = item
        height, width = image.shape[-2:]
        hidden = hidden_pixels(heat, (height, width)).to(image.device)
        states = [torch.where(hidden, 0.0, image), torch.where(hidden[1:-1], image, 0.0)]
        values = class_probabilities(model, torch.cat(states), label, multi_label)
        deletion, insertion = values[: len(hidden)], values[len(hidden) :]
        return deletion, np.concatenate([deletion[-1:], insertion, deletion[:1]])  # both curves have the same ends

    items = zip(images, classes.tolist(), maps, strict=True)
    workers = torch.get_num_threads() if images.device.type == "cpu" else 0
    deleted, inserted = zip(*prefetch(compute_curves, items, workers), strict=True)
    return FaithfulnessCurves(np.stack(deleted), np.stack(inserted))


def hidden_pixels(heat: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Returns which pixels are hidden at each step, cells of highest relevance first: (steps + 1, 1, H, W)."""
    rank = np.empty(heat.size)
    tie_breaker = np.random.default_rng(1).random(heat.size)  # many cells of a map may be exactly zero
    rank[np.lexsort((tie_breaker, -heat.ravel()))] = np.arange(heat.size)
    rows, columns = (np.arange(n) * m // n for n, m in zip(size, heat.shape, strict=True))
    steps = min(STEPS, heat.size)
    counts = np.round(np.linspace(0, heat.size, steps + 1))
    hidden = rank.reshape(heat.shape)[None] < counts[:, None, None]
    return torch.from_numpy(hidden[:, rows][:, :, columns])[:, None]


@torch.inference_mode()
def class_probabilities(model: Callable[[Tensor], Tensor], images: Tensor, label: int, multi_label: bool) -> np.ndarray:
    """Returns the probability of one class for each image: (B,)."""
    logits = model(images)
    probabilities = logits.sigmoid() if multi_label else logits.softmax(dim=-1)
    return probabilities[:, label].cpu().numpy()


def random_maps(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random maps, the baseline of every method."""
    return np.random.default_rng(seed).random(shape)


def parameter_randomization(
    model: ViT | ResNetBase, images: Tensor, classes: Tensor | None, methods: Sequence[Method]
) -> dict[Method, list[float]]:
    """Tests whether maps depend on what the model learned, by shuffling its weights (Adebayo et al., 2018).

    Args:
        model: The model, in evaluation mode; it is not modified.
        images: Normalized images, (B, C, H, W).
        classes: The index of the class to explain for each image, integers (B,); None as in `explain`.
        methods: The explanation methods to test.

    Returns:
        For each method, three means over the images of Spearman's rank correlation between the map of the model and
            that of a copy with shuffled weights: those of the head, of the upper half, and of the whole model. A map
            that stays the same (correlation 1) does not depend on these weights.
    """
    before = {method: explain(model, images, classes, method) for method in methods}
    correlations: dict[Method, list[float]] = {method: [] for method in methods}
    for randomized in randomized_copies(model, images):
        for method in methods:
            after = explain(randomized, images, classes, method)
            pairs = zip(before[method], after, strict=True)
            correlations[method].append(float(np.mean([rank_correlation(a, b) for a, b in pairs])))
    return correlations


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's rank correlation; 0 if one of the two maps is constant or not finite."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()) or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(spearmanr(first.ravel(), second.ravel()).statistic)


def randomized_copies(model: ViT | ResNetBase, images: Tensor, seed: int = 0) -> Iterator[ViT | ResNetBase]:
    """Yields copies with shuffled weights: of the head, also of the upper half of the layers, and of all layers."""
    names = [n for n, p in model.named_parameters() if p.numel() > 1]
    heads = {n for n in names if n.startswith(("head", "pre_logits", "pool"))}
    upper = heads | set(names[len(names) // 2 :])
    for chosen in (heads, upper, set(names)):
        randomized = copy.deepcopy(model)
        shuffle_parameters(randomized, chosen, torch.Generator().manual_seed(seed))
        recompute_batch_norms(randomized, chosen, images)
        yield randomized


@torch.no_grad()
def shuffle_parameters(model: nn.Module, names: set[str], generator: torch.Generator) -> None:
    """Permutes the values within each of these parameters."""
    for name, parameter in model.named_parameters():
        if name in names:
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    for module in model.modules():
        if isinstance(module, NoKeyBiasLinear):
            module.clear_key_bias()


@torch.no_grad()
def recompute_batch_norms(model: nn.Module, shuffled: set[str], images: Tensor) -> None:
    """Recomputes the statistics of shuffled batch norms, since activations would explode with the old ones."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    norms = [module for name, module in named if f"{name}.weight" in shuffled]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        model(images)
    model.eval()
