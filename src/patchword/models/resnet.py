"""ResNets: the stem of the paper's hybrids, BiT (its convolutional baseline), and He et al.'s for small images.

The first two use weight standardization (Qiao et al., 2019) and GroupNorm instead of batch norm. The hybrid's
units are post-activation and pad as TensorFlow does; BiT's are pre-activation and pad as PyTorch does. The layers of
spatial.py can replace the 3x3 convolutions of the last two.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ResNetConfig, ViTConfig, WeightStandardization
from .spatial import AxialLayer, LocalAttention, NonLocal, make_attention

GROUPS = 32

# Makes the attention layer that replaces a 3x3 convolution: channels in, channels out, stride.
AttentionMaker = Callable[[int, int, int], nn.Module]


class StdConv2d(nn.Conv2d):
    """A convolution with weight standardization: each filter has mean 0 and variance 1 when it is applied."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int = 1, *, rule: WeightStandardization) -> None:
        # BiT pads evenly, like PyTorch; the others like TensorFlow's SAME, which depends on the image size.
        super().__init__(cin, cout, kernel, stride, padding=kernel // 2 if rule == "bit" else 0, bias=False)
        self.rule = rule

    def standardized_weight(self) -> Tensor:
        """The weight that the convolution applies."""
        w = self.weight
        variance, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True, correction=0)
        if self.rule == "google":
            return (w - mean) / (variance.sqrt() + 1e-5)
        return (w - mean) / (variance + (1e-8 if self.rule == "timm" else 1e-10)).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        if self.rule != "bit":
            x = pad_same(x, self.kernel_size[0], self.stride[0])
        return self._conv_forward(x, self.standardized_weight(), None)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pads so that the output has ceil(size / stride) pixels, the odd pixel at the right and the bottom."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class HybridUnit(nn.Module):
    """Bottleneck, post-activation: 1x1, 3x3, 1x1, and a projected shortcut if the shape changes."""

    def __init__(self, cin: int, width: int, stride: int, rule: WeightStandardization) -> None:
        super().__init__()
        eps = group_norm_eps(rule)
        self.conv1, self.norm1 = StdConv2d(cin, width, 1, rule=rule), nn.GroupNorm(GROUPS, width, eps)
        self.conv2, self.norm2 = StdConv2d(width, width, 3, stride, rule=rule), nn.GroupNorm(GROUPS, width, eps)
        self.conv3, self.norm3 = StdConv2d(width, 4 * width, 1, rule=rule), nn.GroupNorm(GROUPS, 4 * width, eps)
        self.shortcut: nn.Module = nn.Identity()
        if cin != 4 * width or stride != 1:
            conv = StdConv2d(cin, 4 * width, 1, stride, rule=rule)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=nn.GroupNorm(GROUPS, 4 * width, eps)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class HybridStem(nn.Module):
    """Image to feature map: the root (stride 4), then stages of bottleneck units, each after the first halving."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        rule, width = config.weight_standardization, config.stem_width
        self.conv = StdConv2d(config.in_channels, width, 7, 2, rule=rule)
        self.norm = nn.GroupNorm(GROUPS, width, group_norm_eps(rule))
        self.stages = nn.ModuleList()
        channels = width
        for stage, units in enumerate(config.stem_layers):
            blocks = nn.Sequential()
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                blocks.append(HybridUnit(channels, width * 2**stage, stride, rule))
                channels = width * 2**stage * 4
            self.stages.append(blocks)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, C', H/s, W/s)
        x = F.relu(self.norm(self.conv(images)))
        x = F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x


def group_norm_eps(rule: WeightStandardization) -> float:
    """Returns the epsilon of GroupNorm that goes with a rule of weight standardization."""
    return 1e-6 if rule == "google" else 1e-5


class BiTUnit(nn.Module):
    """Bottleneck, pre-activation: the shortcut of a unit that changes the shape starts after the first norm."""

    def __init__(self, cin: int, width: int, stride: int, attention: AttentionMaker | None = None) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, cin), StdConv2d(cin, width, 1, rule="bit")
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, width), make_conv3x3(width, width, stride, attention, rule="bit")
        self.norm3, self.conv3 = nn.GroupNorm(GROUPS, width), StdConv2d(width, 4 * width, 1, rule="bit")
        changes = cin != 4 * width or stride != 1
        self.shortcut = StdConv2d(cin, 4 * width, 1, stride, rule="bit") if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


def make_conv3x3(
    cin: int, cout: int, stride: int, attention: AttentionMaker | None, rule: WeightStandardization | None = None
) -> nn.Module:
    """Makes the 3x3 convolution of a unit, with standardized weights if there is a rule, or what replaces it."""
    if attention is not None:
        return attention(cin, cout, stride)
    if rule is not None:
        return StdConv2d(cin, cout, 3, stride, rule=rule)
    return nn.Conv2d(cin, cout, 3, stride, padding=1, bias=False)


def attention_maker(config: ResNetConfig, stage: int) -> AttentionMaker | None:
    """Returns what makes the attention layers of a stage; None if it has convolutions."""
    has_attention = config.spatial != "conv" and stage >= config.spatial_stage
    return partial(make_attention, config, stage) if has_attention else None


def has_non_local(config: ResNetConfig, stage: int, unit: int) -> bool:
    """Whether a Non-local block precedes this unit: the last one of the second last stage, as in the paper's res4."""
    place = max(0, len(config.layers) - 2)
    return config.non_local is not None and (stage, unit) == (place, config.layers[place] - 1)


