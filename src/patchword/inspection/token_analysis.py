"""The tokens on their way: how long they are, how alike, and what they have in common, as colour."""

import numpy as np
import torch
from torch import Tensor

from ..models import ViT
from ..models.layers import layer_indices
from .capture import features


@torch.inference_mode()
def token_norms(model: ViT, image: Tensor) -> np.ndarray:
    """The length of each patch token as it enters the first block and as it leaves each block: (L + 1, h, w).

    A few tokens many times as long as their neighbours are the artefacts that registers cure.
    """
    found = features(model, image[None])
    k, grid = model.config.num_prefix, model.config.grid
    stages = [found["positions"], *(found[f"blocks.{i}"] for i in range(len(model.blocks)))]
    return np.stack([stage[0, k:].norm(dim=-1).unflatten(0, grid).cpu().numpy() for stage in stages])


def outlier_fraction(norms: np.ndarray, times: float = 3.0) -> float:
    """The part of the tokens of a map that are longer than `times` their median."""
    return float((norms > times * np.median(norms)).mean())


@torch.inference_mode()
def patch_tokens(model: ViT, images: Tensor, layer: int = -1) -> Tensor:
    """The patch tokens that leave a block: (B, h, w, D)."""
    (index,) = layer_indices(len(model.blocks), [layer])
    found = features(model, images, [index])[f"blocks.{index}"]
    return found[:, model.config.num_prefix :].unflatten(1, model.config.grid)


def patch_similarity(model: ViT, image: Tensor, patch: tuple[int, int], layer: int = -1) -> np.ndarray:
    """The cosine of one patch, (row, column), with all others: (h, w)."""
    tokens = torch.nn.functional.normalize(patch_tokens(model, image[None], layer)[0], dim=-1)
    return (tokens @ tokens[patch]).cpu().numpy()


def patch_colors(model: ViT, images: Tensor, layer: int = -1) -> np.ndarray:
    """The patches of all images together as colour, (B, h, w, 3): patches of one colour mean the same to the model."""
    tokens = patch_tokens(model, images, layer)
    return principal_colours(tokens.flatten(0, 2).float().cpu().numpy()).reshape(*tokens.shape[:3], 3)


def principal_colours(vectors: np.ndarray) -> np.ndarray:
    """The first three principal components of vectors (N, D) as red, green and blue, 0 to 1: (N, 3)."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    places = centred @ directions[:, ::-1][:, :3]
    places = np.pad(places, ((0, 0), (0, 3 - places.shape[1])))
    low, high = np.percentile(places, 2, axis=0), np.percentile(places, 98, axis=0)
    return np.clip((places - low) / np.maximum(high - low, 1e-12), 0, 1).astype(np.float32)
