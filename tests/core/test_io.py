"""Atomic writes, locks between processes, digests, the cache directory, signals and text."""

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
from io import StringIO
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from rich.console import Console

from patchword.core import io
from patchword.core.findings import Finding, findings_table, sort_by_severity
from patchword.core.runtime import (
    available_cores,
    cpu_flags,
    limit_threads,
    machine_info,
    machine_summary,
    memory_limit,
    peak_memory,
    resident_memory,
)
from patchword.core.text import escape_unprintable, one_line, pluralize
from patchword.errors import CheckpointError, DataError, OutputError, PatchwordError

SYSTEM_CALLS = ("open", "write", "fsync", "replace")  # of `replace_file`


@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_replace_file_is_atomic(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    io.replace_file(target, [b"old"])

    def raise_disk_full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, raise_disk_full)
        with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)) as error:
            io.replace_file(target, [b"new"])
    assert error.value.code == "cannot_write"
    assert str(target) in str(error.value)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert io.replace_file(target, [b"ne", b"w"]) == hashlib.sha256(b"new").hexdigest() == io.sha256(target)
    assert target.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_concurrent_writers_do_not_mix_their_content(tmp_path: Path) -> None:
    target, barrier = tmp_path / "file", threading.Barrier(2)

    def write(content: bytes) -> None:
        with io.atomic_file(target) as temporary:
            io.write_file(temporary, [content[:50]])
            barrier.wait(30)  # both have written half of their content
            with temporary.open("ab") as file:
                file.write(content[50:])

    threads = [threading.Thread(target=write, args=(letter * 100,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in (b"a" * 100, b"b" * 100)


def test_files_have_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "shared").touch(mode=0o600)
    io.replace_file(tmp_path / "file", [b"x"])
    io.apply_umask(tmp_path / "shared")
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "file", "shared")}) == 1


