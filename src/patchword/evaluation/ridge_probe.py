"""The paper's few-shot probe: least squares with a penalty, from features to rows of -1 and 1, in closed form.

As big_vision's evaluator has it: features are whitened by the mean and the standard deviation of the shots, a constant
of 100 stands for the bias (so large that the penalty hardly touches it), and W = (X^T X + l2 I)^-1 X^T Y.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError

BIAS = 100.0
TINY = 1e-5  # added to the standard deviation
L2 = 2.0**10  # what the paper's figures were made with


class Ridge:
    """The solution for every penalty, from one eigenvalue decomposition."""

    def __init__(self, x: Tensor, y: Tensor, classes: int) -> None:
        x = x.double()
        self.mean, self.std = x.mean(dim=0), x.std(dim=0, correction=0) + TINY
        x = self.whitened(x)
        goals = 2.0 * F.one_hot(y, classes).double() - 1.0
        if len(x) >= x.shape[1]:
            self.values, vectors = torch.linalg.eigh(x.T @ x)
            self.left, self.right = vectors, vectors.T @ (x.T @ goals)
        else:  # fewer pictures than features: the same by the smaller matrix X X^T
            self.values, vectors = torch.linalg.eigh(x @ x.T)
            self.left, self.right = x.T @ vectors, vectors.T @ goals

    def whitened(self, x: Tensor) -> Tensor:
        return F.pad((x.double() - self.mean) / self.std, (0, 1), value=BIAS)

    def scores(self, x: Tensor, l2: float = L2) -> Tensor:
        """(N, K); the largest of a row is the answer."""
        return self.whitened(x) @ ((self.left / (self.values + l2)) @ self.right)

    def accuracy(self, x: Tensor, y: Tensor, l2: float = L2) -> float:
        return float((self.scores(x, l2).argmax(dim=1) == y).double().mean())


def draw_shots(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Indices of `shots` pictures of each class that there is; every class must have as many."""
    chance, chosen = np.random.default_rng(seed), []
    for label in np.unique(targets):
        places = np.flatnonzero(targets == label)
        if len(places) < shots:
            raise DataError(f"Class {label} has only {len(places)} pictures for training; {shots} shots need more.")
        chosen.append(chance.permutation(places)[:shots])
    return np.concatenate(chosen)
