"""Stratified splits of a training set, and how a saved split is applied again.

The choice depends only on the seed and the positions of the samples, so it is the same on every machine.
"""

import base64
import zlib
from typing import Any

import numpy as np

from ..errors import DataError
from .class_labels import format_names
from .formats.indexed_shards import IndexedSource
from .keyed_rng import keys, uniform
from .sources import Source


def stratified_split(targets: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split off about `fraction` of each class for validation; returns (training, validation) indices, sorted.

    Every class keeps at least one training sample. Every class with two or more samples has at least one in the
    validation set, unless there are more such classes than validation samples.

    Args:
        targets: class indices, int64 (N,); or multi-hot (N, K) for multi-label data.
    """
    order = np.argsort(uniform(keys(seed, 0, np.arange(len(targets))), "split")[:, 0], kind="stable")
    choose = _choose_multi_label if targets.ndim == 2 else _choose_by_class
    chosen = order[choose(targets[order], fraction)]
    if not len(chosen):
        raise DataError(
            f"Cannot split a validation set off {len(targets)} training images: no class has more than one. "
            f"Add images, or set data.val to a separate validation set."
        )
    return split_by_mask(mask_of(len(targets), chosen))


def mask_of(count: int, chosen: np.ndarray) -> np.ndarray:
    """Return which of `count` samples are chosen, bool (count,)."""
    mask = np.zeros(count, dtype=bool)
    mask[chosen] = True
    return mask


def split_by_mask(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (training, validation) indices, sorted, by the mask of validation; much faster than `setdiff1d`."""
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def stratified_subset(targets: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return the sorted indices of about `fraction` of each class, at least one; multi-label data: of all samples."""
    order = np.argsort(uniform(keys(seed, 0, np.arange(len(targets))), "part")[:, 0], kind="stable")
    if targets.ndim == 2:
        return np.sort(order[: max(1, round(fraction * len(targets)))])
    grouped, counts = _group_by_class(targets[order])
    quotas = np.maximum(1, np.rint(fraction * counts)).astype(np.int64)
    return np.sort(order[_take_first(grouped, counts, quotas)])


def _choose_by_class(targets: np.ndarray, fraction: float) -> np.ndarray:
    """Choose the first samples of each class, as many as its quota."""
    grouped, counts = _group_by_class(targets)
    return _take_first(grouped, counts, _compute_quotas(counts, fraction))


def _group_by_class(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the samples, class by class and else in their order, and the sizes of the classes."""
    counts = np.bincount(targets)
    classes = (np.cumsum(counts > 0) - 1)[targets]  # without those that have no samples
    counts = counts[counts > 0]
    small = classes.astype(np.uint16) if len(counts) <= 2**16 else classes  # two bytes are sorted in linear time
    return np.argsort(small, kind="stable"), counts


def _take_first(grouped: np.ndarray, counts: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Return the first samples of each class, as many as its quota."""
    rank = np.arange(len(grouped)) - np.repeat(np.cumsum(counts) - counts, counts)  # of each sample within its class
    chosen: np.ndarray = grouped[rank < np.repeat(quotas, counts)]
    return chosen


def _compute_quotas(counts: np.ndarray, fraction: float) -> np.ndarray:
    """Compute the number of validation samples per class: `fraction` of the total, proportional to class size."""
    total = max(1, round(counts.sum() * fraction))
    maximum = np.maximum(counts - 1, 0)
    minimum = np.minimum(maximum, 1) if (maximum > 0).sum() <= total else np.zeros_like(counts)
    quotas = np.clip((counts * fraction).astype(np.int64), minimum, maximum)
    while gap := total - quotas.sum():  # rounding: adjust the class that is furthest from its exact fraction
        error = (counts * fraction - quotas) * np.sign(gap)
        error[quotas == (maximum if gap > 0 else minimum)] = -np.inf
        if error.max() == -np.inf:
            break
        quotas[error.argmax()] += np.sign(gap)
    return quotas


def _choose_multi_label(targets: np.ndarray, fraction: float) -> np.ndarray:
    """Iterative stratification (Sechidis et al., 2011): choose samples label by label, the rarest label first."""
    has_label = targets > 0
    counts = has_label.sum(axis=0)
    quotas = _compute_quotas(counts, fraction)
    remaining = counts.copy()  # training samples of each label
    chosen = np.zeros(len(has_label), dtype=bool)
    for label in np.argsort(counts, kind="stable"):
        for sample in np.flatnonzero(has_label[:, label] & ~chosen):
            if quotas[label] <= 0:
                break
            if (remaining[has_label[sample]] > 1).all():  # no label may lose its last training sample
                chosen[sample] = True
                quotas -= has_label[sample]
                remaining -= has_label[sample]
    unlabeled = np.flatnonzero(~has_label.any(axis=1))
    chosen[unlabeled[: round(len(unlabeled) * fraction)]] = True
    return np.flatnonzero(chosen)


def describe_split(source: Source, val: np.ndarray) -> dict[str, Any]:
    """Return the validation samples of a split as JSON, for `apply_split`: their keys, or a mask in a large source."""
    if isinstance(source, IndexedSource):  # a bit per sample, a hundredth of the size of keys
        packed = np.packbits(mask_of(len(source), val)).tobytes()
        return {"val_mask": base64.b64encode(zlib.compress(packed)).decode()}
    return {"val": [source.key(int(index)) for index in val]}


def apply_split(source: Source, saved: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Apply a split that `describe_split` described; returns (training, validation) indices."""
    if "val_mask" in saved:
        return _apply_mask(len(source), saved["val_mask"])
    val_keys = saved.get("val")
    if not isinstance(val_keys, list):
        raise DataError("The saved split has no list 'val', so its validation samples are unknown.")
    index_of = {source.key(index): index for index in range(len(source))}
    if missing := [key for key in val_keys if key not in index_of]:
        raise DataError(f"Samples of the saved split are no longer in the data: {format_names(missing)}.")
    chosen = np.array(sorted(index_of[key] for key in val_keys), dtype=np.int64)
    return split_by_mask(mask_of(len(source), chosen))


def _apply_mask(count: int, text: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        size = (count + 7) // 8
        unpacker = zlib.decompressobj()
        bits = np.frombuffer(unpacker.decompress(base64.b64decode(text), size + 1), np.uint8)
        if len(bits) != size or not unpacker.eof:
            raise ValueError
    except (ValueError, TypeError, zlib.error):
        raise DataError(
            "The mask 'val_mask' of the saved split is damaged: its validation samples are unknown."
        ) from None
    return split_by_mask(np.unpackbits(bits, count=count).astype(bool))
