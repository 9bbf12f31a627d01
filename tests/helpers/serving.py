"""A real server for tests: `patchword serve` in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

TIMEOUT = 300  # seconds


def http_get(url: str, **options: Any) -> httpx.Response:
    """GET with a long timeout."""
    return httpx.get(url, **{"timeout": TIMEOUT, **options})


def http_post(url: str, **options: Any) -> httpx.Response:
    """POST with a long timeout."""
    return httpx.post(url, **{"timeout": TIMEOUT, **options})


class Server:
    """`patchword serve MODEL --port 0 ...`, its URL and its log."""

    def __init__(self, *arguments: object, port: int = 0, **environment: str) -> None:
        command = [sys.executable, "-m", "patchword", "serve", *map(str, arguments), "--port", str(port)]
        pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.url = ""
        self.thread = threading.Thread(target=self.read_log, daemon=True)
        self.thread.start()
        if not self.ready.wait(TIMEOUT) or not self.url:
            self.kill()
            raise AssertionError("the server did not become ready:\n" + "".join(self.lines))

    def read_log(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if '"event": "ready"' in line:
                self.url = json.loads(line)["url"]
                self.ready.set()
        self.ready.set()  # it has ended: nobody needs to wait any longer

    def events(self, kind: str) -> list[dict[str, object]]:
        """Log lines with this event."""
        rows = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [row for row in rows if row["event"] == kind]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join(TIMEOUT)
        assert self.process.stderr
        self.process.stderr.close()

    def worker_pid(self) -> int:
        """The process with the model: a child of the fork server, which is a child of the server."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(children).read_text().split():
            for grandchild in Path(f"/proc/{child}/task/{child}/children").read_text().split():
                return int(grandchild)
        raise AssertionError("no worker")

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels."""
        text = http_get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[Server]:
    """A server that is killed at the end."""
    server = Server(*arguments, **environment)
    try:
        yield server
    finally:
        server.kill()
