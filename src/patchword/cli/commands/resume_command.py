"""`patchword resume`: continue a training run."""

from pathlib import Path
from typing import Annotated, Literal

from ..arguments import arg, positional
from ..model_args import JsonFlag
from ..output import print_train_result
from . import train_command


def resume(
    run: Annotated[Path, positional("RUN")],
    parallel: Annotated[Literal["ddp", "fsdp"] | None, arg("ddp|fsdp")] = None,
    json: JsonFlag = False,
) -> int:
    """Resume a training run that was stopped or killed, from its last checkpoint.

    Example: patchword resume runs/photos

    A run whose length is set by --epochs or --steps ends bit-identical to an uninterrupted one.

    Args:
        run: run directory, e.g. runs/photos
        parallel: how several processes share the model from now on; by default, as before
    """
    from ... import training
    from ...training.console import ConsoleCallback
    from ...training.loggers import make_loggers
    from ...training.run_dir import read_config

    callbacks = (ConsoleCallback(), *make_loggers(read_config(run)))
    result = training.resume(run, callbacks=callbacks, parallel=parallel, started=train_command.START_TIME)
    return print_train_result(result, json)
