"""Analysis of the tokens: their norms, their similarity, and their principal components as colors."""

import numpy as np
import torch
from torch import Tensor

from ..models import ViT
from ..models.layers import layer_indices
from .capture import features


@torch.inference_mode()
def token_norms(model: ViT, image: Tensor) -> np.ndarray:
    """Computes the norm of each patch token before the first block and after each block.

    A few tokens of many times the usual norm are the artifacts that registers remove (Darcet et al., 2024).

    Args:
        model: The model, in evaluation mode.
        image: A normalized image, (C, H, W).

    Returns:
        Norms (L + 1, h, w) for L blocks and a grid of h x w patches.
    """
    outputs = features(model, image[None])
    k, grid = model.config.num_prefix, model.config.grid
    stages = [outputs["norm_pre"], *(outputs[f"blocks.{i}"] for i in range(len(model.blocks)))]
    return np.stack([stage[0, k:].norm(dim=-1).unflatten(0, grid).cpu().numpy() for stage in stages])


def outlier_fraction(norms: np.ndarray, factor: float = 3.0) -> float:
    """Returns the fraction of the tokens whose norm is more than `factor` times the median."""
    return float((norms > factor * np.median(norms)).mean())


@torch.inference_mode()
def patch_tokens(model: ViT, images: Tensor, layer: int = -1) -> Tensor:
    """Returns the patch tokens after a block, without prefix tokens.

    Args:
        model: The model, in evaluation mode.
        images: Normalized images, (B, C, H, W).
        layer: The block, by default the last; negative numbers count from the end.

    Returns:
        Tokens (B, h, w, D) on the patch grid.
    """
    (index,) = layer_indices(len(model.blocks), [layer])
    tokens = features(model, images, [index])[f"blocks.{index}"]
    return tokens[:, model.config.num_prefix :].unflatten(1, model.config.grid)


def patch_similarity(model: ViT, image: Tensor, patch: tuple[int, int], layer: int = -1) -> np.ndarray:
    """Computes the cosine similarity of the token of one patch to those of all patches.

    Args:
        model: The model, in evaluation mode.
        image: A normalized image, (C, H, W).
        patch: The row and column of the patch.
        layer: The block after which tokens are compared, by default the last.

    Returns:
        A map (h, w) of values from -1 to 1.
    """
    tokens = torch.nn.functional.normalize(patch_tokens(model, image[None], layer)[0], dim=-1)
    return (tokens @ tokens[patch]).cpu().numpy()


def patch_colors(model: ViT, images: Tensor, layer: int = -1) -> np.ndarray:
    """Computes the first three principal components of the patch tokens of all images, as colors.

    Patches of similar color have similar representations (as in DINOv2, Oquab et al., 2023).

    Args:
        model: The model, in evaluation mode.
        images: Normalized images, (B, C, H, W).
        layer: The block after which tokens are compared, by default the last.

    Returns:
        RGB colors from 0 to 1, float32 (B, h, w, 3).
    """
    tokens = patch_tokens(model, images, layer)
    return principal_colors(tokens.flatten(0, 2).float().cpu().numpy()).reshape(*tokens.shape[:3], 3)


def principal_colors(vectors: np.ndarray) -> np.ndarray:
    """Returns the first three principal components of vectors (N, D) as RGB colors from 0 to 1: (N, 3)."""
    centered = vectors.astype(np.float64) - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centered.T @ centered)
    scores = centered @ directions[:, ::-1][:, :3]
    scores = np.pad(scores, ((0, 0), (0, 3 - scores.shape[1])))
    low, high = np.percentile(scores, 2, axis=0), np.percentile(scores, 98, axis=0)
    return np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1).astype(np.float32)
