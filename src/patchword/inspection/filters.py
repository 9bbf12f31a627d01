"""Filters of the first layer, and their principal components (the paper's Figure 7, left)."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from ..models import ViT
from ..models.resnet import ResNetBase, StdConv2d

NUM_COMPONENTS = 28  # as in the paper


@dataclass(frozen=True)
class Filters:
    """The filters of the first layer, and their principal components.

    Attributes:
        place: The layer, "patch embedding" or "first convolution".
        raw: The D filters, (D, C, h, w).
        components: Their principal components, strongest first, at most 28: (n, C, h, w).
        explained: The fraction of the variance that each component explains, (n,).
    """

    place: str
    raw: np.ndarray
    components: np.ndarray
    explained: np.ndarray


def embedding_filters(model: ViT | ResNetBase) -> Filters:
    """Returns the filters of the layer that reads pixels, and their principal components (the paper's Figure 7, left).

    This layer is the patch embedding; in hybrids, convolutional stems and ResNets, it is the first convolution.
    """
    place, raw = first_layer_filters(model)
    flat = raw.reshape(len(raw), -1).astype(np.float64)
    flat = flat - flat.mean(axis=0)
    _, singular_values, directions = np.linalg.svd(flat, full_matrices=False)
    count = min(NUM_COMPONENTS, len(directions))
    total = float((singular_values**2).sum()) or 1.0
    components = directions[:count].reshape(count, *raw.shape[1:])
    return Filters(place, raw, components, singular_values[:count] ** 2 / total)


def first_layer_filters(model: ViT | ResNetBase) -> tuple[str, np.ndarray]:
    """Returns the name and the filters (D, C, h, w) of the layer that reads pixels."""
    if isinstance(model, ViT) and model.config.stem == "linear":
        config = model.config
        weight = model.patch_embed.proj.weight.detach()
        shape = (-1, config.in_channels, *config.patch_size)
        return "patch embedding", weight.reshape(shape).cpu().numpy()
    start = model.stem if isinstance(model, ViT) else model
    root = next(module for module in start.modules() if isinstance(module, nn.Conv2d))
    weight = root.standardized_weight() if isinstance(root, StdConv2d) else root.weight
    return "first convolution", weight.detach().cpu().numpy()
