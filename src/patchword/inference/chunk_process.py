"""A child process that computes chunks, so that an image that crashes it does not end the job.

A decoder that crashes, or memory that runs out, kills a process without an exception. `ChunkProcess` notices, starts
the process again, and finds the image: after three deaths on one chunk its images are read one by one, each announced
before it is read.
"""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

import torch

from ..checkpoints import Checkpoint
from ..core.runtime import set_num_threads
from ..core.text import one_line
from ..data.storage import open_storage
from ..errors import DataError, ImageError, PatchwordError
from .entry_reader import EntryReader
from .prediction_manifest import Manifest
from .prediction_parts import ChunkModel, ChunkResult, chunk_images, predict_chunk

MAX_DEATHS = 3  # of one chunk, before its images are read one by one: fewer may be the end of a machine
SECONDS_PER_REPORT = 0.5  # of the progress inside a chunk
POLL_SECONDS = 0.2

# spawn: torch's threads do not survive a fork.
_CONTEXT = multiprocessing.get_context("spawn")


class ProcessDiedError(Exception):
    """The child ended without a result.

    Attributes:
        position: The image that it had announced; -1 if it reads several at once.
    """

    def __init__(self, exit_code: int | None, position: int = -1) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.position = exit_code, position


class Interrupted(Exception):  # noqa: N818  # not an error
    """`should_stop` has become true."""


class ChunkProcess:
    """Computes chunks in a child process, which is started when it is needed.

    Args:
        out: Where the output with its manifest is.
        checkpoint: The model.
        num_threads: Threads of the child; None for torch's default.
        on_progress: Called with the number of images that were computed since its last call.
        should_stop: Polled while a chunk is computed; when true, the child is killed and `Interrupted` raised.
    """

    def __init__(
        self,
        out: str,
        checkpoint: Checkpoint,
        num_threads: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._arguments = out, checkpoint, num_threads
        self.on_progress, self.should_stop = on_progress, should_stop
        self._process: Any = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A chunk that it computes is lost, but no part of it was written."""
        if self._process is not None:
            assert self._connection is not None
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def compute_safely(self, number: int, deaths: int = 0) -> ChunkResult:
        """Compute a chunk, whatever its images do to the process.

        Args:
            number: The number of the chunk.
            deaths: How many processes it has killed before.

        Raises:
            DataError: The chunk kills the process even without the images that do so alone (code "chunk_crashes").
        """
        while deaths < MAX_DEATHS:
            try:
                return self.compute(number)
            except ProcessDiedError:
                deaths += 1
        poisonous = self.find_poisonous(number)
        try:
            return self.compute(number, poisonous)
        except ProcessDiedError as error:
            raise DataError(
                f"Chunk {number} ends the process again and again ({error}), though none of its images does so alone. "
                f"The memory may be too small: set OMP_NUM_THREADS=1, then type the same command again.",
                code="chunk_crashes",
            ) from None

    def find_poisonous(self, number: int) -> set[int]:
        """Read and compute the images of a chunk one by one; return the positions of those that end the process."""
        poisonous: set[int] = set()
        start = 0
        while True:
            try:
                self._request(("scan", number, start))
                return poisonous
            except ProcessDiedError as died:
                if died.position < start:
                    raise
                poisonous.add(died.position)
                start = died.position + 1

    def compute(self, number: int, poisonous: Collection[int] = ()) -> ChunkResult:
        """Compute a chunk; raises `ProcessDiedError` if the child dies."""
        result: ChunkResult = self._request(("chunk", number, sorted(poisonous)))
        return result

    def _request(self, request: tuple[Any, ...]) -> Any:
        if self._process is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
        except OSError:  # the child died between two chunks
            self.close()
            raise ProcessDiedError(None) from None
        return self._receive()

    def _start(self) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._connection.send_bytes(pickle.dumps(self._arguments))  # not kept: it is as large as the model
            self._receive()
        except (OSError, ProcessDiedError) as error:
            self.close()
            raise DataError(f"The process that computes chunks cannot start ({one_line(error)}).") from None

    def _receive(self) -> Any:
        """Return the next result, and handle the messages before it."""
        assert self._connection is not None
        position, counted = -1, 0
        while True:
            if self.should_stop():
                self.close()
                raise Interrupted
            if not wait([self._connection], POLL_SECONDS):  # the end of the process closes its end
                continue
            try:
                kind, *values = self._connection.recv()
            except (EOFError, OSError):
                self._process.join()
                exit_code = self._process.exitcode
                self.close()
                self.on_progress(-counted)  # they are computed again
                raise ProcessDiedError(exit_code, position) from None
            if kind == "progress":
                self.on_progress(values[0])
                counted += values[0]
            elif kind == "image":
                position = values[0]
            elif kind == "done":
                return values[0]
            elif kind == "error":
                raise _to_exception(*values)


def _to_exception(kind: type[Exception], message: str, attributes: dict[str, Any]) -> Exception:
    """Rebuild an error of the child, whatever the arguments of its class are."""
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error


# The child


def _serve(connection: Connection) -> None:
    """Compute chunks until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    try:
        out, checkpoint, num_threads = pickle.loads(connection.recv_bytes())
        with torch.inference_mode():
            _serve_requests(connection, out, checkpoint, num_threads)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone: nobody needs the rest of the chunk


def _serve_requests(connection: Connection, out: str, checkpoint: Checkpoint, num_threads: int | None) -> None:
    worker: _Worker | None = None
    request: tuple[Any, ...] | None = None
    while True:
        try:
            if worker is None:
                worker = _Worker(connection, out, checkpoint, num_threads)
                result: ChunkResult | None = None
            else:
                assert request is not None
                result = worker.compute(*request[1:]) if request[0] == "chunk" else worker.find_crash(*request[1:])
            connection.send(("done", result))
        except PatchwordError as error:
            connection.send(("error", type(error), str(error), vars(error)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            connection.send(("error", RuntimeError, traceback.format_exc(), {}))
        request = connection.recv()


class _Worker:
    """The model and the manifest, in the child."""

    def __init__(self, connection: Connection, out: str, checkpoint: Checkpoint, num_threads: int | None) -> None:
        if num_threads:
            set_num_threads(num_threads)
        manifest = Manifest.read(open_storage(out))
        assert manifest is not None
        self.connection, self.manifest = connection, manifest
        self.model = ChunkModel.open(checkpoint, manifest.settings)
        self.count, self.reported = 0, time.monotonic()

    def compute(self, number: int, poisonous: list[int]) -> ChunkResult:
        result = predict_chunk(self.model, self.manifest, number, poisonous=poisonous, on_image=self._count)
        self._report()
        return result

    def _count(self) -> None:
        self.count += 1
        if time.monotonic() - self.reported > SECONDS_PER_REPORT:
            self._report()

    def _report(self) -> None:
        self.connection.send(("progress", self.count))
        self.count, self.reported = 0, time.monotonic()

    def find_crash(self, number: int, start: int) -> ChunkResult | None:
        """Compute images one by one; each is announced first."""
        reader = EntryReader(self.manifest.roots)
        entries = self.manifest.entries(number)
        for position in range(start, len(entries)):
            self.connection.send(("image", position))
            images = chunk_images(reader, entries[position : position + 1], ())
            for image in images:
                try:
                    pixels = self.model.encoder.pixels(image.image)
                except ImageError:
                    continue
                self.model.run(pixels[None])
        return None
