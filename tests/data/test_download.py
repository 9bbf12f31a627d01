"""Downloads from a local HTTP server that misbehaves in every known way."""

import errno
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from patchword.data import download as module
from patchword.data.download import DownloadError, download
from patchword.errors import DataError

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TIMEOUT = 600  # seconds to wait for anything


class Server(ThreadingHTTPServer):
    """One file at /file; attributes make the server misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/file"
        self.content = CONTENT
        self.headers: dict[str, str] = {"ETag": '"one"'}
        self.ranges = True  # supports Range requests
        self.length = True  # sends Content-Length
        self.statuses: list[int] = []  # statuses of the next responses, instead of the file
        self.cuts: list[int] = []  # the next responses end after that many bytes
        self.stalls: list[int] = []  # the next responses stall after that many bytes
        self.running = threading.Event()  # cleared: a response pauses after 10,000 bytes until it is set
        self.running.set()
        self.log: list[dict[str, str]] = []  # the headers of each request
        self.paths: list[str] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.running.set()
        self.shutdown()
        self.thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""

    def requested_ranges(self) -> list[str | None]:
        """The Range header of each request."""
        return [headers.get("Range") for headers in self.log]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.log.append(dict(self.headers))
        server.paths.append(self.path)
        if server.statuses and (status := server.statuses.pop(0)) != 200:
            self.send_error(status)
            return
        body, start = server.content, self.start()
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        for name, value in server.headers.items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if server.length:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.send_body(body[start:])

    def start(self) -> int:
        requested, condition = self.headers.get("Range"), self.headers.get("If-Range")
        changed = condition is not None and condition not in self.server.headers.values()
        return 0 if requested is None or changed or not self.server.ranges else int(requested[6:].rstrip("-"))

    def send_body(self, body: bytes) -> None:
        server = self.server
        stall = server.stalls.pop(0) if server.stalls else None
        cut = server.cuts.pop(0) if server.cuts else None
        end = min(len(body) if each is None else each for each in (cut, stall))
        for offset in range(0, end, 10_000):
            self.wfile.write(body[offset : min(end, offset + 10_000)])
            server.running.wait(TIMEOUT)
        if stall is not None:
            server.stopped.wait(TIMEOUT)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_BACKOFF", 0.001)
    server = Server()
    yield server
    server.stop()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    progress: list[tuple[int, int | None]] = []
    target = tmp_path / "new/folder/file"
    result = download(
        server.url, target, md5=MD5, sha256=SHA256, size=len(CONTENT), on_progress=lambda *a: progress.append(a)
    )
    assert result == target
    assert target.read_bytes() == CONTENT
    assert leftovers(target.parent) == ["file"]
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert progress == sorted(progress)
    download(server.url, target, md5=MD5)
    assert len(server.log) == 1


def test_interrupted_transfer_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 50_000]
    download(server.url, tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requested_ranges() == [None, "bytes=100000-", "bytes=150000-"]
    assert server.log[1]["If-Range"] == '"one"'


def test_server_without_ranges_restarts(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [100_000], False
    download(server.url, tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requested_ranges() == [None, "bytes=100000-"]


def test_retries_end_without_progress(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000] + [0] * 20
    with pytest.raises(DownloadError, match=r"100,000.*300,000 bytes"):
        download(server.url, tmp_path / "file", md5=MD5)
    assert len(server.log) == module.MAX_TRIES
    assert (tmp_path / "file.part").stat().st_size == 100_000  # for the next run
    server.cuts = []
    download(server.url, tmp_path / "file", md5=MD5)
    assert server.requested_ranges()[-1] == "bytes=100000-"


def test_progress_resets_the_number_of_retries(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PROGRESS", 20_000)
    server.cuts = [30_000] * 9
    download(server.url, tmp_path / "file", md5=MD5)
    assert len(server.log) == 10 > module.MAX_TRIES


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_pieces_of_different_versions_are_not_joined(server: Server, tmp_path: Path, validator: str) -> None:
    server.headers, server.cuts = {validator: '"one"'}, [100_000] + [0] * 3
    with pytest.raises(DownloadError):
        download(server.url, tmp_path / "file")
    server.headers, server.content = {validator: '"two"'}, OTHER
    download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == OTHER


def test_without_validator_the_checksum_decides(server: Server, tmp_path: Path) -> None:
    server.headers, server.content, server.cuts = {"ETag": 'W/"weak"'}, OTHER, [100_000] + [0] * 3
    with pytest.raises(DownloadError):
        download(server.url, tmp_path / "file", md5=MD5)
    server.content = CONTENT
    download(server.url, tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.requested_ranges()[-2:] == ["bytes=100000-", None]  # joined, found wrong, downloaded in one piece
    assert "If-Range" not in server.log[-2]


def test_no_resume_without_validator_and_checksum(server: Server, tmp_path: Path) -> None:
    server.headers, server.cuts = {}, [100_000]
    download(server.url, tmp_path / "file")
    assert server.requested_ranges() == [None, None]


def test_wrong_file_is_deleted_and_reported(server: Server, tmp_path: Path) -> None:
    server.content = OTHER
    with pytest.raises(DownloadError) as caught:
        download(server.url, tmp_path / "file", md5=MD5)
    assert caught.value.code == "unreachable"
    for digest in (hashlib.md5(OTHER).hexdigest(), MD5):
        assert digest in str(caught.value)
    assert leftovers(tmp_path) == []
    assert len(server.log) == 1


def test_urls_are_tried_in_order(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    download([server.url + "?first", server.url + "?second"], tmp_path / "file", md5=MD5)
    assert server.paths == ["/file?first", "/file?second"]


def test_busy_server_is_retried(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    download(server.url, tmp_path / "file", md5=MD5)
    assert len(server.log) == 3


@pytest.mark.slow
def test_stalled_transfer_is_resumed(server: Server, tmp_path: Path) -> None:
    server.stalls = [50_000]
    download(server.url, tmp_path / "file", md5=MD5, timeout=2)
    assert "bytes=50000-" in server.requested_ranges()  # on a busy machine other responses may be late, too


def test_server_that_stays_silent_times_out(server: Server, tmp_path: Path) -> None:
    server.stalls = [0] * 10
    with pytest.raises(DownloadError, match=r"\bdata\b.* 0\.1 seconds"):
        download(server.url, tmp_path / "file", md5=MD5, timeout=0.1)


def test_offline_error_explains_the_manual_download(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file"
    with pytest.raises(DownloadError) as caught:
        download([url, "http://unknown.invalid/file"], tmp_path / "file", md5=MD5)
    message = str(caught.value)
    reason = os.strerror(errno.ECONNREFUSED)
    for expected in (f"{url}: {reason}", "http://unknown.invalid/file: ", str(tmp_path / "file"), f"md5 {MD5}"):
        assert expected in message


def test_manually_downloaded_file_is_verified(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    download(server.url, tmp_path / "file", md5=MD5, size=len(CONTENT))
    (tmp_path / "file").write_bytes(OTHER)
    with pytest.raises(DataError, match=hashlib.md5(OTHER).hexdigest()) as error:
        download(server.url, tmp_path / "file", md5=MD5)
    assert error.value.code == "invalid_data"
    assert str(tmp_path / "file") in str(error.value)
    assert (tmp_path / "file").read_bytes() == OTHER  # a file of the user is never deleted
    assert server.log == []


def test_wrong_content_length_is_refused_before_the_transfer(server: Server, tmp_path: Path) -> None:
    received: list[tuple[int, int | None]] = []
    with pytest.raises(DownloadError, match=r"300,000 bytes.*299,999"):
        download(server.url, tmp_path / "file", size=299_999, on_progress=lambda *a: received.append(a))
    assert received == []


def test_oversized_response_is_aborted(server: Server, tmp_path: Path) -> None:
    server.length, server.content = False, CONTENT * 20
    with pytest.raises(DownloadError, match=r"\b[34]\d\d,\d{3} bytes.*300,000"):  # not 6,000,000
        download(server.url, tmp_path / "file", size=len(CONTENT))
    assert leftovers(tmp_path) == []


def test_complete_partial_file_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    (tmp_path / "file.part.json").write_text(json.dumps({"url": server.url, "validator": None}))
    download(server.url, tmp_path / "file", md5=MD5, size=len(CONTENT))
    assert server.log == []
    assert leftovers(tmp_path) == ["file"]


def test_oversized_partial_file_is_discarded(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT * 2)
    (tmp_path / "file.part.json").write_text(json.dumps({"url": server.url, "validator": '"one"'}))
    download(server.url, tmp_path / "file", md5=MD5)
    assert server.requested_ranges() == ["bytes=600000-", None]


@pytest.mark.parametrize("metadata", ["", "{", "[]", '{"url": 3}'])
def test_damaged_metadata_restarts_the_download(server: Server, tmp_path: Path, metadata: str) -> None:
    (tmp_path / "file.part").write_bytes(OTHER[:1000])
    (tmp_path / "file.part.json").write_text(metadata)
    download(server.url, tmp_path / "file", md5=MD5)
    assert server.requested_ranges() == [None]


def test_environment_proxies_are_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/file"))
    monkeypatch.delenv("no_proxy", raising=False)
    download("http://data.invalid/set", tmp_path / "file", md5=MD5)
    assert server.paths == ["http://data.invalid/set"]


def test_missing_disk_space_is_detected_in_advance(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1,000,000,000,000,000 .*PATCHWORD_CACHE"):
        download(server.url, tmp_path / "file", size=10**15)
    assert server.log == []


CHILD = """
import sys
from pathlib import Path
{before}
from patchword.data.download import download
from patchword.errors import DataError
try:
    download(sys.argv[1], Path(sys.argv[2]), md5=sys.argv[3], timeout=600)
