"""Checkpoints of a run, written so that a kill, a full disk or a damaged file costs at most one checkpoint.

A checkpoint is a directory RUN/checkpoints/step-00000120. In format 1 it holds a model directory (the evaluated model)
and state.safetensors (what training needs besides). In format 2, that of sharded runs, every process has written its
fraction of all tensors (sharded_checkpoint.py), beside model.json. Both have state.json with the checksums of all
files, which is written last. A checkpoint is written under a temporary name, synced to disk, and then renamed.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS_FILE, model_json
from ..checkpoints.sharded_tensors import MANIFEST_FILE, SHARD_PATTERN, evaluated_model, read_whole
from ..core.io import digest, json_bytes, sha256, sync, tensor_bytes, write_file
from ..errors import CheckpointError, Note
from .distributed import ProcessGroup

FORMAT, SHARDED_FORMAT = 1, 2
STATE_FILE = "state.safetensors"
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bfloat16: "BF16", torch.bool: "BOOL"}
TEMPORARY_PREFIXES = (WRITING, REMOVING) = (".making-", ".removing-")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps.

    Attributes:
        step: The number of completed steps.
        seconds: The training time so far.
        metrics_bytes: The length of metrics.jsonl.
        best: The row of the best evaluation so far.
        tensors: The weights, averages and optimizer state that the checkpoint's model does not hold.
        notes: What was reported so far; None if an early version, which did not save it, wrote the checkpoint.
        first_step_at: Seconds of the budget that were spent when the first step began; None without a budget.
    """

    step: int
    seconds: float
    metrics_bytes: int
    best: dict[str, Any] | None
    tensors: dict[str, Tensor]
    notes: tuple[Note, ...] | None = ()
    first_step_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything but the tensors."""
        extra: dict[str, Any] = {"messages": [note.to_json() for note in self.notes or ()]}
        if self.first_step_at is not None:
            extra["first_step_at"] = self.first_step_at
        plain = {name: getattr(self, name) for name in ("step", "seconds", "metrics_bytes", "best")}
        return {**plain, "notes": extra}

    @classmethod
    def from_json(cls, document: dict[str, Any], tensors: dict[str, Tensor]) -> "Snapshot":
        """Inverse of `to_json`; also reads what earlier versions wrote ("told", "begun")."""
        extra = document["notes"]
        saved = extra.get("messages", extra.get("told"))
        notes = None if saved is None else tuple(map(Note.from_json, saved))
        plain = {name: document[name] for name in ("step", "seconds", "metrics_bytes", "best")}
        return cls(**plain, tensors=tensors, notes=notes, first_step_at=extra.get("first_step_at", extra.get("begun")))


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The last intact checkpoint.

    Attributes:
        snapshot: The state of the run.
        model: The tensors of the evaluated model.
        notes: What is said about damaged checkpoints.
        shards: Of a sharded checkpoint that a sharded run loads: its directory, instead of all tensors.
    """

    snapshot: Snapshot
    model: dict[str, Tensor]
    notes: tuple[Note, ...] = ()
    shards: Path | None = None


def safetensors_chunks(tensors: dict[str, Tensor]) -> list[Any]:
    """Return a .safetensors file in chunks, without a second copy of the tensors in memory."""
    header, offset, data = {}, 0, []
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + size]}
        offset += size
        if size:
            data.append(tensor_bytes(t))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *data]


