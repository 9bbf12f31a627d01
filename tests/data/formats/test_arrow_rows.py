"""Parquet files and Hugging Face data sets: which columns count, what a cell may hold, what is left out."""

import io
import json
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


def png(grey: int, size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (grey, grey, grey)).save(file, "PNG")
    return file.getvalue()


def grey(source: Source, index: int) -> int:
    return int(np.asarray(source.read(index, mode="L"))[0, 0])


def write(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, rows: int = 3) -> Path:
    table = pa.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_a_file_of_bytes_and_words(tmp_path: Path) -> None:
    pictures = [png(i * 10) for i in range(8)]
    path = write(tmp_path / "x.parquet", {"id": range(8), "image": pictures, "label": ["b", "a"] * 4})
    source = resolve_dataset(str(path)).splits["train"]
    assert source.labels == ("a", "b")
    assert source.targets.tolist() == [1, 0] * 4
    assert [grey(source, i) for i in range(8)] == [i * 10 for i in range(8)]
    assert [grey(source.subset(np.array([7, 2])), i) for i in (0, 1)] == [70, 20]
    assert source.key(7) == "x.parquet row 7"
    assert source.name(7) == str(tmp_path / "x.parquet row 7")


def test_parts_by_file_name_and_names_from_hugging_face(tmp_path: Path) -> None:
    """Class names hold for all parts, in their own order, also those that no row has."""
    features = {"img": {"_type": "Image"}, "kind": {"names": ["zebra", "ant", "cow"], "_type": "ClassLabel"}}
    cells = [{"bytes": png(i), "path": None} for i in range(12)]
    for name, rows in (("train-00000-of-00002", range(6)), ("train-00001-of-00002", range(6, 12))):
        columns = {"kind": [i % 2 for i in rows], "img": [cells[i] for i in rows]}
        write(tmp_path / "data" / f"{name}.parquet", columns, features, rows=4)
    write(tmp_path / "data/validation-00000-of-00001.parquet", {"kind": [2], "img": [cells[5]]}, features)
    write(tmp_path / "data/test-00000-of-00001.parquet", {"kind": [-1, -1], "img": cells[:2]}, features)
    write(tmp_path / "data/extra.parquet", {"kind": [0], "img": cells[:1]}, features)
    parts = open_data(DataConfig(source=str(tmp_path)), 0)
    assert parts.train.labels == ("zebra", "ant", "cow")
    assert parts.train.targets.tolist() == [0, 1] * 6
    assert [grey(parts.train, i) for i in range(12)] == list(range(12))
    assert parts.val is not None
    assert parts.val.targets.tolist() == [2]
    assert grey(parts.val, 0) == 5
    assert parts.test is None
    assert parts.notes[0].code == "split_left_out"
    assert "'test'" in parts.notes[0]
    assert "extra.parquet" in parts.notes[1]
    assert len(parts.notes) == 2


def test_numbers_are_ordered_by_value(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(0)] * 4, "label": [10, 9, 2, 10]})
    source = resolve_dataset(str(path)).splits["train"]
    assert source.labels == ("2", "9", "10")
    assert source.targets.tolist() == [2, 1, 0, 2]


