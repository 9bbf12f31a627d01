"""Dataset references and their splits; sources of files and arrays; unreadable images."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.shared_data import shared_path
from patchword.config import DataConfig
from patchword.data.channel_stats import compute_channel_stats
from patchword.data.check_readable import require_readable
from patchword.data.resolve import open_data, resolve_dataset
from patchword.data.sources import FileSource, Source, from_arrays
from patchword.errors import DataError, ImageError


def paint(path: Path, color: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def read_colors(source: Source) -> list[object]:
    return [source.read(index, mode="RGB").getpixel((0, 0)) for index in range(len(source))]


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """train: 8 cats (red), 6 dogs (green); test: one dog. Files are numbered by their shade."""
    for i in range(8):
        paint(tmp_path / f"pets/train/cat/{i}.png", (200 + i, 0, 0))
    for i in range(6):
        paint(tmp_path / f"pets/train/dog/{i}.png", (0, 200 + i, 0))
    paint(tmp_path / "pets/test/dog/0.png", (0, 99, 0))
    return tmp_path / "pets"


def test_folder_with_splits(pets: Path) -> None:
    splits = open_data(DataConfig(source=str(pets), val_fraction=0.25), 0)
    assert splits.train.labels == ("cat", "dog")
    assert len(splits.train) == 10
    assert splits.val is not None
    assert splits.val.targets.tolist() == [0, 0, 1, 1]
    assert splits.test is not None
    assert splits.test.labels == ("cat", "dog")
    assert splits.test.targets.tolist() == [1]
    assert read_colors(splits.test) == [(0, 99, 0)]
    colors = read_colors(splits.train) + read_colors(splits.val)
    assert sorted(colors) == sorted([(200 + i, 0, 0) for i in range(8)] + [(0, 200 + i, 0) for i in range(6)])


def test_separate_references_for_each_split(pets: Path, tmp_path: Path) -> None:
    """References of different formats. From a reference with splits, the named split is used, else its training set."""
    paint(tmp_path / "other/val/dog/1.png", (1, 1, 1))
    paint(tmp_path / "other/train/dog/2.png", (2, 2, 2))
    (tmp_path / "list.csv").write_text("path,label\npets/test/dog/0.png,dog\nother/val/dog/1.png,cat\n")
    config = DataConfig(source=str(pets), val=str(tmp_path / "other"), test=str(tmp_path / "list.csv"))
    splits = open_data(config, 0)
    assert len(splits.train) == 14
    assert splits.split_info["kind"] == "given"
    assert splits.val is not None
    assert read_colors(splits.val) == [(1, 1, 1)]
    assert splits.val.targets.tolist() == [1]
    assert splits.test is not None
    assert splits.test.targets.tolist() == [1, 0]
    (tmp_path / "other/val").rename(tmp_path / "other/test")
    splits = open_data(config, 0)
    assert splits.val is not None
    assert read_colors(splits.val) == [(2, 2, 2)]


def test_classes_missing_in_the_training_set(pets: Path) -> None:
    paint(pets / "test/Cat/1.png")
    paint(pets / "test/eel/1.png")
    with pytest.raises(DataError, match=r"test set .*'Cat', 'eel'\..*'cat', 'dog'"):
        open_data(DataConfig(source=str(pets)), 0)


def test_folder_as_multi_label_data(pets: Path) -> None:
    splits = open_data(DataConfig(source=str(pets), multi_label=True), 0)
    assert splits.train.targets.dtype == np.float32
    assert set(map(tuple, splits.train.targets)) == {(0, 1), (1, 0)}
    assert splits.test is not None
    assert splits.test.targets.tolist() == [[0, 1]]
    assert splits.train.multi_label


def test_named_datasets_take_precedence_over_folders(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pets.rename(pets.parent / "digits")
    monkeypatch.chdir(pets.parent)
    assert len(resolve_dataset("digits").splits["train"].labels) == 10
    assert resolve_dataset("./digits").splits["train"].labels == ("cat", "dog")
    assert resolve_dataset("./digits").splits["train"].name(0) == "digits/train/cat/0.png"


def test_single_split_is_used_whatever_its_name(pets: Path) -> None:
    splits = open_data(DataConfig(source=str(pets / "train"), test=str(pets / "test")), 0)
    assert splits.test is not None
    assert len(splits.test) == 1
    (pets / "train").rename(pets / "val")
    with pytest.raises(DataError, match=r"pets .*training set.*'test', 'val'"):
        open_data(DataConfig(source=str(pets)), 0)
    (pets / "test").rename(pets.parent / "test")
    splits = open_data(DataConfig(source=str(pets)), 0)
    assert splits.split_info["kind"] == "stratified"
    assert splits.test is None


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "^No dataset"),
        ("cifr10", r"named dataset cifr10\..*'cifar10'"),
        ("no/such/folder", r"named dataset no/such/folder\."),
        ("no-*.tar", r"named dataset no-\*\.tar\."),
        ("pets/train/cat/0.png", r"pets/train/cat/0\.png .*supported"),
        ("empty", r"images .*empty\. .*\.jpg"),
        ("single", r"single .*'photos'.*\b2\b.*'labels\.csv'"),
    ],
)
def test_invalid_references(pets: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str) -> None:
    monkeypatch.chdir(pets.parent)
    Path("empty").mkdir()
    paint(Path("single/photos/1.png"))
    Path("single/labels.csv").touch()
    with pytest.raises(DataError, match=message):
        open_data(DataConfig(source=reference), 0)


def test_archive_next_to_class_folders_is_ignored(pets: Path) -> None:
    (pets / "pets.tar").write_bytes(b"junk")
    (pets / "pets.parquet").write_bytes(b"junk")
    assert len(resolve_dataset(str(pets)).splits["train"]) == 14


def test_missing_optional_packages(tmp_path: Path) -> None:
    """In a process that cannot import them, the error says what to install."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    code = """
