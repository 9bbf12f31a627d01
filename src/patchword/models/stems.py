"""What an image passes before it is cut into patches: nothing, a few convolutions, or a ResNet (resnet.py)."""

from torch import nn

from ..config import ViTConfig
from .resnet import HybridStem


def conv_stem(config: ViTConfig) -> nn.Sequential:
    """For small images: each stage a 3x3 convolution, batch norm, ReLU, and max-pooling that halves the image."""
    layers: list[nn.Module] = []
    channels = config.in_channels
    for width in config.stem_layers:
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*layers)


def make_stem(config: ViTConfig) -> nn.Module:
    if config.stem == "resnet":
        return HybridStem(config)
    return conv_stem(config) if config.stem == "conv" else nn.Identity()
