"""Dynamic batching: images that wait at the same time are computed together.

When the model is idle it takes what is waiting, up to a batch. A single image does not wait at all; under load, batches
fill up. Images are served in order of arrival; images whose client has disconnected are dropped before they cost
anything.
"""

import asyncio
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from .limits import Limits
from .problem_json import Problem, service_unavailable
from .prometheus import Metrics
from .worker import Worker, WorkerDiedError, WorkerFailedError

EXPENSIVE_COST = 4  # explanations need gradients and attention maps all weights: time relative to a prediction


@dataclass(eq=False)
class Job:
    """One image to compute; jobs with the same task can share a batch.

    Attributes:
        task: Key in `worker.HANDLERS`, followed by the arguments.
        pixels: uint8 (H, W, C).
        result: The row of the result that belongs to this image.
    """

    task: tuple[Any, ...]
    pixels: np.ndarray
    result: asyncio.Future[np.ndarray]


class Batcher:
    """The queue in front of the model. It runs in the event loop; only `Worker.compute` runs in a thread."""

    def __init__(self, worker: Worker, limits: Limits, metrics: Metrics) -> None:
        self.worker, self.limits, self.metrics = worker, limits, metrics
        self.waiting: deque[Job] = deque()
        self.num_in_flight = 0  # images that were admitted and have no response yet
        self.seconds_per_image = 0.0  # measured by `Service.warm_up`
        self.wake_up = asyncio.Event()
        self.closing = False
        self.task = asyncio.create_task(self.run())

    def check_capacity(self, count: int) -> None:
        """Check whether the queue has room for `count` images; raise a `Problem` if not."""
        if self.closing:
            raise service_unavailable("The server is shutting down.")
        if count > self.limits.queue_size:
            detail = f"{count} images exceed the queue of this server, which holds {self.limits.queue_size}."
            raise Problem(422, detail, code="too_many_images")
        if self.num_in_flight + count > self.limits.queue_size:
            self.metrics.requests_rejected.inc()
            raise service_unavailable(f"The queue is full: {self.num_in_flight} images are waiting.")

    def admit(self, count: int) -> None:
        """Reserve room for `count` images."""
        self.check_capacity(count)
        self.num_in_flight += count
        self.metrics.images_in_flight.set(self.num_in_flight)

    def release(self, count: int) -> None:
        """Give the room of `count` images back."""
        self.num_in_flight -= count
        self.metrics.images_in_flight.set(self.num_in_flight)

    async def submit(self, pixels: np.ndarray, *task: Any) -> np.ndarray:
        """Compute one image (H, W, C). Cancel this call if the result is no longer needed."""
        job = Job(task, pixels, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.wake_up.set()
        return await job.result  # cancelling this also cancels the future, and `next_batch` then skips the job

    def max_batch_size(self, task: tuple[Any, ...]) -> int:
        """Return the batch size that takes at most a third of the response timeout."""
        seconds = self.seconds_per_image * (1 if task[0] in ("predict", "embed") else EXPENSIVE_COST)
        return max(1, min(self.limits.batch_size, int(self.limits.response_timeout / 3 / max(seconds, 1e-9))))

    def next_batch(self) -> list[Job]:
        """Take the first job that is still needed, and later ones with the same task, from the queue."""
        batch: list[Job] = []
        rest: deque[Job] = deque()
        for job in self.waiting:
            if job.result.done():
                self.metrics.images_abandoned.inc()
            elif not batch or (job.task == batch[0].task and len(batch) < self.max_batch_size(job.task)):
                batch.append(job)
            else:
                rest.append(job)
        self.waiting = rest
        return batch

    async def run(self) -> None:
        """Compute batches until the task is cancelled."""
        while True:
            await self.wake_up.wait()
            self.wake_up.clear()
            while batch := self.next_batch():
                await self.compute(batch)

    async def compute(self, batch: list[Job]) -> None:
        """Compute a batch and set the result, or the problem, of every job."""
        name, *arguments = batch[0].task
        loop = asyncio.get_running_loop()
        problem: Problem | None = None
        try:
            pixels = np.stack([job.pixels for job in batch])
            results = await loop.run_in_executor(self.worker.pool, self.worker.compute, name, pixels, *arguments)
        except WorkerDiedError:
            problem = service_unavailable("The model's process died and is being restarted.")
        except WorkerFailedError as error:
            self.metrics.log("model error", traceback=str(error))
            problem = Problem(500, "The model could not compute a result. See the server's log.")
        except Exception:  # the queue must continue, whatever happens to one batch
            self.metrics.log("internal error", traceback=traceback.format_exc())
            problem = Problem(500, "Internal error. See the server's log.")
        self.metrics.batch_images.observe(len(batch))
        for index, job in enumerate(batch):
            if job.result.done():
                continue
            if problem is not None:
                job.result.set_exception(problem)
            else:
                job.result.set_result(results[index])

    async def close(self) -> None:
        """Reject new images, finish the admitted ones, and stop."""
        self.closing = True
        while self.num_in_flight:
            await asyncio.sleep(0.01)
        self.task.cancel()
