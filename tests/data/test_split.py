"""Splits: every class on both sides, the same everywhere, and the same again when a run is resumed."""

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
    """The very samples: a change here would change what every earlier run was measured with."""
    train, val = stratified_split(np.arange(20) % 2, 0.2, 0)
    assert train.dtype == val.dtype == np.int64
    assert val.tolist() == KNOWN
    assert train.tolist() == [i for i in range(20) if i not in KNOWN]


KNOWN = [9, 12, 15, 16]


def test_every_class_is_in_both_parts() -> None:
    targets = np.repeat([0, 1, 2, 3], [1000, 100, 3, 1])
    train, val = stratified_split(targets, 0.1, 7)
    assert counts(targets, val) == [99, 10, 1, 0]
    assert counts(targets, train) == [901, 90, 2, 1]


def test_more_classes_than_the_fraction_allows() -> None:
    targets = np.repeat(np.arange(100), 2)
    train, val = stratified_split(targets, 0.1, 0)
    assert len(val) == 20
    assert set(counts(targets, train)) == {1, 2}


@pytest.mark.parametrize(("sizes", "fraction", "expected"), [([2], 0.1, 1), ([2, 1], 0.1, 1), ([3, 3], 0.9, 4)])
def test_tiny_sets(sizes: list[int], fraction: float, expected: int) -> None:
    targets = np.repeat(np.arange(len(sizes)), sizes)
    assert len(stratified_split(targets, fraction, 0)[1]) == expected


@pytest.mark.parametrize("targets", [np.array([0]), np.array([0, 1, 2]), np.eye(3, dtype=np.float32)])
def test_where_no_validation_part_can_be_made(targets: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"Cannot split a validation set off . training images.*data\.val"):
        stratified_split(targets, 0.5, 0)


def test_seeds_give_other_splits_and_no_favoured_places() -> None:
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
    assert set(targets[train]) == set(targets)  # no class is lost to training
    room = len(targets) - len(set(classes))
    multi_label = sum(classes.count(c) > 1 for c in set(classes))
    wanted = max(1, round(len(targets) * fraction))
    assert len(val) == min(wanted, room)
    if multi_label <= wanted:
        assert set(targets[val]) == {c for c in classes if classes.count(c) > 1}


def test_several_labels_keep_their_frequencies() -> None:
    rng = np.random.default_rng(0)
    frequencies = np.array([0.5, 0.3, 0.1, 0.02, 0.004])
    targets = (rng.random((3000, 5)) < frequencies).astype(np.float32)
    train, val = stratified_split(targets, 0.2, 1)
    assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(3000))
    share = targets[val].sum(axis=0) / targets.sum(axis=0)
    assert abs(share - 0.2).max() < 0.06
    assert abs(len(val) / 3000 - 0.2) < 0.03
    assert not np.array_equal(val, stratified_split(targets, 0.2, 2)[1])


def test_no_label_loses_its_last_sample_to_validation() -> None:
    targets = np.array([[1, 1, 0], [1, 0, 1], [1, 0, 1]], dtype=np.float32)
    for seed in range(20):
        train, val = stratified_split(targets, 0.5, seed)
        assert targets[train].any(axis=0).all()
        assert len(val) == 1


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(tmp_path / f"data/{'ab'[i % 2]}/{i:02d}.png")
    return tmp_path / "data"


def test_a_split_is_made_again_from_json(pictures: Path) -> None:
    config = DataConfig(source=str(pictures), val_fraction=0.3)
    first = open_data(config, 5)
    split = json.loads(json.dumps(first.split_info))
    assert split["kind"] == "stratified"
    assert split["seed"] == 5
    assert split["fraction"] == 0.3
    assert len(split["val"]) == 6
    moved = pictures.rename(pictures.parent / "elsewhere")
    again = open_data(DataConfig(source=str(moved)), 99, split)  # neither seed nor fraction counts any more
    for one, other in ((first.train, again.train), (first.val, again.val)):
        assert one is not None
        assert other is not None
        assert [one.key(i) for i in range(len(one))] == [other.key(i) for i in range(len(other))]
        assert np.array_equal(one.targets, other.targets)
    assert again.split_info == split
    assert set(split["val"]) == {first.val.key(i) for i in range(6)}


def test_changed_data_are_refused(pictures: Path) -> None:
    config = DataConfig(source=str(pictures))
    split = open_data(config, 0).split_info
    added = pictures / "a/added.png"
    Image.new("L", (4, 4)).save(added)
    with pytest.raises(DataError, match="data have changed since the run started: the training set"):
        open_data(config, 0, split)
    added.unlink()
    (pictures / "a/00.png").rename(pictures / "b/00.png")
    with pytest.raises(DataError, match="have changed"):
        open_data(config, 0, split)


def test_given_parts_are_watched_too(pictures: Path) -> None:
    for name in ("train", "val"):
        (pictures / name).mkdir()
    (pictures / "a").rename(pictures / "train/a")
    (pictures / "b").rename(pictures / "train/b")
    for name in "ab":
        (pictures / "val" / name).mkdir()
        Image.new("L", (4, 4)).save(pictures / f"val/{name}/1.png")
    config = DataConfig(source=str(pictures))
    first = open_data(config, 0)
    assert first.split_info["kind"] == "given"
    assert set(first.split_info["fingerprint"]) == {"train", "val"}
    assert open_data(config, 1, first.split_info).split_info == first.split_info
    (pictures / "val/b/1.png").unlink()
    with pytest.raises(DataError, match="the validation set has other samples"):
        open_data(config, 0, first.split_info)


@pytest.mark.parametrize("saved", [{}, {"kind": "stratified", "fingerprint": "x"}])
def test_a_saved_split_that_says_too_little(saved: dict[str, str]) -> None:
    source = from_arrays(np.zeros((4, 2, 2), dtype=np.uint8), np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match="no 'fingerprint'"):
        with_validation(DatasetSplits(source), 0.5, 0, saved)
    with pytest.raises(DataError, match="no list 'val'"):
        apply_split(source, saved)
    with pytest.raises(DataError, match="no longer in the data: 'array 4'"):
        apply_split(source, {"val": ["array 4"]})


def test_arrays_are_split_as_well() -> None:
    source = from_arrays(
        np.arange(40, dtype=np.uint8)[:, None, None] + np.zeros((1, 2, 2), np.uint8), np.arange(40) % 4
    )
    parts = with_validation(DatasetSplits(source), 0.25, 3)
    assert parts.val is not None
    assert len(parts.val) == 10
    for index in range(len(parts.val)):
        value = parts.val.read(index, mode="L").getpixel((0, 0))
        assert parts.val.key(index) == f"array {value}"
        assert parts.val.targets[index] == value % 4
    again = with_validation(DatasetSplits(source), 0.25, 4, json.loads(json.dumps(parts.split_info)))
    assert again.val is not None
    assert np.array_equal(again.val.rows, parts.val.rows)


def test_file_names_that_are_no_text(pictures: Path) -> None:
    """Linux allows any bytes in a name; they must survive the way through JSON."""
    try:
        (pictures / "a/00.png").rename(pictures / "a/\udcff.png")
    except OSError:
        pytest.skip("this file system takes only text for names")
    config = DataConfig(source=str(pictures), val_fraction=0.5)
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
    assert prints[2] == prints[4]  # the same three samples, got in two ways
