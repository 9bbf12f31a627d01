"""A local HTTP server with the endpoints of a model hub that downloads need."""

import hashlib
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

REPO = "owner/vit"
WEIGHTS = "model.safetensors"
SMALL = random.Random(0).randbytes(100_000)


class Hub(ThreadingHTTPServer):
    """One repository with one commit; attributes make the server misbehave."""

    def __init__(self, handler: type["Handler"] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.commit = "1" * 40
        self.files: dict[str, bytes] = {"config.json": b'{"model_type": "vit"}', WEIGHTS: SMALL}
        self.wrong: dict[str, bytes] = {}  # sent instead of the listed content
        self.headers: dict[str, str] = {}  # sent with every file
        self.refusal: tuple[int, dict[str, str]] | None = (
            None  # status and headers of every response about the repository
        )
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
        """Ignore clients that disconnect."""

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
            self.respond(*self.server.refusal, b"")
        elif path == f"/api/models/{REPO}/revision/main":
            self.respond(200, {"Content-Type": "application/json"}, json.dumps(self.server.listing()).encode())
        elif path.startswith(f"/api/models/{REPO}/"):
            self.respond(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif path.startswith(f"/{REPO}/resolve/{self.server.commit}/"):
            self.send_file(path.rpartition("/")[2])
        else:
            self.respond(404, {"X-Error-Code": "RepoNotFound"}, b"")

    def respond(self, status: int, headers: dict[str, str], body: bytes, send: int | None = None) -> None:
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
        self.respond(status, headers | self.server.headers, body, cut)
        if reset:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset huggingface_hub to its default settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setattr(constants, name, False)
    close_session()
    yield
    close_session()
