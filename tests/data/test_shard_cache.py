"""The cache of blocks of shards: few requests, bounded, shared by processes, and intact after kills."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np
import pytest

from patchword.data import background, shard_cache
from patchword.data.background import BackgroundTasks
from patchword.data.shard_cache import ShardCache, read_block, remove_oldest
from patchword.data.storage import LocalStorage
from patchword.errors import DataError, StorageError

SIZE, BLOCK = 10_000, 1024
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


class CountingStorage(LocalStorage):
    """A directory that records which ranges are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()

    def read_range(self, key: str, start: int, stop: int, etag: str | None = None) -> bytes:
        with self.lock:
            self.ranges.append((key, start, stop))
        return super().read_range(key, start, stop, etag)


@pytest.fixture
def storage(tmp_path: Path) -> CountingStorage:
    store = CountingStorage(tmp_path / "store")
    for name in ("a.tar", "b.tar"):
        store.create(name, DATA)
    return store


def make(storage: CountingStorage, max_bytes: float = 1e9, folder: Path | None = None) -> ShardCache:
    return ShardCache(storage, max_bytes, folder or storage.root.parent / "cache", BLOCK)


def read(cache: ShardCache, key: str, start: int, stop: int) -> bytes:
    stored = cache.storage.head(key)
    assert stored is not None
    return cache.read(key, stored.etag, stored.size, start, stop)


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*") if path.parent.name != "locks")


def test_any_range_is_right_and_every_block_is_requested_once(storage: CountingStorage) -> None:
    cache = make(storage)
    ranges = [(0, 1), (0, SIZE), (BLOCK - 1, BLOCK + 1), (BLOCK, 2 * BLOCK), (5000, 5000), (SIZE - 3, SIZE)]
    for start, stop in [*ranges, *np.sort(np.random.default_rng(1).integers(0, SIZE + 1, (300, 2))).tolist()]:
        assert read(cache, "a.tar", start, stop) == DATA[start:stop]
    assert sorted(storage.ranges) == [("a.tar", i, min(SIZE, i + BLOCK)) for i in range(0, SIZE, BLOCK)]
    again = make(CountingStorage(storage.root))  # as in another process
    assert read(again, "a.tar", 0, SIZE) == DATA
    assert again.storage.ranges == []  # type: ignore[attr-defined]


def test_blocks_ahead_are_downloaded_in_the_background(storage: CountingStorage, tmp_path: Path) -> None:
    cache = make(storage)
    read(cache, "a.tar", 0, 1)  # one image is not a sequence
    assert len(list((tmp_path / "cache").glob("*/000000"))) == 1
    read(cache, "a.tar", 1, 2)
    end = time.monotonic() + 60  # only a guard against hanging
    while not list((tmp_path / "cache").glob("*/000009")) and time.monotonic() < end:
        time.sleep(0.001)
    read(cache, "a.tar", 0, SIZE)
    assert sorted(storage.ranges) == [("a.tar", i, min(SIZE, i + BLOCK)) for i in range(0, SIZE, BLOCK)]
    small = make(storage, max_bytes=100 * BLOCK, folder=tmp_path / "small")  # nothing needed is removed for it
    for start in range(100):
        read(small, "b.tar", start, start + 1)
    assert [key for key, _, _ in storage.ranges].count("b.tar") == 1


