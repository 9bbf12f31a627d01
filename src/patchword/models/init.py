"""Initial weights of a ViT, as in the paper's code."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from .attention import Attention, AttentionBias
from .rope import MixedRotary

if TYPE_CHECKING:
    from .vit import ViT


@torch.no_grad()
def init_weights(model: "ViT") -> None:
    """Initializes blocks by Xavier, patches by LeCun, positions by N(0, 0.02), head and class token by zero.

    The order of random numbers must not change: a seed always gives the same model.
    """
    if model.patch_embed.proj.weight.is_meta:
        return  # only names and shapes matter; random numbers on the meta device import slowly
    for name, parameter in model.named_parameters():
        if name.startswith(("positions.", "registers")) or name.endswith((".relative", ".bias.prefix")):
            nn.init.normal_(parameter, std=0.02)
        elif name == "pool.probe":
            nn.init.normal_(parameter, std=model.config.embed_dim**-0.5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=1e-6)
    for module in model.modules():
        if isinstance(module, Attention):
            init_qkv(module.qkv)
        elif isinstance(module, AttentionBias) and module.relative is not None and model.config.local_attention_init:
            module.relative.copy_(module.local_init(model.config.local_attention_init))
        elif isinstance(module, MixedRotary):
            module.reset()
    projection = model.patch_embed.proj
    nn.init.trunc_normal_(projection.weight, std=projection.in_features**-0.5)
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)
    for name, module in model.named_children():
        if name.startswith("head") and isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def init_qkv(qkv: nn.Linear) -> None:
    """Initializes the three stacked matrices separately, each with its own fan-out."""
    for weight in qkv.weight.chunk(3):
        nn.init.xavier_uniform_(weight)
    if qkv.bias is not None:
        nn.init.zeros_(qkv.bias)
