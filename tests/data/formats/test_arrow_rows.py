"""Parquet files and saved Hugging Face datasets: columns, cells, and what is left out."""

import io
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchword.config import DataConfig
from patchword.data.formats.parquet import RowGroups
from patchword.data.resolve import open_data, resolve_dataset
from patchword.data.sources import Source
from patchword.errors import DataError, HubError, ImageError

pa = pytest.importorskip("pyarrow", reason="needs the extra [data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra [data]")


def png(gray: int, size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (gray, gray, gray)).save(file, "PNG")
    return file.getvalue()


def gray(source: Source, index: int) -> int:
    return int(np.asarray(source.read(index, mode="L"))[0, 0])


def write(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, rows: int = 3) -> Path:
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_bytes_and_string_labels(tmp_path: Path) -> None:
    images = [png(i * 10) for i in range(8)]
    path = write(tmp_path / "x.parquet", {"id": range(8), "image": images, "label": ["b", "a"] * 4})
    source = resolve_dataset(str(path)).splits["train"]
    assert source.labels == ("a", "b")
    assert source.targets.tolist() == [1, 0] * 4
    assert [gray(source, i) for i in range(8)] == [i * 10 for i in range(8)]
    assert [gray(source.subset(np.array([7, 2])), i) for i in (0, 1)] == [70, 20]
    assert source.key(7) == "x.parquet row 7"
    assert source.name(7) == str(tmp_path / "x.parquet row 7")


def test_splits_by_file_name_and_class_names_from_metadata(tmp_path: Path) -> None:
    """Class names apply to all splits, in their own order, including classes without rows."""
    features = {"img": {"_type": "Image"}, "kind": {"names": ["zebra", "ant", "cow"], "_type": "ClassLabel"}}
    cells = [{"bytes": png(i), "path": None} for i in range(12)]
    for name, rows in (("train-00000-of-00002", range(6)), ("train-00001-of-00002", range(6, 12))):
        columns = {"kind": [i % 2 for i in rows], "img": [cells[i] for i in rows]}
        write(tmp_path / "data" / f"{name}.parquet", columns, features, rows=4)
    write(tmp_path / "data/validation-00000-of-00001.parquet", {"kind": [2], "img": [cells[5]]}, features)
    write(tmp_path / "data/test-00000-of-00001.parquet", {"kind": [-1, -1], "img": cells[:2]}, features)
    write(tmp_path / "data/extra.parquet", {"kind": [0], "img": cells[:1]}, features)
    splits = open_data(DataConfig(source=str(tmp_path)), 0)
    assert splits.train.labels == ("zebra", "ant", "cow")
    assert splits.train.targets.tolist() == [0, 1] * 6
    assert [gray(splits.train, i) for i in range(12)] == list(range(12))
    assert splits.val is not None
    assert splits.val.targets.tolist() == [2]
    assert gray(splits.val, 0) == 5
    assert splits.test is None
    assert splits.notes[0].code == "split_left_out"
    assert "'test'" in splits.notes[0]
    assert splits.notes[1].code == "files_left_out"
    assert "extra.parquet" in splits.notes[1]
    assert len(splits.notes) == 2


def test_integer_labels_are_sorted_by_value(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(0)] * 4, "label": [10, 9, 2, 10]})
    source = resolve_dataset(str(path)).splits["train"]
    assert source.labels == ("2", "9", "10")
    assert source.targets.tolist() == [2, 1, 0, 2]


def test_unreadable_cells_raise_image_error(tmp_path: Path) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 4), 65535 // 2, dtype=np.uint16)).save(deep, "PNG")
    (tmp_path / "beside.png").write_bytes(png(77))
    cells = [None, {"bytes": None, "path": None}, {"bytes": b"", "path": "x"}, {"bytes": b"junk", "path": None}]
    cells += [{"bytes": deep.getvalue(), "path": None}, {"bytes": None, "path": "beside.png"}]
    cells += [{"bytes": None, "path": "gone.png"}]
    cells += [{"bytes": None, "path": path} for path in (str(tmp_path / "beside.png"), "a/../../x/beside.png")]
    table = write(tmp_path / "x.parquet", {"image": cells, "label": [0, 1, 0] * 3})
    source = resolve_dataset(str(table)).splits["train"]
    codes = dict(enumerate(("image_empty", "image_empty", "image_empty", "image_unsupported"))) | {6: "image_not_found"}
    codes |= {7: "image_outside_folder", 8: "image_outside_folder"}
    for index, code in codes.items():
        with pytest.raises(ImageError, match=f"^Cannot read .*{'gone' if index == 6 else f'row {index}'}") as error:
            source.read(index, mode="RGB")
        assert error.value.code == code
    assert gray(source, 4) == 127
    assert gray(source, 5) == 77