def test_json_round_trip(tmp_path: Path) -> None:
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
def lock_holder(path: Path, name: str, enter: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock until it is killed."""
    code = HOLDER.format(name=name, enter=enter)
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_lock_excludes_other_processes_until_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock_holder(path, "try_lock") as child:
        assert io.try_lock(path) is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists(), "the killed process left its lock file"
    lock = io.try_lock(path)
    assert lock is not None
    assert io.try_lock(path) is None
    io.unlock(lock)
    assert not path.exists()


def test_leftover_lock_file_does_not_lock(tmp_path: Path) -> None:
    path = tmp_path / ".set.lock"
    path.write_text(f"{os.getpid()}\n")
    with io.locked(tmp_path / "set"):
        assert io.try_lock(path) is None
    lock = io.try_lock(path)
    assert lock is not None
    io.unlock(lock)


def test_waiting_for_a_lock_prints_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def enter() -> None:
        with io.locked(tmp_path / "set"):
            entered.set()

    with lock_holder(tmp_path / "set", "locked", "held.__enter__()"):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.5)
    assert entered.wait(60)
    thread.join()
    assert str(tmp_path / "set") in capsys.readouterr().err


def test_file_system_without_locks_does_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def acquire(self: object, **options: Any) -> None:
            raise OSError(number, "refused")

        return acquire

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse(errno.ENOLCK))
    assert io.try_lock(tmp_path / "lock") is not None
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        io.try_lock(tmp_path / "lock")


def test_weights_digest() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1, dtype=torch.int64), "c": torch.zeros(0)}
    same = {name: weights[name].clone() for name in "cba"}
    expected = io.weights_digest(weights)
    assert io.weights_digest(same) == expected
    others = [
        {**weights, "a": weights["a"].reshape(3, 2)},
        {**weights, "a": weights["a"].bfloat16()},
        {**weights, "a": weights["a"] + torch.eye(2, 3) * 1e-7},
        {**weights, "b": torch.tensor(0)},
        {"a": weights["a"], "b": weights["b"], "d": weights["c"]},
    ]
    assert len({expected, *map(io.weights_digest, others)}) == 6
    transposed = weights["a"].t()  # not contiguous: the memory layout does not matter
    assert io.weights_digest({"a": transposed}) == io.weights_digest({"a": transposed.contiguous()})
    assert bytes(io.tensor_bytes(weights["b"])) == (1).to_bytes(8, sys.byteorder)


def test_digest_separates_its_values() -> None:
    assert io.digest("ab", "c") != io.digest("a", "bc")
    assert io.digest("one") == hashlib.sha256(b"one").hexdigest()


def test_cache_dir_without_home_needs_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "PATCHWORD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without an entry in /etc/passwd
    with pytest.raises(DataError, match="PATCHWORD_CACHE"):
        io.cache_dir()


SECOND_SIGNAL = """
import signal
from patchword.core.runtime import StopSignal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with SIGINT ignored
with StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGINT
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_second_signal_is_not_caught() -> None:
    """In a process of its own: signals are those of the whole process, which other tests share."""
    done = subprocess.run([sys.executable, "-c", SECOND_SIGNAL], capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"


def test_memory_is_plausible() -> None:
    limit = memory_limit()
    assert limit is not None
    assert 0 < resident_memory() < limit
    assert resident_memory() < 1.1 * peak_memory() < limit  # the kernel counts the two in different ways


def test_text() -> None:
    assert pluralize(1, "image") == "1 image"
    assert pluralize(2000, "class", "es") == "2,000 classes"
    assert escape_unprintable("a\n\u202eb") == "a\\n\\u202eb"
    assert escape_unprintable("고양이") == "고양이"
    assert one_line(ValueError("a\n b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 500))) == 160


def test_atomic_output_error_codes(tmp_path: Path) -> None:
    def write(target: Path, **options: Any) -> PatchwordError:
        with pytest.raises(OutputError) as error, io.atomic_output(target, **options) as temporary:
            temporary.write_bytes(b"new")
        return error.value

    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").touch()
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "file").code == "output_exists"
    assert write(tmp_path / "photos", overwrite=True).code == "output_exists"
    assert write(tmp_path / "empty", overwrite=True).code == "output_exists", "a file does not replace a directory"
    assert write(tmp_path / "file/below").code == "cannot_write"
    assert write(tmp_path / "a\0b").code == "cannot_write"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "photos"]
    with io.atomic_output(tmp_path / "file", overwrite=True) as temporary:
        temporary.write_bytes(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_atomic_output_keeps_the_error_of_its_block(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="own") as error, io.atomic_output(tmp_path / "file"):
        raise CheckpointError("own", code="unsafe_pickle")
    assert error.value.code == "unsafe_pickle"
    assert list(tmp_path.iterdir()) == []


def test_build_once_discards_an_incomplete_directory(tmp_path: Path) -> None:
    (tmp_path / "set.partial").mkdir()
    (tmp_path / "set.partial/incomplete").touch()
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "complete").touch()

    for _ in range(2):
        assert [path.name for path in io.build_once(tmp_path / "set", build).iterdir()] == ["complete"]
    assert len(calls) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_cache_errors_name_the_environment_variable(number: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="PATCHWORD_CACHE") as error, io.wrap_cache_errors(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert error.value.code == "invalid_data"
    assert str(tmp_path / "file") in str(error.value)
    assert os.strerror(number) in str(error.value)


def test_nested_json_is_limited(tmp_path: Path) -> None:
    assert io.json_depth({"a": [1, {"b": 2}]}) == 3
    assert io.json_depth(1) == 0
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * io.MAX_JSON_DEPTH + "1" + "}" * io.MAX_JSON_DEPTH)
    assert io.json_depth(io.read_json(path)) == io.MAX_JSON_DEPTH
    path.write_text('{"a":' * 33 + "1" + "}" * 33)
    with pytest.raises(CheckpointError) as error:
        io.read_json(path)
    assert error.value.code == "invalid_checkpoint"


def test_limit_threads_restores_the_number() -> None:
    before = torch.get_num_threads()
    with limit_threads(1):
        assert torch.get_num_threads() == 1
    with limit_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_machine_info_is_consistent() -> None:
    info = machine_info()
    assert 1 <= info["cores"] == available_cores() <= (os.cpu_count() or 1)
    assert info["torch"] == torch.__version__
    assert set(info["flags"]) <= cpu_flags()
    assert f"torch {torch.__version__}" in machine_summary()


def test_findings_are_sorted_and_escaped() -> None:
    findings = [
        Finding("note", "a", "n"),
        Finding("error", "b", "e", tuple("abcdefg"), "fix"),
        Finding("note", "c", "[red]m\x1b"),
    ]
    assert [finding.severity for finding in sort_by_severity(findings)] == ["error", "note", "note"]
    assert findings[1].to_json() == {
        "severity": "error", "code": "b", "message": "e", "details": list("abcdefg"), "advice": "fix"
    }  # fmt: skip
    console = Console(width=80, file=StringIO())
    console.print(findings_table(findings))
    printed = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "and 2 more" in printed
    assert "[red]m\\x1b" in printed
    assert "\x1b" not in printed