class ResNetBase(nn.Module):
    """Base class: a convolutional network with global average pooling and a linear head."""

    config: ResNetConfig
    conv: nn.Conv2d
    head: nn.Module

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        return self.head(self.embed_images(images))

    def embed_images(self, images: Tensor) -> Tensor:
        """Image embeddings, the input of the head: (B, C')."""
        return self.feature_map(images).mean(dim=(2, 3))

    def feature_map(self, images: Tensor) -> Tensor:
        """The last feature map: (B, C', H', W')."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes convolutions by Kaiming (He et al., 2015), and the head by zeros."""
        if self.conv.weight.is_meta:
            return  # only names and shapes matter
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, AxialLayer | LocalAttention | NonLocal):
                module.reset_parameters()
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)


class ResNet(ResNetBase):
    """BiT: root, stages of pre-activation units, norm, global average pooling, linear head."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        channels = 64 * config.width_factor
        self.conv = StdConv2d(config.in_channels, channels, 7, 2, rule="bit")
        self.stages = nn.ModuleList()
        for stage, units in enumerate(config.layers):
            width = 64 * config.width_factor * 2**stage
            blocks = nn.Sequential()
            for unit in range(units):
                if has_non_local(config, stage, unit) and config.non_local:
                    blocks.append(NonLocal(channels, config.non_local, nn.GroupNorm(GROUPS, channels)))
                stride = 2 if stage > 0 and unit == 0 else 1
                blocks.append(BiTUnit(channels, width, stride, attention_maker(config, stage)))
                channels = 4 * width
            self.stages.append(blocks)
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.head = nn.Linear(channels, config.num_classes) if config.num_classes else nn.Identity()
        self.reset_parameters()

    def feature_map(self, images: Tensor) -> Tensor:
        """The last feature map: (B, C', H/32, W/32) for four stages."""
        x = F.max_pool2d(F.pad(self.conv(images), (1, 1, 1, 1)), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x))


class SmallUnit(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut that is projected if the shape changes."""

    def __init__(self, cin: int, cout: int, stride: int, attention: AttentionMaker | None = None) -> None:
        super().__init__()
        self.conv1 = make_conv3x3(cin, cout, stride, attention)
        self.conv2 = make_conv3x3(cout, cout, 1, attention)
        self.norm1, self.norm2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.shortcut = nn.Conv2d(cin, cout, 1, stride, bias=False) if cin != cout or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class SmallResNet(ResNetBase):
    """He et al.'s ResNet for CIFAR: with three stages of three units it is their ResNet-20."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        channels = 16 * config.width_factor
        self.conv = nn.Conv2d(config.in_channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.stages = nn.ModuleList()
        for stage, units in enumerate(config.layers):
            blocks = nn.Sequential()
            for unit in range(units):
                if has_non_local(config, stage, unit) and config.non_local:
                    blocks.append(NonLocal(channels, config.non_local, nn.BatchNorm2d(channels)))
                width, stride = 16 * config.width_factor * 2**stage, 2 if stage > 0 and unit == 0 else 1
                blocks.append(SmallUnit(channels, width, stride, attention_maker(config, stage)))
                channels = width
            self.stages.append(blocks)
        self.head = nn.Linear(channels, config.num_classes) if config.num_classes else nn.Identity()
        self.reset_parameters()

    def feature_map(self, images: Tensor) -> Tensor:
        """The last feature map: (B, C', H/4, W/4) for three stages."""
        x = F.relu(self.norm(self.conv(images.contiguous(memory_format=torch.channels_last))))
        for stage in self.stages:
            x = stage(x)
        return x
