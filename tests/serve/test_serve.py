"""The server over a real socket: results, limits, load and failures."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from helpers.command import run
from helpers.model_zoo import RESNETS, VITS, make_checkpoint
from helpers.serving import TIMEOUT, Server, http_get, http_post, serving
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.inference.classifier import Classifier
from patchword.inspection import head_attention
from patchword.inspection.capture import attention_maps
from patchword.serve import create_app
from patchword.serve.batcher import Batcher
from patchword.serve.limits import Limits
from patchword.serve.service import Service

RNG = np.random.default_rng(0)


def png(size: tuple[int, int] = (40, 50), seed: int | None = None) -> bytes:
    noise = np.random.default_rng(seed) if seed is not None else RNG
    file = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    write_checkpoint(path, make_checkpoint(VITS["registers"]))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--queue-size", 64, "--num-threads", 1) as running:
        yield running


def post(server: Server, path: str, data: bytes, kind: str = "image/png", **options: Any) -> httpx.Response:
    return http_post(f"{server.url}{path}", content=data, headers={"Content-Type": kind}, **options)


# Results


@pytest.mark.slow
def test_predictions_match_the_classifier(server: Server, folder: Path) -> None:
    data = png()
    expected = Classifier.load(folder)(data, top=3)
    raw = post(server, "/v1/predict?top=3", data).json()
    form = http_post(f"{server.url}/v1/predict?top=3", files={"file": ("cat.png", data, "image/png")}).json()
    as_json = http_post(f"{server.url}/v1/predict?top=3", json={"image": base64.b64encode(data).decode()}).json()
    for body in (raw, form, as_json):
        (result,) = body["results"]
        assert [s["label"] for s in result["predictions"]] == [s.label for s in expected.scores]
        found = [s["probability"] for s in result["predictions"]]
        np.testing.assert_allclose(found, [s.probability for s in expected.scores], rtol=1e-4)
    assert form["results"][0]["name"] == "cat.png"


def test_unreadable_image_among_others(server: Server) -> None:
    files = [("file", ("a.png", png())), ("file", ("b.png", b"\x89PNG broken")), ("file", ("c.png", png()))]
    response = http_post(f"{server.url}/v1/predict", files=files)
    names = [(r["name"], "error" in r) for r in response.json()["results"]]
    assert response.status_code == 200
    assert names == [("a.png", False), ("b.png", True), ("c.png", False)]
    assert [r.get("code") for r in response.json()["results"]] == [None, "image_unsupported", None]


def test_heic_and_avif(server: Server, folder: Path) -> None:
    avif = io.BytesIO()
    Image.open(io.BytesIO(png(seed=1))).save(avif, "AVIF")
    heic = (Path(__file__).parents[1] / "fixtures/heic/tiles.heic").read_bytes()
    for data, kind in ((avif.getvalue(), "image/avif"), (heic, "image/heic")):
        (result,) = post(server, "/v1/predict?top=1", data, kind).json()["results"]
        assert result["predictions"][0]["label"] == Classifier.load(folder)(data).label


def test_explanations(server: Server, folder: Path) -> None:
    data = png((60, 90))
    result = post(server, "/v1/predict?explain=true", data).json()["results"][0]
    explanation = result["explanation"]
    assert explanation["index"] == result["predictions"][0]["index"]
    assert explanation["method"] == "relevance"
    assert np.shape(explanation["map"]) == (4, 9)
    assert np.max(explanation["map"]) == 1
    with Image.open(io.BytesIO(base64.b64decode(explanation["png"]))) as drawn:
        assert drawn.size == (90, 60)
    left, top, right, bottom = explanation["box"]
    assert 0 <= left < right <= 1
    assert 0 <= top < bottom <= 1
    explanation = post(server, "/v1/explain?label=2&method=rollout", data).json()["results"][0]["explanation"]
    assert explanation["method"] == "rollout"
    assert explanation["index"] is None, "its map is the same for all classes"
    classifier = Classifier.load(folder)
    images = classifier.preprocess.normalize(classifier.pixels(data)[None])
    from patchword.inspection import rollout
    from patchword.plots.overlay import scale_to_unit

    np.testing.assert_allclose(
        explanation["map"], scale_to_unit(rollout(classifier.model, images)[0].numpy()), atol=2e-4
    )  # type: ignore


def test_attention_and_features(server: Server, folder: Path) -> None:
    data = png()
    classifier = Classifier.load(folder)
    images = classifier.preprocess.normalize(classifier.pixels(data)[None])
    body = post(server, "/v1/attention?layer=-1&head=2", data).json()["results"][0]["attention"]
    tokens = body["rows"] * body["columns"] + body["prefix"]
    values = np.frombuffer(base64.b64decode(body["values"]), np.uint8).reshape(tokens + 1, tokens)
    weights = attention_maps(classifier.model, images, [2])[2][0, 2].detach().numpy()  # type: ignore[arg-type]
    prefix = body["prefix"]
    expected = weights[:, prefix:] / weights[:, prefix:].max(axis=1, keepdims=True)
    np.testing.assert_allclose(values[:-1, prefix:] / 255, expected, atol=0.01)
    read = head_attention(classifier.model, images)[0, 2, 2].flatten().numpy()  # type: ignore[arg-type]
    np.testing.assert_allclose(values[-1, prefix:] / 255, read / read.max(), atol=0.01)
    features = post(server, "/v1/embed", data).json()["results"][0]["features"]
    embedding = classifier.model.embed_images(images)[0].detach().numpy()
    np.testing.assert_allclose(features, embedding, rtol=1e-3, atol=1e-4)


def test_model_info_health_and_metrics(server: Server) -> None:
    info = http_get(f"{server.url}/v1/model").json()
    assert info["labels"][0] == "class 0, also <0>"
    assert info["grid"] == [4, 9]
    assert info["layers"] == 3
    assert http_get(f"{server.url}/healthz").status_code == http_get(f"{server.url}/readyz").status_code == 200
    assert server.metric("patchword_requests_total") > 0
    document = http_get(f"{server.url}/v1/openapi.json").json()
    assert {"/v1/predict", "/v1/explain", "/v1/attention", "/v1/embed", "/v1/model"} <= set(document["paths"])


def test_page_and_security_headers(server: Server) -> None:
    for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
        response = http_get(server.url + path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(kind)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in response.headers
    own = http_get(f"{server.url}/healthz", headers={"X-Request-ID": "abc-1"})
    forged = http_get(f"{server.url}/healthz", headers={"X-Request-ID": "a b\t{}"})
    assert own.headers["x-request-id"] == "abc-1"
    assert len(forged.headers["x-request-id"]) == 32


# Errors


def check_problem(response: httpx.Response, status: int, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert body["title"]
    assert body["request_id"]
    assert body["code"] == code if code else body["code"].isidentifier()
    return str(body["detail"])


def test_error_codes(server: Server) -> None:
    image = png()
    check_problem(post(server, "/v1/predict", b""), 422, "no_image")
    check_problem(post(server, "/v1/predict", image[:100]), 422, "image_damaged")
    check_problem(post(server, "/v1/predict", b"<svg/>", "text/html"), 415, "unsupported_media_type")
    check_problem(post(server, "/v1/predict", b"{", "application/json"), 400, "invalid_json")
    check_problem(http_post(f"{server.url}/v1/predict", json={"image": "?"}), 422, "invalid_base64")
    assert "32 MiB" in check_problem(post(server, "/v1/predict", b"x" * (32 * 2**20 + 1)), 413, "request_too_large")
    for count in (17, 18, 40):
        many = [("file", (f"{i}.png", image)) for i in range(count)]
        assert "16" in check_problem(http_post(f"{server.url}/v1/predict", files=many), 422, "too_many_images")
    assert http_post(f"{server.url}/v1/predict", files=many[:16]).status_code == 200
    form = "multipart/form-data; boundary=x"
    check_problem(
        post(server, "/v1/predict", b"--x\r\nContent-Disposition: form-data\r\n\r\n", form), 400, "invalid_form"
    )
    assert "top" in check_problem(post(server, "/v1/predict?top=0", image), 422, "invalid_parameter")
    check_problem(post(server, "/v1/explain?label=dog", image), 422, "unknown_class")
    assert "relevance" in check_problem(post(server, "/v1/explain?method=magic", image), 422, "invalid_parameter")
    assert "0 to 2" in check_problem(post(server, "/v1/attention?layer=3", image), 422, "invalid_parameter")
    check_problem(http_get(f"{server.url}/v1/unknown"), 404, "not_found")
    check_problem(http_get(f"{server.url}/v1/predict"), 405, "method_not_allowed")
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    body = check_problem(post(server, "/v1/predict", bomb.getvalue()), 422, "image_too_large")
    assert f"{Limits().max_pixels:,}" in body
    assert "max_pixels" not in body, "a Python argument, which clients cannot set"
    two = [("file", ("a.png", b"")), ("file", ("b.png", b"x"))]
    check_problem(http_post(f"{server.url}/v1/predict", files=two), 422, "unreadable_image")


@pytest.mark.slow
def test_token(folder: Path) -> None:
    with serving(folder, "--num-threads", 1, PATCHWORD_TOKEN="s3cret") as locked:
        check_problem(http_get(f"{locked.url}/v1/model"), 401, "unauthorized")
        check_problem(http_get(f"{locked.url}/v1/model", headers={"Authorization": "Bearer wrong"}), 401)
        right = {"Authorization": "Bearer s3cret"}
        assert http_get(f"{locked.url}/v1/model", headers=right).status_code == 200
        assert http_get(f"{locked.url}/healthz").status_code == http_get(locked.url).status_code == 200


@pytest.mark.slow
def test_invalid_ports_exit_with_2(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", folder, "--port", port)
    assert result.returncode == 2
    assert f"127.0.0.1:{port} " in result.stderr
    assert "--port" in result.stderr
    assert "Traceback" not in result.stderr
    assert run("serve", folder, "--port", 70000).returncode == 2


FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\\ud800.png"\r\n\r\n%s\r\n--x--\r\n'
truncated = st.builds(lambda cut: png(seed=1)[:cut], st.integers(0, 3000))
bodies = st.one_of(st.binary(max_size=200), truncated, truncated.map(lambda data: FORM % data))
forms = [f"multipart/form-data; boundary=x{rest}" for rest in ("", "; charset=undefined", "; charset=unicode_escape")]
kinds = st.sampled_from(["image/png", "application/json", *forms, "multipart/form-data", "", "a"])
paths = st.sampled_from(
    ["/v1/predict", "/v1/explain?label=1", "/v1/attention?layer=1", "/v1/embed", "/v1/predict?top=x"]
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies, kind=kinds, path=paths)
def test_no_body_causes_an_internal_error(server: Server, body: bytes, kind: str, path: str) -> None:
    response = post(server, path, body, kind)
    assert response.status_code in (200, 400, 415, 422), response.text


# Load and failures


@contextmanager
def paused_worker(server: Server) -> Iterator[None]:
    """Suspend the model's process, so that requests must wait."""
    worker = server.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        time.sleep(0.02)


