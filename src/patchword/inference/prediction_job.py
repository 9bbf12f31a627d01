"""A large job from start to end: the manifest, the chunks that are missing, and the mark of success.

The output is the only state. Whatever kills a job, the same command continues it: it lists the parts and computes the
others. Where chunks are computed is up to a runner: `run_locally` here, `cluster.ray` on a Ray cluster.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..checkpoints import Checkpoint
from ..core.io import digest, weights_digest
from ..core.runtime import StopSignal, cpu_flags, cpu_name
from ..core.text import pluralize
from ..data.formats.arrow_rows import import_parquet
from ..data.storage import Storage, is_remote, open_storage
from ..engines.capabilities import installed_versions
from ..engines.engine import ENGINES
from ..errors import ConfigError, Note, Stopped, StorageError
from .chunk_process import ChunkProcess, Interrupted
from .classifier import Classifier, require_head
from .input_listing import InputListing
from .prediction_manifest import CHUNK_SIZE, MAX_CHUNK_SIZE, Manifest, write_manifest
from .prediction_parts import (
    ChunkResult,
    list_parts,
    part_key,
    prediction_columns,
    read_success,
    summarize_parts,
    write_success,
)
from .predictions import class_labels

Task = Literal["predict", "embed"]
RECORDED_PACKAGES = ("torch", "numpy", "pillow", "simplejpeg", "onnxruntime", "openvino", "pyarrow")
# Flags that decide how int8 and bf16 kernels round; a job with such an engine runs on one kind of CPU.
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")


@dataclass(frozen=True)
class JobRequest:
    """What a user asks for.

    Attributes:
        task: Predictions or features.
        checkpoint: The model.
        inputs: References of images.
        out: A directory or a URL.
        engine: The engine for predictions; "auto" measures once, when the job starts.
        top: The number of classes for each image.
        chunk_size: Images in a part; None for the default, or for that of a job that is continued.
    """

    task: Task
    checkpoint: Checkpoint
    inputs: tuple[str, ...]
    out: str
    engine: str = "torch"
    top: int = 5
    chunk_size: int | None = None


@dataclass
class Job:
    """A job with its manifest.

    Attributes:
        request: What was asked for.
        manifest: Its images and settings.
        done: Chunks whose parts exist.
        was_started: Whether another process has started it before.
        notes: What the user should know.
        results: What this process computed.
    """

    request: JobRequest
    manifest: Manifest
    done: set[int]
    was_started: bool
    notes: list[Note] = field(default_factory=list)
    results: list[ChunkResult] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Images in parts that exist."""
        return sum(map(self.manifest.chunk_length, self.done))

    def pending(self) -> list[int]:
        """Return the chunks to compute, in order; in random order if another process may compute them, too."""
        chunks = [number for number in range(self.manifest.num_chunks) if number not in self.done]
        if self.was_started:
            random.shuffle(chunks)
        return chunks

    def is_computed(self, number: int) -> bool:
        """Whether another process has computed a chunk since the parts were listed."""
        return self.manifest.storage.head(part_key(number)) is not None


Runner = Callable[[Job, Callable[[int], object]], None]
"""Computes `job.pending()`; calls the function with numbers of images, appends to `job.results`."""


def open_job(request: JobRequest) -> Job:
    """Start a job, or continue one: read the manifest, or list the images and write it.

    Raises:
        ConfigError: The output belongs to another job (code "output_differs"), or the request is invalid.
        StorageError: Inputs or output cannot be read or written.
    """
    import_parquet("A prediction job")
    if request.chunk_size is not None and not 1 <= request.chunk_size <= MAX_CHUNK_SIZE:
        raise ConfigError(f"--chunk-size must be from 1 to {MAX_CHUNK_SIZE}, not {request.chunk_size}.")
    out = absolute(request.out)
    storage = open_storage(out)
    manifest = Manifest.read(storage) or require_unused(storage)
    is_complete = manifest is not None and read_success(storage) is not None
    settings = make_settings(request, manifest, is_complete)
    notes: list[Note] = []
    was_started = manifest is not None
    if manifest is None:
        listing = InputListing(request.inputs, exclude=storage.url)
        size = request.chunk_size or CHUNK_SIZE
        manifest = write_manifest(storage, listing, settings, describe_machine(), size)
        notes += listing.notes
    require_same_job(request, manifest, settings)
    if not is_complete:
        notes += check_machine(manifest)
    done = set(range(manifest.num_chunks)) if is_complete else list_parts(storage)
    return Job(request, manifest, done, was_started, notes)


def absolute(reference: str) -> str:
    """Return a reference that other processes understand."""
    return reference.rstrip("/") if is_remote(reference) else str(Path(reference).expanduser().absolute())


def require_unused(storage: Storage) -> Manifest | None:
    """Refuse a directory with files of the user's, such as the images; what a killed listing left is not in the way.

    Returns:
        The manifest, if another process has written it meanwhile.
    """
    try:
        keys = (entry.key for entry in storage.list())
        foreign = next((key for key in keys if not key.startswith(("manifest/", "."))), None)
    except StorageError:
        return None  # a new directory; if it is none, writing the manifest says what is wrong
    manifest = Manifest.read(storage) if foreign else None
    if foreign and manifest is None:
        raise ConfigError(
            f"--out {storage.url} is not empty and holds no job: it has {foreign}. Choose a new directory.",
            code="output_not_empty",
        )
    return manifest


