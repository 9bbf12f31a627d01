"""The run directory: config.json, split.json, metrics.jsonl, checkpoints/, and at the end a model and a report."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS_FILE, model_json
from ..config import Config
from ..config.format_v1 import upgrade_run
from ..core.io import atomic_output, json_bytes, read_json, replace_file, try_lock, unlock, write_json
from ..errors import CheckpointError, ConfigError
from .callbacks import LogRow
from .checkpointing import safetensors_chunks
from .distributed import ProcessGroup

CONFIG_FILE, SPLIT_FILE, METRICS_FILE, REPORT_FILE = "config.json", "split.json", "metrics.jsonl", "report.html"
LOCK_FILE = ".lock"  # empty; locked by the process that trains. A file that a killed process left locks nothing
FORMAT = 2  # format 1 is read, too (config/format_v1.py)


def create_run_dir(config: Config, out: str | Path | None) -> Path:
    """Create a run directory with config.json, atomically.

    Args:
        config: The configuration of the run.
        out: The directory, which must be new or empty. None: the first free of runs/NAME, runs/NAME-2, ...

    Raises:
        ConfigError: The directory is not empty; code "run_exists".
    """
    if out is None:
        out = next(folder for folder in candidate_run_dirs(config.name) if not folder.exists())
    folder = Path(out).expanduser()
    if is_empty_dir(folder):  # such as a mounted volume, which cannot be replaced
        replace_file(folder / CONFIG_FILE, [json_bytes(config_document(config))])
        return folder
    if folder.exists():
        is_run = (folder / CONFIG_FILE).is_file()
        hint = f"Resume the run with: patchword resume {folder}" if is_run else "Choose another --out"
        raise ConfigError(f"{folder} exists, and is never overwritten. {hint}, or omit --out.", code="run_exists")
    with atomic_output(folder) as temporary:
        temporary.mkdir()
        write_json(temporary / CONFIG_FILE, config_document(config))
    return folder


def config_document(config: Config) -> dict[str, Any]:
    """Return the content of config.json."""
    return {"format": FORMAT, "config": config.to_json()}


def candidate_run_dirs(name: str) -> Iterator[Path]:
    """Yield runs/NAME, runs/NAME-2, runs/NAME-3, ..."""
    yield Path("runs") / name
    for number in itertools.count(2):
        yield Path("runs") / f"{name}-{number}"


def latest_run_dir(name: str) -> Path | None:
    """Return the last of `candidate_run_dirs` that exists."""
    existing = list(itertools.takewhile(Path.exists, candidate_run_dirs(name)))
    return existing[-1] if existing else None


def discard_run_dir(folder: Path) -> None:
    """Undo `create_run_dir`; a directory that cannot be removed, such as a volume, is left empty."""
    with suppress(OSError):
        (folder / CONFIG_FILE).unlink()
        (folder / LOCK_FILE).unlink(missing_ok=True)
        folder.rmdir()


def is_empty_dir(folder: Path) -> bool:
    """Whether this is a directory without content."""
    try:
        return folder.is_dir() and not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror or error}).") from None


def read_config(folder: Path) -> Config:
    """Read config.json, also of format 1.

    Raises:
        ConfigError: This is not a run directory.
        CheckpointError: config.json is damaged or of a newer version.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run: it has no {CONFIG_FILE}. `patchword train` creates runs.")
    document = read_json(path)
    if document.get("format") not in (1, FORMAT):
        raise CheckpointError(
            f"{path} has format {document.get('format')!r}, but this version reads 1 and {FORMAT}. A newer version "
            "of patchword may have written it."
        )
    try:
        return Config.from_json(upgrade_run(document["config"]) if document["format"] == 1 else document["config"])
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def update_config(folder: Path, config: Config) -> None:
    """Record the resolved configuration: with `init`, the architecture is known only after reading the weights.

    Until then config.json holds the configuration as given, from which a resumed run resolves the same model. Runs of
    versions that kept the given configuration are corrected when they are resumed.
    """
    if read_config(folder) != config:
        replace_file(folder / CONFIG_FILE, [json_bytes(config_document(config))])


