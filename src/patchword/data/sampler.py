"""The order of training samples: one endless sequence, shuffled anew in every epoch.

A position in the sequence determines the sample and its random key. A step is a range of positions, so batch size,
gradient accumulation, number of processes and resuming do not change the order or the augmentation of samples.
"""

import functools

import numpy as np

from .keyed_rng import keys, permutation, uniform


class ShuffledSampler:
    """Every sample once per epoch, in a new order in each epoch."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self.seed, self.num_samples = seed, num_samples
        self._cached_order = functools.lru_cache(maxsize=4)(self.epoch_order)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the samples of one epoch, in order."""
        return permutation(self.seed, epoch, self.num_samples)

    def select(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        """Return the indices of the samples at some positions of an epoch, int64."""
        selected: np.ndarray = self._cached_order(epoch)[offsets]
        return selected

    def __call__(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample indices (int64) and random keys (uint64) at the positions start..stop."""
        positions = np.arange(start, stop)
        epochs, offsets = positions // self.num_samples, positions % self.num_samples
        indices, sample_keys = np.empty(len(positions), np.int64), np.empty(len(positions), np.uint64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = self.select(int(epoch), offsets[rows])
            # Offset by num_samples: keys 0..num_samples-1 are those of the shuffle.
            sample_keys[rows] = keys(self.seed, int(epoch), self.num_samples + offsets[rows])
        return indices, sample_keys


class BalancedSampler(ShuffledSampler):
    """Every class equally often: each position of an epoch gets a class, then a random sample of that class."""

    def __init__(self, seed: int, targets: np.ndarray) -> None:
        super().__init__(seed, len(targets))
        if targets.ndim == 2:  # multi-label: a sample belongs to each of its classes
            self.members = [np.flatnonzero(column) for column in targets.T if column.any()]
        else:
            self.members = [np.flatnonzero(targets == label) for label in np.unique(targets)]

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the samples of one epoch, in order; a sample may occur more than once."""
        # Round-robin over the classes, then shuffled: exact counts per epoch, balanced batches in expectation.
        round_robin = np.arange(self.num_samples) % len(self.members)
        classes = round_robin[permutation(self.seed, epoch, self.num_samples)]
        draws = uniform(keys(self.seed, epoch, np.arange(self.num_samples)), "balanced")[:, 0]
        sizes = np.array([len(members) for members in self.members])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        indices: np.ndarray = np.concatenate(self.members)[starts[classes] + (draws * sizes[classes]).astype(np.int64)]
        return indices
