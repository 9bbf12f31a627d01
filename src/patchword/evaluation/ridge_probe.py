"""The paper's few-shot probe: regularized least squares from frozen features to targets of -1 and 1, in closed form.

As in big_vision's evaluator: features are standardized by the mean and standard deviation of the shots, a constant
feature of 100 stands for the bias (so large that the penalty hardly affects it), and W = (X^T X + l2 I)^-1 X^T Y.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError

BIAS = 100.0
EPSILON = 1e-5  # added to the standard deviation
L2 = 2.0**10  # as in the paper's figures


class RidgeProbe:
    """The solution for every penalty, from one eigenvalue decomposition."""

    def __init__(self, x: Tensor, y: Tensor, num_classes: int) -> None:
        x = x.double()
        self.mean, self.std = x.mean(dim=0), x.std(dim=0, correction=0) + EPSILON
        x = self.standardize(x)
        targets = 2.0 * F.one_hot(y, num_classes).double() - 1.0
        if len(x) >= x.shape[1]:
            self.eigenvalues, vectors = torch.linalg.eigh(x.T @ x)
            self.left, self.right = vectors, vectors.T @ (x.T @ targets)
        else:  # fewer images than features: the same solution from the smaller matrix X X^T
            self.eigenvalues, vectors = torch.linalg.eigh(x @ x.T)
            self.left, self.right = x.T @ vectors, vectors.T @ targets

    def standardize(self, x: Tensor) -> Tensor:
        """Standardized features with the constant one appended."""
        return F.pad((x.double() - self.mean) / self.std, (0, 1), value=BIAS)

    def scores(self, x: Tensor, l2: float = L2) -> Tensor:
        """Scores (N, K); the largest in a row is the predicted class."""
        return self.standardize(x) @ ((self.left / (self.eigenvalues + l2)) @ self.right)

    def accuracy(self, x: Tensor, y: Tensor, l2: float = L2) -> float:
        """Top-1 accuracy."""
        return float((self.scores(x, l2).argmax(dim=1) == y).double().mean())


def sample_shots(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Indices of `shots` random images of each class that occurs."""
    rng, chosen = np.random.default_rng(seed), []
    for label in np.unique(targets):
        indices = np.flatnonzero(targets == label)
        if len(indices) < shots:
            raise DataError(f"Class {label} has {len(indices)} training images, fewer than the {shots} shots.")
        chosen.append(rng.permutation(indices)[:shots])
    return np.concatenate(chosen)
