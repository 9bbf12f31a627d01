"""Large jobs in tests: small images, a runner in this process, and what the output contains."""

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from patchword.checkpoints import Checkpoint, read_checkpoint
from patchword.data.storage import Storage, open_storage
from patchword.inference.prediction_job import Job, JobRequest, finish_job, open_job
from patchword.inference.prediction_parts import ChunkModel, predict_chunk

MODEL = "patchword:cifar10"
CHUNK_SIZE = 8
POISON = b"this image kills the process that decodes it"
# Put first on PYTHONPATH: decoding the poison then is a SIGKILL, as if memory had run out.
SITE_CUSTOMIZE = f"""
import os, signal
import patchword.data.image_decoder as decoder
load = decoder.load_image
def load_image(source, **options):
    if source == {POISON!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return load(source, **options)
decoder.load_image = load_image
"""


def photo(number: int, size: int = 32) -> bytes:
    """A PNG file of noise, different for each number."""
    content = io.BytesIO()
    Image.frombytes("RGB", (size, size), random.Random(number).randbytes(3 * size * size)).save(content, "PNG")
    return content.getvalue()


def make_photos(folder: Path, count: int) -> dict[str, bytes]:
    """Write images to subfolders, one of them unreadable; return their contents by key."""
    contents = {f"{number % 3}/{number:04}.png": photo(number) for number in range(count)}
    contents["1/junk.png"] = b"junk"
    for key, content in contents.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)
    return dict(sorted(contents.items()))


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def make_request(inputs: object, out: object, **changes: Any) -> JobRequest:
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    fields: dict[str, Any] = {"task": "predict", "top": 2, "chunk_size": CHUNK_SIZE, "checkpoint": load_model()}
    return JobRequest(inputs=tuple(map(str, inputs)), out=str(out), **fields | changes)


def load_model() -> Checkpoint:
    return read_checkpoint(MODEL)


def run_here(job: Job, on_progress: Callable[[int], object] = lambda count: None) -> None:
    """A runner in this process: no start-up, no isolation."""
    model = ChunkModel.open(job.request.checkpoint, job.manifest.settings)
    for number in job.pending():
        job.results.append(predict_chunk(model, job.manifest, number))


def run_job(inputs: object, out: object, **changes: Any) -> dict[str, Any]:
    """Run a job to its end in this process; return its summary."""
    job = open_job(make_request(inputs, out, **changes))
    run_here(job)
    return finish_job(job)


def read_parts(out: object) -> dict[str, bytes]:
    storage = open_storage(str(out))
    return {each.key: storage.read(each.key) for each in storage.list() if each.key.startswith("part-")}


def read_rows(out: object) -> list[dict[str, Any]]:
    """All rows, in the order of the parts."""
    tables = [pq.read_table(io.BytesIO(content)) for _, content in sorted(read_parts(out).items())]
    return [row for table in tables for row in table.to_pylist()]


def read_paths(out: object) -> list[str]:
    return [row["path"] for row in read_rows(out)]


def upload(storage: Storage, contents: dict[str, bytes]) -> Iterator[str]:
    for key, content in contents.items():
        storage.create(key, content)
        yield key
