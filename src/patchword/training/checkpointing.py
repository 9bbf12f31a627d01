"""The state of a run on disk, written so that a kill, a full disk or a damaged file never costs more than a checkpoint.

A checkpoint is a folder RUN/checkpoints/step-00000120 that holds a model folder (what was evaluated), state.safetensors
(what training needs besides) and state.json, with the checksums of all. It is made under another name, brought to disk,
and only then renamed.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.model_dir import MODEL_JSON, WEIGHTS, model_json
from ..core.io import digest, json_bytes, sha256, sync, tensor_bytes, write_file
from ..errors import CheckpointError, Note

FORMAT = 1
STATE, MANIFEST = "state.safetensors", "state.json"
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bfloat16: "BF16", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps."""

    step: int
    seconds: float  # of training so far
    metrics_bytes: int  # length of metrics.jsonl
    best: dict[str, Any] | None  # the row of the best evaluation so far
    tensors: dict[str, Tensor]  # weights, averages and optimiser state that `model` does not hold
    notes: dict[str, Any] = field(default_factory=dict)


def safetensors_chunks(tensors: dict[str, Tensor]) -> list[Any]:
    """A .safetensors file in pieces, without a second copy of the tensors in memory."""
    header, place, data = {}, 0, []
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [place, place + size]}
        place += size
        if size:
            data.append(tensor_bytes(t))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *data]


class Store:
    """The checkpoints of a run: RUN/checkpoints/."""

    def __init__(self, run: Path, keep: int) -> None:
        self.folder, self.keep = run / "checkpoints", keep
        self.last: int | None = None  # the step that was loaded or saved last

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, last first."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in os.scandir(self.folder))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def save(self, snapshot: Snapshot, model: Checkpoint) -> None:
        """Writes a checkpoint, then removes those that are no longer kept; a step that is on disk stays as it is.

        Raises CheckpointError. At every moment, even then, a whole checkpoint is there if there was one before.
        """
        if snapshot.step == self.last:
            return
        target = self.path(snapshot.step)
        made = self.folder / f".making-{target.name}"
        try:
            self.folder.mkdir(exist_ok=True)
            self.tidy()
            os.mkdir(made)
            sums = {WEIGHTS: write_file(made / WEIGHTS, safetensors_chunks(model.tensors))}
            description = {**model_json(model), "sha256": sums[WEIGHTS]}
            sums[MODEL_JSON] = write_file(made / MODEL_JSON, [json_bytes(description, ascii_only=True)])
            sums[STATE] = write_file(made / STATE, safetensors_chunks(snapshot.tensors))
            write_file(made / MANIFEST, [json_bytes(sealed(manifest(snapshot, sums)), ascii_only=True)])
            sync(made)
            if target.exists():  # damaged: `load` has passed it over
                self.remove(target)
            os.rename(made, target)
            sync(self.folder)
            sync(self.folder.parent)
            self.last = snapshot.step
            self.forget(snapshot)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            raise CheckpointError(
                f"Saving the checkpoint {target} failed ({error.strerror or error}). {self.said_to_be_intact()} "
                f"Make room or mend the disk, then: patchword resume {self.folder.parent}"
            ) from None

    def said_to_be_intact(self) -> str:
        try:
            found = self.load()
        except (CheckpointError, OSError):
            found = None
        return f"The checkpoint of step {found[0].step} is intact." if found else "No earlier checkpoint is intact."

    def forget(self, snapshot: Snapshot) -> None:
        """Keeps the last ones and the best. Those of later steps are damaged, or else one would have been loaded."""
        steps = self.steps()
        kept = set([step for step in steps if step <= snapshot.step][: self.keep])
        if snapshot.best:
            kept.add(snapshot.best["step"])
        for step in steps:
            if step not in kept:
                self.remove(self.path(step))

    def remove(self, path: Path) -> None:
        """In two steps, so that a half removed checkpoint has no checkpoint's name."""
        aside = self.folder / f".removing-{path.name}"
        os.rename(path, aside)
        shutil.rmtree(aside)

    def tidy(self) -> None:
        """Removes what kills have left."""
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if entry.name.startswith((".making-", ".removing-")):
                shutil.rmtree(entry.path)

    def load(self) -> tuple[Snapshot, dict[str, Tensor], list[Note]] | None:
        """The last checkpoint that is whole, the tensors of its model, and what is wrong with later ones."""
        complaints: list[Note] = []
        for step in self.steps():
            try:
                snapshot, model = read_checkpoint_folder(self.path(step))
            except CheckpointError as error:
                complaints.append(Note(f"{error} It is skipped.", "checkpoint_damaged"))
                continue
            self.last = step
            return self.without_lost_best(snapshot, complaints), model, complaints
        if complaints:
            told = f"No checkpoint in {self.folder} is whole; without that folder the run begins anew."
            raise CheckpointError(" ".join([*complaints, told]))
        return None

    def without_lost_best(self, snapshot: Snapshot, complaints: list[Note]) -> Snapshot:
        """The snapshot as it is; but if the checkpoint that was best is damaged, the best is yet to come."""
        if snapshot.best and snapshot.best["step"] != snapshot.step:
            try:
                read_checkpoint_folder(self.path(snapshot.best["step"]))
            except CheckpointError as error:
                complaints.append(Note(f"{error} It was the best so far.", "best_checkpoint_damaged"))
                return replace(snapshot, best=None)
        return snapshot


def manifest(snapshot: Snapshot, sums: dict[str, str]) -> dict[str, Any]:
    said = {name: getattr(snapshot, name) for name in ("step", "seconds", "metrics_bytes", "best", "notes")}
    return {"format": FORMAT, **said, "files": sums}


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """With a checksum of itself."""
    return {**content, "seal": digest(json.dumps(content, sort_keys=True))}


def read_checkpoint_folder(folder: Path) -> tuple[Snapshot, dict[str, Tensor]]:
    """What `Store.save` wrote; a single changed bit anywhere is a CheckpointError that names the file."""
    said = read_manifest(folder / MANIFEST)
    for name, expected in said["files"].items():
        try:
            good = sha256(folder / name) == expected
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror}).") from None
        if not good:
            raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one in {MANIFEST}.")
    values = {name: said[name] for name in ("step", "seconds", "metrics_bytes", "best", "notes")}
    return Snapshot(**values, tensors=load_file(folder / STATE)), load_file(folder / WEIGHTS)


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
        del content["seal"]
        whole = raw == json_bytes(sealed(content), ascii_only=True)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is missing or damaged.") from None
    if not whole:
        raise CheckpointError(f"{path} is damaged: its checksum is not its own.")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']!r}; this patchword reads {FORMAT}.")
    return content
