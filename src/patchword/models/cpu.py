"""Faster ways to compute the same on a CPU: `optimize_for_cpu(model)` puts them into a model, in place.

Modules get a subclass of their own class, so names and tensors stay as they are, and so do copies and checkpoints. Each
subclass takes its shortcut only on a CPU and where nothing could notice: hooks on inner modules always run, and layers
that were replaced (LoRA, int8) are called. Elsewhere it does what its parent does. Figures are of two Zen 4 cores.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention, ScaledDotProductAttention, attention_weights
from .layers import has_hooks, is_plain_linear
from .vit import MLP

Module = TypeVar("Module", bound=nn.Module)


def optimize_for_cpu(model: Module) -> Module:
    """The same model, its attention and MLPs computed in ways that are faster on a CPU; in place."""
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = CPUAttention
            if type(module.attend) is ScaledDotProductAttention:
                module.attend.__class__ = CPUScaledDotProductAttention
        elif type(module) is MLP:
            module.__class__ = CPUMLP
    return model


class CPUAttention(Attention):
    """Without gradients, queries, keys and values come from a product each."""

    def split_qkv(self, x: Tensor) -> Sequence[Tensor]:
        """Three dense results cost less than one that is then read in strides: projection and attention by 3 %."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or not is_plain_linear(self.qkv):
            return super().split_qkv(x)
        weights = self.qkv.weight.chunk(3)
        biases = (None, None, None) if self.qkv.bias is None else self.qkv.bias.chunk(3)
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class CPUScaledDotProductAttention(ScaledDotProductAttention):
    """Training in bf16 holds the attention weights, in bf16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """The fused kernel with its backward pass takes 2 to 9 times as long in bf16."""
        dropout = self.training and self.dropout
        if q.dtype != torch.bfloat16 or q.device.type != "cpu" or not q.requires_grad or dropout:
            return super().forward(q, k, v, bias)
        (b, h, n, d), m = q.shape, k.shape[2]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        with torch.autocast("cpu", enabled=False):  # it would compute the softmax in fp32
            if bias is None:
                weights = attention_weights(q, k)
            else:  # the same formula, with scale and bias inside the product: one rounding, one tensor less
                bias = bias.to(q.dtype).expand(b, h, n, m).flatten(0, 1)
                weights = torch.baddbmm(bias, q, k.mT, alpha=d**-0.5).softmax(dim=-1)
            return (weights @ v).view(b, h, n, d)


class CPUMLP(MLP):
    """Without gradients GELU works in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Fresh memory for the widest tensor of the model costs 7 to 12 % of the time."""
        x = self.fc1(x)
        seen = x.requires_grad or x.device.type != "cpu" or any(map(has_hooks, self.fc1.modules()))
        activate = F.gelu if seen else torch.ops.aten.gelu_
        return self.fc2(self.drop(activate(x, approximate=self.approximate)))
