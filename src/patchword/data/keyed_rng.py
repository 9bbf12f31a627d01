"""Counter-based random numbers: each is a pure function of a key, without any generator state.

A key stands for (seed, epoch, sample). The random choices for a sample (its position in the epoch, its crop, its mixup
weight) therefore do not depend on workers, processes, batch size or resuming. The idea is that of Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

import hashlib

import numpy as np

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of SplitMix64


def hash_mix(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64: a bijection of 64-bit integers that scrambles all bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Return a 64-bit key for each sample of an epoch: uint64, in the shape of `indices`."""
    with np.errstate(over="ignore"):
        base = hash_mix(hash_mix(np.asarray(seed, dtype=np.uint64) * _INCREMENT) + np.uint64(epoch) * _INCREMENT)
        return hash_mix(base + np.asarray(indices).astype(np.uint64) * _INCREMENT)


def bits(keys: np.ndarray, stream: str, count: int = 1) -> np.ndarray:
    """Return `count` random 64-bit integers per key: uint64 (B, count). Streams of different names are independent."""
    salt = np.uint64(int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        counters = np.arange(1, count + 1, dtype=np.uint64) * _INCREMENT
        return hash_mix(hash_mix(np.asarray(keys, dtype=np.uint64) ^ salt)[:, None] + counters)


def uniform(keys: np.ndarray, stream: str, count: int = 1) -> np.ndarray:
    """Return `count` numbers in [0, 1) per key: float64 (B, count). A larger count does not change the first ones."""
    return (bits(keys, stream, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the sample order of an epoch: a permutation of range(count), int64."""
    return np.argsort(keys(seed, epoch, np.arange(count)), kind="stable")
