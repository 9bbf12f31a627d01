"""Class folders, and the matching of their names to the classes of a model."""

import re
from pathlib import Path

import pytest

from patchword.data.datasets.imagenet import imagenet_classes
from patchword.data.formats.image_folder import list_labeled_images, match_classes, open_folder
from patchword.errors import DataError


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_list_labeled_images(tmp_path: Path) -> None:
    make(tmp_path, "dog/2.jpg", "dog/1.jpg", "cat/deep/er/3.png", "cat/notes.txt", "stray.jpg", ".git/x.jpg")
    (tmp_path / "empty").mkdir()
    assert list_labeled_images(tmp_path) == [
        (tmp_path / "cat/deep/er/3.png", "cat"),
        (tmp_path / "dog/1.jpg", "dog"),
        (tmp_path / "dog/2.jpg", "dog"),
    ]


def test_folders_without_class_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing .*not exist"):
        list_labeled_images(tmp_path / "missing")
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}\..*\.jpeg, \.jpg"):  # the supported suffixes
        list_labeled_images(tmp_path)
    make(tmp_path, "1.jpg", "2.jpg")
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/cat/1\.jpg"):
        list_labeled_images(tmp_path)
    with pytest.raises(DataError, match=r"1\.jpg .*folder"):
        list_labeled_images(tmp_path / "1.jpg")


def test_split_folders_are_refused_as_classes(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.jpg", "Val/cat/2.jpg")
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/Val .*{re.escape(str(tmp_path))}/train"):
        list_labeled_images(tmp_path)
    assert [name for _, name in list_labeled_images(tmp_path / "train")] == ["cat"]


def test_class_named_train(tmp_path: Path) -> None:
    make(tmp_path, "train/1.jpg", "bus/2.jpg")
    assert [name for _, name in list_labeled_images(tmp_path)] == ["bus", "train"]


def test_imagenet_table() -> None:
    classes = imagenet_classes()
    wnids = [wnid for wnid, _ in classes]
    assert len(classes) == 1000
    assert wnids == sorted(set(wnids))
    assert all(re.fullmatch(r"n\d{8}", wnid) and names.strip() == names != "" for wnid, names in classes)
    expected = {0: "tench, Tinca tinca", 281: "tabby, tabby cat", 999: "toilet tissue, toilet paper, bathroom tissue"}
    assert {index: classes[index][1] for index in expected} == expected
    assert classes[207] == ("n02099601", "golden retriever")
    assert classes[0][0] == "n01440764"


LABELS = ["tench, Tinca tinca", "Great White-Shark", "projectile, missile", "missile", "crane", "crane, derrick", "7"]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("tench", 0),
        ("tinca_tinca", 0),
        ("TENCH, Tinca tinca", 0),
        ("great_white_shark", 1),
        ("greatwhiteshark", 1),
        ("projectile", 2),
        ("missile", 3),
        ("crane", 4),
        ("derrick", 5),
        ("7", 6),
    ],
)
def test_match_by_label(name: str, index: int) -> None:
    assert match_classes([name], LABELS, 7) == {name: index}


def test_ambiguous_name_matches_no_class() -> None:
    with pytest.raises(DataError, match=r"'crane'.*ambiguous"):
        match_classes(["crane"], ["CRANE", "Crane"], 2)
    assert match_classes(["Crane", "crane"], ["crane", "Crane"], 2) == {"Crane": 1, "crane": 0}  # exact match
    with pytest.raises(DataError, match="'suit'"):
        match_classes(["suit"], ["maillot, suit", "tie, suit"], 2)


def test_match_by_index() -> None:
    assert match_classes(["0", "0007", "12"], None, 13) == {"0": 0, "0007": 7, "12": 12}
    assert match_classes(["0", "1"], ["cat", "dog"], 2) == {"0": 0, "1": 1}
    for bad in ("13", "-1", "1.0", "²", "٣", "9" * 5000, ""):
        with pytest.raises(DataError, match=rf"'{re.escape(bad[:20])}.*\b0 to 12\b"):
            match_classes(["0", bad], None, 13)


def test_label_takes_precedence_over_index() -> None:
    assert match_classes(["0", "1"], ["1", "0"], 2) == {"0": 1, "1": 0}


def test_match_by_wordnet_id_only_with_1000_classes() -> None:
    names = ["n01440764", "n15075141"]
    labels = [f"class {index}" for index in range(1000)]
    assert (
        match_classes(names, None, 1000)
        == match_classes(names, labels, 1000)
        == dict(zip(names, (0, 999), strict=True))
    )
    with pytest.raises(DataError, match="n01440764") as error:
        match_classes(names, None, 999)
    assert "WordNet" not in str(error.value)