def test_multi_label(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(0)] * 4, "label": [["a", "b"], ["b"], [], ["c", "b"]]})
    with pytest.raises(DataError, match=r"row 0 .*'a', 'b'.*data\.multi_label"):
        resolve_dataset(str(path))
    source = resolve_dataset(str(path), multi_label=True).splits["train"]
    assert source.labels == ("a", "b", "c")
    assert source.targets.dtype == np.float32
    assert source.targets.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"x"], "x": [1]}, r"label; .*'image', 'x'"),
        ({"label": [1], "x": [1]}, r"image; .*'label', 'x'"),
        ({"a": [b"x"], "b": [b"y"], "label": [1]}, r"image: 'a', 'b'"),
        ({"image": [b"x", b"y"], "label": ["a", None]}, "row 1 .*label"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, r"x\.parquet .*rows"),
    ],
)
def test_wrong_tables(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_dataset(str(write(tmp_path / "x.parquet", columns)))


def test_wrong_files(tmp_path: Path) -> None:
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    path = write(tmp_path / "high/x.parquet", {"image": [b"x"], "label": [2]}, features)
    with pytest.raises(DataError, match=r"row 0 .*label 2\b.*\b2 classes"):
        resolve_dataset(str(path))
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"junk\.parquet.*damaged"):
        resolve_dataset(str(tmp_path / "junk.parquet"))
    write(tmp_path / "two/a.parquet", {"image": [b"x"], "label": [2]})
    write(tmp_path / "two/b.parquet", {"image": [b"x"], "other": [2]})
    with pytest.raises(DataError, match=r"b\.parquet .*\blabel\b.*a\.parquet"):
        resolve_dataset(str(tmp_path / "two"))


def test_damaged_pages_are_image_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"label": ["a", "b"] * 4, "image": [bytes([65 + i]) * 9999 for i in range(8)]})
    source = resolve_dataset(str(path)).splits["train"]
    data = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(1).column(1)
    start = group.dictionary_page_offset or group.data_page_offset
    data[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(data)
    for row, code in ((4, "image_damaged"), (0, "image_unsupported")):
        with pytest.raises(ImageError, match=f"row {row}: ") as error:
            source.read(row, mode="RGB")
        assert error.value.code == code


def test_row_group_cache_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [bytes([i]) * 1000 for i in range(30)], "label": [0] * 30})
    cells = RowGroups([path], "image", max_bytes=10_000)  # three groups of three rows
    wrong = []

    def read(offset: int) -> None:
        for i in range(60):
            row = (i * 7 + offset) % 30
            if cells(row) != bytes([row]) * 1000:
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 < len(cells._cache) <= 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with two usable splits and an unusable one, saved by `datasets`."""
    datasets = pytest.importorskip("datasets", reason="needs the extra [data]")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zoo", "arc"])})

    def make_split(grays: list[int], labels: list[int]) -> Any:
        cells = [{"bytes": png(g), "path": None} for g in grays]
        return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)

    both = {"train": make_split(list(range(10)), [0, 1] * 5).select([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])}
    both |= {"test": make_split([50], [0]), "unsupervised": make_split([60], [-1])}
    folder = tmp_path_factory.mktemp("saved")
    datasets.DatasetDict(both).save_to_disk(str(folder / "all"))
    both["train"].save_to_disk(str(folder / "train"))
    for name in ("train", "test"):
        both[name].to_parquet(str(folder / f"files/data/{name}-00000-of-00001.parquet"))
    return folder


def test_saved_dataset(saved: Path) -> None:
    splits = open_data(DataConfig(source=str(saved / "all"), val_fraction=0.2), 0)
    assert splits.train.labels == ("zoo", "arc")
    assert splits.val is not None
    assert len(splits.val) == 2
    assert splits.test is not None
    assert gray(splits.test, 0) == 50
    assert splits.notes[0].code == "split_left_out"
    assert "'unsupervised'" in splits.notes[0]
    train = resolve_dataset(str(saved / "all")).splits["train"]
    assert [gray(train, i) for i in range(10)] == list(range(10))[::-1]
    assert train.targets.tolist() == [1, 0] * 5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: gray(train, i % 10), range(200))) == list(range(10))[::-1] * 20
    assert train.key(3) == "train row 3"
    assert train.name(3) == str(saved / "all/train row 3")
    alone = resolve_dataset(str(saved / "train")).splits["train"]
    assert len(alone) == 10
    assert gray(alone, 0) == 9


def test_parquet_written_by_datasets(saved: Path) -> None:
    found = resolve_dataset(str(saved / "files")).splits
    assert found["train"].labels == ("zoo", "arc")
    assert gray(found["train"], 0) == 9
    assert gray(found["test"], 0) == 50


def test_load_dataset_from_a_local_folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` accepts a local folder instead of a name."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    found = resolve_dataset(f"hf-datasets:{saved / 'files'}").splits
    assert set(found) == {"train", "test"}
    assert gray(found["train"], 3) == 6
    with pytest.raises(HubError, match="'.*missing'"):
        resolve_dataset(f"hf-datasets:{tmp_path / 'missing'}")


def test_broken_saved_dataset(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra [data]")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=rf"saved .*{re.escape(str(tmp_path))}"):
        resolve_dataset(str(tmp_path))
