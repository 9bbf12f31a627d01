"""Every way to draw what a model saw in a picture, behind one function."""

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..errors import ConfigError
from ..models import ViT
from ..models.resnet import ResNetBase
from .attention_rollout import head_attention, rollout
from .capture import MAP_COPIES, MAX_MAP_BYTES
from .relevance import gradcam, relevance, token_gradients

Method = Literal["relevance", "tokens", "gradcam", "rollout", "attention"]
METHODS: tuple[Method, ...] = get_args(Method)
CLASS_METHODS: tuple[Method, ...] = ("relevance", "tokens", "gradcam")  # the others are the same for every class
# Where a linear head reads the mean of a map, tokens would be the same as gradcam.
RESNET_METHODS: tuple[Method, ...] = ("gradcam",)


def methods_for(config: ModelConfig) -> tuple[Method, ...]:
    """Those that make sense for a model, the default first."""
    if isinstance(config, ViTConfig):
        return METHODS if config.depth else ()
    return RESNET_METHODS


def default_method(model: ViT | ResNetBase) -> Method:
    can = methods_for(model.config)
    if not can:
        raise ConfigError("A model without blocks has nothing to explain.")
    return can[0]


def explain(model: ViT | ResNetBase, images: Tensor, classes: Tensor, method: Method) -> np.ndarray:
    """Maps (B, h, w), none negative, of normalised images (B, C, H, W) for one class each (B,).

    h and w are the model's grid of patches, or a ResNet's last feature map.
    """
    if method not in methods_for(model.config):
        can = ", ".join(methods_for(model.config)) or "none: it has no blocks"
        raise ConfigError(f"This model cannot be explained by {method}, only by: {can}.")
    check_inputs(images, classes, model.config.num_classes)
    at_once = max_batch_size(model)
    parts = [
        explain_batch(model, images[i : i + at_once], classes[i : i + at_once], method)
        for i in range(0, len(images), at_once)
    ]
    return torch.cat(parts).float().cpu().numpy()


def check_inputs(images: Tensor, classes: Tensor, count: int) -> None:
    if not images.is_floating_point():
        raise ConfigError("explain takes normalised images (B, C, H, W): classifier.preprocess.normalize makes them.")
    if not isinstance(classes, Tensor) or classes.shape != (len(images),):
        raise ConfigError(f"explain takes one class for each of the {len(images)} images: torch.tensor([3, ...]).")
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < count:
        raise ConfigError(f"The model has the classes 0 to {count - 1}; {classes.tolist()} has others.")


def explain_batch(model: ViT | ResNetBase, images: Tensor, classes: Tensor, method: Method) -> Tensor:
    if method == "gradcam":
        return gradcam(model, images, classes)
    if method == "tokens":
        return token_gradients(model, images, classes)
    assert isinstance(model, ViT)
    if method == "relevance":
        return relevance(model, images, classes)
    return rollout(model, images) if method == "rollout" else head_attention(model, images)[:, -1].mean(dim=1)


def max_batch_size(model: ViT | ResNetBase) -> int:
    """So many that all maps of a pass, with their gradients, stay within four times `MAP_BYTES`; one at least."""
    if not isinstance(model, ViT):
        return 8
    config = model.config
    tokens = config.num_prefix + config.num_patches
    return int(min(16, max(1, 4 * MAX_MAP_BYTES // (MAP_COPIES * 4 * config.depth * config.num_heads * tokens**2))))
