"""The model in a process of its own. If the process dies for any reason, it is replaced within a second or two.

On systems with fork, workers are forked from a server process that has imported torch but never computed anything, so
they start fast. On Windows they import torch again, which takes seconds.
"""

import atexit
import contextlib
import io
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..engines.engine import PreparedEngine
from ..inference.classifier import Classifier
from ..inspection.attention_rollout import readout_weights
from ..inspection.capture import attention_maps
from ..inspection.explain import Method, explain
from ..models import ViT

HAS_FORKSERVER = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT: multiprocessing.context.BaseContext = multiprocessing.get_context("forkserver" if HAS_FORKSERVER else "spawn")
if HAS_FORKSERVER:
    CONTEXT.set_forkserver_preload([__name__])


class WorkerDiedError(Exception):
    """The process died before it returned a result, or could not be started."""


class WorkerFailedError(Exception):
    """The process raised an exception, whose traceback is the message; it is still alive."""


class Worker:
    """A process with a model. It computes one batch at a time; `compute` blocks, so call it in a thread.

    Args:
        checkpoint: The model.
        engine: Computes predictions.
        num_threads: CPU threads of the process; None for all cores.
        timeout: Seconds after which a process without a result is replaced.
        on_restart: Called before a process is replaced.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: PreparedEngine,
        num_threads: int | None,
        timeout: float,
        on_restart: Callable[[], object],
    ) -> None:
        self.checkpoint, self.engine = serialize_checkpoint(checkpoint), engine
        self.num_threads, self.timeout, self.on_restart = num_threads, timeout, on_restart
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self.stopped = False
        self.process: BaseProcess | None = None
        self.start()
        atexit.register(self.stop)

    def start(self) -> None:
        """Start the process."""
        self.process = None
        self.connection, child_end = CONTEXT.Pipe()
        arguments = (child_end, self.checkpoint, self.engine, self.num_threads)
        process = CONTEXT.Process(  # type: ignore[attr-defined]  # typeshed lacks it on BaseContext
            target=worker_main, args=arguments, daemon=True, name="patchword model"
        )
        try:
            with block_stop_signals():
                process.start()
        finally:
            child_end.close()  # so that the connection ends when the process dies
        self.process = process

    def compute(self, name: str, pixels: np.ndarray, *arguments: Any) -> np.ndarray:
        """Run a function of `HANDLERS` in the process."""
        message = (name, pixels, arguments)
        try:
            try:
                self.send(message)
            except OSError:  # it died while it was idle: nothing is lost
                self.restart()
                self.send(message)
            if not self.connection.poll(self.timeout):  # it hangs
                raise EOFError
            result: np.ndarray | str = self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(EOFError, OSError, WorkerDiedError):  # if this fails, the next call tries again
                self.restart()
            raise WorkerDiedError from None
        if isinstance(result, str):
            raise WorkerFailedError(result)
        return result

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message; a process that does not read it within the timeout is killed."""
        assert self.process is not None
        watchdog = threading.Timer(self.timeout, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.connection.send(message)
        finally:
            watchdog.cancel()

    def restart(self) -> None:
        """Replace the process."""
        if self.stopped:
            raise WorkerDiedError
        self.connection.close()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.on_restart()
        self.start()

    def stop(self) -> None:
        """Kill the process. Nobody waits for a result anymore."""
        self.stopped = True
        atexit.unregister(self.stop)
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.pool.shutdown(wait=False)


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """Let processes that start within ignore SIGINT and SIGTERM, which terminals send to the whole process group."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it unblocks the signals when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # child processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def serialize_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Pickle a checkpoint with arrays: torch would send tensors by memory shared with a process that may be killed."""
    tensors = {n: t.detach().float() if t.is_floating_point() else t for n, t in checkpoint.tensors.items()}
    fields = {n: getattr(checkpoint, n) for n in ("config", "preprocess", "labels", "temperature", "multi_label")}
    file = io.BytesIO()
    pickle.dump((fields, {name: tensor.numpy() for name, tensor in tensors.items()}), file)
    return file.getvalue()


def worker_main(connection: Connection, content: bytes, engine: PreparedEngine, num_threads: int | None) -> None:
    """Run in the process: compute what is asked for until it is killed or the parent dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for systems where signals cannot be masked
        signal.signal(number, signal.SIG_IGN)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    fields, arrays = pickle.loads(content)
    checkpoint = Checkpoint(tensors={name: torch.from_numpy(array) for name, array in arrays.items()}, **fields)
    classifier = Classifier(checkpoint, "torch" if engine.name == "torch" else engine.open(checkpoint))
    while True:
        try:
            name, pixels, arguments = connection.recv()
        except (EOFError, OSError):
            return
        result: np.ndarray | str
        try:
            result = HANDLERS[name](classifier, torch.from_numpy(pixels), *arguments)
        except Exception:
            result = traceback.format_exc()
        connection.send(result)


def predict(classifier: Classifier, pixels: torch.Tensor) -> np.ndarray:
    """Return probabilities (B, K)."""
    with torch.inference_mode():
        return classifier.probabilities(classifier.logits(pixels)).numpy()


def embed(classifier: Classifier, pixels: torch.Tensor) -> np.ndarray:
    """Return the features that the head reads, (B, D)."""
    with torch.inference_mode():
        return classifier.model.embed_images(classifier.preprocess.normalize(pixels)).numpy()


def explain_class(classifier: Classifier, pixels: torch.Tensor, class_index: int, method: Method) -> np.ndarray:
    """Return heatmaps (B, h, w) of one class."""
    images = classifier.preprocess.normalize(pixels)
    return explain(classifier.model, images, torch.full((len(images),), class_index), method)


def attention(classifier: Classifier, pixels: torch.Tensor, layer: int, head: int | None) -> np.ndarray:
    """Return the attention of every token in a layer, uint8 (B, N + 1, N); the last row is that of the pooled output.

    Each row is scaled by its largest weight on a patch: the weight of a class token or register, which may be a hundred
    times larger, would hide the others.
    """
    model = classifier.model
    assert isinstance(model, ViT)
    prefix, readout = model.config.num_prefix, readout_weights(model.config)
    maps = []
    with torch.inference_mode():
        for image in classifier.preprocess.normalize(pixels):
            weights = attention_maps(model, image[None], [layer])[layer][0]
            weights = weights.mean(dim=0) if head is None else weights[head]
            rows = torch.cat([weights, (readout.to(weights) @ weights)[None]])
            largest = rows[:, prefix:].amax(dim=-1, keepdim=True).clamp_min(1e-12)
            maps.append((255 * (rows / largest).clamp(max=1)).round().to(torch.uint8))
        return torch.stack(maps).numpy()


HANDLERS: dict[str, Callable[..., np.ndarray]] = {
    "predict": predict,
    "embed": embed,
    "explain": explain_class,
    "attention": attention,
}
