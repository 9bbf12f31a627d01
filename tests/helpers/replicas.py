"""Several servers behind HAProxy, as deploy/haproxy.cfg says, and clients that check every response."""

import csv
import io
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from helpers.serving import TIMEOUT, Server, http_get
from patchword.inference.classifier import Classifier

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
NO_HAPROXY = "HAProxy is not installed (apt-get install haproxy)"
CONFIG = Path(__file__).parents[2] / "deploy/haproxy.cfg"
MODEL = "patchword:cifar10"
OPTIONS = ("--num-threads", 1, "--queue-size", 64, "--drain-seconds", 5)
TOLERANCE = 1e-3  # of a probability, which depends a little on the other images of a batch
MAX_REQUESTS = 100_000  # of one client, in case nobody stops it


class Replicas:
    """Servers with the bundled model. Starting one takes seconds, so that tests share those that they do not end."""

    def __init__(self) -> None:
        self.servers: dict[tuple[object, ...], list[Server]] = {}

    def take(self, count: int, *options: object) -> list[Server]:
        """Return this many servers; those that are missing or have ended are started, at the same time."""
        alive = [server for server in self.servers.get(options, []) if server.process.poll() is None]
        with ThreadPoolExecutor(max(1, count - len(alive))) as pool:
            starts = [pool.submit(Server, MODEL, *options) for _ in range(count - len(alive))]
        self.servers.setdefault(options, []).extend(each.result() for each in starts if each.exception() is None)
        return (alive + [each.result() for each in starts])[:count]

    def close(self) -> None:
        """Kill all of them."""
        for servers in self.servers.values():
            for server in servers:
                server.kill()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Proxy:
    """HAProxy with deploy/haproxy.cfg in front of two servers.

    Args:
        folder: Where to put a copy of the file.
        servers: The replicas.
        retries: Whether it sends a failed request to another replica, as the file says.
    """

    def __init__(self, folder: Path, servers: list[Server], retries: bool = True) -> None:
        assert HAPROXY
        text = CONFIG.read_text()
        if not retries:
            assert text.count("    retries 2\n") == 1
            text = text.replace("    retries 2\n", "    retries 0\n")
        if os.geteuid():  # nobody but root can change the user
            text = text.replace("    user haproxy\n    group haproxy\n", "")
        path = folder / "haproxy.cfg"
        path.write_text(text)
        addresses = {"PATCHWORD_BIND": free_address(), "PATCHWORD_STATS": free_address()}
        for number, server in enumerate(servers, 1):
            addresses[f"PATCHWORD_REPLICA_{number}"] = server.url.removeprefix("http://")
        self.url, self.stats_url = (f"http://{addresses[name]}" for name in ("PATCHWORD_BIND", "PATCHWORD_STATS"))
        self.log = (folder / "haproxy.log").open("w")
        pipes: Any = {"stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen([HAPROXY, "-db", "-f", str(path)], env={**os.environ, **addresses}, **pipes)

    def rows(self) -> list[dict[str, str]]:
        """Statistics of the replicas, from HAProxy's CSV page."""
        text = http_get(f"{self.stats_url}/;csv").text.removeprefix("# ")
        table = csv.DictReader(io.StringIO(text))
        return [row for row in table if row["pxname"] == "patchword" and row["svname"].startswith("replica")]

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def wait_until_up(self, count: int) -> None:
        """Wait until this many replicas get requests."""
        for _ in range(20 * TIMEOUT):
            try:
                if (
                    sum(row["status"].startswith("UP") and row["check_status"] == "L7OK" for row in self.rows())
                    == count
                ):
                    return
            except httpx.TransportError:  # it is starting
                assert self.process.poll() is None, "HAProxy has ended"
            threading.Event().wait(0.05)
        raise AssertionError(f"not {count} replicas are up: {self.rows()}")

    def num_redispatched(self) -> int:
        """How many times a request was sent to another replica."""
        return sum(int(row["wredis"]) for row in self.rows())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@contextmanager
def proxied(folder: Path, servers: list[Server], retries: bool = True) -> Iterator[Proxy]:
    """HAProxy that has found all servers ready; it is killed at the end."""
    proxy = Proxy(folder, servers, retries)
    try:
        proxy.wait_until_up(len(servers))
        yield proxy
    finally:
        proxy.close()


def png(seed: int, size: int = 32, detail: int = 4) -> bytes:
    """A PNG of colored squares, or of noise if there are as many as pixels, which makes it large."""
    noise = np.random.default_rng(seed).integers(0, 256, (detail, detail, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((size, size), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class Answer:
    """What a client got; status 0 is a connection that failed.

    Attributes:
        image: Which image it had sent.
        status: Of the response.
        right: Whether the prediction is the one of this image.
    """

    image: int
    status: int
    right: bool


class Images:
    """Images and what the model predicts for them."""

    def __init__(self, count: int = 12) -> None:
        classifier = Classifier.load(MODEL)
        self.data = [png(seed) for seed in range(count)]
        self.expected = [classifier(data, top=1).scores[0] for data in self.data]
        assert len({round(each.probability, 2) for each in self.expected}) > count // 2, "a swapped response shows"

    def is_right(self, image: int, response: httpx.Response) -> bool:
        (result,) = response.json()["results"]
        best, expected = result["predictions"][0], self.expected[image]
        return best["index"] == expected.index and abs(best["probability"] - expected.probability) < TOLERANCE


class Load:
    """Clients that send one image after the other, until the end of the `with` block."""

    def __init__(self, url: str, images: Images, clients: int) -> None:
        self.url, self.images, self.answers = url, images, list[Answer]()
        self.stopping, self.changed = threading.Event(), threading.Condition()
        self.threads = [threading.Thread(target=self.send_all, args=(first,)) for first in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a client hangs"

    def send_all(self, first: int) -> None:
        """One client, on one connection for as long as that is kept open."""
        with httpx.Client(base_url=self.url, timeout=TIMEOUT) as client:
            for number in range(first, first + MAX_REQUESTS):
                if self.stopping.is_set():
                    return
                answer = self.send(client, number % len(self.images.data))
                with self.changed:
                    self.answers.append(answer)
                    self.changed.notify_all()

    def send(self, client: httpx.Client, image: int) -> Answer:
        try:
            response = client.post("/v1/predict?top=1", content=self.images.data[image])
        except httpx.TransportError:
            return Answer(image, 0, False)
        return Answer(
            image, response.status_code, response.status_code == 200 and self.images.is_right(image, response)
        )

    def wait_for(self, more: int) -> None:
        """Wait for this many more responses."""
        with self.changed:
            goal = len(self.answers) + more
            assert self.changed.wait_for(lambda: len(self.answers) >= goal, TIMEOUT), "the load hangs"

    def failures(self) -> list[Answer]:
        """Requests without a prediction, or with a wrong one."""
        return [answer for answer in self.answers if not answer.right]


def num_predicted(server: Server) -> int:
    """How many predictions a server has returned, by its log; exact after it has ended."""
    rows = server.events("request")
    return sum(row["path"] == "/v1/predict" and row["status"] == 200 for row in rows)