def test_background_work_does_not_keep_a_program_from_ending() -> None:
    script = """
import threading, time
from patchword.data.background import BackgroundTasks
tasks = BackgroundTasks(2)
started = threading.Event()
for _ in range(100_000):
    tasks.submit(lambda: (started.set(), time.sleep(0.05)))
started.wait()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)  # all of it would take 40 minutes


def test_errors_in_the_background_are_left_to_the_reader(storage: CountingStorage) -> None:
    cache = make(storage)
    stored = storage.head("a.tar")
    assert stored is not None
    cache.read("a.tar", stored.etag, stored.size, 0, 1)
    os.utime(storage.root / "a.tar", ns=(1, 1))
    assert cache.read("a.tar", stored.etag, stored.size, 1, 2) == DATA[1:2]
    with pytest.raises(StorageError):
        cache.read("a.tar", stored.etag, stored.size, 5 * BLOCK, 5 * BLOCK + 1)


def test_threads_download_a_block_once(storage: CountingStorage) -> None:
    caches = [make(storage) for _ in range(4)]  # with locks of their own, as processes have
    with ThreadPoolExecutor(16) as pool:
        results = pool.map(lambda i: read(caches[i % 4], "ab"[i % 2] + ".tar", 0, SIZE), range(64))
    assert set(results) == {DATA}
    assert len(storage.ranges) == len(set(storage.ranges)) == 2 * 10


def test_capacity_is_kept_and_the_least_recently_used_blocks_go(storage: CountingStorage, tmp_path: Path) -> None:
    cache = make(storage, max_bytes=12 * BLOCK)
    folder = tmp_path / "cache"
    for start in range(0, SIZE, BLOCK):
        read(cache, "a.tar", start, start + 1)
        for path in folder.glob("*/00000[01]"):  # these stay in use
            os.utime(path)
        assert used_bytes(folder) <= 12 * BLOCK
    for start in range(0, SIZE, BLOCK):
        read(cache, "b.tar", start, start + 1)
        for path in folder.glob("*/00000[01]"):
            os.utime(path)
        assert used_bytes(folder) <= 12 * BLOCK
    storage.ranges.clear()
    assert read(cache, "a.tar", 0, 2 * BLOCK) == DATA[: 2 * BLOCK]
    assert storage.ranges == []
    assert read(cache, "a.tar", 5 * BLOCK, 6 * BLOCK) == DATA[5 * BLOCK : 6 * BLOCK]
    assert len(storage.ranges) == 1


def test_changed_shard_is_never_mixed_with_the_old_one(storage: CountingStorage) -> None:
    cache = make(storage)
    old = storage.head("a.tar")
    assert old is not None
    assert cache.read("a.tar", old.etag, old.size, 0, 10) == DATA[:10]
    storage.replace("a.tar", DATA[::-1])
    with pytest.raises(StorageError) as error:
        cache.read("a.tar", old.etag, old.size, BLOCK, BLOCK + 10)
    assert error.value.code == "object_changed"
    assert read(cache, "a.tar", 0, 10) == DATA[::-1][:10]


def test_incomplete_block_is_downloaded_again(storage: CountingStorage, tmp_path: Path) -> None:
    """As after a power failure; a kill leaves none, because blocks are renamed."""
    cache = make(storage)
    read(cache, "a.tar", 0, SIZE)
    for path in sorted((tmp_path / "cache").glob("*/00*")):
        path.write_bytes(path.read_bytes()[: int(path.name)])
    assert read(cache, "a.tar", 0, SIZE) == DATA
    assert len(storage.ranges) == 20


def test_leftovers_of_killed_processes_are_removed(storage: CountingStorage, tmp_path: Path) -> None:
    cache = make(storage)
    read(cache, "a.tar", 0, 1)
    folder = next((tmp_path / "cache").glob("*/000000")).parent
    old, new = folder / ".000001.aa.part", folder / ".000002.bb.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    remove_oldest(tmp_path / "cache", 1e9)
    assert not old.exists()
    assert new.exists()


def test_unwritable_cache_does_not_stop_a_run(
    storage: CountingStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make(storage)
    folder = tmp_path / "cache"
    stored = storage.head("a.tar")
    assert stored is not None
    read(cache, "a.tar", 0, 1)
    blocks = next(folder.glob("*/000000")).parent
    for path in blocks.iterdir():
        path.unlink()
    blocks.rmdir()
    blocks.write_text("a file where the directory of the blocks should be")
    for start in range(0, 3 * BLOCK, BLOCK):
        assert cache.read("a.tar", stored.etag, stored.size, start, start + 5) == DATA[start : start + 5]
    assert capsys.readouterr().err.count("without a cache") == 1
    with pytest.raises(DataError, match="PATCHWORD_CACHE"):
        make(storage, folder=blocks / "below a file")


def limit_file_size(size: int) -> None:
    """Make writing larger files fail: a real OSError (EFBIG) that also root gets."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def full_disk() -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_costs_no_traffic(storage: CountingStorage, tmp_path: Path, full_disk: None) -> None:
    """Only the bytes that are needed are read, nothing ahead; blocks that exist are used; writing is tried again."""
    cache = make(storage)
    read(cache, "b.tar", 0, 1)
    limit_file_size(BLOCK // 2)
    read(cache, "a.tar", 0, 1)  # fails to write
    storage.ranges.clear()
    for start in range(0, SIZE - 5, 100):
        assert read(cache, "a.tar", start, start + 5) == DATA[start : start + 5]
        assert read(cache, "b.tar", start % BLOCK, start % BLOCK + 1) == DATA[start % BLOCK :][:1]
    wanted = [("a.tar", start, start + 5) for start in range(0, SIZE - 5, 100)]
    assert storage.ranges == wanted
    assert not cache._queued
    limit_file_size(resource.RLIM_INFINITY)
    cache._retry_at = 0.0  # as after a minute
    read(cache, "a.tar", 0, 1)
    assert len(list((tmp_path / "cache").glob("*/000000"))) == 2
    storage.ranges.clear()
    read(cache, "a.tar", 0, BLOCK)
    assert ("a.tar", 0, BLOCK) not in storage.ranges  # others may be read ahead again


def test_lock_of_a_stopped_process_is_not_waited_for(
    storage: CountingStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "LOCK_SECONDS", 0.1)
    cache = make(storage)
    locks = [filelock.FileLock(tmp_path / "cache/locks" / str(number)) for number in range(shard_cache.NUM_LOCKS)]
    for lock in locks:
        lock.acquire()
    try:
        assert read(cache, "a.tar", 5, 10) == DATA[5:10]
    finally:
        for lock in locks:
            lock.release()


def test_background_work_is_bounded_and_survives_any_error() -> None:
    tasks, started, done = BackgroundTasks(1), threading.Event(), threading.Event()
    go = threading.Event()

    def fail() -> None:
        started.set()
        go.wait(60)
        raise KeyError("a bug")

    assert tasks.submit(fail)
    assert started.wait(60)
    accepted = sum(tasks.submit(lambda: None) for _ in range(2 * background.MAX_WAITING))
    assert accepted == background.MAX_WAITING
    go.set()
    end = time.monotonic() + 60
    while not tasks.submit(done.set) and time.monotonic() < end:
        time.sleep(0.001)
    assert done.wait(60)


def test_blocks_are_queued_once(storage: CountingStorage) -> None:
    cache = make(storage)
    release = threading.Event()
    for _ in range(4):
        cache._tasks.submit(lambda: release.wait(60))
    for start in (0, 1, 0, BLOCK, 0, 2 * BLOCK, BLOCK + 1):
        read(cache, "a.tar", start, start + 1)
    assert len(cache._tasks._tasks) <= SIZE // BLOCK + 1
    release.set()


CHILD = """
import os, signal, sys
from pathlib import Path
from patchword.data.shard_cache import ShardCache
from patchword.data.storage import LocalStorage

moment = sys.argv[3]

def write_bytes(path, data):
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        if moment == "write":
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(data[len(data) // 2 :])
    if moment == "rename":
        os.kill(os.getpid(), signal.SIGKILL)

Path.write_bytes = write_bytes
storage = LocalStorage(Path(sys.argv[1]))
stored = storage.head("a.tar")
ShardCache(storage, 1e9, Path(sys.argv[2]), 1024).read("a.tar", stored.etag, stored.size, 0, 5000)
"""


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_sigkill_leaves_only_complete_blocks_and_no_lock(storage: CountingStorage, tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", CHILD, str(storage.root), str(folder), moment]
    assert subprocess.run(command, timeout=300).returncode == -signal.SIGKILL
    assert len(list(folder.glob("*/.*.part"))) == 1
    assert not list(folder.glob("*/000*"))
    assert read(make(storage), "a.tar", 0, SIZE) == DATA


def test_missing_block(tmp_path: Path) -> None:
    assert read_block(tmp_path / "none", 10, 0, 5) is None
