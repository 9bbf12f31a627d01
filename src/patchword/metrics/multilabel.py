"""Figures for pictures that may have several labels, each right or wrong by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .classification import average_precision, multi_label_metrics
from .intervals import bootstrap_all

ROUNDS = 200  # of bootstrap: each sorts every class anew


class MultiLabelMetrics:
    """Collects logits and labels, a picture at a time."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []

    def add(self, logits: Tensor, labels: Sequence[int]) -> None:
        """Logits (1, K) of a picture, and the indices of its labels."""
        truth = np.zeros(logits.shape[1], dtype=np.float32)
        truth[list(labels)] = 1
        self.logits.append(logits[0].float().cpu().numpy())
        self.targets.append(truth)

    def detailed(self, classes: int) -> tuple[dict[str, float | int], dict[str, tuple[float, float]]]:
        """map, f1, nll and n; and of each figure its 95 % interval by bootstrap over the pictures."""
        logits, targets = np.stack(self.logits), np.stack(self.targets)
        figures = multi_label_metrics(logits, targets)
        names = [name for name in figures if name != "n"]

        def drawn(rows: np.ndarray) -> np.ndarray:
            found = multi_label_metrics(logits[rows], targets[rows])
            return np.array([found[name] for name in names])

        return figures, dict(zip(names, bootstrap_all(drawn, len(logits), rounds=ROUNDS), strict=True))

    def per_class(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """For each label that occurred: how often, and its average precision."""
        logits, targets = np.stack(self.logits), np.stack(self.targets)
        return [
            {
                "label": labels[k], "index": k, "n": int(targets[:, k].sum()),
                "ap": average_precision(logits[:, k], targets[:, k]),
            }
            for k in np.flatnonzero(targets.any(axis=0)).tolist()
        ]  # fmt: skip

    def rows(self, names: Sequence[str], labels: Sequence[str]) -> list[dict[str, Any]]:
        """What was said of each picture: all labels more probable than not."""
        found = []
        for name, logits, truth in zip(names, self.logits, self.targets, strict=True):
            signed = np.where(truth > 0.5, -logits, logits)
            found.append(
                {
                    "name": name,
                    "true": "; ".join(labels[k] for k in np.flatnonzero(truth).tolist()),
                    "predicted": "; ".join(labels[k] for k in np.flatnonzero(logits > 0).tolist()),
                    "probability": round(float(1 / (1 + np.exp(-logits.max()))), 6),
                    "loss": round(float(np.logaddexp(0, signed).mean()), 6),
                }
            )
        return found
