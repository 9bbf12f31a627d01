"""The run folder: config.json, split.json, metrics.jsonl, checkpoints/, and at the end a model and a report."""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS, model_json
from ..config import Config
from ..config.format_v1 import upgrade_run
from ..core.io import atomic_output, json_bytes, read_json, replace_file, try_lock, unlock, write_json
from ..errors import CheckpointError, ConfigError
from .checkpointing import safetensors_chunks

CONFIG, SPLIT, METRICS, REPORT = "config.json", "split.json", "metrics.jsonl", "report.html"
LOCK = ".lock"  # an empty file, locked by the process that trains the run; one that a kill left locks nothing
FORMAT = 2  # 1 is read, too (config/format_v1.py)


def new_folder(config: Config, out: str | Path | None) -> Path:
    """Makes RUN with config.json in it, in one step. Without `out`: runs/NAME, runs/NAME-2, ..., never overwritten."""
    if out is None:
        out = next(folder for folder in numbered_folders(config.name) if not folder.exists())
    folder = Path(out).expanduser()
    if is_empty(folder):  # a volume, say, that cannot be made anew
        replace_file(folder / CONFIG, [json_bytes(config_content(config))])
        return folder
    if folder.exists():
        hint = f"patchword resume {folder}" if (folder / CONFIG).is_file() else "choose another name"
        raise ConfigError(f"{folder} exists already, and runs are never overwritten: {hint}, or leave --out away.")
    with atomic_output(folder) as made:
        made.mkdir()
        write_json(made / CONFIG, config_content(config))
    return folder


def config_content(config: Config) -> dict[str, Any]:
    return {"format": FORMAT, "config": config.to_json()}


def numbered_folders(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3, ..."""
    yield Path("runs") / name
    for number in itertools.count(2):
        yield Path("runs") / f"{name}-{number}"


def last_folder(name: str) -> Path | None:
    """The last of `numbered_folders` that was made, if any was."""
    made = list(itertools.takewhile(Path.exists, numbered_folders(name)))
    return made[-1] if made else None


def take_back(folder: Path) -> None:
    """Undoes `new_folder`; a volume, or what a link leads to, stays behind, empty as it was."""
    with suppress(OSError):
        (folder / CONFIG).unlink()
        folder.rmdir()


def is_empty(folder: Path) -> bool:
    try:
        return folder.is_dir() and not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror or error}).") from None


def read_config(folder: Path) -> Config:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is not a run: it has no {CONFIG}. `patchword train` makes one.")
    said = read_json(folder / CONFIG)
    if said.get("format") not in (1, FORMAT):
        raise CheckpointError(
            f"{folder / CONFIG} has format {said.get('format')!r}; this patchword reads 1 and {FORMAT}. A newer one "
            "may have written it."
        )
    try:
        return Config.from_json(upgrade_run(said["config"]) if said["format"] == 1 else said["config"])
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None


def update_config(folder: Path, config: Config) -> None:
    """Records the resolved config: with `init`, the architecture is known only after the weights have been read.

    Until then config.json is the config as given, from which a resumed run resolves the same model. Runs of older
    versions, which kept the given config, are corrected when they are resumed.
    """
    if read_config(folder) != config:
        replace_file(folder / CONFIG, [json_bytes(config_content(config))])


def write_split(folder: Path, split: dict[str, Any]) -> None:
    """What the parts of the data are, written once."""
    replace_file(folder / SPLIT, [json_bytes(split, ascii_only=True)])


def read_split(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / SPLIT) if (folder / SPLIT).is_file() else None


def publish(folder: Path, model: Checkpoint) -> None:
    """Makes the run folder a model folder. model.json comes after the weights, which it vouches for."""
    try:
        (folder / MODEL_JSON).unlink(missing_ok=True)
        checksum = replace_file(folder / WEIGHTS, safetensors_chunks(model.tensors))
        replace_file(folder / MODEL_JSON, [json_bytes({**model_json(model), "sha256": checksum}, ascii_only=True)])
    except OSError as error:
        raise CheckpointError(f"The model could not be written to {folder} ({error.strerror or error}).") from None


def is_finished(folder: Path) -> bool:
    """Model and report are there; the report is written last."""
    return (folder / MODEL_JSON).is_file() and (folder / REPORT).is_file()


def tidy(folder: Path) -> None:
    """Removes what kills have left of files that were being written."""
    for pattern in (".*.part", ".report.html.*", "faults/.step-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Metrics:
    """metrics.jsonl: one JSON object a line, in the order of the steps, cut back to the checkpoint on resumption."""

    def __init__(self, folder: Path, length: int) -> None:
        self.path = folder / METRICS
        with self.writing():
            lock = try_lock(folder / LOCK)  # held until the file is closed, or the process ends
            if lock is None:
                raise ConfigError(f"{folder} is being trained by another process: wait for it, or stop it first.")
            self.lock = lock
            self.file = open(self.path, "ab", buffering=0)  # so that nothing is left to be written on closing
            whole = self.path.read_bytes()[:length].rfind(b"\n") + 1  # a damaged file may be shorter
            self.file.truncate(whole)
            self.file.seek(whole)

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} could not be written ({error.strerror or error}); the last checkpoint is intact. "
                f"Make room or mend the disk, then: patchword resume {self.path.parent}"
            ) from None

    def add(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        with self.writing():
            while line:
                line = line[self.file.write(line) :]

    def sync(self) -> int:
        """Brings all rows to disk and returns the length of the file."""
        with self.writing():
            os.fsync(self.file.fileno())
            return self.file.tell()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path.parent)

    def close(self) -> None:
        self.file.close()
        unlock(self.lock)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a kill or a damage has cut is left out."""
    path, rows = folder / METRICS, []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def seconds_spent(folder: Path) -> float:
    """How long the processes of a run have worked so far, by its rows: what a kill has undone is counted, too."""
    return max((row.get("seconds", 0.0) for row in read_rows(folder)), default=0.0)
