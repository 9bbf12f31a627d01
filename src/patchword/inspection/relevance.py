"""Class-specific explanations: relevance maps from the gradient of one class's logit.

- relevance: attention times its gradient, positive part, mean over heads, propagated through the layers (Chefer, Gur
  and Wolf, 2021).
- gradcam: channels of the tokens before the last block, weighted by their mean gradient (Grad-CAM, Selvaraju et al.,
  2017).
- tokens: gradient x input on the same tokens, summed over channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import ViT
from ..models.resnet import ResNetBase
from .attention_rollout import read_out, readout_weights
from .capture import forward_hooks, forward_with_maps


def relevance(model: ViT, images: Tensor, classes: Tensor) -> Tensor:
    """Returns relevance maps after Chefer et al. (2021): (B, h, w), nonnegative."""
    with torch.enable_grad():
        logits, maps = forward_with_maps(model, images.detach().clone().requires_grad_())
        gradients = torch.autograd.grad(sum_class_logits(logits, classes), maps)
    weighted = [(g * m.detach()).clamp_min(0).mean(dim=1) for g, m in zip(gradients, maps, strict=True)]
    pool = weighted.pop()[:, 0] if len(weighted) > len(model.blocks) else None
    identity = torch.eye(weighted[0].shape[-1], device=weighted[0].device).expand_as(weighted[0])
    total = identity
    for layer in weighted:
        total = total + layer @ total
    mixed, k = total - identity, model.config.num_prefix
    if pool is None:  # a sum, not a mean: the gradient contains the weight of each row
        read = mixed[:, readout_weights(model.config) > 0].sum(dim=1)[:, k:]
    else:  # normalized first, as in the paper's equation for cross-attention
        mixed = mixed / mixed.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mixed.dtype).tiny)
        read = read_out(model.config, mixed + identity, pool)
    return read.unflatten(-1, model.config.grid)


def gradcam(model: ViT | ResNetBase, images: Tensor, classes: Tensor) -> Tensor:
    """Returns Grad-CAM maps: (B, h, w), nonnegative; for a ResNet, of the size of its last feature map."""
    values, gradients = last_features(model, images, classes)
    return F.relu((values * gradients.mean(dim=(1, 2), keepdim=True)).sum(dim=-1))


def token_gradients(model: ViT | ResNetBase, images: Tensor, classes: Tensor) -> Tensor:
    """Returns gradient x input maps: (B, h, w), nonnegative."""
    values, gradients = last_features(model, images, classes)
    return F.relu((values * gradients).sum(dim=-1))


def last_features(model: ViT | ResNetBase, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the last spatial features and the gradient of the class's logit in them: (B, h, w, D) each."""
    with torch.enable_grad():
        inputs = images.detach().clone().requires_grad_()
        if isinstance(model, ViT):
            values, logits = tokens_before_last(model, inputs)
            gradients = torch.autograd.grad(sum_class_logits(logits, classes), values)[0]
            k, grid = model.config.num_prefix, model.config.grid
            return values[:, k:].detach().unflatten(1, grid), gradients[:, k:].unflatten(1, grid)
        values = model.feature_map(inputs)
        logits = model.head(values.mean(dim=(2, 3)))
        gradients = torch.autograd.grad(sum_class_logits(logits, classes), values)[0]
    return values.detach().permute(0, 2, 3, 1), gradients.permute(0, 2, 3, 1)


def tokens_before_last(model: ViT, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens before the last block, and logits; after it, patch tokens do not affect the class token."""
    captured: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        captured.append(inputs[0])

    with forward_hooks(model, {f"blocks.{len(model.blocks) - 1}": keep}):
        logits = model(images)
    return captured[0], logits


def sum_class_logits(logits: Tensor, classes: Tensor) -> Tensor:
    """Sums the logit of each image's class; images are independent, so one backward pass gives all gradients."""
    return logits.gather(1, classes[:, None]).sum()
