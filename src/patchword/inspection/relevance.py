"""Why this class: maps that follow the gradient of one class, so that "why cat" and "why dog" differ.

relevance: attention times its gradient, positive part, mean of the heads, followed through the layers (after
Chefer, Gur and Wolf, 2021). gradcam: channels of the tokens before the last block, weighted by their mean gradient
(after Selvaraju et al., 2017). tokens: the same tokens times their own gradients, place by place.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import ViT
from ..models.resnet import FeatureMap
from .attention_rollout import read_rows, readers
from .capture import forward_hooks, forward_with_maps


def relevance(model: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """(B, h, w), none negative."""
    with torch.enable_grad():
        logits, maps = forward_with_maps(model, images.detach().clone().requires_grad_())
        gradients = torch.autograd.grad(chosen(logits, classes), maps)
    parts = [(g * m.detach()).clamp_min(0).mean(dim=1) for g, m in zip(gradients, maps, strict=True)]
    pool = parts.pop()[:, 0] if len(parts) > len(model.blocks) else None
    identity = torch.eye(parts[0].shape[-1], device=parts[0].device).expand_as(parts[0])
    summed = identity
    for part in parts:
        summed = summed + part @ summed
    mixed, k = summed - identity, model.config.num_prefix
    if pool is None:  # rows are summed, not weighted: how much of each is read is in its gradient already
        read = mixed[:, readers(model) > 0].sum(dim=1)[:, k:]
    else:  # brought to the scale of the identity first, as their paper does where one attention reads another
        mixed = mixed / mixed.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)
        read = read_rows(model, mixed + identity, pool)
    return read.unflatten(-1, model.config.grid)


def gradcam(model: ViT | FeatureMap, images: Tensor, classes: Tensor) -> Tensor:
    """(B, h, w), none negative; of a ResNet at the size of its last feature map."""
    values, gradients = last_map(model, images, classes)
    return F.relu((values * gradients.mean(dim=(1, 2), keepdim=True)).sum(dim=-1))


def token_gradients(model: ViT | FeatureMap, images: Tensor, classes: Tensor) -> Tensor:
    """(B, h, w), none negative."""
    values, gradients = last_map(model, images, classes)
    return F.relu((values * gradients).sum(dim=-1))


def last_map(model: ViT | FeatureMap, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The last features that still have a place, and the gradient of the class there: (B, h, w, D) each."""
    with torch.enable_grad():
        inputs = images.detach().clone().requires_grad_()
        if isinstance(model, ViT):
            values, logits = tokens_before_last(model, inputs)
            gradients = torch.autograd.grad(chosen(logits, classes), values)[0]
            k, grid = model.config.num_prefix, model.config.grid
            return values[:, k:].detach().unflatten(1, grid), gradients[:, k:].unflatten(1, grid)
        values = model.feature_map(inputs)
        logits = model.head(values.mean(dim=(2, 3)))
        gradients = torch.autograd.grad(chosen(logits, classes), values)[0]
    return values.detach().permute(0, 2, 3, 1), gradients.permute(0, 2, 3, 1)


def tokens_before_last(model: ViT, images: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that enter the last block, and logits. After that block a class token has read all it will ever read."""
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append(inputs[0])

    with forward_hooks(model, {f"blocks.{len(model.blocks) - 1}": keep}):
        logits = model(images)
    return kept[0], logits


def chosen(logits: Tensor, classes: Tensor) -> Tensor:
    """The sum of each image's logit of its class: images do not touch, so its gradient is that of each alone."""
    return logits.gather(1, classes[:, None]).sum()
