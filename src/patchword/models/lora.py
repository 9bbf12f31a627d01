"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): trainable low-rank updates of frozen attention weights."""

import torch
from torch import Tensor, nn

from .attention import Attention


class LoRALinear(nn.Module):
    """A frozen linear layer plus a low-rank update for each of its fused maps (query, key, value)."""

    def __init__(self, linear: nn.Linear, rank: int, num_maps: int) -> None:
        super().__init__()
        self.linear, self.num_maps = linear.requires_grad_(False), num_maps
        width = linear.out_features // num_maps
        self.down = nn.Parameter(torch.randn(num_maps * rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(num_maps, width, rank))  # zero: the update starts as zero

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, num_maps * width)."""
        low = (x @ self.down.T).reshape(*x.shape[:-1], self.num_maps, -1)  # (B, N, num_maps, rank)
        update: Tensor = torch.einsum("bnpr,pwr->bnpw", low, self.up).flatten(2)
        return self.linear(x) + update


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze the model except its heads, and add LoRA to the projections of every attention layer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    for module in [m for m in model.modules() if isinstance(m, Attention)]:
        module.qkv = LoRALinear(module.qkv, rank, num_maps=3)  # type: ignore[assignment]  # same interface
        module.out = LoRALinear(module.out, rank, num_maps=1)  # type: ignore[assignment]  # same interface


@torch.no_grad()
def merge_lora(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge every LoRA update of a state dict into its weight: the result is that of a plain model."""
    names = [name.removesuffix(".up") for name in state if name.endswith(".up")]
    layers = {layer for layer in names if f"{layer}.linear.weight" in state}
    merged = {}
    for name, tensor in state.items():
        layer, _, leaf = name.rpartition(".linear.")
        if layer in layers and leaf == "weight":
            merged[f"{layer}.weight"] = merge_weight(tensor, state[f"{layer}.down"], state[f"{layer}.up"])
        elif layer in layers:
            merged[f"{layer}.{leaf}"] = tensor
        elif name.rpartition(".")[0] not in layers:
            merged[name] = tensor
    return merged


def merge_weight(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return the weight of the plain linear layer that is equivalent to a `LoRALinear`."""
    down = down.reshape(len(up), -1, down.shape[1])  # (num_maps, rank, D)
    return weight + torch.einsum("pwr,prd->pwd", up, down).flatten(0, 1)
