"""Which run a `train` command continues: one that torchrun restarted, or that was typed again with `--resume auto`."""

import os
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.model_dir import MODEL_JSON
from ..config import Config
from ..config.model import REGULARIZATION_FIELDS
from ..core.io import read_json
from ..errors import ConfigError, Note
from .callbacks import Callback, TrainResult
from .distributed import ProcessGroup
from .run_dir import CONFIG, REPORT, last_folder, read_config

ResumeMode = Literal["auto", "never"]


def is_restarted() -> bool:
    """Whether torchrun has started this process again after a failure on this host (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def run_to_resume(config: Config, out: str | Path | None, mode: ResumeMode, world: ProcessGroup) -> Path | None:
    """The run directory that this command has begun before; None: there is none, or it is not to be resumed."""
    if mode not in ("auto", "never"):
        raise ConfigError(f"resume is {mode!r}; it must be 'auto' or 'never'.")
    restarted = any(world.gathered(is_restarted()))  # a host whose processes did not fail counts no restart
    if mode == "never" and not restarted:
        return None
    return world.from_first(lambda: same_run(config, out))


def same_run(config: Config, out: str | Path | None) -> Path | None:
    """The run directory of this configuration, if there is one.

    One that the user named must not hold a run of another configuration. Without a name it is the last of runs/NAME,
    runs/NAME-2, ..., and a run of another configuration there does not matter: a new directory will be made.
    """
    folder = last_folder(config.name) if out is None else Path(out).expanduser()
    if folder is None or not (folder / CONFIG).is_file():
        return None
    differing = differences(read_config(folder), config)
    if not differing:
        return folder
    if out is None:
        return None
    raise ConfigError(
        f"{folder} holds a run of another configuration: {'; '.join(differing)}. Resume it as it is with `patchword "
        f"resume {folder}`, or choose another --out."
    )


def differences(saved: Config, wanted: Config) -> list[str]:
    """Each field that differs, with both values, except those that a run resolves when it starts."""
    if wanted.precision == "auto":
        wanted = wanted.replace(precision=saved.precision)
    ours, theirs = fields(wanted.to_json()), fields(saved.to_json())
    names = sorted(ours.keys() | theirs.keys())
    names = [name for name in names if ours.get(name) != theirs.get(name) and not is_resolved(name, wanted)]
    return [f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} here" for name in names]


def is_resolved(path: str, config: Config) -> bool:
    """Whether a run's config.json has this field from its data or its pretrained weights, not from the given config."""
    section, _, name = path.partition(".")
    if section != "model":
        return False
    if config.init is not None:
        return name not in REGULARIZATION_FIELDS
    return name == "num_classes" or (name == "image_size" and config.image_size is not None)


def fields(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration without its levels: {"optim.lr": 0.001, ...}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= fields(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def finished_outcome(folder: Path, watchers: tuple[Callback, ...]) -> TrainResult:
    """The outcome of a run that needs no more training, from what its model records."""
    note = Note(f"{folder} is already finished: nothing was trained. Its report is {folder / REPORT}.", "finished")
    for watcher in watchers:
        watcher.say(f"note: {note}")
    record = read_json(folder / MODEL_JSON)["provenance"]
    length = record["step"], record["steps"], record["seconds"]
    return TrainResult(folder, record["metrics"], *length, folder / REPORT, (note,))
