"""Which sample comes when: one endless row of samples, epoch after epoch, each epoch in an order of its own.

A position in that row decides the sample and the key of its randomness. A step is a stretch of positions, so neither
batch size, accumulation, processes nor resumption changes which pictures are seen in which order and shape.
"""

import functools

import numpy as np

from .keyed_rng import keys, permutation, uniform


class ShuffledSampler:
    """Every sample once an epoch, in a new order each time."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self._epoch = functools.lru_cache(maxsize=4)(self.epoch)

    def epoch(self, number: int) -> np.ndarray:
        return permutation(self.seed, number, self.count)

    def __call__(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the samples at these positions, int64, and their keys, uint64."""
        positions = np.arange(start, stop)
        epochs, places = positions // self.count, positions % self.count
        indices, found = np.empty(len(positions), np.int64), np.empty(len(positions), np.uint64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self._epoch(int(epoch))[places[here]]
            found[here] = keys(self.seed, int(epoch), self.count + places[here])  # apart from those of the shuffle
        return indices, found


class BalancedSampler(ShuffledSampler):
    """Every class equally often: each place of an epoch draws a class, then a sample of it."""

    def __init__(self, seed: int, targets: np.ndarray) -> None:
        super().__init__(seed, len(targets))
        if targets.ndim == 2:  # several labels: a sample belongs to each of its classes
            self.members = [np.flatnonzero(column) for column in targets.T if column.any()]
        else:
            self.members = [np.flatnonzero(targets == c) for c in np.unique(targets)]

    def epoch(self, number: int) -> np.ndarray:
        # Classes take turns in a shuffled order, so that every stretch of an epoch is balanced as well.
        turns = np.arange(self.count) % len(self.members)
        classes = turns[permutation(self.seed, number, self.count)]
        draws = uniform(keys(self.seed, number, np.arange(self.count)), "balanced")[:, 0]
        sizes = np.array([len(m) for m in self.members])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return np.concatenate(self.members)[starts[classes] + (draws * sizes[classes]).astype(np.int64)]
