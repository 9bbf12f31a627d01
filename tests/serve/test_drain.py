"""Draining: between SIGTERM and the end, the server still accepts requests but says that it wants none."""

import json
import signal
from pathlib import Path

import httpx
import pytest

from helpers.command import run
from helpers.model_zoo import VITS, make_checkpoint
from helpers.serving import TIMEOUT, Server, http_get, http_post, serving
from patchword.checkpoints import write_checkpoint

IMAGE = (Path(__file__).parents[1] / "fixtures/heic/tiles.heic").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drained") / "model"
    write_checkpoint(path, make_checkpoint(VITS["class"]))
    return path


def begin_to_drain(server: Server) -> None:
    """Send SIGTERM and wait until /readyz says so."""
    server.process.send_signal(signal.SIGTERM)
    for _ in range(10_000):
        if http_get(f"{server.url}/readyz").status_code == 503:
            return
    raise AssertionError("the server does not drain")


@pytest.mark.slow
def test_draining_server_accepts_requests(folder: Path) -> None:
    """For as long as it was asked to; every response closes its connection, so that none is cut off later."""
    with serving(folder, "--num-threads", 1, "--drain-seconds", 3600) as server:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT) as client:
            assert "connection" not in client.get("/readyz").headers
            begin_to_drain(server)
            response = client.post("/v1/predict?top=1", content=IMAGE)
            assert (response.status_code, response.headers["connection"]) == (200, "close")
        assert http_post(f"{server.url}/v1/predict", content=IMAGE).status_code == 200, "a new connection"
        ready = http_get(f"{server.url}/readyz")
        assert (ready.status_code, ready.json()) == (503, {"status": "not ready"})
        assert http_get(f"{server.url}/healthz").status_code == 200, "it is alive: nobody should restart it"
        assert [row["seconds"] for row in server.events("draining")] == [3600]
        assert server.events("stopping") == []
        server.stop(signal.SIGINT)  # ends it at once


@pytest.mark.slow
def test_drain_ends(folder: Path) -> None:
    with serving(folder, "--num-threads", 1, "--drain-seconds", 0.5) as server:
        assert server.stop() == 0
        server.thread.join(TIMEOUT)
        kinds = [json.loads(line)["event"] for line in server.lines if "/readyz" not in line]
        assert kinds == ["ready", "draining", "stopping"]


@pytest.mark.slow
def test_ctrl_c_does_not_drain(folder: Path) -> None:
    with serving(folder, "--num-threads", 1, "--drain-seconds", 3600) as server:
        server.stop(signal.SIGINT)
        server.thread.join(TIMEOUT)
        assert server.events("draining") == []
        assert len(server.events("stopping")) == 1


@pytest.mark.parametrize("seconds", [-1, 3601, "nan", "inf"])
def test_invalid_drain_seconds(seconds: object) -> None:
    result = run("serve", "patchword:cifar10", "--drain-seconds", seconds)
    assert result.returncode == 2
    assert "--drain-seconds" in result.stderr
    assert "Traceback" not in result.stderr
