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
"""Any model of patchword, a `torch.nn.Module`: a `ViT` (or its subclass `DistilledViT`) or a ResNet."""


def build_model(config: ModelConfig) -> Model:
    """Builds a model from its config, with random weights.

    Args:
        config: The architecture, a `ViTConfig` or a `ResNetConfig`.

    Returns:
        The model, in training mode. Its head is initialized to zero, as in the paper.
    """
    if isinstance(config, ViTConfig):
        return DistilledViT(config) if config.distillation else ViT(config)
    return ResNet(config) if config.kind == "bit" else SmallResNet(config)


def create_model(name: str, **fields: Any) -> Model:
    """Builds a model by its name, with random weights.

    Args:
        name: The name of a preset, such as "Ti/16", "B/16", "R50+B/16" or "R50x1"; see `preset`.
        **fields: Fields of `ViTConfig` or `ResNetConfig` that differ from the preset.

    Returns:
        The model, in training mode. Its head is initialized to zero, as in the paper.

    Raises:
        ConfigError: The name (code "unknown_preset") or a field is unknown, or a value is out of range.

    Examples:
        ```python
        import torch
        import patchword as pw

        model = pw.create_model("S/16", num_classes=10, image_size=160)
        logits = model(torch.rand(2, 3, 160, 160))  # (2, 10)
        ```
    """
    return build_model(preset(name, **fields))


def adapt_model(model: Model, **changes: Any) -> Model:
    """Copies the weights into a model of another image size, number of channels or number of classes.

    Args:
        model: The model, which is not modified.
        **changes: New values of `image_size` (position embeddings are resampled), `in_channels` (the weights are
            split or summed, so that gray images give the same output) or `num_classes` (the head is replaced by
            zeros); also dropout rates and other fields that do not affect the weights.

    Returns:
        The adapted model, in the same mode (training or evaluation).

    Raises:
        ConfigError: Another field was given; the weights cannot be adapted to it.
    """
    config = adapt_config(model.config, **changes)
    adapted = build_model(config)
    adapted.load_state_dict(adapt_state(model.state_dict(), model.config, config))
    return adapted.train(model.training)


def tensor_shapes(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the model's state dict as meta tensors: names, shapes and types without memory."""
    with torch.device("meta"):
        return dict(build_model(config).state_dict())
