"""Errors of reading: what is about one image, and what is about the disk or the credentials."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.prediction_jobs import make_request, photo, read_rows, run_here
from patchword.errors import ImageError, StorageError
from patchword.inference.entry_reader import EntryReader, read_ahead
from patchword.inference.input_listing import ImageEntry, InputListing
from patchword.inference.prediction_job import open_job


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(12):
        path = tmp_path / f"photos/{number % 3}/{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(number))
    return tmp_path / "photos"


def list_entries(*references: object) -> tuple[EntryReader, list[ImageEntry]]:
    listing = InputListing([str(reference) for reference in references])
    entries = list(listing)
    return EntryReader(listing.roots), entries


def refused(photos: object, out: Path, break_it: object) -> StorageError:
    """Start a job, break something, and return why it ends; no part may exist."""
    job = open_job(make_request(photos, out))
    break_it()  # type: ignore[operator]
    with pytest.raises(StorageError) as error:
        run_here(job)
    assert not list(out.glob("part-*"))
    return error.value


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc")
def test_a_disk_that_fails_ends_the_job(photos: Path, tmp_path: Path) -> None:
    (photos / "0/broken.png").symlink_to("/proc/self/mem")  # reading its first byte is a real EIO
    assert refused(photos, tmp_path / "out", lambda: None).code == "storage_failed"


def test_too_many_open_files_end_the_job(photos: Path) -> None:
    reader, entries = list_entries(photos)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) if os.path.isdir("/proc/self/fd") else 64
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(used)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files) + 1, hard))
    try:
        with pytest.raises(StorageError) as error:
            for entry in entries:
                reader.read(entry)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in files:
            os.close(number)
    assert error.value.code == "storage_failed"


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_disk_that_is_not_mounted_ends_the_job(photos: Path, tmp_path: Path, is_empty: bool) -> None:
    (tmp_path / "other.png").write_bytes(photo(1))  # can be read, so that not everything is missing

    def unmount() -> None:
        shutil.rmtree(photos)
        if is_empty:
            photos.mkdir()

    error = refused((tmp_path / "other.png", photos), tmp_path / "out", unmount)
    assert error.code == "object_not_found"
    assert "mounted" in str(error)


def test_a_part_without_any_image_ends_the_job(photos: Path, tmp_path: Path) -> None:
    def unmount() -> None:
        for path in photos.rglob("*.png"):
            path.unlink()

    assert refused(photos, tmp_path / "out", unmount).code == "object_not_found"


def test_a_missing_image_is_a_row(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "never.csv").write_text("path\nmissing/1.png\nmissing/2.png\n")
    job = open_job(make_request((photos, tmp_path / "never.csv"), tmp_path / "out", chunk_size=12))
    (photos / "0/00.png").unlink()
    run_here(job)  # the second part has only images that never existed
    rows = read_rows(tmp_path / "out")
    assert [row["code"] for row in rows] == ["object_not_found", *[None] * 11, *["object_not_found"] * 2]


def test_images_beside_a_table_are_refused(tmp_path: Path) -> None:
    """The manifest has no version of them, and their paths may leave the inputs."""
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "in/beside.png", tmp_path / "secret.png"):
        path.write_bytes(photo(1))
    paths = ["beside.png", "../secret.png", str(tmp_path / "secret.png")]
    pq.write_table(pa.table({"image": [{"bytes": None, "path": path} for path in paths]}), tmp_path / "in/a.parquet")
    run_here(open_job(make_request(tmp_path / "in/a.parquet", tmp_path / "out")))
    assert [row["code"] for row in read_rows(tmp_path / "out")] == ["image_not_in_row"] * 3


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything."""
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_denied_files_on_a_disk() -> None:
    """One is a row, unless it can be read later; if all are denied, nothing is known."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            Path(folder, f"{number}.png").write_bytes(photo(number))
        os.chmod(folder, 0o755)
        denied = Path(folder, "1.png")
        denied.chmod(0)
        reader, entries = list_entries(folder)
        with as_another_user():
            codes = [getattr(content, "code", None) for _, content in read_ahead(reader, entries)]
            assert codes == [None, "access_denied", None]
            reader.errors.check()
        denied.chmod(0o644)
        with as_another_user(), pytest.raises(StorageError, match="for a while"):
            reader.errors.check()
        denied.chmod(0)
        reader, entries = list_entries(denied)
        with as_another_user():
            with pytest.raises(ImageError):
                reader.read(entries[0])
            with pytest.raises(StorageError, match="permission denied"):
                reader.errors.check()
