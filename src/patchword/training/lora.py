"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): trainable low-rank updates of frozen attention weights."""

import torch
from torch import Tensor, nn

from ..models.attention import Attention


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

    def merged_weight(self) -> Tensor:
        """Return the weight of the equivalent plain linear layer."""
        down = self.down.reshape(self.num_maps, -1, self.down.shape[1])  # (num_maps, rank, D)
        return self.linear.weight + torch.einsum("pwr,prd->pwd", self.up, down).flatten(0, 1)


def add_lora(model: nn.Module, rank: int) -> None:
    """Freeze the model except its heads, and add LoRA to the projections of every attention layer."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    for module in [m for m in model.modules() if isinstance(m, Attention)]:
        module.qkv = LoRALinear(module.qkv, rank, num_maps=3)  # type: ignore[assignment]  # same interface
        module.out = LoRALinear(module.out, rank, num_maps=1)  # type: ignore[assignment]  # same interface


@torch.no_grad()
def merge_lora(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict with every LoRA update merged into its weight: that of a plain model."""
    state = {n: t.detach() for n, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            for key in [n for n in state if n.startswith(f"{name}.")]:
                del state[key]
            state[f"{name}.weight"] = module.merged_weight()
            if module.linear.bias is not None:
                state[f"{name}.bias"] = module.linear.bias.detach()
    return state
