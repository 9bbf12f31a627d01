"""One picture on its way through the model, stage by stage, as arrays."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models import ViT
from .attention_rollout import head_attention
from .capture import features
from .token_analysis import principal_colours


@dataclass(frozen=True)
class Walkthrough:
    """What `walk_through` found; N patches, L blocks, grid (h, w)."""

    view: np.ndarray  # uint8 (H, W, C): what the model sees
    grid: tuple[int, int]
    numbers: int  # of a patch, as it is flattened
    embedded: np.ndarray  # (N, D), after the patch embedding
    positions: np.ndarray | None  # (N, D), where there is a vector for each
    entering: np.ndarray  # (prefix + N, D), as the first block gets them
    prefix: int
    attention: np.ndarray  # (L, h, w): where the answer is read from, mean of the heads
    colours: np.ndarray  # (L, h, w, 3): the patches after each block
    logits: np.ndarray  # (K,)


@torch.inference_mode()
def trace_walkthrough(model: ViT, pixels: np.ndarray, image: Tensor) -> Walkthrough:
    """`pixels` uint8 (H, W, C) and the same image normalised (C, H, W)."""
    found = features(model, image[None])
    config = model.config
    k, grid = config.num_prefix, config.grid
    blocks = [found[f"blocks.{i}"][0, k:].float().cpu().numpy() for i in range(config.depth)]
    table = model.positions.tables()[1]
    return Walkthrough(
        view=pixels,
        grid=grid,
        numbers=model.patch_embed.proj.in_features,
        embedded=found["patch_embed"][0].cpu().numpy(),
        positions=None if table is None else table[0].cpu().numpy(),
        entering=found["positions"][0].cpu().numpy(),
        prefix=k,
        attention=head_attention(model, image[None])[0, : config.depth].mean(dim=1).cpu().numpy(),
        colours=np.stack([principal_colours(block).reshape(*grid, 3) for block in blocks]),
        logits=model(image[None])[0].float().cpu().numpy(),
    )