@pytest.mark.slow
def test_batched_results_belong_to_their_images(server: Server, folder: Path) -> None:
    """48 different images at once, most of which must share a batch: each gets its own result."""
    images = [png((30, 30), seed=i) for i in range(48)]
    classifier = Classifier.load(folder)
    expected = [classifier(p, top=1).scores[0] for p in images]
    before = server.metric("patchword_batch_images_count")
    with ThreadPoolExecutor(48) as pool:
        with paused_worker(server):
            waiting = [pool.submit(post, server, "/v1/predict?top=1", data) for data in images]
            wait_until(lambda: server.metric("patchword_images_in_flight") == 48)
        for each, score in zip(waiting, expected, strict=True):
            found = each.result().json()["results"][0]["predictions"][0]
            assert found["index"] == score.index
            assert found["probability"] == pytest.approx(score.probability, rel=1e-4)
    assert server.metric("patchword_batch_images_count") - before <= 6, "they were not batched"
    assert server.metric("patchword_images_in_flight") == 0


def send_and_disconnect(server: Server, data: bytes, count: int) -> None:
    """Send requests that are accepted, and disconnect before the response."""
    head = f"POST /v1/explain HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(data)}\r\n\r\n"
    with contextlib.ExitStack() as connections:
        for _ in range(count):
            address = "127.0.0.1", int(server.url.rpartition(":")[2])
            connections.enter_context(socket.create_connection(address)).sendall(head.encode() + data)
        wait_until(lambda: server.metric("patchword_images_in_flight") == count)
    wait_until(lambda: server.metric("patchword_images_in_flight") == 0)


