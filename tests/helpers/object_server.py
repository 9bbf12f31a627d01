"""A real S3-compatible server (moto) in a process of its own, and a proxy that makes it fail like a real network."""

import contextlib
import http.client
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

BUCKET = "bucket"
# moto does not verify signatures, but only the owner may overwrite an object.
_CREDENTIAL = "Credential=user/20260101/us-east-1/s3/aws4_request"
_OWNER = {
    "Authorization": f"AWS4-HMAC-SHA256 {_CREDENTIAL}, SignedHeaders=host, Signature=0",
    "Content-Type": "application/octet-stream",
}
FAULTS = ("500", "503", "reset", "lost", "stall", "truncate", "conflict")


class ObjectServer:
    """moto, with one empty bucket. `environment` points obstore at it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()
        self.put("")

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None and time.monotonic() < end, "moto did not start"
            time.sleep(0.05)

    def put(self, key: str, data: bytes = b"") -> None:
        """Store an object; with "" as key, create the bucket."""
        address = f"{self.endpoint}/{BUCKET}/{quote(key)}".rstrip("/")
        urllib.request.urlopen(urllib.request.Request(address, data, _OWNER, method="PUT"), timeout=60).read()

    def get(self, key: str) -> bytes:
        address = f"{self.endpoint}/{BUCKET}/{quote(key)}"
        return bytes(urllib.request.urlopen(urllib.request.Request(address, headers=_OWNER), timeout=60).read())

    def stop(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def environment(endpoint: str, timeout: float = 60) -> dict[str, str]:
    """The variables with which obstore reads from `endpoint`; an operation takes at most `timeout` seconds."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "PATCHWORD_STORAGE_TIMEOUT": str(timeout),
    }


class FaultProxy(ThreadingHTTPServer):
    """Forwards requests to an object server; some of them fail.

    Args:
        upstream: The server.
        rates: The probability of each kind of fault: "500" and "503" are responses instead of the real one, "reset"
            closes the connection before the request reaches the server, "lost" afterwards, "stall" never responds,
            "truncate" breaks off in the body, and "conflict" is the 409 of two writers, though nothing was written.
        seed: Of the choice of requests.

    Attributes:
        script: Faults of the next requests ("" for none); before the random ones.
        log: Method, path and fault of each request.
        denied: Parts of paths; reading them is a 403. "" denies everything.
        denial: "400" for the response of S3 to a token that has expired.
        denials: How many of them follow, until access is allowed again; -1 for no end.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: ObjectServer, rates: Mapping[str, float] | None = None, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.rates, self.random = upstream, dict(rates or {}), random.Random(seed)
        assert set(self.rates) <= set(FAULTS)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.script: list[str] = []
        self.denied: list[str] = []
        self.denial, self.denials = "403", -1
        self.log: list[tuple[str, str, str]] = []
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def choose_fault(self, method: str, path: str, conditional: bool) -> str:
        with self.lock:
            if method in ("GET", "HEAD") and self.denials and any(part in path for part in self.denied):
                self.denials -= 1
                return self.denial
            fault = self.script.pop(0) if self.script else self._draw()
            if fault == "conflict" and not conditional:
                fault = ""
            self.log.append((method, path, fault))
        return fault

    def _draw(self) -> str:
        value = self.random.random()
        for fault, rate in self.rates.items():
            if value < rate:
                return fault
            value -= rate
        return ""

    def faults(self) -> Counter[str]:
        with self.lock:
            return Counter(fault for _, _, fault in self.log if fault)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""

    def stop(self) -> None:
        self.stopped.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.choose_fault(self.command, self.path, "If-None-Match" in self.headers)
        if fault == "stall":
            self.server.stopped.wait(60)
        if fault in ("stall", "reset"):
            return self.reset()
        if fault in ("403", "500", "503", "conflict"):
            return self.respond(409 if fault == "conflict" else int(fault), {}, b"")
        if fault == "400":
            return self.respond(400, {"Content-Type": "application/xml"}, _EXPIRED)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream.port, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            content = response.read()
        except OSError:  # the server is down
            return self.reset()
        finally:
            connection.close()
        if fault == "lost":
            return self.reset()
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
        self.respond(response.status, headers, content, truncate=fault == "truncate")

    def respond(self, status: int, headers: dict[str, str], content: bytes, truncate: bool = False) -> None:
        self.send_response_only(status)
        if self.command == "HEAD":
            content = b""
        else:
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if truncate else content)
        if truncate:
            self.reset()

    def reset(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815


_EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message><RequestId>1</RequestId></Error>"
)
_HOP_BY_HOP = {"connection", "transfer-encoding", "server", "date"}


@contextlib.contextmanager
def serve_objects() -> Iterator[ObjectServer]:
    """Run moto; skips where it is not installed."""
    pytest.importorskip("obstore", reason="object stores need the extra remote")
    pytest.importorskip("moto", reason="moto is not installed")
    server = ObjectServer()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def faulty(server: ObjectServer, rates: Mapping[str, float] | None = None, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a proxy in front of an object server."""
    proxy = FaultProxy(server, rates, seed)
    try:
        yield proxy
    finally:
        proxy.stop()