def test_all_of_imagenet_by_id_and_by_unambiguous_name() -> None:
    classes = imagenet_classes()
    assert list(match_classes([wnid for wnid, _ in classes], None, 1000).values()) == list(range(1000))
    labels = [names for _, names in classes]
    # "crane" is a bird and a machine, and neither has another name.
    unique = [label for label in labels if labels.count(label) == 1]
    assert 990 < len(unique) < 1000
    matched = match_classes(unique, labels, 1000)
    assert all(labels[index] == name for name, index in matched.items())


def test_all_names_must_match_by_the_same_scheme() -> None:
    with pytest.raises(DataError, match=r" '1'\."):
        match_classes(["cat", "dog", "1"], ["cat", "dog"], 2)


def test_error_names_at_most_five_folders() -> None:
    with pytest.raises(DataError, match="'w0', 'w1', 'w2', 'w3', 'w4' and 3 more") as error:
        match_classes([f"w{index}" for index in range(8)], ["cat", "dog"], 2)
    assert "w5" not in str(error.value)
    assert "labels" in str(error.value)


def test_folder_order_is_never_used_as_class_order() -> None:
    with pytest.raises(DataError, match=r"'cat', 'dog'.*order.*labels"):
        match_classes(["cat", "dog"], None, 2)
    with pytest.raises(DataError) as error:
        match_classes(["cat", "dog"], None, 3)
    assert "order" not in str(error.value)


def test_number_of_labels_must_match() -> None:
    with pytest.raises(DataError, match=r"\b2 labels .*\b3 classes"):
        match_classes(["cat"], ["cat", "dog"], 3)


def test_open_class_folders(tmp_path: Path) -> None:
    make(tmp_path, "dog/2.jpg", "cat/deep/3.png", "dog/1.jpg", "10/4.png")
    found = open_folder(tmp_path)
    source = found.splits["train"]
    assert list(found.splits) == ["train"]
    assert not found.notes
    assert source.labels == ("10", "cat", "dog")
    assert source.targets.tolist() == [0, 1, 2, 2]
    assert [source.key(i) for i in range(4)] == ["10/4.png", "cat/deep/3.png", "dog/1.jpg", "dog/2.jpg"]
    assert source.name(2) == str(tmp_path / "dog/1.jpg")


def test_open_splits(tmp_path: Path) -> None:
    make(tmp_path, "Training/cat/1.jpg", "Training/dog/2.jpg", "VALID/dog/3.jpg", "test/cat/4.jpg", "notes/x.txt")
    found = open_folder(tmp_path)
    assert {name: source.labels for name, source in found.splits.items()} == {
        "train": ("cat", "dog"),
        "val": ("dog",),
        "test": ("cat",),
    }
    assert not found.notes
    assert found.splits["train"].key(1) == "Training/dog/2.jpg"


def test_unlabeled_splits_and_other_folders_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.jpg", "val/cat/1.jpg", "test/1.jpg", "copy/train/cat/1.jpg", ".cache/2.jpg")
    found = open_folder(tmp_path)
    assert set(found.splits) == {"train", "val"}
    assert [note.code for note in found.notes] == ["split_left_out", "folders_left_out"]
    assert str(tmp_path / "test") in found.notes[0]
    assert "'copy'" in found.notes[1]


def test_two_folders_for_one_split(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.jpg", "val/cat/1.jpg", "validation/cat/1.jpg")
    with pytest.raises(DataError, match=r"validation set; .*\bvalidation\."):
        open_folder(tmp_path)


def test_class_named_train_next_to_another(tmp_path: Path) -> None:
    make(tmp_path, "train/steam/1.jpg", "train/2.jpg", "bus/2.jpg")
    found = open_folder(tmp_path)
    assert found.splits["train"].labels == ("bus", "train")
    assert len(found.splits["train"]) == 3


def test_symbolic_links_and_cycles(tmp_path: Path) -> None:
    make(tmp_path, "real/1.jpg", "data/dog/2.jpg")
    (tmp_path / "data/cat").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "data/dog/again").symlink_to(tmp_path / "data/dog", target_is_directory=True)
    (tmp_path / "data/dog/broken.jpg").symlink_to(tmp_path / "missing.jpg")
    source = open_folder(tmp_path / "data").splits["train"]
    assert [source.key(i) for i in range(len(source))] == ["cat/1.jpg", "dog/2.jpg", "dog/broken.jpg"]
