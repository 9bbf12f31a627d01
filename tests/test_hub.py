"""Fetching models by name, against a real HTTP server on this machine that speaks the hub's few endpoints."""

import hashlib
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants, hf_hub_download, scan_cache_dir

from patchword.checkpoints import hub
from patchword.errors import HubError

REPO = "owner/vit"
WEIGHTS = "model.safetensors"
SMALL = random.Random(0).randbytes(100_000)


class Hub(ThreadingHTTPServer):
    """One repository with one commit, and ways to misbehave."""

    def __init__(self, handler: type["Handler"] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.commit = "1" * 40
        self.files: dict[str, bytes] = {"config.json": b'{"model_type": "vit"}', WEIGHTS: SMALL}
        self.wrong: dict[str, bytes] = {}  # sent in place of what the listing promises
        self.headers: dict[str, str] = {}  # sent with every file
        self.refusal: tuple[int, dict[str, str]] | None = None  # answers every question about the repository
        self.cuts: list[tuple[int, bool]] = []  # for the next downloads of weights: after how many bytes; with a reset?
        self.log: list[tuple[str, str, str | None]] = []  # method, file, Range
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self) -> None:
        if self.thread.is_alive():
            self.shutdown()
            self.thread.join()
            self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay quiet about clients that hang up."""

    def downloads(self) -> list[str]:
        return [name for method, name, _ in self.log if method == "GET"]

    def listing(self) -> dict[str, object]:
        siblings: list[dict[str, object]] = []
        for name, content in self.files.items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if not name.endswith(".json"):
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return {"id": REPO, "sha": self.commit, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Keep standard error clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.server.refusal:
            self.answer(*self.server.refusal, b"")
        elif path == f"/api/models/{REPO}/revision/main":
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(self.server.listing()).encode())
        elif path.startswith(f"/api/models/{REPO}/"):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif path.startswith(f"/{REPO}/resolve/{self.server.commit}/"):
            self.send_file(path.rpartition("/")[2])
        else:
            self.answer(404, {"X-Error-Code": "RepoNotFound"}, b"")

    def answer(self, status: int, headers: dict[str, str], body: bytes, send: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:send])

    def send_file(self, name: str) -> None:
        content, wanted = self.server.files[name], self.headers.get("Range")
        etag = hashlib.sha256(content).hexdigest() if not name.endswith(".json") else hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
        self.server.log.append((self.command, name, wanted))
        body, status = self.server.wrong.get(name, content), 200
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body, status = body[start:], 206
        cut, reset = None, False
        if self.command == "GET" and name == WEIGHTS and self.server.cuts:
            cut, reset = self.server.cuts.pop(0)
        self.answer(status, headers | self.server.headers, body, cut)
        if reset:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library as it is on a machine without settings of its own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setattr(constants, name, False)
    close_session()
    yield
    close_session()


@pytest.fixture
def server() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.stop()


def fetch(server: Hub, cache: Path, reference: str = f"hf:{REPO}") -> Path:
    return hub.fetch(reference, cache=cache, endpoint=server.endpoint)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_downloads_the_model_and_nothing_else(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # makes the library show its bars without a terminal
    model = {**server.files, "preprocessor_config.json": b"{}", "model.json": b"{}"}
    server.files = {**model, "README.md": b"#", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"other"}
    assert contents(fetch(server, tmp_path)) == model
    printed = capsys.readouterr()
    assert printed.out == "" and "100%" in printed.err


def test_second_call_needs_neither_download_nor_hash_nor_hub(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(server, tmp_path)
    server.log.clear()
    monkeypatch.setattr(hub, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch(server, tmp_path) == first
    assert server.log == []
    server.stop()
    assert fetch(server, tmp_path) == first
    assert fetch(server, tmp_path, f"hf:{REPO}@{server.commit}") == first
    assert not scan_cache_dir(tmp_path).warnings  # our seals do not disturb the library's own tools


def test_offline_mode(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(server, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(server, tmp_path) == folder
    with pytest.raises(HubError, match="not in the cache.*Unset HF_HUB_OFFLINE"):
        fetch(server, tmp_path / "empty")


def test_uses_and_checks_what_another_program_cached(server: Hub, tmp_path: Path) -> None:
    path = Path(hf_hub_download(REPO, WEIGHTS, revision=server.commit, cache_dir=tmp_path, endpoint=server.endpoint))
    server.stop()
    assert fetch(server, tmp_path, f"hf:{REPO}@{server.commit}") == path.parent
    path.resolve().write_bytes(b"rotten")
    with pytest.raises(HubError, match="damaged"):
        fetch(server, tmp_path, f"hf:{REPO}@{server.commit}")


def test_follows_a_branch(server: Hub, tmp_path: Path) -> None:
    old = fetch(server, tmp_path)
    server.commit, server.files[WEIGHTS] = "2" * 40, SMALL[::-1]
    new = fetch(server, tmp_path)
    server.stop()
    assert fetch(server, tmp_path) == new != old
    assert (new / WEIGHTS).read_bytes() == SMALL[::-1] and (old / WEIGHTS).read_bytes() == SMALL


def test_damaged_download_is_refused_and_forgotten(server: Hub, tmp_path: Path) -> None:
    server.wrong[WEIGHTS] = SMALL[:-1] + bytes([SMALL[-1] ^ 1])
    with pytest.raises(HubError, match=f"{WEIGHTS} arrived damaged"):
        fetch(server, tmp_path)
    assert not any(path.read_bytes() == server.wrong[WEIGHTS] for path in tmp_path.rglob("*") if path.is_file())
    server.wrong.clear()
    assert contents(fetch(server, tmp_path)) == server.files


def test_file_changed_in_the_cache_is_noticed(server: Hub, tmp_path: Path) -> None:
    (fetch(server, tmp_path) / WEIGHTS).resolve().write_bytes(SMALL[::-1])
    with pytest.raises(HubError, match="damaged"):
        fetch(server, tmp_path)
    assert contents(fetch(server, tmp_path)) == server.files


def test_cut_connection_is_resumed(server: Hub, tmp_path: Path) -> None:
    chunk = constants.DOWNLOAD_CHUNK_SIZE  # the library keeps whole chunks only
    server.files[WEIGHTS] = random.Random(1).randbytes(chunk + 2_000_000)
    server.cuts = [(chunk + 1_000_000, False)]
    assert contents(fetch(server, tmp_path)) == server.files
    assert server.log[-1] == ("GET", WEIGHTS, f"bytes={chunk}-")


@pytest.mark.parametrize("cuts", [[(50_000, True)], [(0, False)] * 6], ids=["reset once", "cut six times"])
def test_lost_connection_is_an_error_and_the_next_call_succeeds(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    server.cuts = list(cuts)
    with pytest.raises(HubError, match=f"Could not get {REPO} from {server.endpoint}"):
        fetch(server, tmp_path)
    assert server.cuts == []
    assert contents(fetch(server, tmp_path)) == server.files


def test_unreachable_hub(server: Hub, tmp_path: Path) -> None:
    server.stop()
    with pytest.raises(HubError, match=f"Could not get {REPO} from {server.endpoint}.*HF_ENDPOINT.*HF_HUB_OFFLINE"):
        fetch(server, tmp_path)


def test_silent_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(HubError, match="ReadTimeout"):
        hub.fetch(f"hf:{REPO}", cache=tmp_path, endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}")


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, f"shows no model {REPO}"),
        (404, {}, f"shows no model {REPO}"),
        (401, {}, f"shows no model {REPO}.*HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, f"{REPO} is gated.*HF_TOKEN"),
        (503, {}, f"Could not get {REPO}.*503"),
        (200, {"Content-Type": "text/html"}, f"Could not get {REPO}.*JSON"),
    ],
)
def test_refusals(server: Hub, tmp_path: Path, status: int, headers: dict[str, str], message: str) -> None:
    server.refusal = status, headers
    with pytest.raises(HubError, match=message):
        fetch(server, tmp_path)


def test_names_that_are_not_there(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="shows no model owner/vti"):
        fetch(server, tmp_path, "hf:owner/vti")
    with pytest.raises(HubError, match=f"{REPO} at .* has no revision 'v9'"):
        fetch(server, tmp_path, f"hf:{REPO}@v9")


@pytest.mark.parametrize(
    "reference",
    ["hf:", "hf:vit", "owner/vit", "hf:owner/vit/x", "hf:owner/vit@", "hf:a/b@../../etc", "hf:a b/c", "hf:-a/b--c"],
)
def test_malformed_references(reference: str, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="Write hf:google/vit-base-patch16-224"):
        hub.fetch(reference, cache=tmp_path)


SHARDS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
INDEX = {"model.safetensors.index.json": b"{}"}


@pytest.mark.parametrize(
    "files",
    [{**INDEX, **SHARDS}, {"vit.safetensors": b"s"}, {"pytorch_model.bin": b"b"}, {"v.pth": b"p"}, {"v.npz": b"n"}],
    ids=["shards", "other name", "bin", "pth", "npz"],
)
def test_other_kinds_of_weights(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    server.files = files
    assert contents(fetch(server, tmp_path)) == files
    server.stop()
    assert contents(fetch(server, tmp_path)) == files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.npz": b"a", "b.npz": b"b"}, "several models"),
        ({"tf_model.h5": b"h", "onnx/vit.safetensors": b"o"}, "no weights that patchword reads"),
        (SHARDS, "only a part"),
        ({**INDEX, "model-00002-of-00002.safetensors": b"two"}, "only a part"),
    ],
)
def test_repositories_that_are_no_model(server: Hub, tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    server.files = files
    with pytest.raises(HubError, match=message):
        fetch(server, tmp_path)
    assert server.downloads() == []


def test_mirror_that_repeats_xet_headers_is_read_plainly(server: Hub, tmp_path: Path) -> None:
    server.headers = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{server.endpoint}/api/xet"}
    assert contents(fetch(server, tmp_path)) == server.files


def test_cache_that_cannot_be_written(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match="Could not store"):
        fetch(server, tmp_path / "file")
