"""A real server for tests: the command itself, in a process of its own, spoken to over a socket."""

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

PATIENCE = 300  # seconds that anything is waited for


def http_get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, **{"timeout": PATIENCE, **options})


def http_post(url: str, **options: Any) -> httpx.Response:
    return httpx.post(url, **{"timeout": PATIENCE, **options})


class Server:
    """`patchword serve MODEL --port 0 ...`, its address, and what it logged."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "patchword", "serve", *map(str, arguments), "--port", "0"]
        pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.url = ""
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()
        if not self.ready.wait(PATIENCE):
            self.end()
            raise AssertionError("the server did not get ready:\n" + "".join(self.lines))

    def listen(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if '"event": "ready"' in line:
                self.url = json.loads(line)["url"]
                self.ready.set()

    def events(self, kind: str) -> list[dict[str, object]]:
        rows = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [row for row in rows if row["event"] == kind]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join(PATIENCE)
        assert self.process.stderr
        self.process.stderr.close()

    def worker(self) -> int:
        """The process that has the model: a child of the fork server, which is a child of ours."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(children).read_text().split():
            for grandchild in Path(f"/proc/{child}/task/{child}/children").read_text().split():
                return int(grandchild)
        raise AssertionError("no worker")

    def meter(self, name: str) -> float:
        text = http_get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[Server]:
    server = Server(*arguments, **environment)
    try:
        yield server
    finally:
        server.end()
