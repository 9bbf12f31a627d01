"""CSV files: accepted columns, and errors with line numbers."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchword.config import DataConfig
from patchword.data.formats.csv_list import open_table
from patchword.data.resolve import open_data
from patchword.errors import DataError, ImageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(6):
        (tmp_path / "p").mkdir(exist_ok=True)
        Image.new("L", (4, 4), i * 40).save(tmp_path / f"p/{i}.png")
    return tmp_path


def table(folder: Path, text: str | bytes, name: str = "data.csv") -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder / name


def test_paths_and_labels(folder: Path) -> None:
    """With a byte-order mark, Windows line ends, quotes, blank lines, capitals and spaces."""
    text = '\ufeffPath, Label \r\np/0.png,cat\r\n\r\n"p/1.png","dog, big"\r\np/2.png, cat \r\n'
    source = open_table(table(folder, text), multi_label=False).splits["train"]
    assert source.labels == ("cat", "dog, big")
    assert source.targets.tolist() == [0, 1, 0]
    assert source.name(1) == str(folder / "p/1.png")
    assert source.key(1) == "p/1.png"
    assert np.asarray(source.read(2, mode="L"))[0, 0] == 80


@pytest.mark.parametrize(("name", "mark"), [("x.tsv", "\t"), ("x.csv", ";"), ("x.CSV", ",")])
def test_delimiters(folder: Path, name: str, mark: str) -> None:
    text = f"id{mark}label{mark}path\n1{mark}a{mark}p/1.png\n2{mark}b{mark}p/2.png\n"
    source = open_table(table(folder, text, name), multi_label=False).splits["train"]
    assert source.labels == ("a", "b")
    assert source.key(1) == "p/2.png"


def test_integer_labels_are_sorted_by_value(folder: Path) -> None:
    source = open_table(table(folder, "path,label\np/0.png,10\np/1.png,9\np/2.png,0\n"), multi_label=False).splits[
        "train"
    ]
    assert source.labels == ("0", "9", "10")
    assert source.targets.tolist() == [2, 1, 0]


def test_split_column(folder: Path) -> None:
    text = "path,label,split\np/0.png,b,Train\np/1.png,a,train\np/2.png,b,validation\np/3.png,a,TEST\n"
    splits = open_data(DataConfig(source=str(table(folder, text))), 0)
    assert splits.train.labels == ("a", "b")
    assert splits.train.targets.tolist() == [1, 0]
    assert splits.val is not None
    assert splits.val.targets.tolist() == [1]
    assert splits.test is not None
    assert splits.test.name(0).endswith("3.png")
    assert splits.split_info["kind"] == "given"
    with_new_class = table(folder, text + "p/4.png,eel,test\n")
    with pytest.raises(DataError, match=r"test set .*'eel'\..*'a', 'b'"):
        open_data(DataConfig(source=str(with_new_class)), 0)


LABELS = "path,labels\np/0.png,cat; dog\np/1.png,\np/2.png,dog|eel\n"
COLUMNS = "path,cat,dog,eel,split\np/0.png,1,1,0,train\np/1.png,0,0,0,train\np/2.png,0.0,1.0, 1,train\n"
ROWS = "path,label\np/0.png,cat\np/1.png,\np/0.png,dog\np/2.png,dog\np/2.png,eel\np/2.png,eel\n"


@pytest.mark.parametrize("text", [LABELS, COLUMNS, ROWS])
def test_multi_label(folder: Path, text: str) -> None:
    found = open_table(table(folder, text), multi_label=True)
    source = found.splits["train"]
    assert source.labels == ("cat", "dog", "eel")
    assert source.targets.dtype == np.float32
    assert source.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert not found.notes


def test_duplicate_lines_count_once(folder: Path) -> None:
    found = open_table(table(folder, "path,label\np/0.png,a\np/1.png,b\np/0.png,a\n"), multi_label=False)
    assert len(found.splits["train"]) == 2
    assert [note.code for note in found.notes] == ["duplicate_rows_left_out"]
    assert "data.csv has 1 " in found.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data\.csv .*rows"),
        ("path,label\n", r"data\.csv .*rows"),
        ("file,name\np/0.png,a\n", r"'label'; .*'file', 'name'.*data\.multi_label"),
        ("p/0.png,a\np/1.png,b\n", r"'path'.*'p/0\.png', 'a'"),
        ("path,label\np/0.png,a\np/1.png\n", r"line 3: 1 cells.*\b2 columns"),
        ("path,label\np/0.png,a\np/1.png,b,c\n", r"line 3: 3 cells.*\b2 columns"),
        ('path,label\n"p/0.png,a\np/1.png,b\n', r"line 3: .*quotes"),
        ("path,label\np/0.png,a\n,b\n", r"line 3: .*'path' .*empty"),
        ('path,label,note\np/0.png,a,"two\nlines"\np/1.png,,x\n', "line 4 .*label"),
        ("path,label,path\np/0.png,a,b\n", "'path', 'label', 'path'"),
        ("path,labels\np/0.png,a\np/1.png,b;c\n", r"line 3 .*'b', 'c'.*data\.multi_label"),
        ("path,label\np/0.png,a\np/0.png,b\n", r"line 3: p/0\.png .*'b'.*line 2 .*'a'"),
        ("path,label,split\np/0.png,a,train\np/0.png,a,test\n", r"line 3: p/0\.png .*test set.*line 2 .*training set"),
        ("path,label,split\np/0.png,a,train\np/1.png,a,dev\n", r"line 3: .*split 'dev' .*train, "),
        ("path,label\nno/0.png,a\nno/1.png,b\n", r"\b2 images .*no/0\.png"),
        (b"path,label\np/0.png,a\np/1.png,caf\xe9\n", "line 3 .*UTF-8"),
        ("path,label\np/0.png,a\n".encode("utf-16"), "line 1 .*UTF-8"),
        ("path,label\np/0.png," + "a" * 200_000 + "\n", "line 2: field .*131072"),
    ],
)
def test_errors_name_the_line(folder: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_table(table(folder, text), multi_label=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,cat,width\np/0.png,1,640\n", r"line 2: .*'width' .*'640'.*\b0 nor 1\b"),
        ("path,split\np/0.png,train\n", r"'labels' .*'path', 'split'"),
    ],
)
def test_errors_of_multi_label_tables(folder: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_table(table(folder, text), multi_label=True)


def test_missing_image_raises_image_error(folder: Path) -> None:
    source = open_table(table(folder, "path,label\ngone.png,a\np/1.png,b\n"), multi_label=False).splits["train"]
    assert len(source) == 2
    source.read(1, mode="RGB")
    with pytest.raises(ImageError, match=r"gone\.png") as error:
        source.read(0, mode="RGB")
    assert error.value.code == "image_not_found"


def test_unicode_paths_and_labels(folder: Path) -> None:
    Image.new("L", (4, 4), 9).save(folder / "p/猫 é.png")
    source = open_table(table(folder, "path,label\np/猫 é.png,кошка\np/0.png,犬\n"), multi_label=False).splits["train"]
    assert source.labels == ("кошка", "犬")
    assert np.asarray(source.read(0, mode="L"))[0, 0] == 9


@pytest.mark.slow
def test_a_million_lines(folder: Path) -> None:
    lines = "".join(f"p/{i}.png,class {i % 100}\n" for i in range(1_000_000))
    path = table(folder, "path,label\n" + lines)
    source = open_table(path, multi_label=False).splits["train"]
    assert len(source) == 1_000_000
    assert len(source.labels) == 100
