"""The intermediate results of one image on its way through the model, as arrays."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models import ViT
from .attention_rollout import head_attention
from .capture import features
from .token_analysis import principal_colors


@dataclass(frozen=True)
class Walkthrough:
    """The intermediate results of one image: N patches, L blocks, grid (h, w)."""

    pixels: np.ndarray  # uint8 (H, W, C): what the model sees
    grid: tuple[int, int]
    patch_dim: int  # number of values of a flattened patch
    patch_embeddings: np.ndarray  # (N, D), after the patch embedding
    pos_embed: np.ndarray | None  # (N, D); None if there is no vector per position
    tokens: np.ndarray  # (num_prefix + N, D), the input of the first block
    num_prefix: int
    attention: np.ndarray  # (L, h, w), of the tokens that the head reads, mean over heads
    colors: np.ndarray  # (L, h, w, 3), principal components of the patches after each block
    logits: np.ndarray  # (K,)


@torch.inference_mode()
def trace_walkthrough(model: ViT, pixels: np.ndarray, image: Tensor) -> Walkthrough:
    """Records a forward pass of `image`, normalized (C, H, W), whose pixels are uint8 (H, W, C)."""
    outputs = features(model, image[None])
    config = model.config
    k, grid = config.num_prefix, config.grid
    blocks = [outputs[f"blocks.{i}"][0, k:].float().cpu().numpy() for i in range(config.depth)]
    table = model.positions.tables()[1]
    return Walkthrough(
        pixels=pixels,
        grid=grid,
        patch_dim=model.patch_embed.proj.in_features,
        patch_embeddings=outputs["patch_embed"][0].cpu().numpy(),
        pos_embed=None if table is None else table[0].cpu().numpy(),
        tokens=outputs["positions"][0].cpu().numpy(),
        num_prefix=k,
        attention=head_attention(model, image[None])[0, : config.depth].mean(dim=1).cpu().numpy(),
        colors=np.stack([principal_colors(block).reshape(*grid, 3) for block in blocks]),
        logits=model(image[None])[0].float().cpu().numpy(),
    )
