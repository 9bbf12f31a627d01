"""The order of training samples in shards: random, but every shard is read from front to back, by one process.

An epoch's shards are shuffled and laid end to end. This sequence is cut into L lanes, and every batch takes the same
number of samples from each lane, lane by lane. A process whose fraction of the batch covers whole lanes therefore reads
whole shards, one after the other. Inside a lane, samples are shuffled within a window.

The order is a pure function of (seed, epoch, position), as in `data.sampler`. It depends on the batch size and on the
number of lanes, but not on processes, micro-batches, loader threads or resuming.
"""

import functools

import numpy as np

from ..config import Config
from ..errors import ConfigError
from .formats.indexed_shards import IndexedSource
from .keyed_rng import bits, keys, permutation
from .sampler import BalancedSampler, ShuffledSampler
from .sources import Source


class LaneSampler(ShuffledSampler):
    """Every sample once per epoch, from a fixed number of lanes that each read one shard after the other.

    Args:
        seed: Determines the order.
        shard_sizes: The number of samples of each shard; the indices of a shard follow those of the shard before.
        batch_size: The number of samples per step, over all processes and micro-batches.
        lanes: The number of lanes; the largest divisor of `batch_size` up to it is used.
        window: How many consecutive samples of a lane are shuffled together.
        order: The index of each sample, if the samples are not in the order of their shards.
    """

    def __init__(
        self,
        seed: int,
        shard_sizes: np.ndarray,
        *,
        batch_size: int,
        lanes: int,
        window: int,
        order: np.ndarray | None = None,
    ) -> None:
        super().__init__(seed, int(shard_sizes.sum()))
        starts = np.cumsum(shard_sizes) - shard_sizes
        self.shard_starts, self.shard_sizes = starts[shard_sizes > 0], shard_sizes[shard_sizes > 0]
        self.batch_size, self.window, self.order = batch_size, window, order
        self.num_lanes = max(n for n in range(1, min(lanes, batch_size) + 1) if batch_size % n == 0)
        self.per_lane = batch_size // self.num_lanes  # samples of each lane in a batch
        self._cached_window = functools.lru_cache(maxsize=4 * self.num_lanes)(self._window_order)
        self._cached_shards = functools.lru_cache(maxsize=4)(self._shuffled_shards)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the samples of one epoch, in order."""
        return self.select(epoch, np.arange(self.num_samples))

    def select(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        """Return the indices of the samples at some positions of an epoch, int64; only their windows are computed."""
        first = epoch * self.num_samples
        steps, slots = np.divmod(first + offsets, self.batch_size)
        lanes = slots // self.per_lane
        before = self._count_before(first)
        # Each lane gets as many samples as the epoch has positions for it: at most one batch's fraction more or less
        # than another lane, also if the epoch begins or ends in the middle of a batch.
        cuts = np.concatenate([[0], np.cumsum(self._count_before(first + self.num_samples) - before)])
        places = steps * self.per_lane + slots % self.per_lane - before[lanes]  # in the lane, since the epoch began
        return self._locate(epoch, self._shuffle_in_windows(epoch, lanes, places, cuts))

    def _count_before(self, position: int) -> np.ndarray:
        """Count the positions of each lane before a position of the endless sequence."""
        full, rest = divmod(position, self.batch_size)
        return full * self.per_lane + np.clip(rest - np.arange(self.num_lanes) * self.per_lane, 0, self.per_lane)

    def _shuffle_in_windows(self, epoch: int, lanes: np.ndarray, places: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        """Shuffle the samples of each window; returns the place of each sample in the sequence of the epoch."""
        # The windows of the lanes end in turn: otherwise all lanes would need new blocks of shards in the same step.
        shifts = lanes * self.window // self.num_lanes
        numbers = (places + shifts) // self.window
        first = cuts[lanes] + np.maximum(numbers * self.window - shifts, 0)
        last = np.minimum(cuts[lanes] + (numbers + 1) * self.window - shifts, cuts[lanes + 1])
        starts, examples, rows = np.unique(first, return_index=True, return_inverse=True)
        orders = [self._cached_window(epoch, *window) for window in zip(starts, last[examples], strict=True)]
        begins = np.cumsum([0, *map(len, orders)])  # of each window in their concatenation
        shuffled: np.ndarray = first + np.concatenate(orders)[begins[rows] + cuts[lanes] + places - first]
        return shuffled

    def _window_order(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the random order of the samples of a window, which are at some places of the sequence."""
        return np.argsort(bits(keys(self.seed, epoch, np.arange(start, stop)), "window")[:, 0], kind="stable")

    def _locate(self, epoch: int, sequence: np.ndarray) -> np.ndarray:
        """Convert places in the sequence of an epoch's shards to indices of samples."""
        shards, stops = self._cached_shards(epoch)
        numbers = np.searchsorted(stops, sequence, side="right")
        chosen = shards[numbers]
        indices: np.ndarray = self.shard_starts[chosen] + sequence - (stops[numbers] - self.shard_sizes[chosen])
        return indices if self.order is None else self.order[indices]

    def _shuffled_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards of an epoch in their order, and where each one ends in the sequence."""
        shards = permutation(self.seed, epoch, len(self.shard_sizes))
        return shards, np.cumsum(self.shard_sizes[shards])


def make_sampler(source: Source, config: Config) -> ShuffledSampler:
    """Make the sampler of a training set: lanes for indexed shards, one global shuffle for all other data.

    Raises:
        ConfigError: `data.balanced_sampling` is set for indexed shards.
    """
    data, seed = config.data, config.seed
    if not isinstance(source, IndexedSource):
        return BalancedSampler(seed, source.targets) if data.balanced_sampling else ShuffledSampler(seed, len(source))
    if data.balanced_sampling:
        field = "data.balanced_sampling"
        problem = (
            "true is not supported for shards with an index: they are read from front to back. Set it to false, and "
            "class_weights to true, which weights rare classes in the loss."
        )
        raise ConfigError(f"{field} {problem}", field=field, problem=problem)
    sizes, order = source.shard_sizes()
    window = data.shuffle_window
    return LaneSampler(seed, sizes, batch_size=config.batch_size, lanes=data.lanes, window=window, order=order)