def make_settings(request: JobRequest, manifest: Manifest | None, is_complete: bool = False) -> dict[str, Any]:
    """Return everything that the predictions of a job depend on, as JSON.

    Args:
        request: What the user asks for.
        manifest: The manifest of a job that is continued.
        is_complete: Whether nothing is left to compute, so that the engine need not be built.
    """
    checkpoint = request.checkpoint
    facts: tuple[object, ...] = (checkpoint.config, checkpoint.preprocess)
    settings: dict[str, Any] = {"task": request.task, "inputs": [absolute(reference) for reference in request.inputs]}
    if request.task == "embed":
        columns = ["path", "features", "error", "code"]
        return settings | {"model": digest(*facts, weights_digest(checkpoint.tensors)), "columns": columns}
    require_head(checkpoint)
    labels = class_labels(checkpoint)
    facts += (labels, checkpoint.temperature, checkpoint.multi_label)
    engine = request.engine
    if engine == "auto" and manifest is not None:
        engine = manifest.settings.get("engine", engine)  # measured when the job started
    if engine != "torch" and not is_complete:
        engine = Classifier(checkpoint, engine).engine_name  # it works here, or a sentence says why not
    top = min(request.top, len(labels))
    settings |= {"model": digest(*facts, weights_digest(checkpoint.tensors)), "engine": engine, "top": top}
    return settings | {"columns": prediction_columns(top)}


def describe_machine() -> dict[str, Any]:
    """Return versions and CPU of this machine."""
    supported = cpu_flags()
    isa = [flag for flag in ISA_FLAGS if flag in supported]
    return {"versions": installed_versions(RECORDED_PACKAGES), "cpu": cpu_name(), "isa": isa}


DIFFERENCES = {
    "task": "another command",
    "model": "another model (its weights, preprocessing or labels)",
    "engine": "another engine",
    "top": "another --top",
    "inputs": "other images",
    "columns": "other columns",
}


def require_same_job(request: JobRequest, manifest: Manifest, settings: dict[str, Any]) -> None:
    """Refuse to mix the predictions of two jobs in one output."""
    differences = [text for name, text in DIFFERENCES.items() if manifest.settings.get(name) != settings.get(name)]
    if request.chunk_size not in (None, manifest.chunk_size):
        differences.append(f"another --chunk-size ({manifest.chunk_size})")
    if differences:
        raise ConfigError(
            f"{request.out} belongs to a job with {differences[0]}. Repeat that command, or choose another --out.",
            code="output_differs",
        )


def check_machine(manifest: Manifest) -> list[Note]:
    """Compare this machine with the one that started a job.

    Raises:
        ConfigError: It computes other predictions: the engine is not exact, and the CPU of another kind.
    """
    here, there = describe_machine(), manifest.machine
    engine = manifest.settings.get("engine", "torch")
    if here["isa"] != there["isa"] and engine in ENGINES and not ENGINES[engine].exact:
        raise ConfigError(
            f"The job was started on a CPU with {', '.join(there['isa'])}, this one has {', '.join(here['isa'])}: the "
            f"predictions of the engine {engine} would differ. Use machines of one kind, or start a new job with "
            f"--engine torch.",
            code="machine_differs",
        )
    changed = [name for name in ("versions", "cpu") if here[name] != there[name]]
    if not changed:
        return []
    text = f"the job was started with other {' and '.join(changed)}: predictions may differ by rounding."
    return [Note(text, "machine_differs")]


def run_locally(job: Job, on_progress: Callable[[int], object]) -> None:
    """Compute the missing chunks in a child process of this one; see `ChunkProcess`.

    Raises:
        Stopped: After SIGTERM or SIGINT. Complete parts stay.
    """
    with StopSignal() as stop:
        stopping = lambda: stop.signal is not None  # noqa: E731
        out = job.manifest.storage.url
        with ChunkProcess(out, job.request.checkpoint, None, on_progress, stopping) as process:
            for number in job.pending():
                if job.is_computed(number):
                    on_progress(job.manifest.chunk_length(number))
                    continue
                try:
                    job.results.append(process.compute_safely(number))
                except Interrupted:
                    assert stop.signal is not None
                    raise stopped(job, stop.signal) from None


def stopped(job: Job, number: int) -> Stopped:
    """Make what is raised after a signal, and says how to continue."""
    complete = len(job.done) + len(job.results)
    parts = f"{complete:,} of {pluralize(job.manifest.num_chunks, 'part')}"
    return Stopped(f"stopped; {parts} are complete. To continue, type the same command again.", number)


def finish_job(job: Job) -> dict[str, Any]:
    """Check that every part exists, mark the job as complete, and return its summary.

    Raises:
        StorageError: Parts are missing (code "parts_missing").
    """
    storage = job.manifest.storage
    summary = read_success(storage)
    if summary is not None:
        return summary
    missing = set(range(job.manifest.num_chunks)) - list_parts(storage)
    if missing:
        raise StorageError(
            f"{pluralize(len(missing), 'part')} of {job.manifest.num_chunks:,} are missing in {job.request.out}, for "
            f"example {part_key(min(missing))}. Type the same command again to compute them.",
            code="parts_missing",
        )
    known: dict[int, Counter[str]] = {result.number: result.errors for result in job.results if result.created}
    summary = summarize_parts(job.manifest, known)
    write_success(job.manifest, summary)
    return summary
