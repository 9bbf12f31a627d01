"""Cosine similarity of the position embeddings (the paper's Figure 7, center)."""

import math

import numpy as np
import torch

from ..config import Size
from ..errors import ConfigError
from ..models import ViT

NO_TABLE = {
    "none": "The model has no position embeddings: its output does not depend on the order of the patches.",
    "rotary": "The model uses rotary positions, which rotate queries and keys: there is no vector per position.",
    "relative": "The model uses a relative position bias per offset and head: there is no vector per position.",
}


@torch.no_grad()
def position_similarity(model: ViT) -> np.ndarray:
    """Computes the cosine similarity of every two position embeddings (the paper's Figure 7, center).

    Returns:
        An array (h, w, h, w) for a grid of h x w patches; `[i, j]` is the map of position (i, j).

    Raises:
        ConfigError: The model has no vector for each position, because its position embeddings are rotary, relative or
            absent.
    """
    table = model.positions.tables()[1]
    if table is None:
        raise ConfigError(NO_TABLE[model.config.pos_embed], code="unsupported_by_model")
    return table_similarity(table[0].float().cpu().numpy(), model.config.grid)


def table_similarity(table: np.ndarray, grid: Size) -> np.ndarray:
    """Returns the same for position embeddings (N, D), row by row."""
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return (unit @ unit.T).reshape(*grid, *grid)


def cross_strength(similarity: np.ndarray) -> tuple[float, float]:
    """Returns the mean similarity to positions of the same row or column, and to all others: the paper's cross pattern.

    NaN if there are none, as in a grid of one row.
    """
    h, w = similarity.shape[:2]
    rows, columns = np.divmod(np.arange(h * w), w)
    same_line = (rows[:, None] == rows) | (columns[:, None] == columns)
    flat, itself = similarity.reshape(h * w, h * w), np.eye(h * w, dtype=bool)
    on_cross, off_cross = flat[same_line & ~itself], flat[~same_line]
    return (
        float(on_cross.mean()) if on_cross.size else math.nan,
        float(off_cross.mean()) if off_cross.size else math.nan,
    )
