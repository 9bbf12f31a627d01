"""Stratified splits: every class in both splits, the same on every machine and after resuming."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchword.config import DataConfig
from patchword.data.resolve import open_data, with_validation
from patchword.data.sources import DatasetSplits, fingerprint, from_arrays
from patchword.data.split import apply_split, stratified_split
from patchword.errors import DataError


def counts(targets: np.ndarray, indices: np.ndarray) -> list[int]:
    return np.bincount(targets[indices], minlength=targets.max() + 1).tolist()


def test_known_split() -> None:
    """Pinned samples: a change would invalidate the metrics of all earlier runs."""
    train, val = stratified_split(np.arange(20) % 2, 0.2, 0)
    assert train.dtype == val.dtype == np.int64
    assert val.tolist() == KNOWN
    assert train.tolist() == [i for i in range(20) if i not in KNOWN]


KNOWN = [9, 12, 15, 16]


def test_every_class_is_in_both_splits() -> None:
    targets = np.repeat([0, 1, 2, 3], [1000, 100, 3, 1])
    train, val = stratified_split(targets, 0.1, 7)
    assert counts(targets, val) == [99, 10, 1, 0]
    assert counts(targets, train) == [901, 90, 2, 1]


def test_more_classes_than_validation_samples() -> None:
    targets = np.repeat(np.arange(100), 2)
    train, val = stratified_split(targets, 0.1, 0)
    assert len(val) == 20
    assert set(counts(targets, train)) == {1, 2}


@pytest.mark.parametrize(("sizes", "fraction", "expected"), [([2], 0.1, 1), ([2, 1], 0.1, 1), ([3, 3], 0.9, 4)])
def test_tiny_datasets(sizes: list[int], fraction: float, expected: int) -> None:
    targets = np.repeat(np.arange(len(sizes)), sizes)
    assert len(stratified_split(targets, fraction, 0)[1]) == expected


@pytest.mark.parametrize("targets", [np.array([0]), np.array([0, 1, 2]), np.eye(3, dtype=np.float32)])
def test_no_validation_set_from_single_samples(targets: np.ndarray) -> None:
    with pytest.raises(DataError, match=rf"\b{len(targets)} .*data\.val\b"):
        stratified_split(targets, 0.5, 0)


def test_seeds_give_different_unbiased_splits() -> None:
    targets = np.zeros(100, dtype=np.int64)
    chosen = np.concatenate([stratified_split(targets, 0.1, seed)[1] for seed in range(300)])
    assert abs(np.bincount(chosen, minlength=100) - 30).max() < 25  # five standard deviations of 5.2


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60).filter(lambda t: len(set(t)) < len(t)),
    st.floats(0.01, 0.99),
    st.integers(0, 2**62),
)
def test_properties(classes: list[int], fraction: float, seed: int) -> None:
    targets = np.array(classes)
    train, val = stratified_split(targets, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(len(targets)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(val) > 0).all()
    assert len(val)
    assert set(targets[train]) == set(targets)  # every class has training samples
    room = len(targets) - len(set(classes))
    num_splittable = sum(classes.count(c) > 1 for c in set(classes))
    expected = max(1, round(len(targets) * fraction))
    assert len(val) == min(expected, room)
    if num_splittable <= expected:
        assert set(targets[val]) == {c for c in classes if classes.count(c) > 1}


def test_multi_label_split_keeps_label_frequencies() -> None:
    rng = np.random.default_rng(0)
    frequencies = np.array([0.5, 0.3, 0.1, 0.02, 0.004])
    targets = (rng.random((3000, 5)) < frequencies).astype(np.float32)
    train, val = stratified_split(targets, 0.2, 1)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(3000))
    fractions = targets[val].sum(axis=0) / targets.sum(axis=0)
    assert abs(fractions - 0.2).max() < 0.06
    assert abs(len(val) / 3000 - 0.2) < 0.03
    assert not np.array_equal(val, stratified_split(targets, 0.2, 2)[1])


def test_no_label_loses_its_last_training_sample() -> None:
    targets = np.array([[1, 1, 0], [1, 0, 1], [1, 0, 1]], dtype=np.float32)
    for seed in range(20):
        train, val = stratified_split(targets, 0.5, seed)
        assert targets[train].any(axis=0).all()
        assert len(val) == 1


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(tmp_path / f"data/{'ab'[i % 2]}/{i:02d}.png")
    return tmp_path / "data"


def test_saved_split_is_reproduced(photos: Path) -> None:
    config = DataConfig(source=str(photos), val_fraction=0.3)
    first = open_data(config, 5)
    split = json.loads(json.dumps(first.split_info))
    assert split["kind"] == "stratified"
    assert split["seed"] == 5
    assert split["fraction"] == 0.3
    assert len(split["val"]) == 6
    moved = photos.rename(photos.parent / "elsewhere")
    again = open_data(DataConfig(source=str(moved)), 99, split)  # seed and fraction are ignored
    for one, other in ((first.train, again.train), (first.val, again.val)):
        assert one is not None
        assert other is not None
        assert [one.key(i) for i in range(len(one))] == [other.key(i) for i in range(len(other))]
        assert np.array_equal(one.targets, other.targets)
    assert again.split_info == split
    assert set(split["val"]) == {first.val.key(i) for i in range(6)}


def test_changed_data_is_refused(photos: Path) -> None:
    config = DataConfig(source=str(photos))
    split = open_data(config, 0).split_info
    added = photos / "a/added.png"
    Image.new("L", (4, 4)).save(added)
    with pytest.raises(DataError, match=r"changed.*training set"):
        open_data(config, 0, split)
    added.unlink()
    (photos / "a/00.png").rename(photos / "b/00.png")
    with pytest.raises(DataError, match=r"changed.*training set"):
        open_data(config, 0, split)


def test_changed_validation_set_is_refused(photos: Path) -> None:
    for name in ("train", "val"):
        (photos / name).mkdir()
    (photos / "a").rename(photos / "train/a")
    (photos / "b").rename(photos / "train/b")
    for name in "ab":
        (photos / "val" / name).mkdir()
        Image.new("L", (4, 4)).save(photos / f"val/{name}/1.png")
    config = DataConfig(source=str(photos))
    first = open_data(config, 0)
    assert first.split_info["kind"] == "given"
    assert set(first.split_info["fingerprint"]) == {"train", "val"}
    assert open_data(config, 1, first.split_info).split_info == first.split_info
    (photos / "val/b/1.png").unlink()
    with pytest.raises(DataError, match=r"changed.*validation set"):
        open_data(config, 0, first.split_info)


@pytest.mark.parametrize("saved", [{}, {"kind": "stratified", "fingerprint": "x"}])
def test_incomplete_saved_split(saved: dict[str, str]) -> None:
    source = from_arrays(np.zeros((4, 2, 2), dtype=np.uint8), np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match="'fingerprint'"):
        with_validation(DatasetSplits(source), 0.5, 0, saved)
    with pytest.raises(DataError, match="'val'"):
        apply_split(source, saved)
    with pytest.raises(DataError, match="'array 4'"):
        apply_split(source, {"val": ["array 4"]})


def test_arrays_are_split() -> None:
    source = from_arrays(
        np.arange(40, dtype=np.uint8)[:, None, None] + np.zeros((1, 2, 2), np.uint8), np.arange(40) % 4
    )
    splits = with_validation(DatasetSplits(source), 0.25, 3)
    assert splits.val is not None
    assert len(splits.val) == 10
    for index in range(len(splits.val)):
        value = splits.val.read(index, mode="L").getpixel((0, 0))
        assert splits.val.key(index) == f"array {value}"
        assert splits.val.targets[index] == value % 4
    again = with_validation(DatasetSplits(source), 0.25, 4, json.loads(json.dumps(splits.split_info)))
    assert again.val is not None
    assert np.array_equal(again.val.rows, splits.val.rows)


def test_file_names_that_are_not_utf8(photos: Path) -> None:
    """Linux allows any bytes in a name; they must survive a JSON round trip."""
    try:
        (photos / "a/00.png").rename(photos / "a/\udcff.png")
    except OSError:
        pytest.skip("this file system accepts only valid Unicode in names")
    config = DataConfig(source=str(photos), val_fraction=0.5)
    seed = next(seed for seed in range(50) if "a/\udcff.png" in open_data(config, seed).split_info["val"])
    split = json.loads(json.dumps(open_data(config, seed).split_info))
    again = open_data(config, seed, split)
    assert again.val is not None
    assert [again.val.key(i) for i in range(10)] == split["val"]


def test_fingerprints() -> None:
    images, targets = np.zeros((4, 2, 2), dtype=np.uint8), np.array([0, 1, 0, 1])
    base = from_arrays(images, targets)
    others = [
        from_arrays(images, targets[::-1].copy()),
        from_arrays(images[:3], targets[:3]),
        from_arrays(images, targets, ["a", "b"]),
        base.subset(np.array([0, 1, 2])),
        base.subset(np.array([2, 1, 0, 3])),
    ]
    prints = [fingerprint(each) for each in (base, *others)]
    assert len(set(prints)) == len(others)
    assert fingerprint(from_arrays(images, targets)) == prints[0]
    assert prints[2] == prints[4]  # the same three samples, selected in two ways
