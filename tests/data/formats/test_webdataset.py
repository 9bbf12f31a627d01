"""Tar shards: samples by key, random access without unpacking, damage reported."""

import errno
import io
import os
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchword.config import DataConfig
from patchword.data.resolve import open_data, resolve_dataset
from patchword.data.sources import Source
from patchword.errors import DataError, ImageError


def encode_image(gray: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (gray, gray, gray)).save(file, kind)
    return file.getvalue()


def write(path: Path, members: dict[str, bytes | str], **more: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **more) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(first: int, last: int) -> dict[str, bytes | str]:
    members: dict[str, bytes | str] = {}
    for i in range(first, last):
        members |= {f"{i:04d}.png": encode_image(i), f"{i:04d}.cls": str(i % 3)}
    return members


def gray(source: Source, index: int) -> int:
    return int(np.asarray(source.read(index, mode="L"))[0, 0])


def test_numbered_pattern_glob_and_folder_are_equivalent(tmp_path: Path) -> None:
    for shard in range(3):
        write(tmp_path / f"train-{shard:06d}.tar", samples(shard * 10, shard * 10 + 10))
    write(tmp_path / "val-000000.tar", samples(100, 105))
    references = ("train-{000000..000002}.tar", "train-*.tar", "")
    for source in [resolve_dataset(str(tmp_path / each)).splits["train"] for each in references]:
        assert source.labels == ("0", "1", "2")
        assert source.targets.tolist() == [i % 3 for i in range(30)]
        assert [gray(source, i) for i in range(30)] == list(range(30))
        assert source.key(12) == "train-000001.tar:0012.png"
        assert source.name(12) == str(tmp_path / source.key(12))
    splits = open_data(DataConfig(source=str(tmp_path)), 0)
    assert splits.val is not None
    assert gray(splits.val, 4) == 104
    assert not splits.notes
    explicit = open_data(DataConfig(source=str(tmp_path / "train-*.tar"), val=str(tmp_path / "val-*.tar")), 0)
    assert explicit.val is not None
    assert len(explicit.val) == 5
    with pytest.raises(DataError, match=r"train-000003\.tar .*not exist"):
        resolve_dataset(str(tmp_path / "train-{000000..000003}.tar"))
    with pytest.raises(DataError, match=r"000000\.\.999999999.* range"):
        resolve_dataset(str(tmp_path / "train-{000000..999999999}.tar"))


def test_splits_in_folders(tmp_path: Path) -> None:
    write(tmp_path / "train/0.tar", samples(0, 4))
    write(tmp_path / "Validation/0.tar", samples(4, 7))
    found = resolve_dataset(str(tmp_path)).splits
    assert {name: len(source) for name, source in found.items()} == {"train": 4, "val": 3}


def test_label_formats(tmp_path: Path) -> None:
    members: dict[str, bytes | str] = {
        "a/1.jpg": encode_image(1, "JPEG"),
        "a/1.cls": "cat\n",
        "b/1.JPG": encode_image(2, "JPEG"),
        "b/1.json": '{"label": "dög"}',
        "b/2.seg.png": encode_image(99),  # of the same key, but not the image
        "b/2.json": '{"caption": "no label", "label": 7}',
        "b/2.png": encode_image(3),
        "c.json": '{"width": 8}',
        "c.cls": "cat",
        "c.png": encode_image(4),
    }
    source = resolve_dataset(str(write(tmp_path / "x.tar", members))).splits["train"]
    assert [source.labels[t] for t in source.targets] == ["cat", "dög", "7", "cat"]
    assert [gray(source, i) for i in range(4)] == [1, 2, 3, 4]


def test_multi_label(tmp_path: Path) -> None:
    members = {
        "1.png": encode_image(1),
        "1.json": '{"label": ["b", "a"]}',
        "2.png": encode_image(2),
        "2.json": '{"labels": []}',
    }
    path = str(write(tmp_path / "x.tar", members))
    assert resolve_dataset(path, multi_label=True).splits["train"].targets.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(DataError, match=r"x\.tar:1\.png .*'b', 'a'.*data\.multi_label"):
        resolve_dataset(path)


