"""LoRA: frozen weights, and beside the attention's matrices a product of two small ones that learns in their place."""

import torch
from torch import Tensor, nn

from ..models.attention import Attention


class LoRALinear(nn.Module):
    """A frozen linear map plus, for each of its `parts` (queries, keys, values), an update of low rank."""

    def __init__(self, linear: nn.Linear, rank: int, parts: int) -> None:
        super().__init__()
        self.linear, self.parts = linear.requires_grad_(False), parts
        width = linear.out_features // parts
        self.down = nn.Parameter(torch.randn(parts * rank, linear.in_features) * linear.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(parts, width, rank))  # zero: training starts from the model as it was

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, parts * width)
        low = (x @ self.down.T).unflatten(-1, (self.parts, -1))  # (B, N, parts, r)
        return self.linear(x) + torch.einsum("bnpr,pwr->bnpw", low, self.up).flatten(2)

    def merged(self) -> Tensor:
        """The weights of the one linear map that computes the same."""
        down = self.down.unflatten(0, (self.parts, -1))  # (parts, r, D)
        return self.linear.weight + torch.einsum("pwr,prd->pwd", self.up, down).flatten(0, 1)


def add_lora(model: nn.Module, rank: int) -> None:
    """Freezes the model but for its heads, and gives every attention its small matrices."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    for module in [m for m in model.modules() if isinstance(m, Attention)]:
        module.qkv = LoRALinear(module.qkv, rank, parts=3)  # type: ignore[assignment]
        module.out = LoRALinear(module.out, rank, parts=1)  # type: ignore[assignment]


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors with every LoRA worked into the matrix it stands beside: an ordinary model's tensors."""
    state = {n: t.detach() for n, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            mine = {n: t for n, t in state.items() if n.startswith(f"{name}.")}
            for n in mine:
                del state[n]
            state[f"{name}.weight"] = module.merged()
            if module.linear.bias is not None:
                state[f"{name}.bias"] = module.linear.bias.detach()
    return state