class CheckpointStore:
    """The checkpoints of a run: RUN/checkpoints/.

    Args:
        run_dir: The run directory.
        keep_last: How many checkpoints are kept, besides the best.
        group: The processes of a sharded run, all of which load and save; None if only one saves.

    Attributes:
        last_step: The step that was loaded or saved last.
    """

    def __init__(self, run_dir: Path, keep_last: int, group: ProcessGroup | None = None) -> None:
        self.folder, self.keep_last, self.group = run_dir / "checkpoints", keep_last, group
        self.last_step: int | None = None

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, last first."""
        if not self.folder.is_dir():
            return []
        matches = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in os.scandir(self.folder))
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def save(self, snapshot: Snapshot, model: Checkpoint) -> None:
        """Write a checkpoint, then remove old ones. A step that is saved already stays as it is.

        At every moment, also after an error, an intact checkpoint exists if there was one before.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        if snapshot.step == self.last_step:
            return
        target = self.path(snapshot.step)
        temporary = self.folder / f"{WRITING}{target.name}"
        with self.translate_errors(temporary, target):
            self.make_temporary(temporary)
            write_checkpoint_files(temporary, snapshot, model)
            self.publish(temporary, target, snapshot)

    def save_sharded(self, snapshot: Snapshot, tensors: dict[str, Tensor], model: Checkpoint) -> None:
        """Write a sharded checkpoint, as `save` does; called by all processes of the run.

        Args:
            snapshot: The state of the run, whose own tensors are not saved.
            tensors: Everything that training needs; each process gives its fraction.
            model: What describes the evaluated model; its tensors are among the others.
        """
        from .sharded_checkpoint import write_shards  # takes a second to import

        assert self.group is not None
        if snapshot.step == self.last_step:
            return
        target = self.path(snapshot.step)
        temporary = self.folder / f"{WRITING}{target.name}"

        def seal() -> None:
            if {path.name for path in temporary.glob(SHARD_PATTERN)} != checksums.keys():
                shutil.rmtree(temporary, ignore_errors=True)
                raise self.not_saved(target, "its directory is not the same for all processes; all hosts must share it")
            with self.translate_errors(temporary, target):
                checksums[MODEL_JSON] = write_model_json(temporary, {**model_json(model), "sha256": None})
                write_manifest(temporary, {"format": SHARDED_FORMAT, **snapshot.to_json(), "files": checksums})
                self.publish(temporary, target, snapshot)

        def prepare() -> None:
            with self.translate_errors(temporary, target):
                self.make_temporary(temporary)

        self.group.run_on_main(prepare)
        try:
            checksums = write_shards(temporary, tensors, self.group)
        except CheckpointError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error
            raise self.group.run_on_main(lambda: self.not_saved(target, reason)) from None
        self.group.run_on_main(seal)
        self.last_step = snapshot.step

    @contextmanager
    def translate_errors(self, temporary: Path, target: Path) -> Iterator[None]:
        """Raise CheckpointError instead of OSError, and remove what was written."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self.not_saved(target, error.strerror or error) from None

    def make_temporary(self, temporary: Path) -> None:
        """Create an empty directory for a new checkpoint."""
        self.folder.mkdir(exist_ok=True)
        self.remove_leftovers()
        os.mkdir(temporary)

    def publish(self, temporary: Path, target: Path, snapshot: Snapshot) -> None:
        """Give a complete checkpoint its name, then remove old ones."""
        if target.exists():  # damaged, or `load` would have loaded it
            self.remove(target)
        os.rename(temporary, target)
        sync(self.folder)
        sync(self.folder.parent)
        self.last_step = snapshot.step
        self.remove_old(snapshot)

    def not_saved(self, target: Path, reason: object) -> CheckpointError:
        """Return the error that says which checkpoint is intact, and how to continue."""
        return CheckpointError(
            f"Saving the checkpoint {target} failed ({reason}). {self.describe_intact()} "
            f"Free disk space or repair the disk, then run: patchword resume {self.folder.parent}",
            code="checkpoint_not_saved",
        )

    def describe_intact(self) -> str:
        """Return which checkpoint is intact, as a sentence."""
        with suppress(OSError):
            for step in self.steps():
                with suppress(CheckpointError):
                    verify_checkpoint(self.path(step))
                    return f"The checkpoint of step {step} is intact."
        return "No earlier checkpoint is intact."

    def remove_old(self, snapshot: Snapshot) -> None:
        """Keep the last checkpoints and the best. Those of later steps are damaged, or they would have been loaded."""
        steps = self.steps()
        kept = set([step for step in steps if step <= snapshot.step][: self.keep_last])
        if snapshot.best:
            kept.add(snapshot.best["step"])
        for step in steps:
            if step not in kept:
                self.remove(self.path(step))

    def remove(self, path: Path) -> None:
        """Rename, then remove, so that a half removed checkpoint does not look like one."""
        renamed = self.folder / f"{REMOVING}{path.name}"
        os.rename(path, renamed)
        shutil.rmtree(renamed)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left behind."""
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if entry.name.startswith(TEMPORARY_PREFIXES):
                shutil.rmtree(entry.path)

    def load(self) -> LoadedCheckpoint | None:
        """Load the last intact checkpoint; None if there are no checkpoints.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged.
        """
        notes: list[Note] = []
        for step in self.steps() if self.group is None else self.group.broadcast(self.steps()):
            try:
                loaded = self.read(step)
            except CheckpointError as error:
                notes.append(Note(f"{error} It is skipped.", "checkpoint_damaged"))
                continue
            self.last_step = step
            return self.drop_damaged_best(replace(loaded, notes=tuple(notes)))
        if notes:
            advice = f"No checkpoint in {self.folder} is intact. Remove that directory to start the run again."
            raise CheckpointError(" ".join([*notes, advice]), code="checkpoints_damaged")
        return None

    def read(self, step: int) -> LoadedCheckpoint:
        """Read the checkpoint of a step; a sharded run only verifies one that is sharded, too."""
        manifest = verify_checkpoint(self.path(step), self.group)
        if self.group is not None and manifest["format"] == SHARDED_FORMAT:
            return LoadedCheckpoint(Snapshot.from_json(manifest, {}), {}, shards=self.path(step))
        return LoadedCheckpoint(*read_tensors(self.path(step), manifest))

    def drop_damaged_best(self, loaded: LoadedCheckpoint) -> LoadedCheckpoint:
        """Forget the best evaluation if its checkpoint is damaged."""
        best = loaded.snapshot.best
        if best and best["step"] != loaded.snapshot.step:
            try:
                verify_checkpoint(self.path(best["step"]), self.group)
            except CheckpointError as error:
                note = Note(f"{error} It was the best so far.", "best_checkpoint_damaged")
                return replace(loaded, snapshot=replace(loaded.snapshot, best=None), notes=(*loaded.notes, note))
        return loaded


