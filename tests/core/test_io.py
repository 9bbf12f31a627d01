"""The lowest layer: files that are whole or not there, locks between processes, digests, the cache directory, text."""

import contextlib
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from patchword.core import io
from patchword.core.runtime import Stop, memory_limit, peak_memory, resident_memory
from patchword.core.text import one_line, plural, visible
from patchword.errors import CheckpointError, DataError

FAILING = ("open", "write", "fsync", "replace")  # calls of the operating system that `replace_file` makes


@pytest.mark.parametrize("name", FAILING)
def test_a_file_is_replaced_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    io.replace_file(target, [b"old"])

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(CheckpointError, match="file could not be written .No space left"):
            io.replace_file(target, [b"new"])
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert io.replace_file(target, [b"ne", b"w"]) == hashlib.sha256(b"new").hexdigest() == io.sha256(target)
    assert target.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    target, both = tmp_path / "file", threading.Barrier(2)

    def write(content: bytes) -> None:
        with io.atomic_file(target) as made:
            io.write_file(made, [content[:50]])
            both.wait(30)  # each is in the middle of its file
            with made.open("ab") as file:
                file.write(content[50:])

    threads = [threading.Thread(target=write, args=(letter * 100,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in (b"a" * 100, b"b" * 100)


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "shared").touch(mode=0o600)
    io.replace_file(tmp_path / "file", [b"x"])
    io.share(tmp_path / "shared")
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "file", "shared")}) == 1


def test_json_comes_back(tmp_path: Path) -> None:
    content = {"label": "고양이", "numbers": [1, 2.5, None]}
    io.replace_json(tmp_path / "new/file.json", content)
    assert io.read_json(tmp_path / "new/file.json") == content
    assert "고양이" in (tmp_path / "new/file.json").read_text(encoding="utf-8")
    assert io.json_bytes("고\udc80", ascii_only=True) == b'"\\uace0\\udc80"\n'
    assert io.json_bytes("고\udc80").decode() == '"고?"\n'


HOLDER = """
import sys, time
from pathlib import Path
from patchword.core.io import {name}
held = {name}(Path(sys.argv[1]))
{enter}
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holding(path: Path, name: str, enter: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, and never gives it back."""
    code = HOLDER.format(name=name, enter=enter)
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_lock_keeps_other_processes_out_until_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holding(path, "try_lock") as child:
        assert io.try_lock(path) is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists(), "what the kill left"
    lock = io.try_lock(path)
    assert lock is not None
    assert io.try_lock(path) is None
    io.unlock(lock)
    assert not path.exists()


def test_a_file_that_is_left_locks_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".set.lock"
    path.write_text(f"{os.getpid()}\n")
    with io.locked(tmp_path / "set"):
        assert io.try_lock(path) is None
    lock = io.try_lock(path)
    assert lock is not None
    io.unlock(lock)


def test_who_waits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def enter() -> None:
        with io.locked(tmp_path / "set"):
            entered.set()

    with holding(tmp_path / "set", "locked", "held.__enter__()"):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.5)
    assert entered.wait(60)
    thread.join()
    assert "Waiting for another process, which is fetching" in capsys.readouterr().err


def test_a_disk_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def acquire(self: object, **options: Any) -> None:
            raise OSError(number, "refused")

        return acquire

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse(errno.ENOLCK))
    assert io.try_lock(tmp_path / "lock") is not None
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        io.try_lock(tmp_path / "lock")


def test_weights_have_one_digest() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1, dtype=torch.int64), "c": torch.zeros(0)}
    same = {name: weights[name].clone() for name in "cba"}
    found = io.weights_digest(weights)
    assert io.weights_digest(same) == found
    others = [
        {**weights, "a": weights["a"].reshape(3, 2)},
        {**weights, "a": weights["a"].bfloat16()},
        {**weights, "a": weights["a"] + torch.eye(2, 3) * 1e-7},
        {**weights, "b": torch.tensor(0)},
        {"a": weights["a"], "b": weights["b"], "d": weights["c"]},
    ]
    assert len({found, *map(io.weights_digest, others)}) == 6
    transposed = weights["a"].t()  # not contiguous: the values count, not how they lie in memory
    assert io.weights_digest({"a": transposed}) == io.weights_digest({"a": transposed.contiguous()})
    assert bytes(io.tensor_bytes(weights["b"])) == (1).to_bytes(8, sys.byteorder)


def test_facts_do_not_run_into_each_other() -> None:
    assert io.digest("ab", "c") != io.digest("a", "bc")
    assert io.digest("one") == hashlib.sha256(b"one").hexdigest()


def test_without_a_home_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "PATCHWORD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where the user has no entry in the system's list
    with pytest.raises(DataError, match="set PATCHWORD_CACHE"):
        io.cache_folder()


def test_a_second_signal_is_obeyed_at_once() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_memory_is_plausible() -> None:
    limit = memory_limit()
    assert limit is not None
    assert 0 < resident_memory() < limit
    assert resident_memory() < 1.1 * peak_memory() < limit  # the kernel counts the two in different ways


def test_text() -> None:
    assert plural(1, "image") == "1 image"
    assert plural(2000, "class", "es") == "2,000 classes"
    assert visible("a\n\u202eb") == "a\\n\\u202eb"
    assert visible("고양이") == "고양이"
    assert one_line(ValueError("a\n b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 500))) == 160
