"""How a run starts or continues: the functions `train` and `resume`.

They find or create the run directory, lock it, open the data and hand over to `Run`.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.train import Parallel
from ..core.runtime import limit_threads
from ..data.check_readable import require_readable
from ..data.resolve import open_data, subsample, with_validation
from ..data.sources import DatasetSplits
from ..errors import ConfigError
from .auto_resume import ResumeMode, find_run_to_resume, finished_result, is_restarted, with_machine_fields
from .callbacks import Callback, TrainResult
from .distributed import ProcessGroup
from .precision import resolve_precision
from .run import Run
from .run_dir import (
    REPORT_FILE,
    create_run_dir,
    discard_run_dir,
    hold_run_lock,
    is_finished,
    read_config,
    read_split,
)


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    splits: DatasetSplits | None = None,
    callbacks: tuple[Callback, ...] = (),
    resume: ResumeMode = "never",
    started: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> TrainResult | None:
    """Train a model, evaluate it, and write it to a run directory with an HTML report.

    Args:
        config: The configuration, for example from `load_recipe`.
        out: The run directory, which must be new or empty; by default runs/NAME, runs/NAME-2, ...
        splits: The data, if it is in memory; by default `config.data` names it.
        callbacks: Objects whose methods are called during the run.
        resume: "auto" continues the run in `out` (by default the last run of this name) if it has the same
            configuration; "never" refuses an existing run. A job that torchrun restarted always resumes.
        started: The value of `now()` when a time budget began; by default the time of this call.
        now: The clock, in seconds, for budgets and the time between checkpoints.

    Returns:
        The result; None in all processes but the first.

    Raises:
        ConfigError: The configuration is invalid, or `out` exists (code "run_exists" or "run_differs").
        DataError: The data cannot be used.
        TrainingError: A loss, gradient or output was NaN or Inf (code "not_finite").
        Stopped: A signal stopped the run, after its state was saved.

    Examples:
        ```python
        import patchword as pw

        result = pw.train(pw.load_recipe("quickstart"), "runs/digits")
        print(result.metrics["test"]["top1"], result.report)
        ```
    """
    started = now() if started is None else started
    with contextlib.closing(ProcessGroup(config.dist_timeout)) as group, limit_threads(config.num_threads):
        existing = find_run_to_resume(config, out, resume, group)
        if existing is not None:
            if group.run_on_main(lambda: is_finished(existing)):
                return finished_result(existing, callbacks) if group.is_main else None
            return continue_run(existing, splits, group, callbacks, started, now, given=config)
        config = config.replace(precision=resolve_precision(config.precision, group.device))
        opened = open_splits(config, splits, None)  # before the directory is created: a path may be wrong
        for name, source in opened.as_dict().items():
            require_readable(source, f"The split {name!r}")
        run_dir = Path(group.run_on_main(lambda: str(create_run_dir(config, out))))
        with hold_run_lock(run_dir, group):
            try:
                run = Run(run_dir, config, opened, group, callbacks, started, now)
            except BaseException:
                if group.is_main:  # nothing was trained, such as when the weights of `init` cannot be read
                    discard_run_dir(run_dir)
                raise
            return run.run()


def resume(
    run_dir: str | Path,
    *,
    splits: DatasetSplits | None = None,
    callbacks: tuple[Callback, ...] = (),
    parallel: Parallel | None = None,
    started: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> TrainResult | None:
    """Continue a run that was stopped or killed, from its last intact checkpoint.

    Args:
        run_dir: The run directory.
        splits: The same data as in `train`, if it was called with `splits`.
        callbacks: As in `train`.
        parallel: "ddp" or "fsdp", if the run continues in another way than it was started; see `Config.parallel`.
        started: As in `train`.
        now: As in `train`.

    Returns:
        The result; None in all processes but the first.

    Raises:
        ConfigError: The run is finished (code "run_finished"); a job that torchrun restarted returns its result.
        DataError: The data has changed since the run started.

    Examples:
        ```python
        import patchword as pw

        result = pw.resume("runs/digits")
        ```
    """
    started = now() if started is None else started
    run_dir = Path(run_dir).expanduser()
    config = read_config(run_dir)
    with contextlib.closing(ProcessGroup(config.dist_timeout)) as group, limit_threads(config.num_threads):
        if group.run_on_main(lambda: is_finished(run_dir)):
            if not is_restarted(group):
                report = run_dir / REPORT_FILE
                raise ConfigError(
                    f"{run_dir} is finished, so there is nothing to resume. Its report is {report}.",
                    code="run_finished",
                )
            return finished_result(run_dir, callbacks) if group.is_main else None
        given = config.replace(parallel=parallel or config.parallel)
        return continue_run(run_dir, splits, group, callbacks, started, now, given)


def continue_run(
    run_dir: Path,
    splits: DatasetSplits | None,
    group: ProcessGroup,
    callbacks: tuple[Callback, ...],
    started: float,
    now: Callable[[], float],
    given: Config,
) -> TrainResult | None:
    """Run an existing run directory to its end, with the given fields that change no result (`with_machine_fields`)."""
    with hold_run_lock(run_dir, group):  # before anything is read: another process may be about to replace it
        config = with_machine_fields(read_config(run_dir), given)
        resolve_precision(config.precision, group.device)  # raises if this machine cannot compute in it
        opened = open_splits(config, splits, read_split(run_dir))
        return Run(run_dir, config, opened, group, callbacks, started, now).run()


def open_splits(config: Config, splits: DatasetSplits | None, saved: dict[str, Any] | None) -> DatasetSplits:
    """Open the data, with a validation set, as a run uses it.

    Args:
        config: The configuration.
        splits: The data, if it is in memory.
        saved: How a run that is resumed has split it.
    """
    if splits is not None:
        complete = with_validation(splits, config.data.val_fraction, config.seed, saved)
        return subsample(complete, config.data.train_fraction, config.seed)
    if not config.data.source:
        raise ConfigError(
            "data.source is empty. Give your data, as in `patchword train finetune --data.source photos`."
        )
    return open_data(config.data, config.seed, saved)
