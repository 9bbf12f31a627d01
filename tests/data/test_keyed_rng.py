"""Counter-based random numbers pass statistical tests and never change.

Seeds are fixed, so a test either passes or fails for good; the limits would fail one true generator in 10,000.
"""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from patchword.data.keyed_rng import bits, hash_mix, keys, permutation, uniform

MIN_P_VALUE = 1e-4
NUM_SAMPLES = 100_000


def assert_even(counts: np.ndarray) -> None:
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE


def assert_independent(first: np.ndarray, second: np.ndarray) -> None:
    """Neither a correlation nor a deviation in any of 16 x 16 cells."""
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(len(first))
    assert_even(np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])[0].ravel())


def test_values_are_pinned() -> None:
    # A run that is repeated with a later version must see the same images.
    pinned = keys(3, 2, np.array([0, 1]))
    assert pinned.tolist() == [5919191730987360447, 7586704366570615742]
    assert uniform(keys(0, 0, np.array([0, 1])), "a", 2)[0].tolist() == pytest.approx(
        [0.92308821, 0.03187967], abs=1e-8
    )
    assert permutation(1, 0, 8).tolist() == [7, 0, 2, 3, 1, 6, 4, 5]


def test_hash_mix_is_the_finalizer_of_splitmix64() -> None:
    # The published first three outputs of SplitMix64 with the seed 0.
    counters = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert hash_mix(counters).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_key_depends_only_on_its_sample() -> None:
    together = keys(5, 7, np.arange(1000))
    alone = np.concatenate([keys(5, 7, np.array([index])) for index in range(1000)])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(uniform(together, "x", 3)[400], uniform(alone[400:401], "x", 3)[0])


def test_larger_count_does_not_change_the_first_values() -> None:
    sample_keys = keys(0, 0, np.arange(10))
    np.testing.assert_array_equal(uniform(sample_keys, "x", 7)[:, :3], uniform(sample_keys, "x", 3))


def test_largest_seed() -> None:
    assert len(set(keys(2**63 - 1, 2**20, np.arange(1000)).tolist())) == 1000


def test_keys_are_distinct_over_seeds_epochs_and_samples() -> None:
    all_keys = np.concatenate([keys(seed, epoch, np.arange(2000)) for seed in range(10) for epoch in range(10)])
    assert len(np.unique(all_keys)) == len(all_keys)


def test_hash_mix_has_the_avalanche_property() -> None:
    values = keys(0, 0, np.arange(2000))
    for bit in range(64):
        changed = np.bitwise_count(hash_mix(values) ^ hash_mix(values ^ np.uint64(1 << bit)))
        assert abs(changed.mean() - 32) < 0.5
        assert changed.min() > 8


@pytest.mark.parametrize("purpose", ["flip", "shift", "crop", "mix", ""])
def test_uniform(purpose: str) -> None:
    numbers = uniform(keys(0, 0, np.arange(NUM_SAMPLES)), purpose, 2)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        assert_even(np.histogram(column, bins=256, range=(0, 1))[0])
        assert stats.kstest(column, "uniform").pvalue > MIN_P_VALUE


def test_every_bit_is_unbiased() -> None:
    words = bits(keys(0, 0, np.arange(NUM_SAMPLES)), "noise")[:, 0]
    ones = ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(axis=0)
    assert np.abs(ones - NUM_SAMPLES / 2).max() < 4.5 * math.sqrt(NUM_SAMPLES) / 2


def test_streams_are_independent() -> None:
    sample_keys = keys(0, 0, np.arange(NUM_SAMPLES))
    assert_independent(uniform(sample_keys, "flip")[:, 0], uniform(sample_keys, "shift")[:, 0])


def test_values_of_one_stream_are_independent() -> None:
    first, second, third = uniform(keys(0, 0, np.arange(NUM_SAMPLES)), "crop", 3).T
    assert_independent(first, second)
    assert_independent(first, third)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (2**62, 0)], ids=str)
def test_epochs_and_seeds_are_independent(other: tuple[int, int]) -> None:
    indices = np.arange(NUM_SAMPLES)
    assert_independent(uniform(keys(0, 0, indices), "flip")[:, 0], uniform(keys(*other, indices), "flip")[:, 0])


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 512])
def test_neighboring_samples_are_independent(distance: int) -> None:
    numbers = uniform(keys(0, 0, np.arange(NUM_SAMPLES + distance)), "flip")[:, 0]
    assert_independent(numbers[:-distance], numbers[distance:])


def test_epochs_of_one_sample_are_independent_and_uniform() -> None:
    numbers = np.concatenate([uniform(keys(4, epoch, np.array([17])), "flip")[0] for epoch in range(20_000)])
    assert stats.kstest(numbers, "uniform").pvalue > MIN_P_VALUE
    assert_independent(numbers[:-1], numbers[1:])


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_epoch_order_is_a_permutation(count: int) -> None:
    order = permutation(3, 1, count)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(count))


def test_all_orders_are_equally_likely() -> None:
    found = Counter(tuple(permutation(0, epoch, 5).tolist()) for epoch in range(24_000))
    assert_even(np.array([found[order] for order in permutations(range(5))]))


def test_every_position_is_equally_likely() -> None:
    orders = np.stack([permutation(seed, 0, 50) for seed in range(4000)])
    for sample in (0, 1, 25, 49):
        assert_even(np.bincount(orders[:, sample], minlength=50))


def test_orders_of_two_epochs_are_independent() -> None:
    first, second = permutation(0, 0, NUM_SAMPLES), permutation(0, 1, NUM_SAMPLES)
    assert (first == second).sum() < 8  # on average 1
    assert abs(stats.spearmanr(first, second).statistic) < 4 / math.sqrt(NUM_SAMPLES)


def test_augmentation_is_independent_of_the_position() -> None:
    # The order sorts the keys themselves, so derived values must not correlate with the key.
    positions = np.argsort(permutation(0, 0, NUM_SAMPLES)) / NUM_SAMPLES
    assert_independent(positions, uniform(keys(0, 0, np.arange(NUM_SAMPLES)), "flip")[:, 0])