def write_split(folder: Path, split_info: dict[str, Any]) -> None:
    """Record how the dataset was split; written once."""
    replace_file(folder / SPLIT_FILE, [json_bytes(split_info, ascii_only=True)])


def read_split(folder: Path) -> dict[str, Any] | None:
    """Return what `write_split` recorded, if anything."""
    return read_json(folder / SPLIT_FILE) if (folder / SPLIT_FILE).is_file() else None


def publish_model(folder: Path, model: Checkpoint) -> None:
    """Make the run directory a model directory. model.json is written last, because it holds the weights' checksum."""
    try:
        (folder / MODEL_JSON).unlink(missing_ok=True)
        checksum = replace_file(folder / WEIGHTS_FILE, safetensors_chunks(model.tensors))
        replace_file(folder / MODEL_JSON, [json_bytes({**model_json(model), "sha256": checksum}, ascii_only=True)])
    except OSError as error:
        raise CheckpointError(f"The model could not be written to {folder} ({error.strerror or error}).") from None


def is_finished(folder: Path) -> bool:
    """Whether model and report exist; the report is written last."""
    return (folder / MODEL_JSON).is_file() and (folder / REPORT_FILE).is_file()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left behind."""
    for pattern in (".*.part", ".report.html.*", "faults/.step-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock_run_dir(folder: Path) -> filelock.BaseFileLock:
    """Lock a run for this process, until `unlock` or the process's end.

    Raises:
        ConfigError: Another process is training it; code "run_locked".
    """
    with translate_os_errors(folder / LOCK_FILE):
        lock = try_lock(folder / LOCK_FILE)
    if lock is None:
        raise ConfigError(
            f"Another process is training {folder}. Wait until it ends, or stop it first.", code="run_locked"
        )
    return lock


@contextmanager
def hold_run_lock(run_dir: Path, group: ProcessGroup) -> Iterator[None]:
    """Let only this group of processes train the run; its main process holds the lock."""
    locks: list[filelock.BaseFileLock] = []
    group.run_on_main(lambda: locks.append(lock_run_dir(run_dir)))
    try:
        yield
    finally:
        for lock in locks:
            unlock(lock)


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError instead of OSError, and say how to continue."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror or error}). The last checkpoint is intact. "
            f"Free disk space or repair the disk, then run: patchword resume {path.parent}"
        ) from None


class MetricsLog:
    """metrics.jsonl: one JSON object per line, in the order of the steps.

    Args:
        folder: The run directory.
        length: The length of the file, in bytes, at the checkpoint that the run resumes from. The rest is cut off.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self.path = folder / METRICS_FILE
        with translate_os_errors(self.path):
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # unbuffered: closing it cannot fail
            complete = self.path.read_bytes()[:length].rfind(b"\n") + 1  # a damaged file may be shorter
            self.file.truncate(complete)
            self.file.seek(complete)

    def append(self, row: LogRow) -> None:
        """Write a row."""
        line = json.dumps(row).encode() + b"\n"
        with translate_os_errors(self.path):
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> int:
        """Sync all rows to disk, and return the length of the file."""
        with translate_os_errors(self.path):
            os.fsync(self.file.fileno())
            return self.file.tell()

    def rows(self) -> list[LogRow]:
        """Return all rows so far."""
        return read_metrics(self.path.parent)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(folder: Path) -> list[LogRow]:
    """Read the rows of metrics.jsonl; incomplete lines are skipped."""
    path, rows = folder / METRICS_FILE, []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def elapsed_seconds(folder: Path) -> float:
    """Return how long the processes of a run have trained, by its rows: also what a kill has undone."""
    return max((row.get("seconds", 0.0) for row in read_metrics(folder)), default=0.0)
