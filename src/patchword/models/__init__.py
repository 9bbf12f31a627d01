"""The models: ViT and its hybrids (vit.py), DeiT's (distilled.py), ResNets (resnet.py).

And weights adapted to new shapes (adapt.py), and computed faster on a CPU (cpu.py).
"""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..config.presets import preset
from .adapt import adapt_config, adapt_state
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
    "adapt_config",
    "adapt_model",
    "adapt_state",
    "build_model",
    "create_model",
    "optimize_for_cpu",
    "patchify",
    "tensor_shapes",
    "unpatchify",
]

Model = ViT | ResNet | SmallResNet


def build_model(config: ModelConfig) -> Model:
    """A model with fresh random weights; `create` does it by name."""
    if isinstance(config, ViTConfig):
        return DistilledViT(config) if config.distillation else ViT(config)
    return ResNet(config) if config.kind == "bit" else SmallResNet(config)


def create_model(name: str, **fields: Any) -> Model:
    """A named model with fresh random weights: `create("B/16", num_classes=10, image_size=384)`."""
    return build_model(preset(name, **fields))


def adapt_model(model: Model, **changes: Any) -> Model:
    """The same weights in a model of another image size, channel count or number of classes."""
    config = adapt_config(model.config, **changes)
    new = build_model(config)
    new.load_state_dict(adapt_state(model.state_dict(), model.config, config))
    return new.train(model.training)


def tensor_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of this model holds, as a meta tensor: names, shapes and types, no memory."""
    with torch.device("meta"):
        return dict(build_model(config).state_dict())
