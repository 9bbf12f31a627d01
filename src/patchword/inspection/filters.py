"""What the first layer looks for: its filters, and their principal components (the paper's Figure 7, left)."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from ..models import ViT
from ..models.resnet import FeatureMap, StdConv2d

COMPONENTS = 28  # as many as the paper shows


@dataclass(frozen=True)
class Filters:
    """Filters of one layer, (D, C, h, w), and their components, the strongest first, (at most 28, C, h, w)."""

    place: str  # what the layer is, in words
    raw: np.ndarray
    components: np.ndarray
    explained: np.ndarray  # the part of the variance of all filters that lies along each component


def embedding_filters(model: ViT | FeatureMap) -> Filters:
    """Filters of the layer that sees pixels: the patch embedding, or the root of a stem or ResNet."""
    place, raw = first_filters(model)
    flat = raw.reshape(len(raw), -1).astype(np.float64)
    flat = flat - flat.mean(axis=0)
    _, sizes, directions = np.linalg.svd(flat, full_matrices=False)
    count = min(COMPONENTS, len(directions))
    total = float((sizes**2).sum()) or 1.0
    components = directions[:count].reshape(count, *raw.shape[1:])
    return Filters(place, raw, components, sizes[:count] ** 2 / total)


def first_filters(model: ViT | FeatureMap) -> tuple[str, np.ndarray]:
    if isinstance(model, ViT) and model.config.stem == "linear":
        config = model.config
        weight = model.patch_embed.proj.weight.detach()
        shape = (-1, config.in_channels, *config.patch_size)
        return "patch embedding", weight.reshape(shape).cpu().numpy()
    start = model.stem if isinstance(model, ViT) else model
    root = next(module for module in start.modules() if isinstance(module, nn.Conv2d))
    weight = root.standardised() if isinstance(root, StdConv2d) else root.weight
    return "first convolution", weight.detach().cpu().numpy()
