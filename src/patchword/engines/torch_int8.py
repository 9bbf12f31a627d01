"""Matrix products in int8 with torch alone: each token has a range of its own, and each output channel of a weight."""

import torch
from torch import Tensor, nn

from ..errors import ConfigError


class Int8Linear(nn.Module):
    """A trained linear layer for inference."""

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
        flat = x.flatten(0, -2)
        scale = flat.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        product = torch._int_mm((flat / scale).round().to(torch.int8), self.weight)
        result = product.float().mul_(scale).mul_(self.scale)
        if self.bias is not None:
            result += self.bias
        return result.unflatten(0, x.shape[:-1])


def in_int8(model: nn.Module) -> nn.Module:
    """The model with every linear layer of its blocks replaced, in place."""
    large = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".blocks." in f".{name}"]
    if not large:
        raise ConfigError("The model has no large matrix products, which is what int8 is for here.")
    for name in large:
        model.set_submodule(name, Int8Linear(model.get_submodule(name)))  # type: ignore[arg-type]
    return model
