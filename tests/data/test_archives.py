"""Untrusted archives: valid ones are extracted, unsafe and damaged ones refused; interrupted builds are repeated."""

import io
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from patchword.core.io import build_once, cache_dir
from patchword.data.archives import extract, read_files
from patchword.errors import DataError

FILES = {"set/a.txt": b"first", "set/deep/b.bin": bytes(range(256)) * 1000, "c": b""}


def tar_of(path: Path, *members: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    """The suffix of the path determines the format."""
    with tarfile.open(path, f"w:{path.suffix[1:].replace('tar', '')}") as tar:  # type: ignore[call-overload]
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def zip_of(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def deb_of(path: Path, data: bytes) -> Path:
    """Debian's format: `ar` with three members, each padded to an even length."""
    content = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data)):
        content += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
        )
    path.write_bytes(content)
    return path


def special(name: str, kind: bytes, target: str = "") -> tuple[str, tarfile.TarInfo]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return name, info


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz", "zip", "deb"])
def test_valid_archives_are_extracted_and_read(tmp_path: Path, suffix: str) -> None:
    path, members = tmp_path / f"set.{suffix}", list(FILES.items())
    if suffix == "zip":
        zip_of(path, *members)
    elif suffix == "deb":
        inner = tar_of(tmp_path / "data.tar.xz", *((f"./{name}", content) for name, content in members))
        deb_of(path, inner.read_bytes())
    else:
        tar_of(path, special("set", tarfile.DIRTYPE), *members)
    (tmp_path / "out").mkdir()
    extract(path, tmp_path / "out")
    assert content_of(tmp_path / "out") == FILES
    assert read_files(path, {"a.txt", "b.bin", "missing"}) == {"a.txt": b"first", "b.bin": FILES["set/deep/b.bin"]}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("../escape", b"x")], "outside"),
        ([("good", b"x"), ("set/../../escape", b"x")], "outside"),
        ([("{outside}/escape", b"x")], "outside"),
        ([("..\\escape", b"x")], "outside"),
        ([("C:escape", b"x")], "outside"),
        ([special("link", tarfile.SYMTYPE, "..")], "device"),
        ([special("link", tarfile.SYMTYPE, ".."), ("link/escape", b"x")], "device"),
        ([("good", b"x"), special("link", tarfile.LNKTYPE, "/etc/passwd")], "device"),
        ([special("pipe", tarfile.FIFOTYPE)], "device"),
        ([special("disk", tarfile.BLKTYPE)], "device"),
        ([("same", b"x"), ("same", b"y")], "'same' twice"),
        ([("file", b"x"), ("file/below", b"y")], "'file/below' twice"),
        ([("bomb", bytes(3_000_000))], "1,000,000 bytes"),
        ([(f"{number}", b"") for number in range(30)], "20 files"),
    ],
)
def test_unsafe_tars_are_refused(tmp_path: Path, members: list[tuple[str, object]], reason: str) -> None:
    outside, out = tmp_path / "outside", tmp_path / "outside/out"
    out.mkdir(parents=True)
    named = [(name.replace("{outside}", str(outside)), content) for name, content in members]
    path = tar_of(tmp_path / "bad.tar.gz", *named)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=reason) as caught:
        extract(path, out, max_bytes=1_000_000, max_files=20)
    assert str(path) in str(caught.value)
    assert [each.name for each in outside.iterdir()] == ["out"]
    assert not any(each.is_symlink() for each in out.rglob("*"))


def test_unsafe_zips_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("alias")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for name, reason in (("../escape", "outside"), (link, "link"), ("bomb", "1,000,000 bytes")):
        path = zip_of(tmp_path / "bad.zip", (name, bytes(2_000_000)))
        (out := tmp_path / "out").mkdir(exist_ok=True)
        with pytest.raises(DataError, match=reason):
            extract(path, out, max_bytes=1_000_000 if name == "bomb" else 10_000_000)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad.zip", "out"]


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.xz", "zip", "deb"])
def test_damaged_archives_raise_data_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"set.{suffix}"
    if suffix == "zip":
        zip_of(path, *FILES.items())
    elif suffix == "deb":
        deb_of(path, tar_of(tmp_path / "data.tar.xz", *FILES.items()).read_bytes())
    else:
        tar_of(path, *FILES.items())
    data = path.read_bytes()
    refused = 0
    for length in range(0, len(data) - 1, max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        try:
            read_files(path, {"b.bin"})
        except DataError as caught:
            error = caught
        else:
            continue
        refused += 1
        assert str(path) in str(error)
        assert "damaged" in str(error)
    assert refused > 20


def test_build_once_is_atomic(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("x")
        if len(built) == 1:
            raise DataError("interrupted")

    with pytest.raises(DataError, match="interrupted"):
        build_once(tmp_path / "set", build)
    assert not [each for each in tmp_path.iterdir() if each.is_dir()]
    for _ in range(2):
        assert content_of(build_once(tmp_path / "set", build)) == {"file": b"x"}
    assert len(built) == 2


CHILD = """
import sys, time
from pathlib import Path
from patchword.core.io import build_once
def build(folder):
    (folder / "incomplete").write_text("x")
    print("started", flush=True)
    time.sleep(3600)
build_once(Path(sys.argv[1]), build)
"""


def test_killed_build_is_repeated(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "set")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "set.partial/incomplete").exists()
    assert not (tmp_path / "set").exists()
    build_once(tmp_path / "set", lambda folder: (folder / "complete").write_text("x"))
    # Nothing of the killed process is left, and its lock does not block.
    assert content_of(tmp_path / "set") == {"complete": b"x"}


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PATCHWORD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / ".cache/patchword"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache/patchword"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared/cache")
    assert cache_dir() == Path("/shared/cache/patchword")
    monkeypatch.setenv("PATCHWORD_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