def test_incomplete_samples_are_left_out_and_reported(tmp_path: Path) -> None:
    members = samples(0, 4) | {
        "x.png": encode_image(1),
        "y.cls": "1",
        "z.png": encode_image(1),
        "z.json": "{",
        "._0.png": b"",
    }
    members |= {"w.png": encode_image(1), "w.cls": b"\xff\xfe"}
    found = resolve_dataset(str(write(tmp_path / "x.tar", members)))
    assert len(found.splits["train"]) == 4
    assert [note.code for note in found.notes] == ["samples_left_out"]
    assert "'x', 'y', 'z', 'w'" in found.notes[0]
    with pytest.raises(DataError, match=r"'.*empty\.tar'.*KEY\.jpg"):
        resolve_dataset(str(write(tmp_path / "empty.tar", {"x.png": encode_image(1)})))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_member_names_are_never_used_as_paths(tmp_path: Path, form: int) -> None:
    outside = tmp_path / "outside.png"
    keys = ["/etc/passwd", str(outside.with_suffix("")), "../../up", "ü" * 150, "n" * 300]
    members: dict[str, bytes | str] = {}
    for i, key in enumerate(keys):
        members |= {f"{key}.png": encode_image(i), f"{key}.cls": str(i), "link.cls": "9"}
    path = write(tmp_path / "inside/x.tar", members, format=form)
    with tarfile.open(path, "a", format=form) as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            link = tarfile.TarInfo("link.png")
            link.type, link.linkname = kind, str(outside)
            tar.addfile(link)
    outside.write_bytes(encode_image(200))
    found = resolve_dataset(str(path))
    source = found.splits["train"]
    assert [gray(source, i) for i in range(len(source))] == [0, 1, 2, 3, 4]
    assert found.notes[0].code == "samples_left_out"
    assert "'link'" in found.notes[0]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["inside", "outside.png", "x.tar"]


def test_truncated_tar(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", samples(0, 10))
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        members = {member.name: member for member in tar}
    cut = members["0007.png"].offset_data + 5
    for end, named in ((cut, "'0007.png'"), (members["0007.png"].offset + 100, "truncated")):
        path.write_bytes(data[:end])
        found = resolve_dataset(str(path))
        assert len(found.splits["train"]) == 7
        assert gray(found.splits["train"], 6) == 6
        assert found.notes[0].code == "shard_damaged"
        assert named in found.notes[0]
        assert "7 samples" in found.notes[0]
    middle = members["0003.png"].offset
    path.write_bytes(data[:middle] + b"\x55" * 512 + data[middle + 512 :])
    found = resolve_dataset(str(path))
    assert len(found.splits["train"]) == 3
    assert found.notes[0].code == "shard_damaged"
    assert "header" in found.notes[0]


@pytest.mark.parametrize(("size", "reason"), [(2**62, "'bomb.png'"), (None, "sizes|header")])
def test_inconsistent_member_sizes(tmp_path: Path, size: int | None, reason: str) -> None:
    path = write(tmp_path / "x.tar", samples(0, 2))
    with tarfile.open(path) as tar:
        end = max(member.offset_data + 512 * -(-member.size // 512) for member in tar)
    bomb = tarfile.TarInfo("bomb.png")
    bomb.size = 512 - end if size is None else size  # jumps back to the second header: an endless loop
    path.write_bytes(path.read_bytes()[:end] + bomb.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    found = resolve_dataset(str(path))
    assert len(found.splits["train"]) == 2
    assert found.notes[0].code == "shard_damaged"
    assert re.search(reason, found.notes[0])


def test_files_that_are_not_tars(tmp_path: Path) -> None:
    for name, data, reason in (
        ("junk.tar", b"junk" * 500, r"junk\.tar.*damaged"),
        ("none.tar", b"", r"none\.tar.*damaged"),
        ("packed.tar", b"\x1f\x8b\x08" + bytes(100), r"packed\.tar.*gunzip"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=reason):
            resolve_dataset(str(tmp_path / name))


def test_removed_or_truncated_tar_raises_image_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", samples(0, 3))
    source = resolve_dataset(str(path)).splits["train"]
    os.truncate(path, 600)
    with pytest.raises(ImageError, match=r"x\.tar:0002\.png"):
        source.read(2, mode="RGB")
    path.unlink()
    with pytest.raises(ImageError, match=rf"x\.tar:0000\.png: {os.strerror(errno.ENOENT)}"):
        source.read(0, mode="RGB")


def test_reading_is_thread_safe(tmp_path: Path) -> None:
    source = (
        resolve_dataset(str(write(tmp_path / "x.tar", samples(0, 200)))).splits["train"].subset(np.arange(200)[::-1])
    )
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: gray(source, i), range(200))) == list(range(200))[::-1]
