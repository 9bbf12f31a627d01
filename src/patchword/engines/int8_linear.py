"""Dynamic int8 matmuls in plain PyTorch: activations are quantized per token, weights per output channel."""

import torch
from torch import Tensor, nn

from ..errors import ConfigError


class Int8Linear(nn.Module):
    """A trained linear layer with int8 weights, for inference."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8).t().contiguous())  # (in, out)
        self.register_buffer("scale", scale.t().contiguous())  # (1, out)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scale = tokens.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        product = torch._int_mm((tokens / scale).round().to(torch.int8), self.weight)
        result = product.float().mul_(scale).mul_(self.scale)
        if self.bias is not None:
            result += self.bias
        return result.reshape(*x.shape[:-1], -1)


def quantize_linear_layers(model: nn.Module) -> nn.Module:
    """Replace every linear layer of the transformer blocks by its int8 version, in place."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".blocks." in f".{name}"
    }
    if not layers:
        raise ConfigError("int8 needs a Vision Transformer: this model has no linear layers in transformer blocks.")
    for name, linear in layers.items():
        model.set_submodule(name, Int8Linear(linear))
    return model
