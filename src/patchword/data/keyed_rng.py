"""Random numbers that are looked up, not drawn: each is a function of a key and of nothing that happened before.

A key stands for (seed, epoch, sample). What is random about a sample (its place in the order, its crop, its mixing
partner's weight) therefore does not depend on workers, processes, batch sizes or resumption.
"""

import hashlib

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: consecutive counters land far apart


def hash_mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that scrambles all bits (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """One 64-bit key for each sample of an epoch: uint64, in the shape of `indices`."""
    with np.errstate(over="ignore"):
        base = hash_mix(hash_mix(np.asarray(seed, dtype=np.uint64) * _STEP) + np.uint64(epoch) * _STEP)
        return hash_mix(base + np.asarray(indices).astype(np.uint64) * _STEP)


def bits(keys: np.ndarray, purpose: str, count: int = 1) -> np.ndarray:
    """`count` numbers of 64 random bits for each key: uint64 (B, count). Different purposes give independent ones."""
    salt = np.uint64(int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        counters = np.arange(1, count + 1, dtype=np.uint64) * _STEP
        return hash_mix(hash_mix(np.asarray(keys, dtype=np.uint64) ^ salt)[:, None] + counters)


def uniform(keys: np.ndarray, purpose: str, count: int = 1) -> np.ndarray:
    """`count` numbers in [0, 1) for each key: float64 (B, count). A larger count does not change the first ones."""
    return (bits(keys, purpose, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: a permutation of range(count), int64."""
    return np.argsort(keys(seed, epoch, np.arange(count)), kind="stable")
