"""Two replicas behind HAProxy: what a stopped, a killed and a full replica cost the clients."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from helpers.replicas import (
    HAPROXY,
    NO_HAPROXY,
    OPTIONS,
    Images,
    Load,
    Replicas,
    num_predicted,
    png,
    proxied,
)
from helpers.serving import TIMEOUT, Server, http_get, http_post

pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAPROXY is None, reason=NO_HAPROXY)]

BUFFER = 2**20  # tune.bufsize: HAProxy can repeat what fits into it


@pytest.fixture(scope="module")
def images() -> Images:
    return Images()


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    started = Replicas()
    yield started
    started.close()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(20 * TIMEOUT):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it does not happen")


def in_flight(server: Server) -> float:
    return server.metric("patchword_images_in_flight")


def suspend_model(server: Server) -> int:
    """Suspend the process with the model, so that requests wait; return its pid."""
    worker = server.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    return worker


def predict(url: str, data: bytes) -> httpx.Response:
    return http_post(f"{url}/v1/predict?top=1", content=data)


def send_until_one_waits(
    pool: ThreadPoolExecutor, url: str, data: bytes, server: Server
) -> list[Future[httpx.Response]]:
    """Send a request again until this server has it; its model is suspended, that of the other one is not."""
    sent: list[Future[httpx.Response]] = []
    while not in_flight(server):
        sent.append(pool.submit(predict, url, data))
        wait_until(lambda: sent[-1].done() or in_flight(server) == 1)
    return sent


def test_sigterm_loses_nothing(tmp_path: Path, replicas: Replicas, images: Images) -> None:
    """Even without retries: HAProxy stops sending before the server stops accepting."""
    first, second = replicas.take(2, *OPTIONS)
    before = num_predicted(second)
    with proxied(tmp_path, [first, second], retries=False) as proxy:
        with Load(proxy.url, images, clients=6) as load:
            load.wait_for(60)
            assert first.stop() == 0
            load.wait_for(60)
        assert load.failures() == []
        proxy.wait_until_up(1)
        first.thread.join(TIMEOUT)
        wait_until(lambda: num_predicted(first) + num_predicted(second) - before == len(load.answers))  # each once
        assert num_predicted(first)
        assert num_predicted(second) > before
        kinds = [row["event"] for row in first.events("draining") + first.events("stopping")]
        assert kinds == ["draining", "stopping"]


def test_sigkill_loses_only_a_large_request_in_flight(tmp_path: Path, replicas: Replicas, images: Images) -> None:
    """Small requests that were in flight are repeated; one that exceeds HAProxy's buffer gets 502."""
    large = png(0, size=700, detail=700)
    assert len(large) > BUFFER
    first, second = replicas.take(2, *OPTIONS)
    with proxied(tmp_path, [first, second]) as proxy:
        assert predict(proxy.url, large).status_code == 200
        worker = suspend_model(first)
        with ThreadPoolExecutor() as pool:
            sent = send_until_one_waits(pool, proxy.url, large, first)
            with Load(proxy.url, images, clients=6) as load:
                wait_until(lambda: in_flight(first) >= 3)
                first.process.kill()
                os.kill(worker, signal.SIGKILL)
                load.wait_for(60)
        responses = [each.result() for each in sent]
        assert load.failures() == []
        assert proxy.num_redispatched() >= 2
        (lost,) = [each for each in responses if each.status_code != 200]
        assert lost.status_code == 502
        assert lost.headers["content-type"] == "application/problem+json"
        assert lost.json()["code"] == "bad_gateway"


def test_refused_requests_go_to_another_replica(tmp_path: Path, replicas: Replicas, images: Images) -> None:
    """The first replica is full (one image), and the balancer always tries it first, because the other one has more."""
    (full,), (free,) = replicas.take(1, "--num-threads", 1, "--queue-size", 1), replicas.take(1, *OPTIONS)
    with proxied(tmp_path, [full, free]) as proxy:
        workers = [suspend_model(full), suspend_model(free)]
        with ThreadPoolExecutor(12) as pool:
            sent = send_until_one_waits(pool, proxy.url, images.data[0], full)
            before = in_flight(free)
            sent += [pool.submit(predict, proxy.url, images.data[0]) for _ in range(8)]
            wait_until(lambda: in_flight(free) == before + 8)
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
        assert [each.status_code for each in (future.result() for future in sent)] == [200] * len(sent)
        assert all(images.is_right(0, each.result()) for each in sent)
        assert full.metric("patchword_requests_rejected_total") >= 1
        assert proxy.num_redispatched() >= 1


def test_limits_of_the_proxy(tmp_path: Path, replicas: Replicas, images: Images) -> None:
    """What must not reach a replica, and what clients see without any."""
    (only,) = replicas.take(1, *OPTIONS)
    with proxied(tmp_path, [only]) as proxy:
        for path in ("/metrics", "/readyz", "/healthz"):
            assert http_get(proxy.url + path).status_code == 404, path
        assert http_get(f"{proxy.url}/v1/model").status_code == 200
        with socket.create_connection(proxy.address, timeout=TIMEOUT) as client:
            head = f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {32 * 2**20 + 1}\r\n\r\n"
            client.sendall(head.encode())
            assert client.recv(12) == b"HTTP/1.1 413", "before the body"
        given = http_post(f"{proxy.url}/v1/predict", content=images.data[0], headers={"X-Request-ID": "abc-1"})
        assert given.headers["x-request-id"] == given.json()["request_id"] == "abc-1"
        assert predict(proxy.url, images.data[0]).headers["x-request-id"]
        only.process.kill()
        proxy.wait_until_up(0)
        refused = predict(proxy.url, images.data[0])
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["code"] == "unavailable"