def write_checkpoint_files(folder: Path, snapshot: Snapshot, model: Checkpoint) -> None:
    """Write the files of a checkpoint to an empty directory, and sync them to disk."""
    checksums = {WEIGHTS_FILE: write_file(folder / WEIGHTS_FILE, safetensors_chunks(model.tensors))}
    document = {**model_json(model), "sha256": checksums[WEIGHTS_FILE]}
    checksums[MODEL_JSON] = write_model_json(folder, document)
    checksums[STATE_FILE] = write_file(folder / STATE_FILE, safetensors_chunks(snapshot.tensors))
    write_manifest(folder, {"format": FORMAT, **snapshot.to_json(), "files": checksums})


def write_model_json(folder: Path, document: dict[str, Any]) -> str:
    """Write model.json, which describes the evaluated model, and return its checksum."""
    return write_file(folder / MODEL_JSON, [json_bytes(document, ascii_only=True)])


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write state.json, the last file of a checkpoint."""
    write_file(folder / MANIFEST_FILE, [json_bytes(add_seal(manifest), ascii_only=True)])
    sync(folder)


def add_seal(document: dict[str, Any]) -> dict[str, Any]:
    """Add the document's own checksum."""
    return {**document, "seal": digest(json.dumps(document, sort_keys=True))}


def read_training_checkpoint(folder: Path) -> tuple[Snapshot, dict[str, Tensor]]:
    """Read a checkpoint of a run.

    Returns:
        The snapshot, and the tensors of the model.

    Raises:
        CheckpointError: A file is missing or damaged, by a single bit or more; the message names it.
    """
    return read_tensors(folder, verify_checkpoint(folder))


def read_tensors(folder: Path, manifest: dict[str, Any]) -> tuple[Snapshot, dict[str, Tensor]]:
    """Read the tensors of an intact checkpoint: the snapshot, and those of the evaluated model."""
    if manifest["format"] == FORMAT:
        return Snapshot.from_json(manifest, load_file(folder / STATE_FILE)), load_file(folder / WEIGHTS_FILE)
    tensors = read_whole(folder)
    return Snapshot.from_json(manifest, tensors), evaluated_model(tensors)


def verify_checkpoint(folder: Path, group: ProcessGroup | None = None) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are intact.

    Args:
        folder: The checkpoint.
        group: Processes that share the work, and all get the result.

    Raises:
        CheckpointError: A file is missing or damaged, by a single bit or more; the message names it.
    """
    path = folder / MANIFEST_FILE
    manifest = read_manifest(path) if group is None else group.run_on_main(lambda: read_manifest(path))
    names = sorted(manifest["files"])
    own = names if group is None else names[group.rank :: group.size]
    problem = next((p for name in own if (p := find_damage(folder / name, manifest["files"][name]))), None)
    for text in [problem] if group is None else group.all_gather(problem):
        if text:
            raise CheckpointError(text)
    return manifest


def find_damage(path: Path, checksum: str) -> str | None:
    """Return what is wrong with a file of a checkpoint, as a sentence; None if it is intact."""
    try:
        is_intact = sha256(path) == checksum
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None if is_intact else f"{path} is damaged: its checksum differs from that in {MANIFEST_FILE}."


def read_manifest(path: Path) -> dict[str, Any]:
    """Read state.json and verify its own checksum."""
    try:
        raw = path.read_bytes()
        document = json.loads(raw)
        del document["seal"]
        is_intact = raw == json_bytes(add_seal(document), ascii_only=True)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is missing or damaged.") from None
    if not is_intact:
        raise CheckpointError(f"{path} is damaged: it does not match its own checksum.")
    if document["format"] not in (FORMAT, SHARDED_FORMAT):
        known = f"{FORMAT} and {SHARDED_FORMAT}"
        raise CheckpointError(f"{path} has format {document['format']!r}, but this version reads {known}.")
    return dict(document)
