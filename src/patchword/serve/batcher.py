"""Requests that arrive together are computed together.

When the model is free it takes what waits, up to a batch: alone, a picture does not wait at all; under load, batches
fill by themselves. First come, first served; what nobody waits for any more is dropped before it costs anything.
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
from .worker import Worker, WorkerDied, WorkerFailed

BACKWARD_COST = 4  # times as long: a map needs the gradients, too, an attention all its weights


@dataclass(eq=False)
class Job:
    """A picture and what is wanted of it; jobs with the same question can share a batch."""

    question: tuple[Any, ...]
    pixels: np.ndarray
    answer: asyncio.Future[np.ndarray]


class Batcher:
    """The queue before the model. All of it runs in the event loop; only `Worker.ask` is in a thread."""

    def __init__(self, worker: Worker, limits: Limits, meters: Metrics) -> None:
        self.worker, self.limits, self.meters = worker, limits, meters
        self.waiting: deque[Job] = deque()
        self.inside = 0  # pictures admitted and not yet answered
        self.seconds = 0.0  # that one picture takes, once it is known
        self.awake = asyncio.Event()
        self.closing = False
        self.task = asyncio.create_task(self.run())

    def check_room(self, count: int) -> None:
        """Before anything is spent on a request: is there room for its pictures?"""
        if self.closing:
            raise service_unavailable("The server is about to stop.")
        if count > self.limits.queue:
            detail = f"{count} pictures at once are more than this server ever holds, {self.limits.queue}."
            raise Problem(422, detail, code="too_many_images")
        if self.inside + count > self.limits.queue:
            self.meters.refused.inc()
            raise service_unavailable(f"{self.inside} pictures are waiting already.")

    def admit(self, count: int) -> None:
        self.check_room(count)
        self.inside += count
        self.meters.inside.set(self.inside)

    def release(self, count: int) -> None:
        self.inside -= count
        self.meters.inside.set(self.inside)

    async def ask(self, pixels: np.ndarray, *question: Any) -> np.ndarray:
        """The answer for one picture, (H, W, C). To be cancelled when nobody waits for it any more."""
        job = Job(question, pixels, asyncio.get_running_loop().create_future())
        self.waiting.append(job)
        self.awake.set()
        return await job.answer  # if this is cancelled, so is the future, and `take` passes over it

    def most(self, question: tuple[Any, ...]) -> int:
        """How many go together: a batch of a large model must not take longer than anybody waits."""
        seconds = self.seconds * (1 if question[0] in ("predict", "embed") else BACKWARD_COST)
        return max(1, min(self.limits.batch, int(self.limits.answering / 3 / max(seconds, 1e-9))))

    def take(self) -> list[Job]:
        """The first job that is still wanted, and those behind it that ask the same."""
        batch: list[Job] = []
        left: deque[Job] = deque()
        for job in self.waiting:
            if job.answer.done():
                self.meters.abandoned.inc()
            elif not batch or (job.question == batch[0].question and len(batch) < self.most(job.question)):
                batch.append(job)
            else:
                left.append(job)
        self.waiting = left
        return batch

    async def run(self) -> None:
        while True:
            await self.awake.wait()
            self.awake.clear()
            while batch := self.take():
                await self.compute(batch)

    async def compute(self, batch: list[Job]) -> None:
        kind, *arguments = batch[0].question
        loop = asyncio.get_running_loop()
        failure: Problem | None = None
        try:
            pixels = np.stack([job.pixels for job in batch])
            answers = await loop.run_in_executor(self.worker.pool, self.worker.ask, kind, pixels, *arguments)
        except WorkerDied:
            failure = service_unavailable("The model's process died and is being started again.")
        except WorkerFailed as error:
            self.meters.log("the model failed on a batch", traceback=str(error))
            failure = Problem(500, "The model could not compute an answer. The server's log says why.")
        except Exception:  # the queue must go on, whatever happens to a batch
            self.meters.log("a fault of ours", traceback=traceback.format_exc())
            failure = Problem(500, "Something went wrong in the server. Its log says what.")
        self.meters.batches.observe(len(batch))
        for place, job in enumerate(batch):
            if job.answer.done():
                continue
            if failure is not None:
                job.answer.set_exception(failure)
            else:
                job.answer.set_result(answers[place])

    async def close(self) -> None:
        """Nothing new; what was accepted is finished."""
        self.closing = True
        while self.inside:
            await asyncio.sleep(0.01)
        self.task.cancel()
