"""Models: ViT and its hybrids (vit.py), DeiT's distilled ViT (distilled.py), ResNets (resnet.py).

adapt.py adapts weights to other input shapes and numbers of classes; cpu.py has faster paths for CPUs.
"""

from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig, ViTConfig
from ..config.presets import preset
from .adapt import adapt_config, adapt_state
from .cpu import optimize_for_cpu
from .distilled import DistilledViT
from .patches import unpatchify
from .resnet import ResNet, SmallResNet
from .vit import ViT, patchify

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
    """Builds a model with random weights; `create_model` does it by name."""
    if isinstance(config, ViTConfig):
        return DistilledViT(config) if config.distillation else ViT(config)
    return ResNet(config) if config.kind == "bit" else SmallResNet(config)


def create_model(name: str, **fields: Any) -> Model:
    """Builds a named model with random weights: `create_model("B/16", num_classes=10, image_size=384)`."""
    return build_model(preset(name, **fields))


def adapt_model(model: Model, **changes: Any) -> Model:
    """Copies the weights into a model of another image size, number of channels or number of classes."""
    config = adapt_config(model.config, **changes)
    adapted = build_model(config)
    adapted.load_state_dict(adapt_state(model.state_dict(), model.config, config))
    return adapted.train(model.training)


def tensor_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the model's state dict as meta tensors: names, shapes and types without memory."""
    with torch.device("meta"):
        return dict(build_model(config).state_dict())
