"""How alike the positions are: the cosine of every position with every other (the paper's Figure 7, centre)."""

import math

import numpy as np
import torch

from ..config import Size
from ..models import ViT

NO_TABLE = {
    "none": "The model has no position embeddings: its output does not depend on the order of the patches.",
    "rotary": "The model uses rotary positions, which rotate queries and keys: there is no vector per position.",
    "relative": "The model uses a relative position bias per offset and head: there is no vector per position.",
}


@torch.no_grad()
def position_similarity(model: ViT) -> np.ndarray:
    """(h, w, h, w): [i, j] is the map of the cosines of position (i, j) with all others."""
    table = model.positions.tables()[1]
    if table is None:
        raise ValueError(NO_TABLE[model.config.pos_embed])
    return table_similarity(table[0].float().cpu().numpy(), model.config.grid)


def table_similarity(table: np.ndarray, grid: Size) -> np.ndarray:
    """The same from position vectors (N, D), row by row."""
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return (unit @ unit.T).reshape(*grid, *grid)


def cross_strength(similarity: np.ndarray) -> tuple[float, float]:
    """Mean similarity with the same row or column, and with everything else: the paper's cross, in two numbers.

    NaN where there is none, as in a grid of one row.
    """
    h, w = similarity.shape[:2]
    rows, columns = np.divmod(np.arange(h * w), w)
    same_line = (rows[:, None] == rows) | (columns[:, None] == columns)
    flat, itself = similarity.reshape(h * w, h * w), np.eye(h * w, dtype=bool)
    beside, elsewhere = flat[same_line & ~itself], flat[~same_line]
    return tuple(float(part.mean()) if part.size else math.nan for part in (beside, elsewhere))  # type: ignore[return-value]
