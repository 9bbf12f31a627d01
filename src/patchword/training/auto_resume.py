"""Which run a `train` command continues: after a restart by torchrun, or with `--resume auto`."""

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
from .run_dir import CONFIG_FILE, REPORT_FILE, latest_run_dir, read_config

ResumeMode = Literal["auto", "never"]
"""Whether `train` continues an existing run with the same configuration."""


def is_restarted(group: ProcessGroup) -> bool:
    """Whether torchrun has restarted the job after a failure (--max-restarts).

    All processes are asked, because a host counts only the restarts that its own processes caused.
    """
    return any(group.all_gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0))


def find_run_to_resume(config: Config, out: str | Path | None, mode: ResumeMode, group: ProcessGroup) -> Path | None:
    """Return the run directory that this command continues; None to start a new run."""
    if mode not in ("auto", "never"):
        raise ConfigError(f"resume is {mode!r}; it must be 'auto' or 'never'.")
    if mode == "never" and not is_restarted(group):
        return None
    return group.run_on_main(lambda: find_same_run(config, out))


def find_same_run(config: Config, out: str | Path | None) -> Path | None:
    """Return the run directory that has this configuration, if there is one.

    Args:
        config: The configuration as given.
        out: A directory that must not hold a run with another configuration. None: the last of runs/NAME,
            runs/NAME-2, ..., which is not resumed if its configuration differs.

    Raises:
        ConfigError: `out` holds a run with another configuration; code "run_differs".
    """
    folder = latest_run_dir(config.name) if out is None else Path(out).expanduser()
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return None
    differences = list_differences(read_config(folder), config)
    if not differences:
        return folder
    if out is None:
        return None
    raise ConfigError(
        f"{folder} holds a run with another configuration: {'; '.join(differences)}. Resume it as it is with "
        f"`patchword resume {folder}`, or choose another --out.",
        code="run_differs",
    )


def list_differences(saved: Config, given: Config) -> list[str]:
    """Describe each field that differs, except those that a run resolves when it starts, or that change no result."""
    if given.precision == "auto":
        given = given.replace(precision=saved.precision)
    given = with_machine_fields(given, saved)
    ours, theirs = flatten(given.to_json()), flatten(saved.to_json())
    names = sorted(ours.keys() | theirs.keys())
    names = [name for name in names if ours.get(name) != theirs.get(name) and not is_resolved_at_start(name, given)]
    return [f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} here" for name in names]


def with_machine_fields(config: Config, other: Config) -> Config:
    """Return a configuration with another's fields that fit a run to its machines, and change no result."""
    data = config.data.replace(num_workers=other.data.num_workers, shard_cache_gib=other.data.shard_cache_gib)
    return config.replace(parallel=other.parallel, dist_timeout=other.dist_timeout, data=data)


def is_resolved_at_start(path: str, config: Config) -> bool:
    """Whether a run takes this field from its data or pretrained weights, not from the given configuration."""
    section, _, name = path.partition(".")
    if section != "model":
        return False
    if config.init is not None:
        return name not in REGULARIZATION_FIELDS
    return name == "num_classes" or (name == "image_size" and config.image_size is not None)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration: {"optim.lr": 0.001, ...}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def finished_result(run_dir: Path, callbacks: tuple[Callback, ...]) -> TrainResult:
    """Return the result of a finished run, from what its model records."""
    report = run_dir / REPORT_FILE
    note = Note(f"{run_dir} is already finished: nothing was trained. Its report is {report}.", "finished")
    for callback in callbacks:
        callback.on_message(f"note: {note}")
    record = read_json(run_dir / MODEL_JSON)["provenance"]
    return TrainResult(run_dir, record["metrics"], record["step"], record["steps"], record["seconds"], report, (note,))
