"""The queue, error responses and metrics, without a model."""

import asyncio
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from patchword.serve.batcher import Batcher
from patchword.serve.limits import Limits
from patchword.serve.problem_json import STATUSES, Problem, service_unavailable
from patchword.serve.prometheus import Metrics
from patchword.serve.worker import WorkerDiedError, WorkerFailedError

LIMITS = Limits(queue_size=4, batch_size=3)


class FakeWorker:
    """Returns the mean of each image, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pool, self.error = ThreadPoolExecutor(1), error
        self.batches: list[tuple[str, int]] = []

    def compute(self, name: str, pixels: np.ndarray, *arguments: Any) -> np.ndarray:
        self.batches.append((name, len(pixels)))
        if self.error is not None:
            raise self.error
        return pixels.mean(axis=(1, 2, 3))


def run_batcher(worker: FakeWorker, tasks: list[str], log: io.StringIO) -> list[Any]:
    """Submits images of one color each at the same time; returns their results or errors."""

    async def scenario() -> list[Any]:
        batcher = Batcher(worker, LIMITS, Metrics(log))  # type: ignore[arg-type]
        images = [np.full((2, 2, 3), value, np.uint8) for value in range(len(tasks))]
        jobs = [batcher.submit(image, task) for image, task in zip(images, tasks, strict=True)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        await batcher.close()
        return results

    try:
        return asyncio.run(scenario())
    finally:
        worker.pool.shutdown()


def test_images_with_the_same_task_share_batches() -> None:
    worker = FakeWorker()
    results = run_batcher(worker, ["predict", "embed", "predict", "predict", "predict"], io.StringIO())
    assert [float(result) for result in results] == [0, 1, 2, 3, 4]
    assert worker.batches == [("predict", 3), ("embed", 1), ("predict", 1)]


@pytest.mark.parametrize(
    ("error", "status", "event"),
    [
        (WorkerDiedError(), 503, None),
        (WorkerFailedError("Traceback of the model"), 500, "model error"),
        (MemoryError("too large"), 500, "internal error"),
    ],
)
def test_errors_of_the_worker_become_problems(error: Exception, status: int, event: str | None) -> None:
    log = io.StringIO()
    (problem,) = run_batcher(FakeWorker(error), ["predict"], log)
    assert isinstance(problem, Problem)
    assert problem.status == status
    assert [json.loads(line)["event"] for line in log.getvalue().splitlines()] == ([event] if event else [])


def test_capacity() -> None:
    async def scenario() -> None:
        metrics = Metrics(io.StringIO())
        worker = FakeWorker()
        batcher = Batcher(worker, LIMITS, metrics)  # type: ignore[arg-type]
        batcher.admit(3)
        batcher.check_capacity(1)
        with pytest.raises(Problem) as full:
            batcher.admit(2)
        assert (full.value.status, full.value.headers) == (503, {"Retry-After": "1"})
        with pytest.raises(Problem) as impossible:
            batcher.admit(5)
        assert (impossible.value.status, impossible.value.code) == (422, "too_many_images")
        assert b"patchword_requests_rejected_total 1.0" in metrics.text()
        assert b"patchword_images_in_flight 3.0" in metrics.text()
        batcher.release(3)
        await batcher.close()
        with pytest.raises(Problem) as closing:
            batcher.check_capacity(1)
        assert closing.value.status == 503
        worker.pool.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", STATUSES)
def test_problem_response(status: int) -> None:
    response = Problem(status, "Detail.", {"X-Test": "1"}).response("id-1")
    document = json.loads(bytes(response.body))
    title, code = STATUSES[status]
    assert document == {"status": status, "title": title, "detail": "Detail.", "code": code, "request_id": "id-1"}
    assert (response.status_code, response.headers["x-test"]) == (status, "1")
    assert response.media_type == "application/problem+json"


def test_service_unavailable_asks_to_retry() -> None:
    problem = service_unavailable("The queue is full.")
    assert (problem.status, problem.code, problem.title) == (503, "unavailable", "Service unavailable")
    assert problem.headers == {"Retry-After": "1"}


def test_metrics_of_two_apps_are_separate() -> None:
    first, second = Metrics(io.StringIO()), Metrics(io.StringIO())
    first.record_request("/v1/predict", "POST", 200, 0.1, "id")
    first.record_restart()
    assert b'patchword_requests_total{path="/v1/predict",status="200"} 1.0' in first.text()
    assert b"patchword_worker_restarts_total 1.0" in first.text()
    assert b"patchword_worker_restarts_total 0.0" in second.text()
