"""The models: ViT and its hybrids (vit.py), DeiT's (distilled.py), ResNets (resnet.py).

And weights adapted to new shapes (adapt.py), and computed faster on a CPU (cpu.py).
"""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..config.presets import preset
from .adapt import adapt_state, changed_config
from .cpu import optimize_for_cpu
from .distilled import DistilledViT
from .patches import patchify, unpatchify
from .resnet import ResNet, SmallResNet
from .vit import ViT

__all__ = [
    "DistilledViT",
    "ResNet",
    "SmallResNet",
    "ViT",
    "adapt_state",
    "build",
    "changed_config",
    "create",
    "optimize_for_cpu",
    "patchify",
    "resized",
    "tensor_shapes",
    "unpatchify",
]

Model = ViT | ResNet | SmallResNet


def build(config: ModelConfig) -> Model:
    """A model with fresh random weights; `create` does it by name."""
    if isinstance(config, ViTConfig):
        return DistilledViT(config) if config.distillation else ViT(config)
    return ResNet(config) if config.kind == "bit" else SmallResNet(config)


def create(name: str, **fields: Any) -> Model:
    """A named model with fresh random weights: `create("B/16", num_classes=10, image_size=384)`."""
    return build(preset(name, **fields))


def resized(model: Model, **changes: Any) -> Model:
    """The same weights in a model of another image size, channel count or number of classes."""
    config = changed_config(model.config, **changes)
    new = build(config)
    new.load_state_dict(adapt_state(model.state_dict(), model.config, config))
    return new.train(model.training)


def tensor_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of this model holds, as a meta tensor: names, shapes and types, no memory."""
    with torch.device("meta"):
        return dict(build(config).state_dict())