def test_abandoned_images_are_not_computed(server: Server) -> None:
    """Two groups of clients disconnect; the third gets responses, and nothing is computed for the others."""
    data = png((30, 30))
    before = server.metric("patchword_batch_images_sum")
    with ThreadPoolExecutor(24) as pool:
        with paused_worker(server):
            for _ in range(2):
                send_and_disconnect(server, data, 24)
            third = [pool.submit(post, server, "/v1/explain", data) for _ in range(20)]
            wait_until(lambda: server.metric("patchword_images_in_flight") == 20)
        assert [each.result().status_code for each in third] == [200] * 20
    computed = server.metric("patchword_batch_images_sum") - before
    # An explanation needs two computations, prediction and heatmap; one abandoned batch of 16 may be in flight.
    assert 40 <= computed <= 40 + 16, "abandoned images were computed"


@pytest.mark.slow
def test_full_queue_rejects_at_once(server: Server) -> None:
    data = png((30, 30))
    with ThreadPoolExecutor(64) as pool:
        with paused_worker(server):
            waiting = [pool.submit(post, server, "/v1/predict", data) for _ in range(64)]
            wait_until(lambda: server.metric("patchword_images_in_flight") == 64)
            rejected = post(server, "/v1/predict", data)
            assert rejected.headers["retry-after"] == "1"
            assert "64 images" in check_problem(rejected, 503, "unavailable")
        assert {each.result().status_code for each in waiting} == {200}
    assert post(server, "/v1/predict", data).status_code == 200


