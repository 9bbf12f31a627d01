"""The order of samples in shards: exact epochs, independent of processes, and sequential in every shard."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchword.data.lane_sampler import LaneSampler


def make(sizes: list[int], batch_size: int = 12, lanes: int = 6, window: int = 4, seed: int = 0) -> LaneSampler:
    return LaneSampler(seed, np.array(sizes), batch_size=batch_size, lanes=lanes, window=window)


def rank_ranges(steps: range, batch_size: int, grad_accum: int, rank: int, world: int) -> list[tuple[int, int]]:
    """The ranges of positions of a process, as `Trainer.batch_ranges` yields them."""
    size = batch_size // grad_accum // world
    numbers = range(steps.start * grad_accum, steps.stop * grad_accum)
    return [((n * world + rank) * size, (n * world + rank + 1) * size) for n in numbers]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    batch_size=st.integers(1, 60),
    lanes=st.integers(1, 70),
    window=st.integers(1, 50),
    seed=st.integers(0, 2**62),
)
def test_every_sample_once_per_epoch(sizes: list[int], batch_size: int, lanes: int, window: int, seed: int) -> None:
    sampler = make(sizes, batch_size, lanes, window, seed)
    total = sum(sizes)
    indices, keys = sampler(0, 3 * total)
    for epoch in range(3):
        assert sorted(indices[epoch * total : (epoch + 1) * total]) == list(range(total))
    assert len(set(keys.tolist())) == 3 * total
    start, stop = total // 3, 2 * total + 1  # any range of positions is the same range of the whole sequence
    part, part_keys = sampler(start, stop)
    assert (part == indices[start:stop]).all()
    assert (part_keys == keys[start:stop]).all()


@pytest.mark.parametrize(("world", "grad_accum"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 3), (3, 2), (6, 1)])
def test_steps_have_the_same_samples_in_the_same_order_for_any_number_of_processes(world: int, grad_accum: int) -> None:
    sampler = make([17, 5, 30, 22, 9, 41], batch_size=24)
    whole, keys = sampler(0, 10 * 24)
    for step in range(10):
        ranges = [rank_ranges(range(step, step + 1), 24, grad_accum, rank, world) for rank in range(world)]
        pieces = [sampler(*ranges[rank][micro]) for micro in range(grad_accum) for rank in range(world)]
        assert (np.concatenate([indices for indices, _ in pieces]) == whole[step * 24 : (step + 1) * 24]).all()
        assert (np.concatenate([k for _, k in pieces]) == keys[step * 24 : (step + 1) * 24]).all()


def test_epochs_and_seeds_have_different_orders() -> None:
    sizes = [50] * 8
    orders = [make(sizes, seed=seed).epoch_order(epoch).tolist() for seed in range(2) for epoch in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    assert make(sizes, seed=1).epoch_order(1).tolist() == orders[3]


def test_shards_are_shuffled_in_every_epoch() -> None:
    for seed in range(2):
        sampler = make([1] * 200, batch_size=1, lanes=1, window=1, seed=seed)  # each shard is one sample
        orders = [sampler.epoch_order(epoch) for epoch in range(2)]
        assert (orders[0] != orders[1]).mean() > 0.9
        for order in orders:
            assert abs(np.corrcoef(order, np.arange(200))[0, 1]) < 0.3


def test_a_process_reads_each_of_its_shards_from_front_to_back() -> None:
    """With a window of one sample, offsets in a shard only grow; at most one shard per lane is split."""
    sizes, world = [100] * 40, 4
    sampler = make(sizes, batch_size=64, lanes=8, window=1)
    readers: dict[int, set[int]] = {}
    for rank in range(world):
        last: dict[tuple[int, int], int] = {}
        for start, stop in rank_ranges(range(4000 // 64), 64, 1, rank, world):
            indices, _ = sampler(start, stop)
            for slot, index in zip(range(start, stop), indices.tolist(), strict=True):
                lane, shard = slot % 64 // 8, index // 100
                assert index > last.get((lane, shard), -1)
                last[lane, shard] = index
                readers.setdefault(shard, set()).add(rank)
    assert len(readers) == 40
    assert sum(len(ranks) > 1 for ranks in readers.values()) <= world - 1


def test_few_shards_are_open_at_a_time() -> None:
    sampler = make([1000] * 64, batch_size=32, lanes=8, window=100)
    for step in range(0, 2000, 97):
        indices, _ = sampler(step * 32, (step + 1) * 32)
        assert (
            len({index // 1000 for index in indices.tolist()}) <= 8 * 2
        )  # a window can begin in one shard and end in the next


def test_samples_of_a_window_are_shuffled() -> None:
    order = make([1000], batch_size=1, lanes=1, window=100).epoch_order(0)
    for start in range(0, 1000, 100):
        window = order[start : start + 100]
        assert sorted(window) == list(range(start, start + 100))
        assert (np.diff(window) > 0).mean() < 0.7
    first_places = [make([100], 1, 1, 100, seed).epoch_order(0).argmin() for seed in range(400)]
    assert np.bincount(np.array(first_places) // 25, minlength=4).min() > 60  # of 100 each on average


def test_number_of_lanes_divides_the_batch() -> None:
    assert [make([9], batch_size, 64).num_lanes for batch_size in (4096, 96, 100, 127, 8, 1)] == [64, 48, 50, 1, 8, 1]


def test_samples_in_another_order_than_their_shards() -> None:
    order = np.array([3, 0, 2, 1, 4])
    sampler = LaneSampler(0, np.array([2, 3]), batch_size=1, lanes=1, window=1, order=order)
    indices = sampler.epoch_order(0).tolist()
    assert indices in ([3, 0, 2, 1, 4], [2, 1, 4, 3, 0])


def test_any_position_is_cheap() -> None:
    """Only the windows of the positions are computed, also in the middle of the hundredth epoch of a huge dataset."""
    sampler = make([10_000] * 100_000, batch_size=4096, lanes=64, window=1024)  # 10^9 samples
    start = 100 * 10**9 + 12_345_678
    indices, _ = sampler(start, start + 4096)
    assert len(set(indices.tolist())) == 4096
    assert indices.min() >= 0
    assert indices.max() < 10**9
