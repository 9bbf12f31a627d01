"""How far to trust a map: does the model lose the class when what the map shows is taken away, and find it when only
that is given? And does the map change when the model is ruined?

deletion, insertion: patches are blanked, or shown, in the order of the map, and the probability of the class is
watched; the area under the curve is low for a good deletion, high for a good insertion (Petsiuk et al., 2018). Blank
is the mean that the preprocessing subtracts. randomisation: weights are shuffled within each tensor, from the head
down; a map that stays the same did not come from what the model learnt (Adebayo et al., 2018).
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
from ..models import ViT
from ..models.resnet import ResNetBase
from .explain import Method, explain

STEPS = 10  # of a curve; the picture as it is, and the one that is blank, come on top
RANDOM_ORDER = "random order"
RANDOMIZATION_STAGES = ("head", "upper half", "all")  # how much is shuffled


@dataclass(frozen=True)
class FaithfulnessCurves:
    """Probability of the class of each image, (B, steps + 1), at equal steps from nothing done to all done."""

    deletion: np.ndarray
    insertion: np.ndarray

    @property
    def areas(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each image, under its deletion and its insertion curve: (B,), (B,)."""
        return area_under_curve(self.deletion), area_under_curve(self.insertion)


def area_under_curve(curves: np.ndarray) -> np.ndarray:
    return (curves[:, :-1] + curves[:, 1:]).mean(axis=1) / 2


def deletion_insertion(
    model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor, maps: np.ndarray, *, multi_label: bool = False
) -> FaithfulnessCurves:
    """Both curves, for maps (B, h, w) of any grid: a cell is blanked, or shown, as one. `model` gives logits."""

    def both(item: tuple[Tensor, int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        image, label, heat = item
        height, width = image.shape[-2:]
        hidden = hidden_pixels(heat, (height, width)).to(image.device)
        states = [torch.where(hidden, 0.0, image), torch.where(hidden[1:-1], image, 0.0)]
        found = class_probabilities(model, torch.cat(states), label, multi_label)
        deleted, within = found[: len(hidden)], found[len(hidden) :]
        return deleted, np.concatenate([deleted[-1:], within, deleted[:1]])  # the ends are the same two pictures

    items = zip(images, classes.tolist(), maps, strict=True)
    workers = torch.get_num_threads() if images.device.type == "cpu" else 0
    deleted, inserted = zip(*prefetch(both, items, workers), strict=True)
    return FaithfulnessCurves(np.stack(deleted), np.stack(inserted))


def hidden_pixels(heat: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Which pixels are touched at each step, cells with the most heat first: (steps + 1, 1, H, W)."""
    rank = np.empty(heat.size)
    chance = np.random.default_rng(1).random(heat.size)  # among equals: many cells of a map may be exactly zero
    rank[np.lexsort((chance, -heat.ravel()))] = np.arange(heat.size)
    rows, columns = (np.arange(n) * m // n for n, m in zip(size, heat.shape, strict=True))
    steps = min(STEPS, heat.size)
    counts = np.round(np.linspace(0, heat.size, steps + 1))
    touched = rank.reshape(heat.shape)[None] < counts[:, None, None]
    return torch.from_numpy(touched[:, rows][:, :, columns])[:, None]


@torch.inference_mode()
def class_probabilities(model: Callable[[Tensor], Tensor], images: Tensor, label: int, multi_label: bool) -> np.ndarray:
    logits = model(images)
    shares = logits.sigmoid() if multi_label else logits.softmax(dim=-1)
    return shares[:, label].cpu().numpy()


def random_maps(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """What every method must beat."""
    return np.random.default_rng(seed).random(shape)


def parameter_randomization(
    model: ViT | ResNetBase, images: Tensor, classes: Tensor, methods: Sequence[Method]
) -> dict[Method, list[float]]:
    """Spearman's rank correlation of each method's maps before and after each of `RUINS`, mean over the images."""
    before = {method: explain(model, images, classes, method) for method in methods}
    found: dict[Method, list[float]] = {method: [] for method in methods}
    for ruined in randomized_copies(model, images):
        for method in methods:
            after = explain(ruined, images, classes, method)
            pairs = zip(before[method], after, strict=True)
            found[method].append(float(np.mean([rank_correlation(a, b) for a, b in pairs])))
    return found


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation; 0 where one of the two is flat or no number, since it then shows nothing."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()) or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(spearmanr(first.ravel(), second.ravel()).statistic)


def randomized_copies(model: ViT | ResNetBase, images: Tensor, seed: int = 0) -> Iterator[ViT | ResNetBase]:
    """Copies with the weights of the head, of the upper half of the layers, too, and all weights shuffled."""
    names = [n for n, p in model.named_parameters() if p.numel() > 1]
    heads = {n for n in names if n.startswith(("head", "pre_logits", "pool"))}
    upper = heads | set(names[len(names) // 2 :])
    for chosen in (heads, upper, set(names)):
        ruined = copy.deepcopy(model)
        shuffle_parameters(ruined, chosen, torch.Generator().manual_seed(seed))
        recompute_batch_norms(ruined, chosen, images)
        yield ruined


@torch.no_grad()
def shuffle_parameters(model: nn.Module, names: set[str], generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


@torch.no_grad()
def recompute_batch_norms(model: nn.Module, shuffled: set[str], images: Tensor) -> None:
    """Shuffled batch norms get the statistics of the shuffled model; with those of the old one it would blow up."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    norms = [module for name, module in named if f"{name}.weight" in shuffled]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        model(images)
    model.eval()