def test_unreadable_cells_are_single_failures(tmp_path: Path) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.full((4, 4), 65535 // 2, dtype=np.uint16)).save(deep, "PNG")
    (tmp_path / "beside.png").write_bytes(png(77))
    cells = [None, {"bytes": None, "path": None}, {"bytes": b"", "path": "x"}, {"bytes": b"junk", "path": None}]
    cells += [{"bytes": deep.getvalue(), "path": None}, {"bytes": None, "path": "beside.png"}]
    cells += [{"bytes": None, "path": "gone.png"}]
    source = resolve_dataset(str(write(tmp_path / "x.parquet", {"image": cells, "label": [0, 1] * 3 + [0]}))).splits[
        "train"
    ]
    codes = dict(enumerate(("image_empty", "image_empty", "image_empty", "image_unsupported"))) | {6: "image_not_found"}
    for index, code in codes.items():
        with pytest.raises(ImageError, match=f"^Cannot read .*{'gone' if index == 6 else f'row {index}'}") as error:
            source.read(index, mode="RGB")
        assert error.value.code == code
    assert grey(source, 4) == 127
    assert grey(source, 5) == 77


def test_several_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(0)] * 4, "label": [["a", "b"], ["b"], [], ["c", "b"]]})
    with pytest.raises(DataError, match="row 0 has several labels, 'a', 'b'.*data.multi_label"):
        resolve_dataset(str(path))
    source = resolve_dataset(str(path), multi_label=True).splits["train"]
    assert source.labels == ("a", "b", "c")
    assert source.targets.dtype == np.float32
    assert source.targets.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"x"], "x": [1]}, "no column contains the label; the columns are 'image', 'x'"),
        ({"label": [1], "x": [1]}, "no column contains the image; the columns are"),
        ({"a": [b"x"], "b": [b"y"], "label": [1]}, "several columns may contain the image: 'a', 'b'"),
        ({"image": [b"x", b"y"], "label": ["a", None]}, "row 1 has no label"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, "no rows"),
    ],
)
def test_wrong_tables(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_dataset(str(write(tmp_path / "x.parquet", columns)))


def test_wrong_files(tmp_path: Path) -> None:
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    path = write(tmp_path / "high/x.parquet", {"image": [b"x"], "label": [2]}, features)
    with pytest.raises(DataError, match="row 0 has the label 2, but there are only 2 classes"):
        resolve_dataset(str(path))
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="junk.parquet: it is damaged or not a Parquet file"):
        resolve_dataset(str(tmp_path / "junk.parquet"))
    write(tmp_path / "two/a.parquet", {"image": [b"x"], "label": [2]})
    write(tmp_path / "two/b.parquet", {"image": [b"x"], "other": [2]})
    with pytest.raises(DataError, match=r"b\.parquet lacks the column label"):
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


def test_memory_for_row_groups_is_bounded(tmp_path: Path) -> None:
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
    """A data set with two usable splits and one that is not, as Hugging Face's library saves it."""
    datasets = pytest.importorskip("datasets", reason="needs the extra [data]")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zoo", "arc"])})

    def part(greys: list[int], labels: list[int]) -> Any:
        cells = [{"bytes": png(g), "path": None} for g in greys]
        return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)

    both = {"train": part(list(range(10)), [0, 1] * 5).select([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])}
    both |= {"test": part([50], [0]), "unsupervised": part([60], [-1])}
    folder = tmp_path_factory.mktemp("saved")
    datasets.DatasetDict(both).save_to_disk(str(folder / "all"))
    both["train"].save_to_disk(str(folder / "train"))
    for name in ("train", "test"):
        both[name].to_parquet(str(folder / f"files/data/{name}-00000-of-00001.parquet"))
    return folder


def test_a_saved_dataset(saved: Path) -> None:
    parts = open_data(DataConfig(source=str(saved / "all"), val_fraction=0.2), 0)
    assert parts.train.labels == ("zoo", "arc")
    assert parts.val is not None
    assert len(parts.val) == 2
    assert parts.test is not None
    assert grey(parts.test, 0) == 50
    assert "'unsupervised'" in parts.notes[0]
    whole = resolve_dataset(str(saved / "all")).splits["train"]
    assert [grey(whole, i) for i in range(10)] == list(range(10))[::-1]
    assert whole.targets.tolist() == [1, 0] * 5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: grey(whole, i % 10), range(200))) == list(range(10))[::-1] * 20
    assert whole.key(3) == "train row 3"
    assert whole.name(3) == str(saved / "all/train row 3")
    alone = resolve_dataset(str(saved / "train")).splits["train"]
    assert len(alone) == 10
    assert grey(alone, 0) == 9


def test_hugging_face_writes_parquet_that_we_read(saved: Path) -> None:
    found = resolve_dataset(str(saved / "files")).splits
    assert found["train"].labels == ("zoo", "arc")
    assert grey(found["train"], 0) == 9
    assert grey(found["test"], 0) == 50


def test_the_hub_loader(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a local folder for a name, which goes the same way as one of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    found = resolve_dataset(f"hf-datasets:{saved / 'files'}").splits
    assert set(found) == {"train", "test"}
    assert grey(found["train"], 3) == 6
    with pytest.raises(HubError, match="Cannot load the dataset"):
        resolve_dataset(f"hf-datasets:{tmp_path / 'nowhere'}")


def test_a_broken_saved_dataset(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra [data]")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match="Cannot read the dataset saved in"):
        resolve_dataset(str(tmp_path))