except DataError as error:
    print(error)
    sys.exit(3)
"""


def child(server: Server, target: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(before=before), server.url, str(target), MD5]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_next_process_resumes_after_a_kill(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    server.running.clear()
    process = child(server, tmp_path / "file")
    wait_for(lambda: part.exists() and part.stat().st_size > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.running.set()
    size = part.stat().st_size
    assert 0 < size < len(CONTENT)
    assert not (tmp_path / "file").exists()
    download(server.url, tmp_path / "file", md5=MD5)
    assert server.requested_ranges() == [None, f"bytes={size}-"]
    assert leftovers(tmp_path) == ["file"]


def test_two_processes_share_one_download(server: Server, tmp_path: Path) -> None:
    server.running.clear()
    first = child(server, tmp_path / "file")
    wait_for(lambda: (tmp_path / "file.part").exists())
    second = child(server, tmp_path / "file")
    assert second.stderr is not None
    assert str(tmp_path / "file") in second.stderr.readline()  # the message of a process that waits for the lock
    server.running.set()
    for process in (first, second):
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert len(server.log) == 1


def test_full_disk_is_reported_and_the_partial_file_kept(server: Server, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    process = child(server, tmp_path / "file", before=limit)
    message, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 3, stderr
    assert os.strerror(errno.EFBIG) in message
    assert "on another disk" in message
    assert "PATCHWORD_CACHE" in message
    assert 0 < (tmp_path / "file.part").stat().st_size <= 100_000
    download(server.url, tmp_path / "file", md5=MD5)
    assert server.requested_ranges()[-1] is not None


def test_read_only_folder_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "read-only").mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root can write to read-only folders
    try:
        with pytest.raises(DataError, match=r"Permission denied.*PATCHWORD_CACHE"):
            download(server.url, tmp_path / "read-only/data/file", md5=MD5)
    finally:
        if root:
            os.seteuid(0)