import sys
sys.modules["pyarrow"] = sys.modules["pyarrow.parquet"] = sys.modules["datasets"] = None
from patchword.data.resolve import resolve_dataset
from patchword.errors import ConfigError
for reference in sys.argv[1:]:
    try:
        resolve_dataset(reference)
    except ConfigError as error:
        print(error)
"""
    references = [str(tmp_path / "x.parquet"), str(tmp_path / "saved"), "hf-datasets:owner/name"]
    run = subprocess.run([sys.executable, "-c", code, *references], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == 3
    assert all("pip install -c constraints.txt '.[data]'" in line for line in lines)
    assert "pyarrow" in lines[0]
    assert "datasets" in lines[1]


def test_opening_a_folder_imports_no_large_library(pets: Path) -> None:
    code = f"""
import sys
from patchword.data.resolve import open_data
from patchword.config import DataConfig
open_data(DataConfig(source={str(pets)!r}), 0)
print([name for name in ("torch", "pyarrow", "datasets", "pandas", "sklearn", "scipy") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_damaged_files_stay_in_the_source(pets: Path) -> None:
    for name in ("cat/1.png", "dog/3.png"):
        (pets / "train" / name).write_bytes(b"junk")
    paint(pets / "train/cat/2.png").write_bytes((pets / "train/cat/0.png").read_bytes()[:50])
    (pets / "train/dog/9.jpg").touch()
    source = resolve_dataset(str(pets)).splits["train"]
    assert len(source) == 15
    codes = dict.fromkeys(("cat/1.png", "dog/3.png"), "image_unsupported")
    codes |= {"cat/2.png": "image_damaged", "dog/9.jpg": "image_empty"}
    for index in range(len(source)):
        name = source.key(index).removeprefix("train/")
        if name in codes:
            with pytest.raises(ImageError, match=name) as error:
                source.read(index, mode="RGB")
            assert error.value.code == codes.pop(name)
        else:
            source.read(index, mode="RGB")
    assert not codes
    require_readable(source)


def test_source_without_readable_images(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{'ab'[i % 2]}").mkdir(exist_ok=True)
        (tmp_path / f"{'ab'[i % 2]}/{i}.jpg").write_bytes(b"junk")
    source = resolve_dataset(str(tmp_path)).splits["train"]
    with pytest.raises(DataError, match=r"\b20 .*images.*\.jpg: "):
        require_readable(source)
    with pytest.raises(DataError, match=r"\b2 images.*\.jpg: "):
        require_readable(source.subset(np.arange(2)))
    with pytest.raises(DataError, match=r"\b30 images.*mean"):
        compute_channel_stats(source, "RGB", (4, 4))
    paint(tmp_path / "a/0.jpg")
    require_readable(source.subset(np.arange(20)))  # one readable image in twenty is enough


def test_arrays() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    source = from_arrays(images, np.array([0, 2, 1, 2, 0], dtype=np.uint8), ["a", "b", "c", "d"])
    assert source.labels == ("a", "b", "c", "d")
    assert source.targets.dtype == np.int64
    assert np.array_equal(np.asarray(source.read(3, mode="RGB")), images[3])
    assert source.read(3, mode="L").mode == "L"
    subset = source.subset(np.array([4, 1]))
    assert subset.images.shape == (2, 4, 6, 3)
    assert subset.name(0) == "array 4"
    assert len(subset) == 2
    assert np.array_equal(np.asarray(subset.read(1, mode="RGB")), images[1])
    gray = from_arrays(images[..., 0], np.array([0, 1, 0, 1, 0]))
    assert gray.images.shape == (5, 4, 6, 1)
    assert gray.labels == ("0", "1")
    assert np.array_equal(np.asarray(gray.read(0, mode="L")), images[0, ..., 0])
    assert np.array_equal(np.asarray(gray.read(0, mode="RGB"))[..., 2], images[0, ..., 0])
    multi_label = from_arrays(images, np.eye(5, 3, dtype=bool))
    assert multi_label.multi_label
    assert multi_label.targets.dtype == np.float32
    assert multi_label.labels == ("0", "1", "2")


IMAGES = np.zeros((2, 4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("images", "targets", "labels", "message"),
    [
        (IMAGES.astype(np.float32), [0, 1], None, r"uint8.*float32"),
        (IMAGES.transpose(0, 3, 1, 2), [0, 1], None, r"images .*\(2, 3, 4, 4\)"),
        (IMAGES[:, :0], [0, 1], None, r"images .*\(2, 0, 4, 3\)"),
        (IMAGES[:0], [], None, r"images .*\(0, 4, 4, 3\)"),
        (IMAGES, [0, 1, 0], None, r"targets .*\b2 .*\(3,\)"),
        (IMAGES, [0.0, 1.0], None, r"targets .*integer.*float64"),
        (IMAGES, [0, -1], None, r"targets .*-1"),
        (IMAGES, [0, 2], ["a", "b"], r"labels .*\b3 classes.*\b2 labels.*'a', 'b'"),
        (IMAGES, [0, 1], ["a", "a"], r"labels .*\b2 classes.*\b2 labels.*'a', 'a'"),
        (IMAGES, [[0, 1], [2, 0]], None, r"targets .*\b0 and 1\b"),
        (IMAGES, [[0, 1], [1, 0]], ["a", "b", "c"], r"labels .*\b2 classes.*\b3 labels.*'c'"),
    ],
)
def test_invalid_arrays(images: np.ndarray, targets: list[int], labels: list[str] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(images, np.array(targets), labels)


def test_relabel_matches_by_name() -> None:
    source = from_arrays(np.zeros((3, 2, 2), np.uint8), np.array([0, 1, 0]), ["b", "c", "never used"])
    assert source.relabel(["a", "b", "c"]).targets.tolist() == [1, 2, 1]
    assert source.as_multi_label().relabel(["c", "b"]).targets.tolist() == [[0, 1], [1, 0], [0, 1]]
    assert source.targets.tolist() == [0, 1, 0]
    assert source.labels[0] == "b"
    with pytest.raises(DataError, match=r"'c'\..*'a', 'b'"):
        source.relabel(["a", "b"])


def test_channel_stats_of_known_images(tmp_path: Path) -> None:
    paint(tmp_path / "1.png", (0, 51, 255))
    paint(tmp_path / "2.png", (255, 51, 255), size=(30, 5))
    (tmp_path / "3.png").write_bytes(b"junk")
    source = FileSource(["1.png", "2.png", "3.png"], ("x",), np.zeros(3, dtype=np.int64), tmp_path)
    mean, std = compute_channel_stats(source, "RGB", (4, 6))
    assert mean == pytest.approx((0.5, 0.2, 1.0))
    assert std == pytest.approx((0.5, 1 / 255, 1 / 255))
    assert len(compute_channel_stats(source, "L", (4, 4))[0]) == 1


def test_channel_stats_match_numpy_and_are_reproducible() -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 5, 4, 3), dtype=np.uint8)
    images[..., 1] //= 2
    source = from_arrays(images, np.arange(300) % 2)
    mean, std = compute_channel_stats(source, "RGB", (5, 4))
    np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)) / 255, rtol=1e-12)
    np.testing.assert_allclose(std, images.std(axis=(0, 1, 2)) / 255, rtol=1e-12)
    few = compute_channel_stats(source, "RGB", (5, 4), max_images=50)
    assert few == compute_channel_stats(source, "RGB", (5, 4), max_images=50)
    assert few != (mean, std)
    np.testing.assert_allclose(few[0], mean, atol=0.05)


def test_real_images_on_many_threads() -> None:
    """Oxford Pets: the official splits, and the same pixels with any number of threads."""
    splits = open_data(DataConfig(source=str(shared_path("data/pets"))), 0)
    assert len(splits.train.labels) == 37
    assert splits.val is not None
    assert splits.test is not None
    assert (len(splits.train) + len(splits.val), len(splits.test)) == (3680, 3669)
    assert len(splits.val) == 368
    assert np.bincount(splits.val.targets, minlength=37).min() >= 9
    source = splits.test.subset(np.arange(0, 3669, 60))
    alone = [np.asarray(source.read(i, mode="RGB", min_size=(32, 32))).sum() for i in range(len(source))]
    with ThreadPoolExecutor(8) as pool:
        threaded = list(
            pool.map(lambda i: np.asarray(source.read(i, mode="RGB", min_size=(32, 32))).sum(), range(len(source)))
        )
    assert alone == threaded
    mean, std = compute_channel_stats(splits.train, "RGB", (32, 32), max_images=100)
    assert all(0.3 < m < 0.6 for m in mean)
    assert all(0.15 < s < 0.35 for s in std)
