"""The model in a process of its own. If it dies, whatever killed it, another takes its place within a second or two.

Where the system can fork, new workers come from a server that has imported torch already and never computed anything,
so they start fast. On Windows they import it anew, which takes seconds.
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
from ..inspection.attention_rollout import pooling_weights
from ..inspection.capture import attention_maps
from ..inspection.explain import explain
from ..models import ViT

HAS_FORKSERVER = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT: multiprocessing.context.BaseContext = multiprocessing.get_context("forkserver" if HAS_FORKSERVER else "spawn")
if HAS_FORKSERVER:
    CONTEXT.set_forkserver_preload([__name__])


class WorkerDied(Exception):
    """The process ended before it answered, or could not be started."""


class WorkerFailed(Exception):
    """The process could not compute an answer; it lives on."""


class Worker:
    """A process with a model. One question at a time; `ask` blocks, so it belongs into a thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: PreparedEngine,
        num_threads: int | None,
        patience: float,
        on_restart: Callable[[], object],
    ) -> None:
        """`patience` is how many seconds an answer may take before the process is taken for stuck and replaced."""
        self.engine = engine
        self.packed, self.num_threads, self.patience, self.on_restart = (
            serialize_checkpoint(checkpoint),
            num_threads,
            patience,
            on_restart,
        )
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self.stopped = False
        self.process: BaseProcess | None = None
        self.start()
        atexit.register(self.stop)

    def start(self) -> None:
        self.process = None
        self.connection, theirs = CONTEXT.Pipe()
        arguments = (theirs, self.packed, self.engine, self.num_threads)
        process = CONTEXT.Process(  # type: ignore[attr-defined]
            target=worker_main, args=arguments, daemon=True, name="patchword model"
        )
        try:
            with block_stop_signals():
                process.start()
        finally:
            theirs.close()  # so that the death of the process is the end of the connection
        self.process = process

    def ask(self, kind: str, pixels: np.ndarray, *arguments: Any) -> np.ndarray:
        question = (kind, pixels, arguments)
        try:
            try:
                self.send(question)
            except OSError:  # it died with nothing to do: nobody needs to know
                self.restart()
                self.send(question)
            if not self.connection.poll(self.patience):  # it hangs; whatever it does, nobody waits for it any more
                raise EOFError
            answer = self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(EOFError, OSError, WorkerDied):  # if it fails, the next question tries again
                self.restart()
            raise WorkerDied from None
        if isinstance(answer, str):
            raise WorkerFailed(answer)
        return answer

    def send(self, question: tuple[Any, ...]) -> None:
        """A process that does not read makes this wait, until it is killed for it."""
        assert self.process is not None
        watchdog = threading.Timer(self.patience, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.connection.send(question)
        finally:
            watchdog.cancel()

    def restart(self) -> None:
        if self.stopped:
            raise WorkerDied
        self.connection.close()
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.on_restart()
        self.start()

    def stop(self) -> None:
        self.stopped = True
        atexit.unregister(self.stop)
        if self.process is not None:  # all that was accepted is answered, or nobody waits for it
            self.process.kill()
            self.process.join()
        self.pool.shutdown(wait=False)


@contextlib.contextmanager
def block_stop_signals() -> Iterator[None]:
    """What is started within is never told to stop by a terminal or a service manager, which tell the whole group."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which unblocks them again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # children inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serialize_checkpoint(checkpoint: Checkpoint) -> bytes:
    """As bytes, tensors as arrays: torch's own way to send tensors shares memory with a process that may be killed."""
    tensors = {n: t.detach().float() if t.is_floating_point() else t for n, t in checkpoint.tensors.items()}
    fields = {n: getattr(checkpoint, n) for n in ("config", "preprocess", "labels", "temperature", "multi_label")}
    file = io.BytesIO()
    pickle.dump((fields, {name: tensor.numpy() for name, tensor in tensors.items()}), file)
    return file.getvalue()


def worker_main(connection: Connection, said: bytes, engine: PreparedEngine, num_threads: int | None) -> None:
    """What the process does until it is told to end, or its parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where signals cannot be masked
        signal.signal(number, signal.SIG_IGN)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    fields, arrays = pickle.loads(said)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    checkpoint = Checkpoint(tensors=tensors, **fields)
    classifier = Classifier(checkpoint, "torch" if engine.name == "torch" else engine.open(checkpoint))
    while True:
        try:
            question = connection.recv()
        except (EOFError, OSError):
            return
        kind, pixels, arguments = question
        try:
            answer: Any = HANDLERS[kind](classifier, torch.from_numpy(pixels), *arguments)
        except Exception:
            answer = traceback.format_exc()
        connection.send(answer)


def predict(classifier: Classifier, pixels: torch.Tensor) -> np.ndarray:
    """Probabilities (B, K)."""
    with torch.inference_mode():
        logits = classifier.logits(pixels)
        return classifier.probabilities(logits).numpy()


def embed(classifier: Classifier, pixels: torch.Tensor) -> np.ndarray:
    """What the head reads, (B, D)."""
    with torch.inference_mode():
        return classifier.model.embed_images(classifier.preprocess.normalize(pixels)).numpy()


def explain_class(classifier: Classifier, pixels: torch.Tensor, label: int, method: Any) -> np.ndarray:
    """Maps (B, h, w) for one class."""
    images = classifier.preprocess.normalize(pixels)
    return explain(classifier.model, images, torch.full((len(images),), label), method)


def attention(classifier: Classifier, pixels: torch.Tensor, layer: int, head: int | None) -> np.ndarray:
    """What every token looks at in a layer, (B, N + 1, N) bytes; the last row is the one the answer is read from.

    Each row runs from 0 to 255 by its largest weight on a patch: the pull of a class token or register, which may be
    a hundred times as strong, would leave nothing of the rest.
    """
    model = classifier.model
    assert isinstance(model, ViT)
    prefix, pooling = model.config.num_prefix, model.config.pooling
    rule = pooling_weights("average" if pooling == "attention" else pooling, model.config)
    found = []
    with torch.inference_mode():
        for image in classifier.preprocess.normalize(pixels):
            weights = attention_maps(model, image[None], [layer])[layer][0]
            chosen = weights.mean(dim=0) if head is None else weights[head]
            rows = torch.cat([chosen, (rule.to(chosen) @ chosen)[None]])
            largest = rows[:, prefix:].amax(dim=-1, keepdim=True).clamp_min(1e-12)
            found.append((255 * (rows / largest).clamp(max=1)).round().to(torch.uint8))
        return torch.stack(found).numpy()


HANDLERS: dict[str, Callable[..., np.ndarray]] = {
    "predict": predict,
    "embed": embed,
    "heat": explain_class,
    "attention": attention,
}