def test_killed_worker_loses_only_its_batch(server: Server) -> None:
    """Two requests that cannot share a batch, and a kill while the model usually computes one of them."""
    data, codes, kills = png(), [200, 200], 0
    before = server.metric("patchword_worker_restarts_total")
    while codes == [200, 200]:  # the kill came before the model started either
        assert kills < 100, "no kill hit a batch"
        kills += 1
        with ThreadPoolExecutor(2) as pool:
            worker = server.worker_pid()
            os.kill(worker, signal.SIGSTOP)
            responses = [pool.submit(post, server, path, data) for path in ("/v1/predict", "/v1/embed")]
            wait_until(lambda: server.metric("patchword_images_in_flight") == 2)
            os.kill(worker, signal.SIGKILL)
            codes = sorted(each.result().status_code for each in responses)
    assert codes == [200, 503]
    os.kill(server.worker_pid(), signal.SIGKILL)  # an idle worker: no request fails
    assert post(server, "/v1/predict", data).status_code == 200
    assert server.metric("patchword_worker_restarts_total") == before + kills + 1


@pytest.mark.slow
def test_int8_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predictions, also after its process was killed, without building its file again."""
    data, cached_files = png(), tmp_path / "engines/files"
    monkeypatch.setenv("PATCHWORD_CACHE", str(tmp_path))
    with serving(folder, "--engine", "onnx-int8", "--num-threads", 1) as server:
        assert http_get(f"{server.url}/v1/model").json()["engine"] == "onnx-int8"
        expected, exact = Classifier.load(folder, "onnx-int8")(data), Classifier.load(folder)(data)
        assert abs(expected.probability - exact.probability) > 1e-5, "int8 differs from fp32"
        assert len(list(cached_files.iterdir())) == 1
        shutil.rmtree(cached_files)
        for _ in range(2):
            (result,) = post(server, "/v1/predict?explain=true", data).json()["results"]
            best = result["predictions"][0]
            assert best["label"] == expected.label
            assert abs(best["probability"] - expected.probability) < 1e-6
            assert result["explanation"]["index"] == best["index"]
            os.kill(server.worker_pid(), signal.SIGKILL)
        assert post(server, "/v1/predict", data).status_code == 200
    assert not cached_files.exists()


def refuses_connections(server: Server) -> bool:
    try:
        http_get(f"{server.url}/healthz")
    except httpx.TransportError:
        return True
    return False


@pytest.mark.slow
def test_sigterm_finishes_accepted_requests(folder: Path) -> None:
    """The model is suspended while the signal arrives: waiting requests get a response, new ones are rejected."""
    with serving(folder, "--num-threads", 1) as stopping:
        with ThreadPoolExecutor(12) as pool:
            worker = stopping.worker_pid()
            os.kill(worker, signal.SIGSTOP)
            waiting = [pool.submit(post, stopping, "/v1/predict", png((30, 30), seed=i)) for i in range(12)]
            wait_until(lambda: stopping.metric("patchword_images_in_flight") == 12)
            stopping.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses_connections(stopping))
            os.kill(worker, signal.SIGCONT)
            assert [each.result().status_code for each in waiting] == [200] * 12
        assert stopping.process.wait(TIMEOUT) == 0
        assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.3, 2.5, 4.0])
def test_sigterm_during_startup(folder: Path, after: float) -> None:
    """A service manager signals the whole process group at any time: it exits cleanly and without a traceback."""
    command = [sys.executable, "-m", "patchword", "serve", str(folder), "--port", "0"]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGTERM)
    body = process.communicate(timeout=TIMEOUT)[1]
    assert "Traceback" not in body
    assert "Error" not in body
    assert process.returncode in (0, -signal.SIGTERM), "before Python has started, the signal kills it"


def test_unknown_parameters_and_paths(server: Server) -> None:
    body = check_problem(post(server, "/v1/predict?topk=3", png()), 422, "unknown_parameter")
    assert "'topk'" in body
    assert "explain, index, label, method, top" in body
    assert "/v1/openapi.json" in check_problem(http_get(f"{server.url}/v2"), 404)
    assert "POST" in check_problem(http_get(f"{server.url}/v1/predict"), 405)


@pytest.mark.slow
def test_slow_headers_and_invalid_requests(server: Server) -> None:
    """Incomplete headers, first or second on a connection, are cut off after seconds; all logs are JSON."""
    port = int(server.url.rpartition(":")[2])
    first, second, invalid = (socket.create_connection(("127.0.0.1", port)) for _ in range(3))
    with first, second, invalid:
        invalid.sendall(b"x\r\n\r\n")
        first.sendall(b"GET /hea")
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        body = b""
        while b"alive" not in body:
            body += second.recv(4096)
        second.sendall(b"G")
        for each in (first, second):
            each.settimeout(TIMEOUT)
            assert each.recv(4096) == b"", "the connection was closed"
    wait_until(lambda: any("Invalid HTTP" in str(row.get("detail")) for row in server.events("library")))
    assert [line for line in server.lines if not line.startswith("{")] == [], "all lines of standard error are JSON"


@pytest.mark.slow
def test_labels_that_look_like_indices(tmp_path: Path) -> None:
    """Labels may be numbers in another order: index= means the index, label= the name."""
    labels = tuple(sorted(str(i) for i in range(5)))
    checkpoint = dataclasses.replace(make_checkpoint(VITS["class"]), labels=(*labels[:2], "4", "3", "2"))
    write_checkpoint(tmp_path / "model", checkpoint)
    with serving(tmp_path / "model", "--num-threads", 1) as each:
        for query, index in (("index=2", 2), ("label=2", 4)):
            explanation = post(each, f"/v1/explain?{query}", png()).json()["results"][0]["explanation"]
            assert explanation["index"] == index
            assert explanation["label"] == checkpoint.labels[index]
        explanation = post(each, "/v1/explain?index=1&method=rollout", png()).json()["results"][0]["explanation"]
        assert explanation["label"] is None
        assert explanation["index"] is None
        check_problem(post(each, "/v1/explain?index=9", png()), 422)
        check_problem(post(each, "/v1/predict?method=rollout", png()), 422)


@pytest.mark.slow
def test_hanging_worker_is_replaced(folder: Path) -> None:
    limits = Limits(response_timeout=1.0)
    with TestClient(create_app(str(folder), limits, num_threads=1, log=io.StringIO())) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        os.kill(service.worker.process.pid, signal.SIGSTOP)
        assert client.post("/v1/predict", content=png()).status_code in (503, 504)
        wait_until(lambda: client.post("/v1/predict", content=png()).status_code == 200)


@pytest.mark.slow
def test_empty_token_is_rejected(folder: Path) -> None:
    result = run("serve", folder, "--port", 0, PATCHWORD_TOKEN="")
    assert result.returncode == 2
    assert "PATCHWORD_TOKEN" in result.stderr


def test_slow_clients_do_not_block_others(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    slow = []
    for _ in range(50):
        each = socket.create_connection((host, int(port)))
        each.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        slow.append(each)
    assert post(server, "/v1/predict", png()).status_code == 200
    for each in slow:
        each.close()


KINDS = {"probe": VITS["probe"], "hybrid": VITS["hybrid"], "gray": VITS["gray"], "ResNet": RESNETS["ResNet"]}


@pytest.mark.slow
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())
def test_every_architecture_is_served(config: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_checkpoint(config))
    with serving(tmp_path / "model", "--num-threads", 1) as each:
        for path in ("/v1/predict?explain=true", "/v1/embed"):
            assert post(each, path, png()).status_code == 200
        code = 422 if config is RESNETS["ResNet"] else 200
        assert post(each, "/v1/attention", png()).status_code == code


ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy/patchword.service").read_text()


def documented_commands() -> dict[str, list[str]]:
    """The command lines of the Dockerfile and of the systemd unit."""
    entry, rest = (json.loads(re.search(rf"^{word} (.*)$", DOCKERFILE, re.M)[1]) for word in ("ENTRYPOINT", "CMD"))  # type: ignore[index]
    unit = re.search(r"^ExecStart=(.*)$", UNIT, re.M)[1].split()  # type: ignore[index]
    return {"container": [*entry, *rest], "systemd": unit}


@pytest.mark.slow
@pytest.mark.parametrize("deployment", ["container", "systemd"])
def test_documented_command_lines(deployment: str, folder: Path) -> None:
    program, serve, model, *options = documented_commands()[deployment]
    assert Path(program).name == "patchword"
    assert serve == "serve"
    assert model in ("/model", "/srv/model")
    at = options.index("--port")
    port = options[at + 1]
    del options[at : at + 2]
    with serving(folder, *options) as running:
        assert running.process.poll() is None
        actual_port = running.url.rpartition(":")[2]
        check = json.loads(re.search(r"^  CMD (.*)$", DOCKERFILE, re.M)[1])  # type: ignore[index]
        assert port in check[-1], "the health check uses the same port"
        command = [sys.executable, *(word.replace(port, actual_port) for word in check[1:])]
        assert subprocess.run(command, timeout=TIMEOUT).returncode == 0
        assert running.stop() == 0
        assert subprocess.run(command, timeout=TIMEOUT, stderr=subprocess.DEVNULL).returncode != 0


def test_app_in_process(folder: Path) -> None:
    """`create_app` with a Classifier, through ASGI."""
    checkpoint: Checkpoint = Classifier.load(folder).checkpoint
    with TestClient(create_app(Classifier(checkpoint), num_threads=1, log=io.StringIO())) as client:
        assert client.post("/v1/predict", content=png(), headers={"Content-Type": "image/png"}).status_code == 200


def test_logs_contain_no_file_names(server: Server) -> None:
    files = {"file": (f"secret-{random.random()}.png", png(), "image/png")}
    before = len(server.events("request"))
    http_post(f"{server.url}/v1/predict", files=files)
    wait_until(lambda: len(server.events("request")) > before)
    row = server.events("request")[-1]
    assert set(row) == {"time", "event", "request_id", "method", "path", "status", "milliseconds"}
    assert not any("secret" in line for line in server.lines)


def test_decoder_slot_is_held_until_the_work_is_done() -> None:
    """Even if the caller is cancelled twice: abandoned work must not pile up."""
    started, release = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(TIMEOUT)

    async def scenario() -> None:
        pool = ThreadPoolExecutor(1)
        service: Any = types.SimpleNamespace(decoders=pool, decoder_slots=asyncio.Semaphore(1))
        task = asyncio.ensure_future(Service.run_in_decoder(service, work))
        while not started.is_set():
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert service.decoder_slots.locked()
        release.set()
        async with asyncio.timeout(TIMEOUT):
            await service.decoder_slots.acquire()
        pool.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "task", "expected"), [(0.0, "predict", 16), (2.0, "predict", 5), (99.0, "embed", 1)]
)
def test_slow_models_get_small_batches(seconds: float, task: str, expected: int) -> None:
    batcher: Any = types.SimpleNamespace(seconds_per_image=seconds, limits=Limits(response_timeout=30.0, batch_size=16))
    assert Batcher.max_batch_size(batcher, (task,)) == expected
    assert Batcher.max_batch_size(batcher, ("explain", 1, "relevance")) == max(
        1, expected // 4 if seconds else expected
    )


@pytest.mark.slow
def test_worker_that_does_not_read_is_replaced(tmp_path: Path) -> None:
    """Images that do not fit into the pipe block the sender."""
    config = VITS["class"].replace(image_size=(256, 256), patch_size=(64, 64))
    write_checkpoint(tmp_path / "model", make_checkpoint(config))
    limits = Limits(response_timeout=1.0)
    with TestClient(create_app(str(tmp_path / "model"), limits, num_threads=1, log=io.StringIO())) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        os.kill(service.worker.process.pid, signal.SIGSTOP)
        files = [("file", (f"{i}.png", png())) for i in range(8)]
        assert client.post("/v1/predict", files=files).status_code in (503, 504)
        wait_until(lambda: client.post("/v1/predict", content=png()).status_code == 200)


@pytest.mark.slow
def test_bodies_are_read_only_when_needed(folder: Path) -> None:
    """Requests without a token or endpoint get a response before their body, whatever its length."""
    with serving(folder, "--num-threads", 1, PATCHWORD_TOKEN="s3cret") as locked:
        host, port = locked.url.removeprefix("http://").split(":")
        for path, code in (("/x", b"404"), ("/", b"405"), ("/v1/predict", b"401"), ("/v1/x", b"401")):
            with socket.create_connection((host, int(port)), timeout=TIMEOUT) as each:
                each.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\nabc".encode())
                assert each.recv(12) == b"HTTP/1.1 " + code


@pytest.mark.slow
def test_token_with_surrounding_spaces_is_rejected(folder: Path) -> None:
    result = run("serve", folder, "--port", 0, PATCHWORD_TOKEN=" secret")
    assert result.returncode == 2
    assert "PATCHWORD_TOKEN" in result.stderr
