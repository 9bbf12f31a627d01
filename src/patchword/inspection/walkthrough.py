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
    """The intermediate results of one image: N patches on a grid (h, w), L blocks, K classes.

    Attributes:
        pixels: What the model sees, uint8 (H, W, C).
        grid: The number of rows and columns of patches.
        patch_dim: The number of values of a flattened patch.
        patch_embeddings: The output of the patch embedding, (N, D).
        pos_embed: The position embeddings, (N, D); None if there is no vector per position.
        tokens: The input of the first block, (num_prefix + N, D): prefix tokens, and sums of the two above, normed
            if the model has a norm there (CLIP).
        num_prefix: The number of prefix tokens.
        attention: The attention of the tokens that the head reads, mean over heads, (L, h, w).
        colors: The principal components of the patches after each block, (L, h, w, 3).
        logits: The output of the model, (K,); without a head, the features (D,).
    """

    pixels: np.ndarray
    grid: tuple[int, int]
    patch_dim: int
    patch_embeddings: np.ndarray
    pos_embed: np.ndarray | None
    tokens: np.ndarray
    num_prefix: int
    attention: np.ndarray
    colors: np.ndarray
    logits: np.ndarray


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
        tokens=outputs["norm_pre"][0].cpu().numpy(),
        num_prefix=k,
        attention=head_attention(model, image[None])[0, : config.depth].nanmean(dim=1).cpu().numpy(),
        colors=np.stack([principal_colors(block).reshape(*grid, 3) for block in blocks]),
        logits=model(image[None])[0].float().cpu().numpy(),
    )
